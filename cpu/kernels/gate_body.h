/*
 * Gates (docs/spec.md, section 10), included by kernel_body.h: rows times a function of other rows, and the gradients. The
 * functions are plain C in activations.h; around them units are widened, multiplied and rounded.
 */

#include "kernels/function_constants.h"

FN_INLINE uint64_t bits_of_f64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
FN_INLINE double f64_of_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Gates of float64 take fewer elements together, `steps_double`: threads may have stacks of 64 KiB. */

/* z * sigmoid(alpha * z), beside the functions that Python knows. */
enum { SWISH = -1 };

/* The limit of a gate as numbers of a kind have it; in A where that is NONE. */
static double limit_of(const struct fn_gate *g, int64_t kind) {
    const float limit = (float)g->limit;
    if (kind == FN_F16) return f32_from_f16(f16_from_f32(limit));
    if (kind == FN_BF16) return f32_from_bf16(bf16_from_f32(limit));
    return kind == FN_F32 || !g->wide ? limit : g->limit;
}

static FN_NOINLINE void round_tile_float(int64_t kind, float *x, int n) {
    if (kind == NONE) return;
    for (int i = 0; i < n; i += UNIT) u_store(F32, x, i, UNIT, round_any(kind, u_load(F32, x, i, UNIT)));
}
/* Of float64 no step is rounded. */
FN_INLINE void round_tile_double(int64_t kind, double *x, int n) { (void)kind, (void)x, (void)n; }

/* The values of a function, and its slopes unless `slope` is NULL; in whole units. */
static void activate_any_float(int activation, float alpha, const float *z, int n, float *f, float *slope);
static void activate_any_double(int activation, double alpha, const double *z, int n, double *f, double *slope);

#define REAL float
#define WHOLE uint32_t
#define OF(name) name##_float
#define bits_of_float bits_of_f32
#define number_of_float f32_of_bits
enum { steps_float = FN_GATE_TILE };
#define together_float UNIT
#include "kernels/activations.h"
#undef together_float
#include "kernels/usual_gates.h"

static void activate_any_float(int activation, float alpha, const float *z, int n, float *f, float *slope) {
    int done = 0;
    if (activation == SWISH) done = activate_usual_swish(alpha, z, n, f, slope);
    else if (activation <= FN_GELU_TANH) done = activate_usual(activation, z, n, f, slope);
    if (!done) activate_float(activation, alpha, z, n, f, slope);
}

#define REAL double
#define WHOLE uint64_t
#define OF(name) name##_double
#define bits_of_double bits_of_f64
#define number_of_double f64_of_bits
enum { steps_double = FN_GATE_TILE / 4, together_double = 8 };
#include "kernels/activations.h"

static void activate_any_double(int activation, double alpha, const double *z, int n, double *f, double *slope) {
    activate_double(activation, alpha, z, n, f, slope);
}

/* n elements as float, in whole units; with `limited` at most `most`. */
FN_INLINE void widen_tile(int kind, int limited, float most, const void *row, int n, float *x) {
#define WIDENED(i, n) u_store(F32, x, i, UNIT, limited ? u_no_more(most, u_load(kind, row, i, n)) : u_load(kind, row, i, n))
    int i = 0;
    for (; i + UNIT <= n; i += UNIT) WIDENED(u_index(i), UNIT);
    if (i < n) WIDENED(i, n - i);
#undef WIDENED
}

static void widen_any(int kind, const void *row, int n, float *x) {
    if (kind == BF16) widen_tile(BF16, 0, 0, row, n, x);
    else if (kind == F16) widen_tile(F16, 0, 0, row, n, x);
    else widen_tile(F32, 0, 0, row, n, x);
}

static void widen_limited(int kind, float most, const void *row, int n, float *x) {
    if (kind == ALL_BF16) widen_tile(ALL_BF16, 1, most, row, n, x);
    else if (kind == BF16) widen_tile(BF16, 1, most, row, n, x);
    else if (kind == F16) widen_tile(F16, 1, most, row, n, x);
    else widen_tile(F32, 1, most, row, n, x);
}

/* The same, rounded back. */
static void narrow_any(int kind, const float *x, int n, void *row) {
    for (int i = 0; i < n; i += UNIT) store_any(kind, row, i, n - i < UNIT ? n - i : UNIT, u_load(F32, x, i, UNIT));
}

/* `kind` is that of all operands, which the compiler then knows, or NONE where they have several kinds. */
#define KIND(of) (kind != NONE ? kind : g->operand[of].kind)

