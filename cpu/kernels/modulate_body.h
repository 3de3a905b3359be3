/*
 * Modulated rows (docs/spec.md, section 12), included by declared_body.h behind log-probabilities. Gradients of scale and shift,
 * which all rows of a sample may share, are sums over rows: each tile of columns is added up by itself.
 */

/* `kind` is that of all operands, which the compiler then knows, or NONE where they have several kinds. */
#define KIND(of) (kind != NONE ? kind : o[of].kind)

/* Forward the rows of out, else those of dy. `step`: the kind that 1 + scale and the product are rounded to, or NONE. */
FN_INLINE void modulate_unit(int64_t kind, int64_t step, int backward, const struct fn_operand *o, char *const *at, int64_t i,
                             int n) {
    const int y = backward ? FN_MODULATE_D : FN_MODULATE_Y;
    const U gain = round_any(step, u_add(load_any(KIND(FN_MODULATE_SCALE), at[FN_MODULATE_SCALE], i, n), u_set1(1)));
    const U product = u_mul(load_any(KIND(y), at[y], i, n), gain);
    if (backward) store_any(KIND(FN_MODULATE_DY), at[FN_MODULATE_DY], i, n, product);
    else store_any(KIND(FN_MODULATE_OUT), at[FN_MODULATE_OUT], i, n,
                   u_add(round_any(step, product), load_any(KIND(FN_MODULATE_SHIFT), at[FN_MODULATE_SHIFT], i, n)));
}
FN_INLINE void modulate_units(int64_t kind, int64_t step, int backward, const struct fn_operand *o, char *const *at, int64_t begin,
                              int64_t end) {
    int64_t i = begin;
    for (; i + UNIT <= end; i += UNIT) modulate_unit(kind, step, backward, o, at, u_index(i), UNIT);
    if (i < end) modulate_unit(kind, step, backward, o, at, i, (int)(end - i));
}

/* The kind of all operands; NONE if there are several. */
static int modulated_kind(const struct fn_declared *job) {
    const struct fn_operand *o = job->operand;
    for (int i = 1; i < FN_MODULATE_OPERANDS; i++)
        if (o[i].kind != NONE && o[i].kind != o[0].kind) return NONE;
    return o[0].kind == BF16 ? ALL_BF16 : (int)o[0].kind;
}

static FN_NOINLINE void modulate_row_float(const struct fn_declared *job, char *const *at, int64_t begin, int64_t end) {
    const struct fn_operand *o = job->operand;
    const int kind = modulated_kind(job), backward = job->pass == FN_BACKWARD, rounds = job->number[FN_MODULATE_ROUND_STEPS] != 0;
#define OF_ONE_KIND(kind, step)                                               \
    do {                                                                      \
        if (backward) modulate_units(kind, step, 1, o, at, begin, end);       \
        else modulate_units(kind, step, 0, o, at, begin, end);                \
    } while (0)
    /* Copies of kinds that are frequent; few processors run portable kernels, where each takes 4 KB. */
    if (kind == F32) OF_ONE_KIND(F32, NONE); /* whose rounding to float changes nothing */
#if !defined(LANES) || LANES > 1
    else if (kind == ALL_BF16 && rounds) OF_ONE_KIND(ALL_BF16, ALL_BF16);
    else if (kind == ALL_BF16) OF_ONE_KIND(ALL_BF16, NONE);
    else if (kind == F16 && !rounds) OF_ONE_KIND(F16, NONE);
#endif
    else modulate_units(NONE, rounds ? o[FN_MODULATE_Y].kind : NONE, backward, o, at, begin, end);
#undef OF_ONE_KIND
}
#undef KIND

