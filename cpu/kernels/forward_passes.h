/*
 * The two passes over a row of a forward pass: the first adds the residual and sums the squares, the second multiplies.
 * Included by kernel_body.h.
 */

/* Names for what the inlined functions are compiled for, beside kinds: they are constants where they are called. */
enum { UNROUNDED, ROUNDED }; /* round_sum: whether h is a sum of a residual as it is, or as it is stored */
enum { NO_ADDITION, ADDITION }; /* add */
enum { NO_SQUARES, SQUARES }; /* square */
enum { UNCACHED, CACHED }; /* in_cache: whether the nearest caches hold the operands */
enum { THROUGH_CACHE, PAST_CACHE }; /* bypass_cache */

/* Optional outputs of the first pass. */
struct extra_outputs {
    float *h; /* where h is kept as float, or NULL if the second pass can read it from an operand */
    void *residual_out; /* where residual_out is stored a second time, bypassing the caches; or NULL */
};

/*
 * One row's operands. The row that is normalised, h, is residual_out as float; the sum before
 * rounding (without round_sum); or x where there is no residual.
 */
struct row {
    const void *x, *residual;
    void *residual_out;
    const struct extra_outputs *extra; /* NULL: there are none */
    float *sums; /* one per segment */
    int64_t ahead; /* the operands are fetched so many bytes ahead */
};

FN_INLINE U add_residual(int x, int residual, int round_sum, int in_cache, const struct row *row, int64_t i, int n) {
    U h;
    if (ADDS_F16 && x == F16 && residual == F16 && round_sum) {
        h = u_add_f16(row->ahead, row->x, row->residual, row->residual_out, i, n);
        if (STREAMS && row->extra && row->extra->residual_out) u_stream(F16, row->extra->residual_out, i, n, h);
    } else {
        h = in_cache ? u_load(x, row->x, i, n) : u_read(x, row->ahead, row->x, i, n);
        if (residual != NONE) {
            const void *other = row->residual;
            h = u_add(h, in_cache ? u_load(residual, other, i, n) : u_read(residual, row->ahead, other, i, n));
            U rounded = u_store(residual, row->residual_out, i, n, h);
            if (STREAMS && row->extra && row->extra->residual_out)
                u_stream(residual, row->extra->residual_out, i, n, h);
            if (round_sum) h = rounded;
        }
    }
    if ((residual == NONE ? x : residual) != F32 && row->extra && row->extra->h)
        u_store(F32, row->extra->h, i, UNIT, h);
    return h;
}

/* A unit of h, once add_residual has written it. */
FN_INLINE U h_at(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    if (residual == NONE) return u_load(x, row->x, i, UNIT);
    if (residual == F32 || round_sum) return u_load(residual, row->residual_out, i, UNIT);
    return u_load(F32, row->extra->h, i, UNIT);
}

FN_INLINE float rstd_of(float sum_of_squares, int64_t hidden, double eps) {
    return 1.0f / sqrtf(sum_of_squares / (float)hidden + (float)eps);
}

/* The operands of one row's second pass. */
struct scale {
    float rstd, offset; /* the offset is for a weight of ANY kind, and WITH_OFFSET */
    int norm, weight_kind; /* where these are ANY */
    const void *h, *weight; /* no weight, where it may be of ANY kind: NULL */
    const void *bias; /* only read if the row is affine */
    void *out;
    int bypass_cache; /* whether out bypasses the caches */
    const char *next_x, *next_residual; /* the next row, which is fetched meanwhile; h if there is nothing to fetch */
};

FN_INLINE U gain_of_any(int out, const struct scale *s, int64_t i, int n) {
    const U g = out == BF16P ? u_load(BF16P, s->weight, i, n) : load_any(s->weight_kind, s->weight, i, n);
    return s->offset != 0 ? u_add(g, u_set1(s->offset)) : g;
}