/* What becomes of y before the product: it is limited, and a number added to it, which -0 leaves as it is. */
struct up {
    float limit, offset;
    float limit_of_z; /* of gradients, where there are limits */
};

FN_INLINE U with_offset(const struct up *up, U y) {
    return u_add(u_no_less(-up->limit, u_no_more(up->limit, y)), u_set1(up->offset));
}

FN_INLINE void gate_unit(int kind, int64_t between, int alone, const struct up *up, const struct fn_gate *g, char *const *at,
                         const float *a, int64_t i, int n) {
    U f = round_any(between, u_load(F32, a, i, UNIT));
    if (!alone) {
        const U y = load_any(KIND(FN_GATED), at[FN_GATED], i, n);
        f = u_mul(up ? with_offset(up, y) : y, f);
    }
    store_any(KIND(FN_GATE_OUT), at[FN_GATE_OUT], i, n, f);
}

FN_INLINE void gate_backward_unit(int kind, int64_t between, int alone, const struct up *up, const struct fn_gate *g,
                                  char *const *at, const float *a, const float *slope, int64_t i, int n) {
    const U d = load_any(KIND(FN_GATE_D), at[FN_GATE_D], i, n), f = round_any(between, u_load(F32, a, i, UNIT));
    const U y = alone ? d : load_any(KIND(FN_GATED), at[FN_GATED], i, n);
    const U da = alone ? d : round_any(between, u_mul(d, up ? with_offset(up, y) : y));
    U dy = u_mul(d, f), dz = u_mul(da, u_load(F32, slope, i, UNIT));
    if (up && g->limit) {
        dy = u_where_within(-up->limit, up->limit, y, dy);
        dz = u_where_within(-INFINITY, up->limit_of_z, load_any(KIND(FN_GATE), at[FN_GATE], i, n), dz);
    }
    if (at[FN_GATED_D]) store_any(KIND(FN_GATED_D), at[FN_GATED_D], i, n, dy);
    if (at[FN_GATE_DZ]) store_any(KIND(FN_GATE_DZ), at[FN_GATE_DZ], i, n, dz);
}
#undef KIND

/* No outputs bypass the cache: gates compute longer than memory takes, and from memory such stores took twice the time. */
FN_INLINE void gate_units(int kind, int64_t between, int alone, const struct up *up, const struct fn_gate *g, char *const *at,
                          const float *a, const float *slope, int n) {
    int i = 0;
    if (slope) {
        for (; i + UNIT <= n; i += UNIT) gate_backward_unit(kind, between, alone, up, g, at, a, slope, u_index(i), UNIT);
        if (i < n) gate_backward_unit(kind, between, alone, up, g, at, a, slope, i, n - i);
    } else {
        for (; i + UNIT <= n; i += UNIT) gate_unit(kind, between, alone, up, g, at, a, u_index(i), UNIT);
        if (i < n) gate_unit(kind, between, alone, up, g, at, a, i, n - i);
    }
}

/* The kind of all operands and of what passes between, if that is rounded; NONE if there are several. */
static int kind_of_all(const struct fn_gate *g) {
    const int64_t kind = g->operand[FN_GATE].kind;
    for (int i = 0; i < FN_GATE_OPERANDS; i++)
        if (g->operand[i].kind != NONE && g->operand[i].kind != kind) return NONE;
    return g->between == NONE || g->between == kind ? (int)kind : NONE;
}

/* The function's values for a tile of the gate, which may be limited, and its slopes unless `slope` is NULL. */
static void activate_tile(const struct fn_gate *g, int kind, const void *gate, int n, float *a, float *slope) {
    _Alignas(64) float widened[FN_GATE_TILE];
    const int activation = g->alpha != 1 ? SWISH : (int)g->activation, all = (n + UNIT - 1) / UNIT * UNIT;
    const int limits = g->limit && activation != FN_SOFTCAP;
    const int as_it_is = g->operand[FN_GATE].kind == F32 && n == all && (uintptr_t)gate % sizeof(float) == 0 && !limits;
    const float alpha = (float)g->alpha;
    const float *const z = as_it_is ? gate : widened;
    const int of_gate = (int)g->operand[FN_GATE].kind;
    if (limits) widen_limited(kind == BF16 ? ALL_BF16 : of_gate, (float)limit_of(g, of_gate), gate, n, widened);
    else if (kind == BF16) widen_tile(ALL_BF16, 0, 0, gate, n, widened);
    else if (!as_it_is) widen_any(of_gate, gate, n, widened);
    if (activation == FN_SOFTCAP) softcap_float(g, z, all, a, slope);
    else activate_any_float(activation, alpha, z, all, a, slope);
}

