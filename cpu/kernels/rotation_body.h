/*
 * Rotation of heads (docs/spec.md, section 8), over the operations that kernel_body.h lists; included by it. A number x of
 * a pair becomes x * cos + y * sin, where y is the other number of the pair, and sin is negative for the first one.
 */

/*
 * A row of the tables, as float in whole units and in the order in which heads are read, or as it is, of the heads' kind.
 * Where pairs lie side by side, both tables have an element for each number, with the sines' signs; else they have one for
 * each pair.
 */
struct table {
    const void *cos, *sin;
    int as_is;
};

/* Whether rows are read by parity. */
static int rotates_by_parity(const struct fn_rotation *r) {
    return ALL_BF16 == BF16P && r->between == FN_BF16 && r->out_kind == FN_BF16 &&
           (r->products == FN_NONE || r->products == FN_BF16);
}

/* A row of a table as float; of float64 by one rounding. */
static void widen_table(int64_t kind, const void *from, int64_t n, float *to) {
    if (kind == FN_F64) {
        round_to_f32(from, n, to);
        for (; n % UNIT; n++) to[n] = 0;
    } else {
        widen_weight((int)kind, from, 0, 0, n, to);
    }
}

/* One element for each number; that of a pair's first number is multiplied by `sign`. */
static void order_of_pairs(int by_parity, float sign, const float *from, int64_t n, float *to) {
    if (!by_parity) {
        for (int64_t i = 0; i < n; i++) {
            to[2 * i] = sign * from[i];
            to[2 * i + 1] = from[i];
        }
        for (int64_t i = 2 * n; i % UNIT; i++) to[i] = 0;
        return;
    }
    for (int64_t i = 0; i < n; i += UNIT / 2) {
        for (int k = 0; k < UNIT / 2; k++) {
            to[2 * i + k] = sign * from[i + k];
            to[2 * i + UNIT / 2 + k] = from[i + k];
        }
    }
}


/* `scratch` has room for fn_table_bytes(size). */
static struct table table_of(const struct fn_rotation *r, const void *cos, const void *sin, float *scratch) {
    const int by_parity = rotates_by_parity(r), interleaved = (r->flags & FN_INTERLEAVED) != 0;
    if (!interleaved && r->cos.kind == r->between && r->sin.kind == r->between) return (struct table){cos, sin, 1};
    const int64_t row = fn_float_row(r->size);
    float *const room = scratch + 2 * row;
    for (int k = 0; k < 2; k++) {
        const int64_t kind = k ? r->sin.kind : r->cos.kind;
        const void *const from = k ? sin : cos;
        float *const to = scratch + k * row;
        if (!interleaved && !by_parity) {
            widen_table(kind, from, r->pairs, to);
            continue;
        }
        widen_table(kind, from, r->pairs, room);
        if (by_parity && kind != FN_BF16) drop_payloads(room, r->pairs);
        if (interleaved) order_of_pairs(by_parity, k ? -1.0f : 1.0f, room, r->pairs, to);
        else order_by_parity(room, r->pairs, to); /* one element for each pair */
    }
    return (struct table){scratch, scratch + row, 0};
}

FN_INLINE U turned(int products, U x, U cos, U other, U sin) {
    U first = u_mul(x, cos), second = u_mul(other, sin);
    if (products != NONE) first = u_round(products, first), second = u_round(products, second);
    return u_add(first, second);
}

/* Heads that are rotated with one row of the tables. Passed by value: stores cannot alias a copy. */
struct turning {
    struct fn_row_of_heads heads;
    struct table table;
    int64_t size, pairs;
};

enum { HALVES, PAIRS }; /* where the numbers of a pair lie: in both halves of a head, or side by side */

/* The numbers [i, i + n) of each head's first half, and those of its second half. */
FN_INLINE void turn_halves(int kind, int products, int out, struct turning t, int64_t i, int n) {
    const U cos = t.table.as_is ? u_load(kind, t.table.cos, i, n) : u_load(F32, t.table.cos, i, UNIT);
    const U sin = t.table.as_is ? u_load(kind, t.table.sin, i, n) : u_load(F32, t.table.sin, i, UNIT);
    const U minus = u_mul(sin, u_set1(-1));
    const char *x = t.heads.x;
    char *y = t.heads.out;
    for (int64_t head = 0; head < t.heads.count; head++, x += t.heads.x_stride, y += t.heads.out_stride) {
        const U a = u_load(kind, x, u_index(i), n), b = u_load(kind, x, u_index(t.pairs + i), n);
        u_store(out, y, u_index(i), n, turned(products, a, cos, b, minus));
        u_store(out, y, u_index(t.pairs + i), n, turned(products, b, cos, a, sin));
    }
}

/* The numbers [i, i + n) of each head, whole pairs. */
FN_INLINE void turn_pairs(int kind, int products, int out, struct turning t, int64_t i, int n) {
    const U cos = u_load(F32, t.table.cos, i, UNIT), sin = u_load(F32, t.table.sin, i, UNIT);
    const char *x = t.heads.x;
    char *y = t.heads.out;
    for (int64_t head = 0; head < t.heads.count; head++, x += t.heads.x_stride, y += t.heads.out_stride) {
        const U a = u_load(kind, x, u_index(i), n);
        u_store(out, y, u_index(i), n, turned(products, a, cos, u_swap(kind == BF16P, a), sin));
    }
}

