/*
 * The forward pass, over the operations that kernel_body.h lists; included by it. A row takes two passes: the first
 * adds the residual and sums the squares, the second multiplies. `forward_rows`, at the end, chooses one of three
 * strategies, which differ in the rows that they work on between the passes of a row.
 */

/* The weight plus its offset, and the bias: rows of float or as they are, one for all heads or one per head. */
struct affine {
    const char *gain, *bias;
    int64_t gain_stride, bias_stride, heads; /* strides in bytes, 0 where there is one row */
    int as_is; /* whether both are the operands themselves, of out's kind */
};

/* The head of the row after this head's. A division per row would take a tenth of a short row's time. */
static int64_t head_after(const struct affine *a, int64_t head) { return head + 1 == a->heads ? 0 : head + 1; }

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
};

FN_INLINE U add_residual(int x, int residual, int round_sum, int in_cache, const struct row *row, int64_t i, int n) {
    U h;
    if (ADDS_F16 && x == F16 && residual == F16 && round_sum) {
        h = u_add_f16(row->x, row->residual, row->residual_out, i, n);
        if (STREAMS && row->extra && row->extra->residual_out) u_stream(F16, row->extra->residual_out, i, n, h);
    } else {
        h = in_cache ? u_load(x, row->x, i, n) : u_read(x, row->x, i, n);
        if (residual != NONE) {
            h = u_add(h, in_cache ? u_load(residual, row->residual, i, n) : u_read(residual, row->residual, i, n));
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
    float rstd, offset;
    const void *h, *weight;
    const void *bias; /* only read if the row is affine */
    void *out;
    int bypass_cache; /* whether out bypasses the caches */
    const char *next_x, *next_residual; /* the next row, which is fetched meanwhile; h if there is nothing to fetch */
};

/* `affine` is the kind of the bias, NONE where the row is not affine. */
FN_INLINE void scale_unit(int h, int norm, int weight, int offset, int affine, int out, const struct scale *s, int64_t i,
                          int n, int bypass_cache) {
    /* Floats that were stored by parity have n elements in both halves of a unit, and room for all of it. */
    U y = u_mul(u_load(h, s->h, i, h == F32 && out == BF16P ? UNIT : n), u_set1(s->rstd));
    if (norm != NONE) y = u_round(norm, y);
    if (weight != NONE) {
        U g = u_load(weight, s->weight, i, weight == F32 && out == BF16P ? UNIT : n);
        if (offset) g = u_add(g, u_set1(s->offset));
        y = u_mul(y, g);
    }
    if (affine != NONE) y = u_add(y, u_load(affine, s->bias, i, affine == F32 && out == BF16P ? UNIT : n));
    if (STREAMS && bypass_cache) u_stream(out, s->out, i, n, y);
    else u_store(out, s->out, i, n, y);
}

/* The kind of the weight: that of the bias; float, where there is none. */
FN_INLINE int weight_kind(int affine) { return affine == NONE ? (int)F32 : affine; }

/* Part of the second pass of the previous row, of the same kind. */
FN_INLINE void scale_eight(int kind, int norm, int affine, const struct scale *previous, int64_t i) {
    for (int k = 0; k < 8; k++)
        scale_unit(kind, norm, weight_kind(affine), 0, affine, kind, previous, u_index(i + k * UNIT), UNIT,
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
                add_residual(x, residual, round_sum, 0, row, u_index(i + 8 * c + k * UNIT), UNIT);
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
#define SQUARE(k) u_square(add_residual(x, residual, round_sum, 1, row, u_index(s * FN_SEGMENT + c + (k)), UNIT))
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
    add_and_square(x, residual, round_sum, row, 0, 1, 0, columns, norm, affine, previous);
    for (int64_t s = 1; s < segments; s++) {
        add_and_square(x, residual, round_sum, row, s * FN_SEGMENT, 1, 1, columns, norm, affine, previous);
        row->sums[s - 1] = u_halve(x == BF16P, sum_units(columns, 128));
    }
    add_and_square(x, residual, round_sum, row, segments * FN_SEGMENT, 0, 1, columns, norm, affine, NULL);
    row->sums[segments - 1] = u_halve(x == BF16P, sum_units(columns, 128));
}

FN_INLINE U add_and_square_unit(int x, int residual, int round_sum, const struct row *row, int64_t i, int n) {
    return u_square(add_residual(x, residual, round_sum, 0, row, u_index(i), n));
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
            scale_unit(x, norm, weight_kind(affine), 0, affine, x, previous, i, UNIT, previous->bypass_cache);
        if (i < hidden) scale_unit(x, norm, weight_kind(affine), 0, affine, x, previous, i, (int)(hidden - i), 0);
    }
    return halve_sums(row->sums, sums);
}

/*
 * Consecutive rows that go through the passes together: the last steps of a row's sum, a root and a division overlap
 * with work on the other rows. If rows are short, all of them fit the nearest cache. Twice as many bytes were slower
 * from memory.
 */
enum { BATCH_BYTES = 16 * 1024 };
struct batch {
    int64_t rows;
    const struct affine *affine; /* NULL: no bias, and one row of the weight for all heads */
    float *kept, *sums; /* in scratch: rows of h, or NULL if they are not kept; sums of segments */
    const char *h; /* the rows of h for the second pass */
    int64_t h_stride; /* in bytes */
    int bypass_cache; /* whether out bypasses the caches */
    char *residual_out; /* NULL, or where residual_out goes, bypassing the caches; the job's lies in scratch then */
    int64_t residual_out_stride;
    float rstd[BATCH]; /* the sums of squares until the first pass is over */
};

static int64_t batch_rows(const struct fn_forward_job *job) {
    int64_t element = fn_element_size(job->x_kind) + fn_element_size(job->residual_kind), room = fn_float_row(job->hidden);
    int64_t rows = BATCH_BYTES / element < FN_KEPT ? BATCH_BYTES / element / room : FN_KEPT / room;
    return rows < 1 ? 1 : rows < BATCH ? rows : BATCH;
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
        const struct row row = {
            .x = job->x + k * job->x_stride,
            .residual = residual == NONE ? NULL : job->residual + k * job->residual_stride,
            .residual_out = residual == NONE ? NULL : job->residual_out + k * job->residual_out_stride,
            .extra = extra.h || extra.residual_out ? &extra : NULL,
            .sums = batch->sums,
        };
        batch->rstd[k] = sum_row(x, residual, round_sum, from_memory, &row, hidden, NONE, 0, NULL);
    }
}

/* A row from its end to its beginning, because the nearest cache still holds the end. */
FN_INLINE void scale_row(int h, int norm, int weight, int offset, int affine, int out, const struct scale *s,
                         int64_t hidden, int bypass_cache) {
    int64_t i = hidden / UNIT * UNIT;
    if (i < hidden) scale_unit(h, norm, weight, offset, affine, out, s, i, (int)(hidden - i), 0);
    for (int64_t done = 0; (i = u_index(i - UNIT)) >= 0; done += 2 * UNIT) {
        if (READS_AHEAD && out != F32) {
            FN_PREFETCH_2(s->next_x + done);
            FN_PREFETCH_2(s->next_residual + done);
        }
        scale_unit(h, norm, weight, offset, affine, out, s, i, UNIT, bypass_cache);
    }
}

/*
 * Second pass over the rows: out. `norm` is the kind that h * rstd is rounded to, or NONE. Prefetchers do not expect a
 * row to be read backwards and the next one forwards. So the next row is fetched meanwhile, if it comes from memory, is
 * long enough for that to matter, and short enough to stay in the second cache.
 */
FN_INLINE void scale_rows(int h, int norm, int weight, int offset, int affine, int out, const struct fn_forward_job *job,
                          const struct batch *batch) {
    int64_t hidden = job->hidden;
    int ahead = job->from_memory && hidden >= FN_SEGMENT && hidden <= 8 * FN_SEGMENT;
    int64_t head = affine ? job->first_row % batch->affine->heads : 0;
    for (int64_t k = 0; k < batch->rows; k++, head = affine ? head_after(batch->affine, head) : 0) {
        const struct scale s = {
            .rstd = batch->rstd[k],
            .offset = (float)job->weight_offset,
            .h = batch->h + k * batch->h_stride,
            .weight = affine ? batch->affine->gain + head * batch->affine->gain_stride : job->weight,
            .bias = affine ? batch->affine->bias + head * batch->affine->bias_stride : NULL,
            .out = job->out + k * job->out_stride,
            .next_x = ahead ? job->x + (k + batch->rows) * job->x_stride : batch->h,
            .next_residual =
                ahead && job->residual ? job->residual + (k + batch->rows) * job->residual_stride : batch->h,
        };
        if (STREAMS && batch->bypass_cache) scale_row(h, norm, weight, offset, affine, out, &s, hidden, 1);
        else scale_row(h, norm, weight, offset, affine, out, &s, hidden, 0);
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
        };
        float sum = sum_row(kind, residual, 1, from_memory, &row, hidden, norm, affine, &copy);
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
#define SQUARE(k) add_and_square_unit(kind, residual, 1, row, UNIT * (k), UNIT)
    if (hidden == 2 * UNIT) return u_add(SQUARE(0), SQUARE(1));
    if (hidden == 4 * UNIT) return u_add(u_add(SQUARE(0), SQUARE(2)), u_add(SQUARE(1), SQUARE(3)));
    if (hidden == 8 * UNIT) return SUM_OF_EIGHT(SQUARE, 1);
#undef SQUARE
    return sum_short_segment(kind, residual, 1, row, 0, hidden);
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
            const struct row row = {
                .x = job->x + (m + k) * job->x_stride,
                .residual = residual == NONE ? NULL : job->residual + (m + k) * job->residual_stride,
                .residual_out = residual == NONE ? NULL : job->residual_out + (m + k) * job->residual_out_stride,
            };
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
            for (; i + UNIT <= hidden; i += UNIT) scale_unit(kind, norm, F32, 0, affine, kind, &s, u_index(i), UNIT, 0);
            if (i < hidden) scale_unit(kind, norm, F32, 0, affine, kind, &s, i, (int)(hidden - i), 0);
        }
    }
}

