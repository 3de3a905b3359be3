/*
 * Rows that are normalised less their means, for a LayerNorm; included by kernel_body.h. Such rows take three passes: the
 * first adds the residual and sums h, the second sums the squares of h less the mean, the third normalises. Rows of other
 * kinds than these are converted to float first (forward_body.h); and there always is a weight and a bias:
 *
 *   CENTERED_KINDS     x, where the residual is of its kind, and h (center_tables.h)
 *   CENTERED           h, norm, affine, out: `affine` is the kind of the weight and of the bias
 */
#define FROM_FLOAT(fn) fn(F32, ANY, F32, F32) fn(F32, ANY, F32, F16) fn(F32, ANY, F32, BF16)
#if FEW_KINDS
#define CENTERED(fn) FROM_FLOAT(fn)
#define CENTERED_AS_IS(fn)
#else
#define CENTERED(fn) FROM_FLOAT(fn) fn(F16, ANY, F32, F16) fn(ALL_BF16, ANY, F32, ALL_BF16)
#define CENTERED_AS_IS(fn) fn(F16, NONE, F16, F16) fn(ALL_BF16, NONE, ALL_BF16, ALL_BF16)
#endif

/* What a row's sum adds: h, which is added and stored for that where there is a residual; or the squares of h less the mean. */
struct terms {
    int kind, residual, squares;
    float mean;
};

FN_INLINE U term(struct terms of, const struct row *row, int64_t i, int n) {
    if (!of.squares) return add_residual(of.kind, of.residual, ROUNDED, UNCACHED, row, i, n);
    return u_square(u_add(u_load(of.kind, row->x, i, n), u_set1(-of.mean))); /* x - y is x + -y */
}

static FN_NOINLINE float halve_terms(int by_parity, float *terms, int64_t width) {
    const U unit = sum_units(terms, width);
    return by_parity ? u_halve(1, unit) : u_halve(0, unit);
}

FN_INLINE float sum_terms(struct terms of, const struct row *row, int64_t hidden) {
    _Alignas(64) float terms[FN_SEGMENT];
    int64_t begin = 0, sums = 0;
    for (; begin + FN_SEGMENT <= hidden; begin += FN_SEGMENT) {
        FN_ROLLED
        for (int c = 0; c < 128; c += UNIT) {
#define TERM(k) term(of, row, u_index(begin + c + (k)), UNIT)
            u_store(F32, terms, c, UNIT, SUM_OF_EIGHT(TERM, 128));
#undef TERM
        }
        row->sums[sums++] = halve_terms(of.kind == BF16P, terms, 128);
    }
    if (begin < hidden) {
        const int64_t n = hidden - begin;
        int64_t i = 0, width = UNIT;
        while (width < n) width *= 2;
        for (; i + UNIT <= n; i += UNIT) u_store(F32, terms, i, UNIT, term(of, row, u_index(begin + i), UNIT));
        if (i < n) {
            u_store(F32, terms, i, UNIT, term(of, row, begin + i, (int)(n - i)));
            clear_rest(of.kind == BF16P, terms + i, n - i);
            i += UNIT;
        }
        for (; i < width; i += UNIT) u_store(F32, terms, i, UNIT, u_set1(0));
        row->sums[sums++] = halve_terms(of.kind == BF16P, terms, width);
    }
    return halve_sums(row->sums, sums);
}

/* The sum of a row's elements or, with `squares`, of the squares of their differences from the mean. */
FN_INLINE float sum_of_row(int kind, int squares, const void *h, float mean, int64_t hidden, int64_t ahead, float *sums) {
    const struct row row = {.x = h, .sums = sums, .ahead = ahead};
    return sum_terms((struct terms){.kind = kind, .residual = NONE, .squares = squares, .mean = mean}, &row, hidden);
}

