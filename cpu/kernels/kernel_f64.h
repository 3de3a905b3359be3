/*
 * Both passes for float64 rows, in plain C that the compiler vectorises: float64 serves to check gradients and
 * references, and its longest loops are bound by memory anyway.
 */

static void widen_to_f64(int kind, const void *row, double *out, int64_t n) {
    if (kind == FN_F64) {
        memcpy(out, row, (size_t)n * sizeof *out);
    } else if (kind == FN_F32) {
        for (int64_t i = 0; i < n; i++) out[i] = f32_at(row, i);
    } else {
        for (int64_t i = 0; i < n; i++)
            out[i] = kind == FN_F16 ? f32_from_f16(half_at(row, i)) : f32_from_bf16(half_at(row, i));
    }
}

static void narrow_from_f64(int kind, const double *values, void *row, int64_t n) {
    char *p = row;
    if (kind == FN_F64) {
        memcpy(p, values, (size_t)n * sizeof *values);
    } else if (kind == FN_F32) {
        for (int64_t i = 0; i < n; i++) {
            float value = (float)values[i];
            memcpy(p + 4 * i, &value, sizeof value);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            float value = f32_odd_from_f64(values[i]);
            uint16_t half = kind == FN_F16 ? f16_from_f32(value) : bf16_from_f32(value);
            memcpy(p + 2 * i, &half, sizeof half);
        }
    }
}

/* The spec's tree over `values`, whose `padded` elements are whole segments. Overwrites them. */
static double sum_f64(double *values, int64_t padded) {
    int64_t segments = padded / FN_SEGMENT, width = 1;
    for (int64_t s = 0; s < segments; s++) {
        double *v = values + s * FN_SEGMENT;
        for (int half = FN_SEGMENT / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) v[i] += v[i + half];
        values[s] = v[0];
    }
    while (width < segments) width *= 2;
    while (width > 1) {
        width /= 2;
        for (int64_t i = 0; i < width && i + width < segments; i++) values[i] += values[i + width];
        segments = segments < width ? segments : width;
    }
    return values[0];
}

/* Subtracts a row's mean; `room` has whole segments. */
static void center_f64(double *row, int64_t n, int64_t padded, double *room) {
    for (int64_t i = 0; i < padded; i++) room[i] = i < n ? row[i] : 0;
    const double mean = sum_f64(room, padded) / (double)n + 0.0;
    for (int64_t i = 0; i < n; i++) row[i] -= mean;
}