/* The rest for a normalised unit. `affine` is the kind of the bias, NONE where the row is not affine. */
FN_INLINE void finish_unit(U y, int norm, int weight, int affine, int out, const struct scale *s, int64_t i, int n,
                           int bypass_cache) {
    if (norm == ANY) y = round_any(s->norm, y);
    else if (norm != NONE) y = u_round(norm, y);
    if (weight == ANY) y = s->weight ? u_mul(y, gain_of_any(out, s, i, n)) : y;
    else if (weight == WITH_OFFSET) y = u_mul(y, u_add(u_load(out, s->weight, i, n), u_set1(s->offset)));
    else if (weight != NONE) y = u_mul(y, u_load(weight, s->weight, i, weight == F32 && out == BF16P ? UNIT : n));
    if (affine != NONE) y = u_add(y, u_load(affine, s->bias, i, affine == F32 && out == BF16P ? UNIT : n));
    if (STREAMS && bypass_cache) u_stream(out, s->out, i, n, y);
    else u_store(out, s->out, i, n, y);
}

FN_INLINE void scale_unit(int h, int norm, int weight, int affine, int out, const struct scale *s, int64_t i, int n,
                          int bypass_cache) {
    /* Floats that were stored by parity have n elements in both halves of a unit, and room for all of it. */
    const U y = u_mul(u_load(h, s->h, i, h == F32 && out == BF16P ? UNIT : n), u_set1(s->rstd));
    finish_unit(y, norm, weight, affine, out, s, i, n, bypass_cache);
}

/* The kind of the weight: that of the bias; float, where there is none. */
FN_INLINE int weight_kind(int affine) { return affine == NONE ? (int)F32 : affine; }

/* Part of the second pass of the previous row, of the same kind. */
FN_INLINE void scale_eight(int kind, int norm, int affine, const struct scale *previous, int64_t i) {
    for (int k = 0; k < 8; k++)
        scale_unit(kind, norm, weight_kind(affine), affine, kind, previous, u_index(i + k * UNIT), UNIT,
                   previous->bypass_cache);
}

FN_INLINE U u_square(U u) { return u_mul(u, u); }

/* The sum of eight squares that are 128 elements apart: the first three levels of a segment's tree. */
FN_INLINE U column(int x, int residual, int round_sum, const struct row *row, int64_t i) {
#define SQUARE(k) u_square(h_at(x, residual, round_sum, row, u_index(i + (k))))
    return SUM_OF_EIGHT(SQUARE, 128);
#undef SQUARE
}

/*
 * Adds the segment at `i` and squares the segment before it, in turn, and makes a part of the second pass of the
 * previous row, unless `previous` is NULL. Memory is read in order, as its prefetchers expect, and the processor
 * computes on the operands in its caches while it waits for memory.
 */
FN_INLINE void add_and_square(int x, int residual, int round_sum, const struct row *row, int64_t i, int add, int square,
                              float *columns, int norm, int affine, const struct scale *previous) {
    FN_ROLLED
    for (int c = 0; c < 128; c += UNIT) {
        if (add)
            for (int k = 0; k < 8; k++)
                add_residual(x, residual, round_sum, UNCACHED, row, u_index(i + 8 * c + k * UNIT), UNIT);
        if (square) u_store(F32, columns, c, UNIT, column(x, residual, round_sum, row, i - FN_SEGMENT + c));
        if (add && previous) scale_eight(x, norm, affine, previous, i + 8 * c);
    }
}

/*
 * The sums of the squares of `segments` whole segments of float in the caches: each unit is squared when it is added,
 * in the order of the tree, which reads eight streams at once. No gain for 16-bit types, which must be widened twice in
 * either order.
 */
FN_INLINE void sum_segments_in_cache(int x, int residual, int round_sum, const struct row *row, int64_t segments,
                                     int norm, int affine, const struct scale *previous) {
    _Alignas(64) float columns[128];
    for (int64_t s = 0; s < segments; s++) {
        FN_ROLLED
        for (int c = 0; c < 128; c += UNIT) {
#define SQUARE(k) u_square(add_residual(x, residual, round_sum, CACHED, row, u_index(s * FN_SEGMENT + c + (k)), UNIT))
            u_store(F32, columns, c, UNIT, SUM_OF_EIGHT(SQUARE, 128));
#undef SQUARE
            if (previous) scale_eight(x, norm, affine, previous, s * FN_SEGMENT + 8 * c);
        }
        row->sums[s] = u_halve(x == BF16P, sum_units(columns, 128));
    }
}

