/*
 * Gradients, over the operations that kernel_body.h lists; included by it. Rows are taken one by one,
 * in two passes: the sum that every element's gradient needs, and the gradients. The second goes
 * backwards, which is not where the processor expects a long row to go on: what comes next, d_total in
 * the first pass and the next row in the second, is fetched ahead.
 */

struct gradient_row {
    const void *dy, *h, *d_total; /* d_total, the gradient of residual_out, may be NULL */
    const char *next_dy, *next_h; /* of the next row; of this one if it is the last */
    const float *g; /* weight + offset in whole units, or NULL */
    float *partial; /* NULL, or whole units to which this row's share of the weight's gradient is added */
    int fresh; /* whether it is the first share, and nothing is there yet */
    void *d; /* NULL, or where the gradient of x goes */
    int stream; /* whether it goes past the caches */
    float rstd;
    float *sums; /* one per segment */
};

FN_INLINE U weighted(U dy, const struct gradient_row *row, int64_t i) {
    return row->g ? u_mul(dy, u_load(F32, row->g, i, UNIT)) : dy;
}

/* The share of the weight's gradient, and the products whose sum is wanted. */
FN_INLINE void multiply_unit(int kind, const struct gradient_row *row, int64_t i, int n, float *products) {
    U dy = u_load(kind, row->dy, i, n), xhat = u_mul(u_load(kind, row->h, i, n), u_set1(row->rstd));
    if (row->partial) {
        U share = u_mul(dy, xhat);
        if (!row->fresh) share = u_add(u_load(F32, row->partial, i, UNIT), share);
        u_store(F32, row->partial, i, UNIT, share);
    }
    if (row->d) u_store(F32, products, 0, UNIT, u_mul(weighted(dy, row, i), xhat));
}

/* First pass: treesum(wdy * xhat). */
FN_INLINE float multiply_row(int kind, int ahead, const struct gradient_row *row, int64_t hidden) {
    const char *later = row->d_total ? row->d_total : row->dy;
    _Alignas(64) float products[FN_SEGMENT];
    int64_t segments = 0;
    for (int64_t begin = 0; begin < hidden; begin += FN_SEGMENT) {
        int64_t n = hidden - begin < FN_SEGMENT ? hidden - begin : FN_SEGMENT, done = 0, width = UNIT;
        while (width < n) width *= 2;
        for (; done + UNIT <= n; done += UNIT) {
            if (ahead) FN_PREFETCH_2(later + (begin + done) * (kind == F32 ? 4 : 2));
            multiply_unit(kind, row, begin + done, UNIT, products + done);
        }
        if (done < n) {
            multiply_unit(kind, row, begin + done, (int)(n - done), products + done);
            /* Padding is +0, also where 0 * rstd is not. */
            for (int64_t k = n - done; k < UNIT; k++)
                products[done + (kind == BF16P ? k % 2 * (UNIT / 2) + k / 2 : k)] = 0;
            done += UNIT;
        }
        if (!row->d) continue;
        for (; done < width; done += UNIT) u_store(F32, products, done, UNIT, u_set1(0));
        row->sums[segments++] = sum_units(kind == BF16P, products, width);
    }
    return row->d ? halve_sums(row->sums, segments) : 0;
}

FN_INLINE void gradient_unit(int kind, const struct gradient_row *row, float c, int64_t i, int n) {
    U xhat = u_mul(u_load(kind, row->h, i, n), u_set1(row->rstd));
    U wdy = weighted(u_load(kind, row->dy, i, n), row, i);
    U d = u_mul(u_add(wdy, u_mul(xhat, u_set1(-c))), u_set1(row->rstd)); /* rounding is symmetric: -(xhat * c) */
    if (row->d_total) d = u_add(d, u_load(kind, row->d_total, i, n));
    if (STREAMS && row->stream) u_stream(kind, row->d, i, n, d);
    else u_store(kind, row->d, i, n, d);
}

/* Second pass, backwards as in scale_rows. `ahead`: whether rows are so long that fetching is worth its instructions. */
FN_INLINE void gradient_of_row(int kind, int ahead, const struct gradient_row *row, int64_t hidden) {
    const struct gradient_row copy = *row; /* the caller's could change with every store, for all a compiler knows */
    float c = multiply_row(kind, ahead, &copy, hidden) / (float)hidden;
    if (!copy.d) return;
    int64_t i = hidden / UNIT * UNIT;
    if (i < hidden) gradient_unit(kind, &copy, c, i, (int)(hidden - i));
    for (int64_t done = 0; (i -= UNIT) >= 0; done += UNIT) {
        if (ahead) {
            FN_PREFETCH_2(copy.next_dy + done * (kind == F32 ? 4 : 2));
            FN_PREFETCH_2(copy.next_h + done * (kind == F32 ? 4 : 2));
        }
        gradient_unit(kind, &copy, c, i, UNIT);
    }
}

#define GRADIENT(kind) \
    hidden < FN_SEGMENT ? gradient_of_row(kind, 0, row, hidden) : gradient_of_row(kind, 1, row, hidden)