/* A tile with optional steps. Those that need no numbers of a whole tile are made as the plain gate is, with a few operations more. */
static FN_NOINLINE void gate_in_steps(const struct fn_gate *g, char *const *at, int n) {
    _Alignas(64) float z[steps_float], y[steps_float], d[steps_float], first[steps_float], second[steps_float];
    const struct fn_operand *o = g->operand;
    const int backward = g->pass == FN_BACKWARD;
    if (!(g->flags & (FN_CLAMP_AFTER | FN_ROUND_STEPS))) {
        const float limit = g->limit ? (float)limit_of(g, o[FN_GATED].kind) : INFINITY;
        const struct up up = {limit, g->up_offset ? (float)g->up_offset : -0.0f, (float)limit_of(g, o[FN_GATE].kind)};
        const int kind = kind_of_all(g) == BF16 ? ALL_BF16 : NONE;
        float *const slope = backward ? second : NULL;
        activate_tile(g, kind == NONE ? NONE : BF16, at[FN_GATE], n, first, slope);
        if (kind == NONE) gate_units(NONE, g->between, 0, &up, g, at, first, slope, n);
        else gate_units(ALL_BF16, g->between == NONE ? NONE : ALL_BF16, 0, &up, g, at, first, slope, n);
        return;
    }
    widen_any((int)o[FN_GATE].kind, at[FN_GATE], n, z);
    widen_any((int)o[FN_GATED].kind, at[FN_GATED], n, y);
    if (backward) widen_any((int)o[FN_GATE_D].kind, at[FN_GATE_D], n, d);
    activate_in_steps_float(g, z, y, backward ? d : NULL, (n + UNIT - 1) / UNIT * UNIT, first, second);
    if (at[FN_GATE_OUT]) narrow_any((int)o[FN_GATE_OUT].kind, first, n, at[FN_GATE_OUT]);
    if (backward && at[FN_GATE_DZ]) narrow_any((int)o[FN_GATE_DZ].kind, second, n, at[FN_GATE_DZ]);
}

/*
 * Fetches what belongs to elements [begin, end), of places `first` to `last`. A processor waits for some 20 lines at a time,
 * and for more it stops: so the places are fetched apart, each with work behind it.
 */
FN_INLINE void fetch(const struct fn_ahead *ahead, int first, int last, int64_t begin, int64_t end) {
    for (int k = first; k <= last && k < ahead->count; k++)
        for (int64_t i = begin * ahead->place[k].item; i < end * ahead->place[k].item; i += FN_ALIGNMENT)
            FN_PREFETCH_2(ahead->place[k].at + i);
}

/* relu2 of bfloat16 without rows to multiply, which takes no longer than a copy. */
static FN_NOINLINE void relu2_alone(int past_caches, const char *z, char *out, int n) {
    int i = 0;
    for (; i + UNIT <= n; i += UNIT) {
        const U r = u_no_less(0, u_load(ALL_BF16, z, u_index(i), UNIT));
        if (STREAMS && past_caches) u_stream(ALL_BF16, out, u_index(i), UNIT, u_mul(r, r));
        else u_store(ALL_BF16, out, u_index(i), UNIT, u_mul(r, r));
    }
    if (i == n) return;
    const U r = u_no_less(0, u_load(ALL_BF16, z, i, n - i));
    u_store(ALL_BF16, out, i, n - i, u_mul(r, r));
}

/* A tile, whose elements begin at `at` of each operand. `kept`: see fn_gate_run. */
static void gate_float(const struct fn_gate *g, char *const *at, int n, float *kept, const struct fn_ahead *ahead, int64_t done) {
    _Alignas(64) float values[FN_GATE_TILE], slopes[FN_GATE_TILE];
    const int kind = kind_of_all(g), backward = g->pass == FN_BACKWARD, alone = !at[FN_GATED];
    float *const a = kept ? kept : values, *const slopes_there = kept ? kept + FN_GATE_TILE : slopes;
    float *const slope = backward ? slopes_there : NULL;
    fetch(ahead, 0, 1, done, done + n);
    if (!(kept && backward)) activate_tile(g, kind, at[FN_GATE], n, a, kept ? slopes_there : slope);
    fetch(ahead, 2, 4, done, done + n);
#define OF_ONE_KIND(kind)                                                        \
    do {                                                                         \
        if (alone) gate_units(kind, NONE, 1, NULL, g, at, a, slope, n);                \
        else if (g->between != NONE) gate_units(kind, kind, 0, NULL, g, at, a, slope, n); \
        else gate_units(kind, NONE, 0, NULL, g, at, a, slope, n);                      \
    } while (0)
    if (kind == BF16) OF_ONE_KIND(ALL_BF16);
    else if (kind == F16) OF_ONE_KIND(F16);
    else if (kind == F32) OF_ONE_KIND(F32);
    else gate_units(NONE, g->between, alone, NULL, g, at, a, slope, n);
#undef OF_ONE_KIND
}