/* Rows [begin, end): the sum alone. */
FN_INLINE void add_rows(int x, int residual, const struct fn_forward_job *job, int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
        const struct row row = {
            .x = job->x + m * job->x_stride,
            .residual = job->residual + m * job->residual_stride,
            .residual_out = job->residual_out + m * job->residual_out_stride,
        };
        int64_t i = 0;
        for (; i + UNIT <= job->hidden; i += UNIT) add_residual(x, residual, 1, 0, &row, u_index(i), UNIT);
        if (i < job->hidden) add_residual(x, residual, 1, 0, &row, i, (int)(job->hidden - i));
    }
}

#include "kernels/kernel_tables.h"

/* Fewer rows are not worth widening the weight for. */
enum { ONE_KIND_ROWS = 4 };

/* How the rows of a job are computed. */
struct plan {
    int x, residual, weight, out; /* the operands' kinds: BF16P for BF16 where rows are taken by parity */
    int norm; /* the kind that h * rstd is rounded to, or NONE */
    int round_sum, offset; /* whether h is the rounded sum and not itself float; whether the weight has an offset */
    int h, keep; /* the kind that the second pass reads h in; whether the first pass keeps it in scratch, as float */
};

static int by_parity(const struct fn_forward_job *job) {
#if defined(BF16_BY_PARITY)
    return job->x_kind == FN_BF16 && job->out_kind == FN_BF16 &&
           (job->residual_kind == FN_NONE || job->residual_kind == FN_BF16) &&
           (job->weight_kind == FN_NONE || job->weight_kind == FN_BF16) &&
           (job->bias_kind == FN_NONE || job->bias_kind == FN_BF16);
#else
    return (void)job, 0;
#endif
}