/* The sums of the squares of `segments` whole segments. */
FN_INLINE void sum_segments(int x, int residual, int round_sum, const struct row *row, int64_t segments, int norm,
                            int affine, const struct scale *previous) {
    _Alignas(64) float columns[128];
    if (segments == 0) return;
    add_and_square(x, residual, round_sum, row, 0, ADDITION, NO_SQUARES, columns, norm, affine, previous);
    for (int64_t s = 1; s < segments; s++) {
        add_and_square(x, residual, round_sum, row, s * FN_SEGMENT, ADDITION, SQUARES, columns, norm, affine, previous);
        row->sums[s - 1] = u_halve(x == BF16P, sum_units(columns, 128));
    }
    add_and_square(x, residual, round_sum, row, segments * FN_SEGMENT, NO_ADDITION, SQUARES, columns, norm, affine,
                   NULL);
    row->sums[segments - 1] = u_halve(x == BF16P, sum_units(columns, 128));
}

FN_INLINE U add_and_square_unit(int x, int residual, int round_sum, const struct row *row, int64_t i, int n) {
    return u_square(add_residual(x, residual, round_sum, UNCACHED, row, u_index(i), n));
}

/* The sum of the squares of the last n < FN_SEGMENT elements, as a unit that is still to be halved. */
FN_INLINE U sum_short_segment(int x, int residual, int round_sum, const struct row *row, int64_t begin, int64_t n) {
    _Alignas(64) float squares[FN_SEGMENT];
    int64_t i = 0, width = UNIT;
    while (width < n) width *= 2;
    for (; i + UNIT <= n; i += UNIT)
        u_store(F32, squares, i, UNIT, add_and_square_unit(x, residual, round_sum, row, begin + i, UNIT));
    if (i < n) {
        u_store(F32, squares, i, UNIT, add_and_square_unit(x, residual, round_sum, row, begin + i, (int)(n - i)));
        i += UNIT;
    }
    for (; i < width; i += UNIT) u_store(F32, squares, i, UNIT, u_set1(0));
    return sum_units(squares, width);
}

/*
 * First pass over a row: residual_out, h if it is kept, and the sum of the squares of h. The second pass of the row
 * `previous`, of the same kind, is made together with it, unless that is NULL.
 */
FN_INLINE float sum_row(int x, int residual, int round_sum, int from_memory, const struct row *row, int64_t hidden,
                        int norm, int affine, const struct scale *previous) {
    int64_t segments = hidden / FN_SEGMENT, sums = segments, i = segments * FN_SEGMENT;
    if (READS_AHEAD && x == F32 && residual != BF16 && residual != F16 && !from_memory)
        sum_segments_in_cache(x, residual, round_sum, row, segments, norm, affine, previous);
    else
        FN_UNSWITCH(!STREAMS && (residual == NONE ? x : residual) != F32 && row->extra,
                    sum_segments(x, residual, round_sum, row, segments, norm, affine, previous));
    if (i < hidden)
        row->sums[sums++] = u_halve(x == BF16P, sum_short_segment(x, residual, round_sum, row, i, hidden - i));
    if (previous) {
        for (; i + UNIT <= hidden; i += UNIT)
            scale_unit(x, norm, weight_kind(affine), affine, x, previous, i, UNIT, previous->bypass_cache);
        if (i < hidden)
            scale_unit(x, norm, weight_kind(affine), affine, x, previous, i, (int)(hidden - i), THROUGH_CACHE);
    }
    return halve_sums(row->sums, sums);
}

/* Part of the next row, while a row is read backwards: the hardware does not expect the next one to be read forwards. */
FN_INLINE void fetch_next_row(const struct scale *s, int64_t done) {
    if (READS_AHEAD) {
        FN_PREFETCH_2(s->next_x + done);
        FN_PREFETCH_2(s->next_residual + done);
    }
}

/* A row from its end to its beginning, because the nearest cache still holds the end. */
FN_INLINE void scale_row(int h, int norm, int weight, int affine, int out, const struct scale *s, int64_t hidden,
                         int bypass_cache) {
    int64_t i = hidden / UNIT * UNIT;
    if (i < hidden) scale_unit(h, norm, weight, affine, out, s, i, (int)(hidden - i), THROUGH_CACHE);
    for (int64_t done = 0; (i = u_index(i - UNIT)) >= 0; done += 2 * UNIT) {
        if (out != F32) fetch_next_row(s, done);
        scale_unit(h, norm, weight, affine, out, s, i, UNIT, bypass_cache);
    }
}