/* n elements as double, and zeros up to `all`. */
static void widen_tile_to_f64(const struct fn_operand *o, const char *row, int n, int all, double *out) {
    widen_to_f64((int)o->kind, row, out, n);
    for (int i = n; i < all; i++) out[i] = 0;
}

/* The same in float64; the function's value is never rounded there. */
static void gate_double(const struct fn_gate *g, char *const *at, int n, double *kept) {
    double z[steps_double], y[steps_double], values[steps_double], slopes[steps_double];
    const struct fn_operand *o = g->operand;
    const int backward = g->pass == FN_BACKWARD, all = (n + together_double - 1) / together_double * together_double;
    double *const a = kept ? kept : values, *const slope = kept ? kept + steps_double : slopes;
    if (fn_gate_has_steps(g)) {
        double d[steps_double];
        widen_tile_to_f64(&o[FN_GATE], at[FN_GATE], n, all, z);
        widen_tile_to_f64(&o[FN_GATED], at[FN_GATED], n, all, y);
        if (backward) widen_tile_to_f64(&o[FN_GATE_D], at[FN_GATE_D], n, all, d);
        activate_in_steps_double(g, z, y, backward ? d : NULL, all, values, slopes);
        if (at[FN_GATE_OUT]) narrow_from_f64((int)o[FN_GATE_OUT].kind, values, at[FN_GATE_OUT], n);
        if (backward && at[FN_GATE_DZ]) narrow_from_f64((int)o[FN_GATE_DZ].kind, slopes, at[FN_GATE_DZ], n);
        return;
    }
    if (at[FN_GATED]) widen_tile_to_f64(&o[FN_GATED], at[FN_GATED], n, all, y);
    if (!(kept && backward)) {
        widen_tile_to_f64(&o[FN_GATE], at[FN_GATE], n, all, z);
        if (g->activation == FN_SOFTCAP) softcap_double(g, z, all, a, backward ? slope : NULL);
        else activate_double((int)g->activation, 1, z, all, a, kept || backward ? slope : NULL);
    }
    if (!backward) {
        for (int i = 0; i < all; i++) y[i] = at[FN_GATED] ? y[i] * a[i] : a[i];
        narrow_from_f64((int)o[FN_GATE_OUT].kind, y, at[FN_GATE_OUT], n);
        return;
    }
    double *const d = z;
    widen_tile_to_f64(&o[FN_GATE_D], at[FN_GATE_D], n, all, d);
    for (int i = 0; i < all; i++) {
        y[i] = slope[i] * (at[FN_GATED] ? d[i] * y[i] : d[i]);
        d[i] *= a[i];
    }
    if (at[FN_GATED_D]) narrow_from_f64((int)o[FN_GATED_D].kind, d, at[FN_GATED_D], n);
    if (at[FN_GATE_DZ]) narrow_from_f64((int)o[FN_GATE_DZ].kind, y, at[FN_GATE_DZ], n);
}

/* Elements that take turns, of so many bytes, apart; and back. */
static FN_NOINLINE void take_apart(int64_t size, const char *restrict pairs, int n, char *restrict even, char *restrict odd) {
#define APART(type)                                                                              \
    for (int i = 0; i < n; i++) {                                                                \
        memcpy(even + i * sizeof(type), pairs + 2 * i * sizeof(type), sizeof(type));             \
        memcpy(odd + i * sizeof(type), pairs + (2 * i + 1) * sizeof(type), sizeof(type));        \
    }
    if (size == 2) { APART(uint16_t) }
    else if (size == 4) { APART(uint32_t) }
    else { APART(uint64_t) }
#undef APART
}
static FN_NOINLINE void bring_together(int64_t size, const char *restrict even, const char *restrict odd, int n,
                                       char *restrict pairs) {
#define TOGETHER(type)                                                                           \
    for (int i = 0; i < n; i++) {                                                                \
        memcpy(pairs + 2 * i * sizeof(type), even + i * sizeof(type), sizeof(type));             \
        memcpy(pairs + (2 * i + 1) * sizeof(type), odd + i * sizeof(type), sizeof(type));        \
    }
    if (size == 2) { TOGETHER(uint16_t) }
    else if (size == 4) { TOGETHER(uint32_t) }
    else { TOGETHER(uint64_t) }
#undef TOGETHER
}

