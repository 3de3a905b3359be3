/*
 * Three strategies of a forward pass, which differ in the rows that they work on between the passes of a row; and the sum
 * alone. Included by kernel_body.h.
 */

/* The weight plus its offset, and the bias: rows of float or as they are, one for all heads or one per head. */
struct affine {
    const char *gain, *bias;
    int64_t gain_stride, bias_stride, heads; /* strides in bytes, 0 where there is one row */
    int as_is; /* whether both are the operands themselves, of out's kind */
};

/* The head of the row after this head's. A division per row would take a tenth of a short row's time. */
static int64_t head_after(const struct affine *a, int64_t head) { return head + 1 == a->heads ? 0 : head + 1; }

/*
 * Consecutive rows that go through the passes together: the last steps of a row's sum, a root and a division overlap
 * with work on the other rows. If rows are short, all of them fit the nearest cache.
 */
struct batch {
    int64_t rows;
    int norm; /* the kind that h * rstd is rounded to, or NONE */
    const struct affine *affine; /* NULL: no bias, and one row of the weight for all heads */
    float *kept, *sums; /* in scratch: rows of h, or NULL if they are not kept; sums of segments */
    const char *h; /* the rows of h for the second pass */
    int64_t h_stride; /* in bytes */
    int bypass_cache; /* whether out bypasses the caches */
    char *residual_out; /* NULL, or where residual_out goes, bypassing the caches; the job's lies in scratch then */
    int64_t residual_out_stride;
    float rstd[BATCH]; /* the sums of squares until the first pass is over */
    float mean[BATCH]; /* of rows that are centered */
};

static int64_t batch_rows(const struct fn_forward_job *job) {
    int64_t element = fn_element_size(job->x_kind) + fn_element_size(job->residual_kind), room = fn_float_row(job->hidden);
    int64_t rows = FN_BATCH_BYTES / element < FN_KEPT ? FN_BATCH_BYTES / element / room : FN_KEPT / room;
    return rows < 1 ? 1 : rows < BATCH ? rows : BATCH;
}

/* Row k of a job, without extra outputs and room for sums. */
FN_INLINE struct row row_at(int residual, const struct fn_forward_job *job, int64_t k) {
    return (struct row){
        .x = job->x + k * job->x_stride,
        .residual = residual == NONE ? NULL : job->residual + k * job->residual_stride,
        .residual_out = residual == NONE ? NULL : job->residual_out + k * job->residual_out_stride,
        .ahead = job->ahead,
    };
}

/* First pass over the rows. */
FN_INLINE void sum_rows(int x, int residual, int round_sum, const struct fn_forward_job *job, struct batch *batch) {
    int from_memory = job->from_memory;
    int64_t hidden = job->hidden;
    for (int64_t k = 0; k < batch->rows; k++) {
        const struct extra_outputs extra = {
            .h = batch->kept ? (float *)((char *)batch->kept + k * batch->h_stride) : NULL,
            .residual_out = batch->residual_out ? batch->residual_out + k * batch->residual_out_stride : NULL,
        };
        struct row row = row_at(residual, job, k);
        row.extra = extra.h || extra.residual_out ? &extra : NULL;
        row.sums = batch->sums;
        batch->rstd[k] = sum_row(x, residual, round_sum, from_memory, &row, hidden, NONE, NONE, NULL);
    }
}

/* Row k of a batch, for its last pass. */
FN_INLINE struct scale scale_at(int affine, const struct fn_forward_job *job, const struct batch *batch, int64_t k, int64_t head,
                                int ahead) {
    return (struct scale){
        .rstd = batch->rstd[k],
        .offset = (float)job->weight_offset,
        .norm = batch->norm,
        .weight_kind = job->weight_kind,
        .h = batch->h + k * batch->h_stride,
        .weight = affine ? batch->affine->gain + head * batch->affine->gain_stride : job->weight,
        .bias = affine ? batch->affine->bias + head * batch->affine->bias_stride : NULL,
        .out = job->out + k * job->out_stride,
        .next_x = ahead ? job->x + (k + batch->rows) * job->x_stride : batch->h,
        .next_residual = ahead && job->residual ? job->residual + (k + batch->rows) * job->residual_stride : batch->h,
    };
}

/* Second pass over the rows: out. `norm` is the kind that h * rstd is rounded to, NONE, or ANY. */
FN_INLINE void scale_rows(int h, int norm, int weight, int affine, int out, const struct fn_forward_job *job,
                          const struct batch *batch) {
    const int64_t hidden = job->hidden;
    const int ahead = job->fetches_next;
    int64_t head = affine ? job->first_row % batch->affine->heads : 0;
    for (int64_t k = 0; k < batch->rows; k++, head = affine ? head_after(batch->affine, head) : 0) {
        const struct scale s = scale_at(affine, job, batch, k, head, ahead);
        if (STREAMS && batch->bypass_cache) scale_row(h, norm, weight, affine, out, &s, hidden, PAST_CACHE);
        else scale_row(h, norm, weight, affine, out, &s, hidden, THROUGH_CACHE);
    }
}

/*
 * Rows [begin, end) of one kind: the first pass of each is made together with the second pass of the row before it, so
 * that memory is read while there is arithmetic to do, and the end of a row's sum overlaps with work on the other row.
 * `previous` is the row before `begin`, and in the end the last row, whose second pass is left to the caller. If the
 * outputs bypass the caches, residual_out lies in scratch until a row's second pass: there is room for two rows.
 */