typedef void gradient_fn(const struct gradient_row *, int64_t);
static void gradient_F32(const struct gradient_row *row, int64_t hidden) { GRADIENT(F32); }
static void gradient_F16(const struct gradient_row *row, int64_t hidden) { GRADIENT(F16); }
#if defined(BF16_BY_PARITY)
static void gradient_BF16P(const struct gradient_row *row, int64_t hidden) { GRADIENT(BF16P); }
#endif
static void gradient_BF16(const struct gradient_row *row, int64_t hidden) { GRADIENT(BF16); }

/* `from` as float, or as it is: whole units are written, of which n elements count. */
FN_INLINE void convert(int from_kind, int to_kind, const void *from, void *to, int64_t n) {
    for (int64_t i = 0; i < n; i += UNIT) {
        int left = n - i < UNIT ? (int)(n - i) : UNIT;
        U u = u_load(from_kind, from, i, from_kind == F32 ? UNIT : left);
        u_store(to_kind, to, i, to_kind == F32 ? UNIT : left, u);
    }
}

/* A row as float: in place if it is, else in `room`. */
static const void *as_float(int kind, const void *row, float *room, int64_t n) {
    if (kind == FN_F32 || !row) return row;
    if (kind == FN_F16) convert(F16, F32, row, room, n);
    else convert(BF16, F32, row, room, n);
    return room;
}

/* Rounds floats that u_mul or u_add made; exactly n elements are written. */
static void from_float(int kind, const float *from, void *row, int64_t n) {
    if (kind == FN_F32) memcpy(row, from, (size_t)n * sizeof *from);
    else if (kind == FN_F16) convert(F32, F16, from, row, n);
    else convert(F32, BF16, from, row, n);
}

/* The kind of all rows, or FN_NONE. */
static int one_kind(const struct fn_backward_job *job) {
    int kind = job->dy_kind;
    int same = job->h_kind == kind && (!job->dx || job->dx_kind == kind) && !job->dresidual &&
               (!job->d_total || job->d_total_kind == kind);
    return same ? kind : FN_NONE;
}

static int gradients_by_parity(const struct fn_backward_job *job) {
#if defined(BF16_BY_PARITY)
    return one_kind(job) == FN_BF16 && (!job->weight || job->weight_kind == FN_BF16);
#else
    return (void)job, 0;
#endif
}

static void backward_rows(const struct fn_backward_job *job, int64_t begin, int64_t end, void *partial, void *scratch) {
    if (job->wide) {
        backward_rows_f64(job, begin, end, partial, scratch);
        return;
    }
    int64_t n = job->hidden, padded = (n + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT;
    float *g = scratch, *dy = g + padded, *h = dy + padded, *d_total = h + padded, *d = d_total + padded;
    int kind = one_kind(job);
    gradient_fn *gradient = kind == FN_F16 ? gradient_F16 : kind == FN_BF16 ? gradient_BF16 : gradient_F32;
#if defined(BF16_BY_PARITY)
    if (gradients_by_parity(job)) gradient = gradient_BF16P;
#endif
    struct gradient_row row = {
        .g = job->weight ? g : NULL, .partial = partial, .fresh = 1, .stream = kind && job->stream, .sums = d + padded,
    };
    for (int64_t m = begin; m < end; m++, row.fresh = 0) {
        const char *dy_row = job->dy + m * job->dy_stride, *h_row = job->h + m * job->h_stride;
        const char *total_row = job->d_total ? job->d_total + m * job->d_total_stride : NULL;
        row.dy = kind ? dy_row : as_float(job->dy_kind, dy_row, dy, n);
        row.h = kind ? h_row : as_float(job->h_kind, h_row, h, n);
        row.d_total = kind ? total_row : as_float(job->d_total_kind, total_row, d_total, n);
        row.next_dy = kind && m + 1 < end ? dy_row + job->dy_stride : row.dy;
        row.next_h = kind && m + 1 < end ? h_row + job->h_stride : row.h;
        row.rstd = ((const float *)job->rstd)[m];
        char *dx = job->dx ? job->dx + m * job->dx_stride : NULL;
        char *dresidual = job->dresidual ? job->dresidual + m * job->dresidual_stride : NULL;
        row.d = kind ? dx : dx || dresidual ? (void *)d : NULL;
        gradient(&row, n);
        if (!kind && dx) from_float(job->dx_kind, d, dx, n);
        if (!kind && dresidual) from_float(job->dresidual_kind, d, dresidual, n);
    }
    if (row.stream) u_stream_end();
}

/* What a thread does once: g, as its rows will read it. */
static void backward_begin(const struct fn_backward_job *job, void *scratch) {
    int kind = gradients_by_parity(job) ? (int)BF16P : job->weight_kind;
    if (!job->weight) return;
    if (job->wide) {
        begin_f64(job, scratch);
        return;
    }
    widen_weight(kind, job->weight, (float)job->weight_offset, job->hidden, scratch);
}

/* The weight's gradient, rounded to its type. */
static void backward_end(const struct fn_backward_job *job, const void *sum) {
    if (job->wide) {
        narrow_from_f64(job->weight_kind, sum, job->dweight, job->hidden);
    } else if (gradients_by_parity(job)) {
        convert(F32, BF16P, sum, job->dweight, job->hidden);
    } else {
        from_float(job->weight_kind, sum, job->dweight, job->hidden);
    }
}