static struct plan plan_of(const struct fn_forward_job *job) {
    struct plan p = {
        .x = job->x_kind, .residual = job->residual_kind, .weight = job->weight_kind, .out = job->out_kind,
    };
    if (by_parity(job)) {
        p.x = p.out = BF16P;
        if (p.residual) p.residual = BF16P;
        if (p.weight) p.weight = BF16P;
    }
    const int rounded_to = job->flags & FN_GATE_BEFORE ? p.out : p.x;
    if (job->flags & FN_ROUND_NORM && rounded_to != F32) p.norm = rounded_to;
    p.round_sum = job->flags & FN_ROUND_SUM && p.residual != NONE && p.residual != F32;
    p.offset = p.weight != NONE && (float)job->weight_offset != 0;
    /* h is an operand, unless it is a sum before rounding. The second pass reads an operand of out's kind, or float. */
    int operand = p.residual ? p.residual : p.x;
    p.keep = (p.residual && p.residual != F32 && !p.round_sum) || (operand != p.out && operand != F32);
    p.h = p.keep ? F32 : operand;
    return p;
}

/* The weight plus its offset, as float: in scratch, unless the weight is that already. Ones if there is no weight. */
static const void *float_weight(const struct fn_forward_job *job, const struct plan *p, float *scratch) {
    if (p->weight == F32 && !p->offset) return job->weight;
    widen_weight(p->weight, job->weight, (float)job->weight_offset, 1, job->hidden, scratch);
    return scratch;
}