FN_INLINE void overlap_rows(int kind, int residual, int norm, int affine, const struct fn_forward_job *job, int64_t begin,
                            int64_t end, struct scale *previous, char *scratch, const struct affine *a) {
    int from_memory = job->from_memory;
    int64_t hidden = job->hidden, kept = (int64_t)sizeof(float) * fn_kept(hidden);
    struct scale copy = *previous; /* stores cannot alias a local copy, so the compiler keeps it in registers */
    int64_t head = affine ? (job->first_row + begin - 1) % a->heads : 0;
    for (int64_t m = begin; m < end; m++) {
        char *residual_out = residual == NONE ? NULL : job->residual_out + m * job->residual_out_stride;
        const struct extra_outputs extra = {.residual_out = copy.bypass_cache ? residual_out : NULL};
        const struct row row = {
            .x = job->x + m * job->x_stride,
            .residual = residual == NONE ? NULL : job->residual + m * job->residual_stride,
            .residual_out = extra.residual_out ? scratch + job->bypass_cache + (m - begin) % 2 * kept : residual_out,
            .extra = &extra,
            .sums = (float *)(scratch + kept),
            .ahead = job->ahead,
        };
        float sum = sum_row(kind, residual, ROUNDED, from_memory, &row, hidden, norm, affine, &copy);
        copy.rstd = rstd_of(sum, hidden, job->eps);
        copy.h = residual == NONE ? row.x : row.residual_out;
        copy.out = job->out + m * job->out_stride;
        if (affine) {
            head = head_after(a, head);
            copy.weight = a->gain + head * a->gain_stride;
            copy.bias = a->bias + head * a->bias_stride;
        }
        if (job->rstd) ((float *)job->rstd)[m] = copy.rstd;
    }
    *previous = copy;
}

/* The sum of the squares of a row, as a unit that is still to be halved; in registers at the usual lengths of heads. */
FN_INLINE U sum_short_row(int kind, int residual, const struct row *row, int64_t hidden) {
#define SQUARE(k) add_and_square_unit(kind, residual, ROUNDED, row, UNIT * (k), UNIT)
    if (hidden == 2 * UNIT) return u_add(SQUARE(0), SQUARE(1));
    if (hidden == 4 * UNIT) return u_add(u_add(SQUARE(0), SQUARE(2)), u_add(SQUARE(1), SQUARE(3)));
    if (hidden == 8 * UNIT) return SUM_OF_EIGHT(SQUARE, 1);
#define NEXT_SQUARE(k) SQUARE((k) + 1)
    if (UNIT == 8 && hidden == 16 * UNIT) return u_add(SUM_OF_EIGHT(SQUARE, 2), SUM_OF_EIGHT(NEXT_SQUARE, 2));
#undef NEXT_SQUARE
#undef SQUARE
    return sum_short_segment(kind, residual, ROUNDED, row, 0, hidden);
}

/*
 * Rows [begin, end) of one kind, shorter than a segment. The last levels of several rows' trees are halved together,
 * and their roots are computed together.
 */
FN_INLINE void short_rows(int kind, int residual, int norm, int affine, int64_t hidden, const struct fn_forward_job *job,
                          int64_t begin, int64_t end, const void *weight, const struct affine *a) {
    _Alignas(64) float units[BATCH * 128], rstd[BATCH];
    int64_t batch = batch_rows(job), head = affine ? (job->first_row + begin) % a->heads : 0;
    for (int64_t m = begin; m < end; m += batch) {
        int64_t rows = end - m < batch ? end - m : batch;
        for (int64_t k = 0; k < rows; k++) {
            const struct row row = row_at(residual, job, m + k);
            u_store(F32, units, k * UNIT, UNIT, sum_short_row(kind, residual, &row, hidden));
        }
        for (int64_t k = rows; k < BATCH; k++) u_store(F32, units, k * UNIT, UNIT, u_set1(0)); /* no rows */
        halve_rows(kind == BF16P, units, rstd);
        for (int k = 0; k < BATCH; k++) rstd[k] = rstd_of(rstd[k], hidden, job->eps);
        if (job->rstd) memcpy((float *)job->rstd + m, rstd, (size_t)rows * sizeof(float));
        for (int64_t k = 0; k < rows; k++, head = affine ? head_after(a, head) : 0) {
            const struct scale s = {
                .rstd = rstd[k],
                .h = residual == NONE ? job->x + (m + k) * job->x_stride
                                      : job->residual_out + (m + k) * job->residual_out_stride,
                .weight = affine ? a->gain + head * a->gain_stride : weight,
                .bias = affine ? a->bias + head * a->bias_stride : NULL,
                .out = job->out + (m + k) * job->out_stride,
            };
            int64_t i = 0;
            for (; i + UNIT <= hidden; i += UNIT)
                scale_unit(kind, norm, F32, affine, kind, &s, u_index(i), UNIT, THROUGH_CACHE);
            if (i < hidden)
                scale_unit(kind, norm, F32, affine, kind, &s, i, (int)(hidden - i), THROUGH_CACHE);
        }
    }
}

/* Rows [begin, end): the sum alone. */
FN_INLINE void add_rows(int x, int residual, const struct fn_forward_job *job, int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
        const struct row row = row_at(residual, job, m);
        int64_t i = 0;
        for (; i + UNIT <= job->hidden; i += UNIT) add_residual(x, residual, ROUNDED, UNCACHED, &row, u_index(i), UNIT);
        if (i < job->hidden) add_residual(x, residual, ROUNDED, UNCACHED, &row, i, (int)(job->hidden - i));
    }
}