/* The numbers that are not rotated. The product rounds a NaN's payload away, which rounding in integers may not meet. */
FN_INLINE void pass_on(int kind, int out, struct turning t) {
    const char *x = t.heads.x;
    char *y = t.heads.out;
    const int64_t first = 2 * t.pairs;
    if (kind == out && (x == y || first == t.size)) return;
    for (int64_t head = 0; head < t.heads.count; head++, x += t.heads.x_stride, y += t.heads.out_stride)
        for (int64_t i = first; i < t.size; i += UNIT) {
            const int n = t.size - i < UNIT ? (int)(t.size - i) : UNIT;
            u_store(out, y, i, n, u_mul(u_load(kind, x, i, n), u_set1(1)));
        }
}

FN_INLINE void turn(int kind, int products, int out, int interleaved, struct turning t) {
    const int64_t n = interleaved ? 2 * t.pairs : t.pairs;
    int64_t i = 0;
    for (; i + UNIT <= n; i += UNIT) {
        if (interleaved) turn_pairs(kind, products, out, t, i, UNIT);
        else turn_halves(kind, products, out, t, i, UNIT);
    }
    if (i < n) {
        if (interleaved) turn_pairs(kind, products, out, t, i, (int)(n - i));
        else turn_halves(kind, products, out, t, i, (int)(n - i));
    }
    pass_on(kind, out, t);
}

typedef void turn_fn(struct turning);
#define TURN(kind, products, out)                                             \
    static void turn_halves_##kind##_##products##_##out(struct turning t) { turn(kind, products, out, HALVES, t); } \
    static void turn_pairs_##kind##_##products##_##out(struct turning t) { turn(kind, products, out, PAIRS, t); }
#define TURN_ENTRY(kind, products, out) \
    [kind][products != NONE][out] = {turn_halves_##kind##_##products##_##out, turn_pairs_##kind##_##products##_##out},
/* Rows of one kind, and those that a norm passes on as float. */
#define TURNS_OF(fn, kind) fn(kind, NONE, kind) fn(kind, kind, kind)
#if FEW_KINDS
#define TURNS(fn)
#else
#define TURNS(fn) fn(F32, NONE, F32) TURNS_OF(fn, F16) TURNS_OF(fn, ALL_BF16) fn(F32, NONE, F16) fn(F32, NONE, BF16)
#endif
TURNS(TURN)
static turn_fn *const turns[KINDS][2][KINDS][2] = {[NONE] = {{{NULL}}}, TURNS(TURN_ENTRY)};

/* Rows of any kinds, with a branch for each unit. */
static FN_NOINLINE void turn_any(int kind, int products, int out, int interleaved, struct turning t) {
    turn(kind, products, out, interleaved, t);
}

static double rounded_f64(int64_t kind, double value) {
    if (kind == FN_NONE || kind == FN_F64) return value;
    if (kind == FN_F32) return (float)value;
    const float odd = f32_odd_from_f64(value);
    return kind == FN_F16 ? f32_from_f16(f16_from_f32(odd)) : f32_from_bf16(bf16_from_f32(odd));
}

static void rotate_heads_f64(const struct fn_rotation *r, const double *cos, const double *sin,
                             const struct fn_row_of_heads *h, double *row) {
    const int64_t step = r->flags & FN_INTERLEAVED ? 2 : 1, apart = step == 2 ? 1 : r->pairs;
    for (int64_t head = 0; head < h->count; head++) {
        widen_to_f64((int)r->between, h->x + head * h->x_stride, row, r->size);
        for (int64_t i = 0; i < r->pairs; i++) {
            double *const a = row + step * i, *const b = a + apart;
            const double first = rounded_f64(r->products, *a * cos[i]) - rounded_f64(r->products, *b * sin[i]);
            *b = rounded_f64(r->products, *b * cos[i]) + rounded_f64(r->products, *a * sin[i]);
            *a = first;
        }
        narrow_from_f64((int)r->out_kind, row, h->out + head * h->out_stride, r->size);
    }
}

void FN_OF(rotate_row)(const struct fn_rotation *r, const void *cos, const void *sin, const struct fn_row_of_heads *sets,
                       void *scratch) {
    if (fn_is_wide(r)) {
        double *const wide = scratch;
        widen_to_f64((int)r->cos.kind, cos, wide, r->pairs);
        widen_to_f64((int)r->sin.kind, sin, wide + r->pairs, r->pairs);
        for (int64_t k = 0; k < r->sets; k++)
            rotate_heads_f64(r, wide, wide + r->pairs, &sets[k], wide + 2 * r->pairs);
        return;
    }
    const int interleaved = (r->flags & FN_INTERLEAVED) != 0, by_parity = rotates_by_parity(r);
    const int kind = by_parity ? (int)BF16P : (int)r->between, to = by_parity ? (int)BF16P : (int)r->out_kind;
    /* Rounding a product of float to float or double changes nothing. */
    const int rounds = r->products == FN_F16 || r->products == FN_BF16;
    const int products = !rounds ? (int)NONE : by_parity ? (int)BF16P : (int)r->products;
    turn_fn *const known = products == NONE || products == kind ? turns[kind][products != NONE][to][interleaved] : NULL;
    const struct table table = table_of(r, cos, sin, scratch);
    for (int64_t k = 0; k < r->sets; k++) {
        const struct turning t = {sets[k], table, r->size, r->pairs};
        if (known) known(t);
        else turn_any(kind, products, to, interleaved, t);
    }
}