/* A tile in turns. */
static FN_NOINLINE void gate_in_turns(const struct fn_gate *g, char *const *at, int n) {
    _Alignas(64) char z[FN_GATE_TILE * sizeof(float)], y[sizeof z], dz[sizeof z], dy[sizeof z];
    const int64_t size = fn_element_size(g->operand[FN_GATE].kind);
    const int backward = g->pass == FN_BACKWARD;
    const struct fn_ahead nothing = {0};
    char *apart[FN_GATE_OPERANDS] = {at[FN_GATE_D], y, z, backward ? dy : at[FN_GATE_OUT], backward ? dz : NULL};
    take_apart(size, at[FN_GATE], n, z, y);
    if (g->wide) gate_double(g, apart, n, NULL);
    else if (fn_gate_has_steps(g)) gate_in_steps(g, apart, n);
    else gate_float(g, apart, n, NULL, &nothing, 0);
    if (backward) bring_together(size, dz, dy, n, at[FN_GATE_DZ]);
}

void FN_OF(gate_run)(const struct fn_gate *g, char *const *at, int64_t n, void *kept, const struct fn_ahead *ahead) {
    const int tile_size = g->wide ? (int)steps_double : (int)FN_GATE_TILE;
    for (int64_t done = 0; done < n; done += tile_size) {
        const int count = (int)(n - done < tile_size ? n - done : tile_size);
        char *tile[FN_GATE_OPERANDS];
        for (int i = 0; i < FN_GATE_OPERANDS; i++)
            tile[i] = at[i] ? at[i] + done * fn_gate_step(g, i) * fn_element_size(g->operand[i].kind) : NULL;
        if (g->flags & FN_IN_TURNS) gate_in_turns(g, tile, count);
        else if (g->wide) gate_double(g, tile, count, kept ? (double *)kept + 2 * done : NULL);
        else if (fn_gate_has_steps(g)) gate_in_steps(g, tile, count);
        else if (g->activation == FN_RELU2 && !at[FN_GATED] && g->pass == FN_FORWARD && !kept && kind_of_all(g) == BF16)
            relu2_alone(g->flags & FN_PAST_CACHES, tile[FN_GATE], tile[FN_GATE_OUT], count);
        else gate_float(g, tile, count, kept ? (float *)kept + 2 * done : NULL, ahead, done);
    }
    if (STREAMS && g->flags & FN_PAST_CACHES) u_stream_end();
}

/* A row of a head, normalised again. The kinds may be known only when the program runs. */
FN_INLINE void normalise_row_again(int parts, int64_t h, int64_t norm, int64_t out, const struct gradient_row *row, int64_t n,
                                   void *y) {
    for (int64_t i = 0; i < n; i += UNIT) {
        const int left = n - i < UNIT ? (int)(n - i) : UNIT;
        const U normed = round_any(norm, u_mul(load_any(h, row->h, i, left), u_set1(row->rstd)));
        store_any(out, y, i, left, weighted(parts, normed, row, i));
    }
}

void FN_OF(normalise_again)(const struct fn_backward_job *job, int64_t m, void *scratch, char *rows) {
    const int64_t bytes = job->hidden * fn_element_size(job->dy_kind);
    if (job->wide) {
        normalise_again_f64(job, m, scratch, rows);
        return;
    }
    const int by_parity = kind_of_rows(job) == BF16P, norm = job->norm_kind, parts = parts_of(job, 0);
    const float *const gains = backward_scratch(job, scratch).gains;
    for (int64_t head = 0; head < job->heads; head++, rows += bytes) {
        const struct gradient_row row = operands_of(job, m * job->heads + head, gains);
        if (!by_parity) normalise_row_again(parts, job->h_kind, norm, job->dy_kind, &row, job->hidden, rows);
        else if (norm == NONE) normalise_row_again(parts, ALL_BF16, NONE, ALL_BF16, &row, job->hidden, rows);
        else normalise_row_again(parts, ALL_BF16, ALL_BF16, ALL_BF16, &row, job->hidden, rows);
    }
}