/* Adds the residual to a batch's rows, and takes their means. */
FN_INLINE void add_rows_and_take_means(int kind, const struct fn_forward_job *job, struct batch *batch) {
    for (int64_t k = 0; k < batch->rows; k++) {
        char *const stream = batch->residual_out ? batch->residual_out + k * batch->residual_out_stride : NULL;
        const struct extra_outputs extra = {.residual_out = stream};
        struct row row = row_at(kind, job, k);
        row.extra = stream ? &extra : NULL;
        row.sums = batch->sums;
        const float sum = sum_terms((struct terms){.kind = kind, .residual = kind}, &row, job->hidden);
        batch->mean[k] = sum / (float)job->hidden + 0.0f; /* never -0 */
    }
}

#define SUMS_OF_ROW(kind)                                                                                \
    static float sum_##kind(const void *h, float mean, int64_t hidden, int64_t ahead, float *sums) {     \
        (void)mean;                                                                                      \
        return sum_of_row(kind, 0, h, 0, hidden, ahead, sums);                                           \
    }                                                                                                    \
    static float squares_##kind(const void *h, float mean, int64_t hidden, int64_t ahead, float *sums) { \
        return sum_of_row(kind, 1, h, mean, hidden, ahead, sums);                                        \
    }                                                                                                    \
    static void add_##kind(const struct fn_forward_job *job, struct batch *batch) { add_rows_and_take_means(kind, job, batch); }
#define SUM_OF_ROW_ENTRY(kind) [kind] = sum_##kind,
#define SQUARES_OF_ROW_ENTRY(kind) [kind] = squares_##kind,
#define ADD_ROWS_ENTRY(kind) [kind] = add_##kind,
CENTERED_KINDS(SUMS_OF_ROW)

/* Third pass over the rows, each from its end to its beginning, as scale_row. Of float half of the next row is fetched: all was slower. */
FN_INLINE void normalise_rows(int h, int norm, int affine, int out, const struct fn_forward_job *job, const struct batch *batch) {
    int64_t head = job->first_row % batch->affine->heads;
    const int ahead = job->fetches_next;
    for (int64_t k = 0; k < batch->rows; k++, head = head_after(batch->affine, head)) {
        const struct scale s = scale_at(affine, job, batch, k, head, ahead);
        const U less = u_set1(-batch->mean[k]), rstd = u_set1(s.rstd);
        int64_t i = job->hidden / UNIT * UNIT, n = job->hidden - i;
        if (n > 0)
            finish_unit(u_mul(u_add(u_load(h, s.h, i, (int)n), less), rstd), norm, affine, affine, out, &s, i, (int)n,
                        THROUGH_CACHE);
        for (int64_t done = 0; (i = u_index(i - UNIT)) >= 0; done += UNIT * 2) {
            fetch_next_row(&s, done);
            finish_unit(u_mul(u_add(u_load(h, s.h, i, UNIT), less), rstd), norm, affine, affine, out, &s, i, UNIT,
                        batch->bypass_cache);
        }
    }
}

#define CENTER(h, norm, affine, out)                                                                                     \
    static void center_##h##_##norm##_##affine##_##out(const struct fn_forward_job *job, const struct batch *batch) {    \
        normalise_rows(h, norm, affine, out, job, batch);                                                                \
    }
#define CENTER_ENTRY(h, norm, affine, out) .second[out][h == out] = center_##h##_##norm##_##affine##_##out,
#define AS_IS_CENTER_ENTRY(h, norm, affine, out) .as_is[norm][out] = center_##h##_##norm##_##affine##_##out,
CENTERED(CENTER) CENTERED_AS_IS(CENTER)

const struct centered_passes FN_OF(centered_passes) = {
    .sum = {CENTERED_KINDS(SUM_OF_ROW_ENTRY)},
    .squares = {CENTERED_KINDS(SQUARES_OF_ROW_ENTRY)},
    .add = {CENTERED_KINDS(ADD_ROWS_ENTRY)},
    CENTERED(CENTER_ENTRY) CENTERED_AS_IS(AS_IS_CENTER_ENTRY)};
