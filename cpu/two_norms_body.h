/*
 * A norm, an addition and a norm of float rows in one call, over the operations that kernel_body.h lists; included by it.
 * A row takes three passes: the first sums the squares of x, the second normalises x, adds the residual and sums the
 * squares of the sum, the third multiplies the sum. The rows between the first norm and the addition stay in registers;
 * a chain of both calls stores and reads them. With 16-bit operands, whose roundings take the registers, a chain was a
 * quarter faster.
 */

/* The first norm of a row: what x is multiplied by. */
struct first_norm {
    float rstd;
    const float *gain;
};

/* The square of a unit of the sum, which is stored where residual_out is. */
FN_INLINE U add_normed(const struct first_norm *first, const struct row *row, int64_t i, int n) {
    U y = u_mul(u_mul(u_load(F32, row->x, i, n), u_set1(first->rstd)), u_load(F32, first->gain, i, n));
    y = u_add(y, u_read(F32, row->residual, i, n));
    u_store(F32, row->residual_out, i, n, y);
    if (STREAMS && row->extra) u_stream(F32, row->extra->residual_out, i, n, y);
    return u_square(y);
}

/* The last n elements of a row, as a unit that is still to be halved. */
FN_INLINE U add_normed_part(const struct first_norm *first, const struct row *row, int64_t begin, int64_t n,
                            float *squares) {
    int64_t width = UNIT, i = 0;
    while (width < n) width *= 2;
    for (; i + UNIT <= n; i += UNIT) u_store(F32, squares, i, UNIT, add_normed(first, row, u_index(begin + i), UNIT));
    if (i < n) {
        u_store(F32, squares, i, UNIT, add_normed(first, row, begin + i, (int)(n - i)));
        i += UNIT;
    }
    for (; i < width; i += UNIT) u_store(F32, squares, i, UNIT, u_set1(0));
    return sum_units(squares, width);
}

/*
 * The second pass of a row; returns the sum of the squares. Memory is read in order. In the caches, units are squared in
 * the order of the tree, which reads eight streams at once.
 */
static float add_normed_row(const struct first_norm *first, const struct row *row, int64_t hidden, int from_memory) {
    _Alignas(64) float squares[FN_SEGMENT];
    int64_t sums = 0, begin = 0;
    for (; begin + FN_SEGMENT <= hidden; begin += FN_SEGMENT) {
        if (from_memory) {
            row->sums[sums++] = u_halve(0, add_normed_part(first, row, begin, FN_SEGMENT, squares));
            continue;
        }
        FN_ROLLED
        for (int c = 0; c < 128; c += UNIT) {
#define SQUARE(k) add_normed(first, row, u_index(begin + c + (k)), UNIT)
            u_store(F32, squares, c, UNIT, SUM_OF_EIGHT(SQUARE, 128));
#undef SQUARE
        }
        row->sums[sums++] = u_halve(0, sum_units(squares, 128));
    }
    if (begin < hidden) row->sums[sums++] = u_halve(0, add_normed_part(first, row, begin, hidden - begin, squares));
    return halve_sums(row->sums, sums);
}

/*
 * Rows [begin, end), in one level; 0 where another way is needed. `first` is the norm before the addition, whose rows pass
 * to `next`. `gain` has room for a row of float.
 */
static int two_norms_rows(const struct fn_forward_job *first, const struct fn_forward_job *next, int64_t begin, int64_t end,
                          void *scratch, float *gain) {
    if (first->x_kind != FN_F32 || first->out_kind != FN_F32 || next->residual_kind != FN_F32 || !next->out_kind) return 0;
    if (first->flags & FN_SCALE_ONLY || next->affine) return 0;
    const struct plan a = plan_of(first), b = plan_of(next);
    struct first_norm norm = {.gain = float_weight(first, &a, gain)};
    struct fn_forward_job both = *next;
    both.x = first->x;
    both.x_stride = first->x_stride;
    const int64_t rows = batch_rows(&both), row_bytes = (int64_t)sizeof(float) * fn_float_row(next->hidden);
    struct batch batch = {
        .sums = (float *)scratch + fn_kept(next->hidden), .bypass_cache = STREAMS && next->bypass_cache,
    };
    for (int64_t m = begin; m < end; m += rows) {
        struct fn_forward_job part = job_from(&both, m);
        if (batch.bypass_cache) { /* the third pass reads the sum in scratch */
            batch.residual_out = part.residual_out;
            batch.residual_out_stride = part.residual_out_stride;
            part.residual_out = (char *)scratch + next->bypass_cache;
            part.residual_out_stride = row_bytes;
        }
        batch.rows = end - m < rows ? end - m : rows;
        sums[F32][NONE][0](&part, &batch);
        for (int64_t k = 0; k < batch.rows; k++) {
            const struct extra_outputs extra = {
                .residual_out = batch.residual_out ? batch.residual_out + k * batch.residual_out_stride : NULL,
            };
            const struct row row = {
                .x = part.x + k * part.x_stride,
                .residual = part.residual + k * part.residual_stride,
                .residual_out = part.residual_out + k * part.residual_out_stride,
                .extra = extra.residual_out ? &extra : NULL,
                .sums = batch.sums,
            };
            norm.rstd = rstd_of(batch.rstd[k], next->hidden, first->eps);
            batch.rstd[k] = rstd_of(add_normed_row(&norm, &row, next->hidden, next->from_memory), next->hidden, next->eps);
        }
        batch.h = part.residual_out;
        batch.h_stride = part.residual_out_stride;
        second_pass(&b, &part, &batch);
    }
    if (STREAMS && next->bypass_cache) u_stream_end();
    return 1;
}