/*
 * The weight and the bias as rows of float: in scratch, unless they are that already. Without a bias -0, as y + -0 is y. Or
 * as they are, if they are of out's kind.
 */
static struct affine affine_of(const struct fn_forward_job *job, const struct plan *p, int as_is, float *scratch) {
    const int64_t room = fn_float_row(job->hidden);
    const float offset = (float)job->weight_offset;
    const int bias = p->out == BF16P && job->bias_kind ? BF16P : job->bias_kind;
    as_is = as_is && p->weight == p->out && bias == p->out && !p->offset && p->h == p->out && affine_as_is[p->norm][p->out];
    struct affine a = {job->weight, job->bias, job->weight_stride, job->bias_stride, job->heads, as_is};
    if (as_is) return a;
    if (p->weight != F32 || p->offset) {
        a.gain = (const char *)scratch;
        a.gain_stride = job->weight_stride ? (int64_t)sizeof(float) * room : 0;
        for (int64_t h = 0; h < (job->weight_stride ? job->heads : 1); h++)
            widen_weight(p->weight, (const char *)job->weight + h * job->weight_stride, offset, 1, job->hidden,
                         scratch + h * room);
    }
    scratch += job->heads * room;
    if (bias != F32) {
        a.bias = (const char *)scratch;
        a.bias_stride = job->bias_stride ? (int64_t)sizeof(float) * room : 0;
        for (int64_t h = 0; h < (job->bias_stride ? job->heads : 1); h++)
            widen_weight(bias, (const char *)job->bias + h * job->bias_stride, 0, -0.0f, job->hidden, scratch + h * room);
    }
    return a;
}

/* The job whose first row is row m. */
static struct fn_forward_job job_from(const struct fn_forward_job *job, int64_t m) {
    struct fn_forward_job part = *job;
    part.x += m * job->x_stride;
    part.out += m * job->out_stride;
    part.first_row += m;
    if (job->rstd) part.rstd = (float *)job->rstd + m;
    if (job->residual_kind) {
        part.residual += m * job->residual_stride;
        part.residual_out += m * job->residual_out_stride;
    }
    return part;
}

/* The first pass over a batch, up to rstd. */
static void first_pass(const struct plan *p, const struct fn_forward_job *part, struct batch *batch) {
    sums[p->x][p->residual][p->round_sum](part, batch);
    for (int64_t k = 0; k < batch->rows; k++) batch->rstd[k] = rstd_of(batch->rstd[k], part->hidden, part->eps);
    if (part->rstd) memcpy(part->rstd, batch->rstd, (size_t)batch->rows * sizeof(float));
}

static void second_pass(const struct plan *p, const struct fn_forward_job *part, const struct batch *batch) {
    if (batch->affine && batch->affine->as_is) affine_as_is[p->norm][p->out](part, batch);
    else if (batch->affine) affine_scales[p->norm][p->out][p->h == p->out](part, batch);
    else scales[p->norm][p->weight][p->offset][p->out][p->h == p->out](part, batch);
}