/* The same of float64, where no step is rounded. */
static FN_NOINLINE void modulate_row_double(const struct fn_declared *job, char *const *at, int64_t begin, int64_t end) {
    const struct fn_operand *o = job->operand;
    const int backward = job->pass == FN_BACKWARD, first = backward ? FN_MODULATE_D : FN_MODULATE_Y;
    const int out = backward ? FN_MODULATE_DY : FN_MODULATE_OUT;
    double y[FN_MODULATE_TILE], scale[FN_MODULATE_TILE], shift[FN_MODULATE_TILE];
    for (int64_t done = begin; done < end; done += FN_MODULATE_TILE) {
        const int n = (int)(end - done < FN_MODULATE_TILE ? end - done : FN_MODULATE_TILE);
        widen_double(o[first].kind, at[first], done, n, y);
        widen_double(o[FN_MODULATE_SCALE].kind, at[FN_MODULATE_SCALE], done, n, scale);
        if (!backward) widen_double(o[FN_MODULATE_SHIFT].kind, at[FN_MODULATE_SHIFT], done, n, shift);
        for (int i = 0; i < n; i++) y[i] *= scale[i] + 1;
        for (int i = 0; !backward && i < n; i++) y[i] += shift[i];
        narrow_double(o[out].kind, y, n, at[out], done);
    }
}

/* Columns [begin, end) of a row of out, or of dy. */
static void modulate_row(const struct fn_declared *job, int64_t m, int64_t begin, int64_t end) {
    char *at[FN_MODULATE_OPERANDS];
    for (int i = 0; i <= FN_MODULATE_DY; i++) at[i] = job->operand[i].kind ? fn_row_of(job, i, m) : NULL;
    if (job->wide) modulate_row_double(job, at, begin, end);
    else modulate_row_float(job, at, begin, end);
}

/* A row's terms of a gradient's sum: the first ones, or added. `y` is NULL where they are d alone. */
FN_INLINE void add_terms(int64_t d_kind, int64_t y_kind, int first, const char *d, const char *y, int64_t i, int n, float *sum) {
    U term = load_any(d_kind, d, i, n);
    if (y) term = u_mul(term, load_any(y_kind, y, i, n));
    u_store(F32, sum, 0, UNIT, first ? term : u_add(u_load(F32, sum, 0, UNIT), term));
}
FN_INLINE void add_row_of_units(int64_t d_kind, int64_t y_kind, int first, const char *d, const char *y, int64_t begin, int n, float *sum) {
    int i = 0;
    for (; i + UNIT <= n; i += UNIT) add_terms(d_kind, y_kind, first, d, y, begin + i, UNIT, sum + i);
    if (i < n) add_terms(d_kind, y_kind, first, d, y, begin + i, n - i, sum + i);
}
static void add_row_float(int kind, int64_t d_kind, int64_t y_kind, int first, const char *d, const char *y, int64_t begin, int n, float *sum) {
#define OF_ONE_KIND(kind)                                                                   \
    do {                                                                                    \
        if (y) FN_UNSWITCH(first, add_row_of_units(kind, kind, first, d, y, begin, n, sum)); \
        else FN_UNSWITCH(first, add_row_of_units(kind, kind, first, d, NULL, begin, n, sum)); \
    } while (0)
    if (kind == ALL_BF16) OF_ONE_KIND(ALL_BF16);
    else if (kind == F32) OF_ONE_KIND(F32);
    else add_row_of_units(d_kind, y_kind, first, d, y, begin, n, sum);
#undef OF_ONE_KIND
}
static void add_row_double(int kind, int64_t d_kind, int64_t y_kind, int first, const char *d, const char *y, int64_t begin, int n, double *sum) {
    double term[FN_MODULATE_TILE], other[FN_MODULATE_TILE];
    (void)kind;
    widen_double(d_kind, d, begin, n, term);
    if (y) widen_double(y_kind, y, begin, n, other);
    for (int i = 0; y && i < n; i++) term[i] *= other[i];
    for (int i = 0; i < n; i++) sum[i] = first ? term[i] : sum[i] + term[i];
}

/* Rounds a sum, which may be a row as it was read: kernels for processors that round by whole numbers take results alone. */
static void round_sum_float(int kind, int64_t to, const float *sum, int n, char *row, int64_t begin) {
    volatile const float nothing = -0.0f;
    const U zero = u_set1(nothing);
    for (int i = 0; i < n; i += UNIT)
        store_any(kind == ALL_BF16 ? kind : to, row, begin + i, n - i < UNIT ? n - i : UNIT, u_add(u_load(F32, sum, i, UNIT), zero));
}
static void round_sum_double(int kind, int64_t to, const double *sum, int n, char *row, int64_t begin) {
    (void)kind;
    narrow_double(to, sum, n, row, begin);
}

#define together_of_sums_float UNIT
#define together_of_sums_double 1