void FN_OF(forward_rows_f64)(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    int64_t n = job->hidden, padded = (n + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT;
    double *h = scratch, *other = h + padded;
    for (int64_t m = begin; m < end; m++) {
        widen_to_f64(FN_F64, job->x + m * job->x_stride, h, n);
        if (job->residual_kind) {
            char *residual_out = job->residual_out + m * job->residual_out_stride;
            widen_to_f64(job->residual_kind, job->residual + m * job->residual_stride, other, n);
            for (int64_t i = 0; i < n; i++) h[i] += other[i];
            narrow_from_f64(job->residual_kind, h, residual_out, n);
            if (job->flags & FN_ROUND_SUM) widen_to_f64(job->residual_kind, residual_out, h, n);
        }
        if (!job->out_kind) continue;
        if (job->flags & FN_CENTER) center_f64(h, n, padded, other);
        if (job->flags & FN_SCALE_ONLY) {
            for (int64_t i = 0; i < n; i++) h[i] *= job->eps;
            narrow_from_f64(job->out_kind, h, job->out + m * job->out_stride, n);
            continue;
        }
        for (int64_t i = 0; i < n; i++) other[i] = h[i] * h[i];
        for (int64_t i = n; i < padded; i++) other[i] = 0;
        double rstd = 1 / sqrt(sum_f64(other, padded) / (double)n + job->eps);
        if (job->rstd) ((double *)job->rstd)[m] = rstd;
        for (int64_t i = 0; i < n; i++) h[i] *= rstd;
        const int64_t head = (job->first_row + m) % job->heads;
        if (job->weight_kind) {
            widen_to_f64(job->weight_kind, (const char *)job->weight + head * job->weight_stride, other, n);
            if (job->weight_offset != 0)
                for (int64_t i = 0; i < n; i++) other[i] += job->weight_offset;
            for (int64_t i = 0; i < n; i++) h[i] *= other[i];
        }
        if (job->bias) {
            widen_to_f64(job->bias_kind, (const char *)job->bias + head * job->bias_stride, other, n);
            for (int64_t i = 0; i < n; i++) h[i] += other[i];
        }
        narrow_from_f64(job->out_kind, h, job->out + m * job->out_stride, n);
    }
}

/* A thread's scratch begins with the rows that gradients_f64 names; the gains of all heads follow. */
static double *gains_f64(const struct fn_backward_job *job, void *scratch) {
    const int64_t padded = (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT;
    return (double *)scratch + 4 * padded + fn_room_for_sums(job->hidden);
}

static void begin_f64(const struct fn_backward_job *job, const void *weight, double *g) {
    widen_to_f64(job->weight_kind, weight, g, job->hidden);
    if (job->weight_offset != 0)
        for (int64_t i = 0; i < job->hidden; i++) g[i] += job->weight_offset;
}

/* Makes a row's share the first one of a sum, or adds it; `other` is NULL, or a factor of each element. */
FN_INLINE void add_shares_f64(int first, const double *values, const double *other, int64_t n, double *sum) {
    for (int64_t i = 0; i < n; i++) {
        const double share = other ? values[i] * other[i] : values[i];
        sum[i] = first ? share : sum[i] + share;
    }
}
static void add_share_f64(int first, const double *values, const double *other, int64_t n, double *sum) {
    if (other) FN_UNSWITCH(first, add_shares_f64(first, values, other, n, sum));
    else FN_UNSWITCH(first, add_shares_f64(first, values, NULL, n, sum));
}

static void gradients_of_row_f64(const struct fn_backward_job *job, int64_t m, int64_t head, int first, double *partial,
                                 void *scratch) {
    const int64_t n = job->hidden, padded = (n + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT, at = head * job->gain_stride;
    double *dy = scratch, *xhat = dy + padded, *other = xhat + padded;
    const double rstd = ((const double *)job->rstd)[m], *g = gains_f64(job, scratch) + at;
    widen_to_f64(job->dy_kind, fn_row_of_dy(job, m), dy, n);
    widen_to_f64(job->h_kind, fn_row_of_h(job, m), xhat, n);
    if (job->center) center_f64(xhat, n, padded, other);
    for (int64_t i = 0; i < n; i++) xhat[i] *= rstd;
    if (partial) {
        add_share_f64(first, dy, xhat, n, partial + at);
        if (job->bias_sums) add_share_f64(first, dy, NULL, n, partial + job->bias_sums + at);
    }
    if (!job->dx && !job->dresidual) return;
    if (job->weight)
        for (int64_t i = 0; i < n; i++) dy[i] *= g[i];
    for (int64_t i = 0; i < n; i++) other[i] = dy[i] * xhat[i];
    for (int64_t i = n; i < padded; i++) other[i] = 0;
    const double c = sum_f64(other, padded) / (double)n;
    if (job->center) center_f64(dy, n, padded, other);
    for (int64_t i = 0; i < n; i++) dy[i] = (dy[i] - xhat[i] * c) * rstd;
    if (job->d_total) {
        widen_to_f64(job->d_total_kind, fn_row_of_d_total(job, m), other, n);
        for (int64_t i = 0; i < n; i++) dy[i] += other[i];
    }
    if (job->dx) narrow_from_f64(job->dx_kind, dy, job->dx + m * job->dx_stride, n);
    if (job->dresidual) narrow_from_f64(job->dresidual_kind, dy, job->dresidual + m * job->dresidual_stride, n);
}

static void gradients_f64(const struct fn_backward_job *job, int64_t begin, int64_t end, struct fn_sum_stack *sums,
                          int merged, struct fn_backward_part *part) {
    if (sums && !part->continues) sums->count++;
    double *const partial = sums ? sums->row[sums->count - 1] : NULL;
    for (int64_t m = begin; m < end; m++)
        for (int64_t head = 0; head < job->heads; head++)
            gradients_of_row_f64(job, m * job->heads + head, head, m == begin && !part->continues, partial, part->scratch);
    for (; partial && merged > 0; merged--) {
        const double *from = sums->row[--sums->count];
        double *into = sums->row[sums->count - 1];
        for (int64_t i = 0; i < job->sums; i++) into[i] += from[i];
    }
}

/* See fn_normalise_again; float64 rows are not rounded before they meet the weight. */
static void normalise_again_f64(const struct fn_backward_job *job, int64_t m, void *scratch, char *rows) {
    const int64_t n = job->hidden;
    double *const y = scratch, *const g = gains_f64(job, y);
    for (int64_t head = 0; head < job->heads; head++, rows += n * fn_element_size(job->dy_kind)) {
        const double rstd = ((const double *)job->rstd)[m * job->heads + head];
        widen_to_f64(job->h_kind, fn_row_of_h(job, m * job->heads + head), y, n);
        for (int64_t i = 0; i < n; i++) y[i] *= rstd;
        for (int64_t i = 0; job->weight && i < n; i++) y[i] *= g[head * job->gain_stride + i];
        narrow_from_f64(job->dy_kind, y, rows, n);
    }
}