/* Long rows of one kind: the first pass of each with the second pass of the row before it. */
static void forward_overlapped(const struct plan *p, const struct fn_forward_job *job, int64_t begin, int64_t end,
                               char *scratch, const struct affine *affine) {
    int bypass_cache = STREAMS && job->bypass_cache;
    int64_t kept = (int64_t)sizeof(float) * fn_kept(job->hidden);
    struct batch batch = {
        .rows = 1, .affine = affine, .sums = (float *)(scratch + kept), .bypass_cache = bypass_cache,
    };
    struct fn_forward_job first = job_from(job, begin), last = job_from(job, end - 1);
    struct scale previous = {.out = first.out, .bypass_cache = bypass_cache};
    if (affine) {
        const int64_t head = first.first_row % affine->heads;
        previous.weight = affine->gain + head * affine->gain_stride;
        previous.bias = affine->bias + head * affine->bias_stride;
    } else {
        previous.weight = float_weight(job, p, (float *)scratch);
    }
    if (bypass_cache && p->residual) {
        batch.residual_out = first.residual_out;
        first.residual_out = scratch + job->bypass_cache + kept; /* the next row lies before it */
    }
    first_pass(p, &first, &batch);
    previous.rstd = batch.rstd[0];
    previous.h = p->residual ? first.residual_out : first.x;
    const int residual = p->residual != NONE, norm = p->norm != NONE;
    if (affine) affine_overlaps[p->x][residual][norm][affine->as_is](job, begin + 1, end, &previous, scratch, affine);
    else overlaps[p->x][residual][norm](job, begin + 1, end, &previous, scratch);
    batch.rstd[0] = previous.rstd;
    batch.h = previous.h;
    second_pass(p, &last, &batch);
}

/* Any rows, a batch at a time. */
static void forward_batched(const struct plan *p, const struct fn_forward_job *job, int64_t begin, int64_t end,
                            char *scratch, const struct affine *affine) {
    int64_t rows = batch_rows(job), row_bytes = (int64_t)sizeof(float) * fn_float_row(job->hidden);
    struct batch batch = {
        .kept = p->keep ? (float *)scratch : NULL,
        .sums = (float *)scratch + fn_kept(job->hidden),
        .affine = affine,
        .bypass_cache = STREAMS && job->bypass_cache,
    };
    for (int64_t m = begin; m < end; m += rows) {
        struct fn_forward_job part = job_from(job, m);
        if (batch.bypass_cache && p->residual) { /* the second pass reads h in scratch */
            batch.residual_out = part.residual_out;
            batch.residual_out_stride = part.residual_out_stride;
            part.residual_out = scratch + job->bypass_cache;
            part.residual_out_stride = row_bytes;
        }
        batch.rows = end - m < rows ? end - m : rows;
        batch.h = p->keep ? scratch : p->residual ? part.residual_out : part.x;
        batch.h_stride = p->keep ? row_bytes : p->residual ? part.residual_out_stride : part.x_stride;
        first_pass(p, &part, &batch);
        second_pass(p, &part, &batch);
    }
}

/* x times a number, which takes the place of rstd. */
static void scale_only(const struct plan *p, const struct fn_forward_job *job, int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
        const struct fn_forward_job part = job_from(job, m);
        const struct batch batch = {.rows = 1, .h = part.x, .rstd = {(float)job->eps}};
        second_pass(p, &part, &batch);
    }
}

static void forward_rows(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    if (job->x_kind == FN_F64) {
        forward_rows_f64(job, begin, end, scratch);
        return;
    }
    const struct plan p = plan_of(job);
    if (!p.out) {
        adds[p.x][p.residual](job, begin, end);
        return;
    }
    if (job->flags & FN_SCALE_ONLY) {
        scale_only(&p, job, begin, end);
        return;
    }
    const int is_short = job->hidden < FN_SEGMENT, few = end - begin < ONE_KIND_ROWS;
    int one_kind = !few && p.x == p.out && p.h == p.out && !p.keep &&
                   overlaps[p.x][0][0] && /* BF16 has none where BF16P has */
                   (is_short || job->overlaps);
    struct affine rows;
    const struct affine *affine = NULL;
    if (job->affine) {
        rows = affine_of(job, &p, few || (!is_short && job->affine_as_is), (float *)((char *)scratch + job->affine));
        affine = &rows;
    }
    if (one_kind && !is_short)
        forward_overlapped(&p, job, begin, end, scratch, affine);
    else if (one_kind && !job->bypass_cache && affine)
        affine_shorts[p.x][p.residual != NONE][p.norm != NONE](job, begin, end, affine);
    else if (one_kind && !job->bypass_cache)
        shorts[p.x][p.residual != NONE][p.norm != NONE](job, begin, end, float_weight(job, &p, scratch));
    else
        forward_batched(&p, job, begin, end, scratch, affine);
    if (STREAMS && job->bypass_cache) u_stream_end();
}