/*
 * The sums of `wanted` gradients over `rows` rows from row `from` on, of n columns from `begin` on: the rowsum of docs/spec.md, section 5,
 * whose blocks are added in the order of cpu/run/backward.c. `sums` has room for two tiles for each level, of dscale and of dshift.
 */
struct modulated_rows {
    const struct fn_declared *job;
    int kind, wanted, n;
    int64_t begin, from, rows, block, blocks;
};

#define SUM_OF_ROWS(REAL)                                                                                                  \
    static void sum_rows_##REAL(const struct modulated_rows *r, int64_t first, int64_t step, int64_t count, REAL *sums) {  \
        const struct fn_declared *job = r->job;                                                                            \
        const struct fn_operand *o = job->operand;                                                                         \
        if (count > 1) {                                                                                                   \
            const int unit = together_of_sums_##REAL, all = (r->n + unit - 1) / unit * unit;                               \
            REAL *const others = sums + 2 * FN_MODULATE_TILE;                                                              \
            sum_rows_##REAL(r, first, 2 * step, count / 2, sums);                                                          \
            if (first + step >= r->blocks) return;                                                                         \
            sum_rows_##REAL(r, first + step, 2 * step, count / 2, others);                                                 \
            for (int of = FN_MODULATE_DSCALE; of <= FN_MODULATE_DSHIFT; of++) {                                            \
                const int begin = (of - FN_MODULATE_DSCALE) * FN_MODULATE_TILE;                                            \
                for (int i = begin; r->wanted >> of & 1 && i < begin + all; i++) sums[i] += others[i];                     \
            }                                                                                                              \
            return;                                                                                                        \
        }                                                                                                                  \
        const int64_t begin = first * r->block, end = begin + r->block < r->rows ? begin + r->block : r->rows;             \
        for (int64_t m = begin; m < end; m++) {                                                                            \
            const char *const d = fn_row_of(job, FN_MODULATE_D, r->from + m), *const y = fn_row_of(job, FN_MODULATE_Y, r->from + m); \
            const int64_t d_kind = o[FN_MODULATE_D].kind, y_kind = o[FN_MODULATE_Y].kind;                                  \
            if (r->wanted >> FN_MODULATE_DSCALE & 1)                                                                       \
                add_row_##REAL(r->kind, d_kind, y_kind, m == begin, d, y, r->begin, r->n, sums);                           \
            if (r->wanted >> FN_MODULATE_DSHIFT & 1)                                                                       \
                add_row_##REAL(r->kind, d_kind, y_kind, m == begin, d, NULL, r->begin, r->n, sums + FN_MODULATE_TILE);     \
            if (r->wanted >> FN_MODULATE_DY & 1) modulate_row(job, r->from + m, r->begin, r->begin + r->n);                \
        }                                                                                                                  \
    }                                                                                                                      \
    static void modulate_sums_##REAL(const struct modulated_rows *r, int64_t sample, REAL *sums) {                         \
        int64_t width = 1;                                                                                                 \
        while (width < r->blocks) width *= 2;                                                                              \
        sum_rows_##REAL(r, 0, 1, width, sums);                                                                             \
        for (int of = FN_MODULATE_DSCALE; of <= FN_MODULATE_DSHIFT; of++) {                                                \
            const struct fn_operand *to = &r->job->operand[of];                                                            \
            char *const row = (char *)to->address + sample * fn_step(to);                                                  \
            const REAL *const sum = sums + (of - FN_MODULATE_DSCALE) * FN_MODULATE_TILE;                                   \
            if (r->wanted >> of & 1) round_sum_##REAL(r->kind, to->kind, sum, r->n, row, r->begin);                        \
        }                                                                                                                  \
    }
SUM_OF_ROWS(float)
SUM_OF_ROWS(double)

void FN_OF(modulate_sums)(const struct fn_declared *job, int wanted, int64_t rows, int64_t sample, int64_t begin, int n, void *sums) {
    const int64_t block = (rows + (1 << FN_LEVELS) - 1) >> FN_LEVELS;
    const struct modulated_rows r = {job, modulated_kind(job), wanted, n, begin, sample * rows, rows, block, (rows + block - 1) / block};
    if (job->wide) modulate_sums_double(&r, sample, sums);
    else modulate_sums_float(&r, sample, sums);
}
