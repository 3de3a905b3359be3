/*
 * Modulated rows (docs/spec.md, section 12), included by declared_body.h behind log-probabilities. Scale and shift have the rows
 * of y, which share memory where they are of samples; their gradients are sums over the rows of each.
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

static FN_NOINLINE void modulate_row_float(const struct fn_declared *job, int kind, char *const *at, int64_t begin, int64_t end) {
    const struct fn_operand *o = job->operand;
    const int backward = job->pass == FN_BACKWARD, rounds = job->flag[FN_MODULATE_ROUND_STEPS].whole != 0;
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
static void modulate_row(const struct fn_declared *job, int kind, int64_t m, int64_t begin, int64_t end) {
    char *at[FN_MODULATE_OPERANDS];
    for (int i = 0; i <= FN_MODULATE_DY; i++) at[i] = job->operand[i].kind ? fn_row_of(job, i, m) : NULL;
    if (job->wide) modulate_row_double(job, at, begin, end);
    else modulate_row_float(job, kind, at, begin, end);
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
static void add_row_double(int64_t d_kind, int64_t y_kind, int first, const char *d, const char *y, int64_t begin, int n, double *sum) {
    double term[FN_MODULATE_TILE], other[FN_MODULATE_TILE];
    widen_double(d_kind, d, begin, n, term);
    if (y) widen_double(y_kind, y, begin, n, other);
    for (int i = 0; y && i < n; i++) term[i] *= other[i];
    for (int i = 0; i < n; i++) sum[i] = first ? term[i] : sum[i] + term[i];
}

/* A row's terms of the gradients' sums. */
static void modulate_terms(const struct fn_declared *job, int kind, const struct row_terms *t) {
    const struct fn_operand *o = job->operand;
    const char *const d = fn_row_of(job, FN_MODULATE_D, t->m), *const y = fn_row_of(job, FN_MODULATE_Y, t->m);
    const int64_t begin = t->work->begin, end = t->work->end, d_kind = o[FN_MODULATE_D].kind, y_kind = o[FN_MODULATE_Y].kind;
    void *const dscale = t->sum[FN_MODULATE_DSCALE], *const dshift = t->sum[FN_MODULATE_DSHIFT];
    if (job->wide) {
        if (dscale) add_row_double(d_kind, y_kind, t->first, d, y, begin, (int)(end - begin), dscale);
        if (dshift) add_row_double(d_kind, y_kind, t->first, d, NULL, begin, (int)(end - begin), dshift);
    } else {
        if (dscale) add_row_float(kind, d_kind, y_kind, t->first, d, y, begin, (int)(end - begin), dscale);
        if (dshift) add_row_float(kind, d_kind, y_kind, t->first, d, NULL, begin, (int)(end - begin), dshift);
    }
    if (t->with_rows && o[FN_MODULATE_DY].kind) modulate_row(job, kind, t->m, begin, end);
}
