/*
 * The kernels, written once. A file kernel_<isa>.c defines ISA and the operations below for its
 * instruction set (most by way of pairs.h) and then includes this file. Work is done in units, as
 * many floats as the instruction set likes to hold at once.
 *
 *   UNIT                       floats in a unit: a power of two that divides 128, known when the
 *                              program runs
 *   U                          a unit; never in an array or a struct, since SVE's types have no size
 *   u_set1 u_add u_mul         each one correctly rounded IEEE operation
 *   u_round                    to a 16-bit kind, to nearest even, and back
 *   u_load                     widens n <= UNIT elements of a row, and fills up with +0
 *   u_store                    rounds, stores n <= UNIT elements, and returns what was stored; only
 *                              results of u_add and u_mul are ever rounded (here and by u_round)
 *   u_halve                    v[:n/2] + v[n/2:] until one value is left
 *
 * and, where u_load and u_store know the kind BF16P, BF16_BY_PARITY.
 *
 * Sums of a segment follow the spec's tree: v = v[:n/2] + v[n/2:]. Elements that are 128 or more apart
 * are added as whole units, down to UNIT apart in `sum_units`, and the rest in `u_halve`.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "kinds.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

#define FN_JOIN_(a, b) a##_##b
#define FN_JOIN(a, b) FN_JOIN_(a, b)

/* Halves `width` floats, whole units, until one value is left. Overwrites them. */
FN_INLINE float sum_units(int by_parity, float *v, int64_t width) {
    while (width > UNIT) {
        width /= 2;
        for (int64_t i = 0; i < width; i += UNIT)
            u_store(F32, v, i, UNIT, u_add(u_load(F32, v, i, UNIT), u_load(F32, v, i + width, UNIT)));
    }
    return u_halve(by_parity, u_load(F32, v, 0, UNIT));
}

/* Halves `count` values, padded with +0 to a power of two, until one is left. */
static float halve_sums(float *sums, int64_t count) {
    int64_t width = 1;
    while (width < count) width *= 2;
    for (int64_t i = count; i < width; i++) sums[i] = 0;
    while (width > 1) {
        width /= 2;
        for (int64_t i = 0; i < width; i++) sums[i] += sums[i + width];
    }
    return sums[0];
}

struct row {
    const void *x, *residual;
    void *residual_out;
    float *h; /* buffer for the row that is normalised, where no operand holds it as float */
    float *squares; /* buffer of one segment */
    float *sums; /* one per segment */
    int in_order; /* whether to go through memory in order, at the price of another pass through the cache */
};

/* The row to be normalised, h: residual_out as float (round_sum), or the sum before rounding. */
FN_INLINE U add_residual(int x, int residual, int round_sum, const struct row *row, int64_t i, int n) {
    U h = u_load(x, row->x, i, n);
    if (residual != NONE) {
        h = u_add(h, u_load(residual, row->residual, i, n));
        U rounded = u_store(residual, row->residual_out, i, n, h);
        if (round_sum) h = rounded;
    }
    if ((residual == NONE ? x : residual) != F32) u_store(F32, row->h, i, UNIT, h);
    return h;
}

FN_INLINE U u_square(U u) { return u_mul(u, u); }

FN_INLINE U square_at(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    return u_square(add_residual(x, residual, round_sum, row, i, UNIT));
}

/* The same for the last n elements of a row, which may be fewer than a unit, or none. */
FN_INLINE U square_of_last(int x, int residual, int round_sum, const struct row *row, int64_t i, int64_t n) {
    if (n <= 0) return u_set1(0);
    if (n >= UNIT) return square_at(x, residual, round_sum, row, i);
    return u_square(add_residual(x, residual, round_sum, row, i, (int)n));
}

/* The sum of eight squares that are 128 elements apart: the first three levels of a segment's tree. */
#define SUM_OF_SQUARES(square)                                                \
    u_add(u_add(u_add(square(0), square(4)), u_add(square(2), square(6))),    \
          u_add(u_add(square(1), square(5)), u_add(square(3), square(7))))

/* Eight places at once: each element passes through registers once, but memory is not read in order. */
FN_INLINE float sum_segment(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    _Alignas(64) float columns[128];
    for (int c = 0; c < 128; c += UNIT, i += UNIT) {
#define SQUARE(k) square_at(x, residual, round_sum, row, i + 128 * (k))
        u_store(F32, columns, c, UNIT, SUM_OF_SQUARES(SQUARE));
#undef SQUARE
    }
    return sum_units(x == BF16P, columns, 128);
}

/* In order, as prefetchers of memory want it, and then again over h, which the first-level cache holds by now. */
FN_INLINE float sum_segment_in_order(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    _Alignas(64) float columns[128];
    for (int64_t k = i; k < i + FN_SEGMENT; k += UNIT) add_residual(x, residual, round_sum, row, k, UNIT);
    const float *h = (residual == NONE ? x : residual) != F32 ? row->h : residual == NONE ? row->x : row->residual_out;
    for (int c = 0; c < 128; c += UNIT, i += UNIT) {
#define SQUARE(k) u_square(u_load(F32, h, i + 128 * (k), UNIT))
        u_store(F32, columns, c, UNIT, SUM_OF_SQUARES(SQUARE));
#undef SQUARE
    }
    return sum_units(x == BF16P, columns, 128);
}

/*
 * A segment of n < FN_SEGMENT elements. Levels of the tree that would only add padding are skipped.
 * All lengths have one type, because GCC 12 crashes on a mixture where UNIT is SVE's.
 */
FN_INLINE float sum_short_segment(int x, int residual, int round_sum, const struct row *row, int64_t begin, int64_t n) {
#define SQUARE(k) square_of_last(x, residual, round_sum, row, begin + UNIT * (k), n - UNIT * (k))
    if (n <= UNIT) return u_halve(x == BF16P, SQUARE(0));
    if (n <= 2 * UNIT) return u_halve(x == BF16P, u_add(SQUARE(0), SQUARE(1)));
    if (n <= 4 * UNIT)
        return u_halve(x == BF16P, u_add(u_add(SQUARE(0), SQUARE(2)), u_add(SQUARE(1), SQUARE(3))));
    int64_t done = 0, width = UNIT;
    while (width < n) width *= 2;
    for (; done < n; done += UNIT) u_store(F32, row->squares, done, UNIT, SQUARE(done / UNIT));
#undef SQUARE
    for (; done < width; done += UNIT) u_store(F32, row->squares, done, UNIT, u_set1(0));
    return sum_units(x == BF16P, row->squares, width);
}

/* First pass over a row: residual_out, h, and the sum of the squares of h. */
FN_INLINE float sum_row(int x, int residual, int round_sum, const struct row *row, int64_t hidden) {
    int64_t segments = hidden / FN_SEGMENT, begin = segments * FN_SEGMENT;
    for (int64_t s = 0; s < segments; s++) {
        int64_t i = s * FN_SEGMENT;
        row->sums[s] = row->in_order ? sum_segment_in_order(x, residual, round_sum, row, i)
                                     : sum_segment(x, residual, round_sum, row, i);
    }
    if (begin < hidden)
        row->sums[segments++] = sum_short_segment(x, residual, round_sum, row, begin, hidden - begin);
    return halve_sums(row->sums, segments);
}

struct scale {
    float rstd, offset;
    const void *weight;
    void *out;
};

FN_INLINE void scale_unit(int norm, int weight, int offset, int out, const struct scale *s, const float *h, int64_t i, int n) {
    /* By parity h is always the buffer, which has room for whole units, and holds n elements in both halves. */
    U y = u_mul(u_load(F32, h, i, out == BF16P ? UNIT : n), u_set1(s->rstd));
    if (norm != NONE) y = u_round(norm, y);
    if (weight != NONE) {
        U g = u_load(weight, s->weight, i, n);
        if (offset) g = u_add(g, u_set1(s->offset));
        y = u_mul(y, g);
    }
    u_store(out, s->out, i, n, y);
}

/* Second pass over a row: out. `norm` is the type that h * rstd is rounded to, or NONE. */
FN_INLINE void scale_row(int norm, int weight, int offset, int out, const struct scale *s, const float *h, int64_t hidden) {
    int64_t i = 0;
    for (; i <= hidden - UNIT; i += UNIT) scale_unit(norm, weight, offset, out, s, h, i, UNIT);
    if (i < hidden) scale_unit(norm, weight, offset, out, s, h, i, (int)(hidden - i));
}

/*
 * One function per combination of types, so that each is compiled with its types known. ROUND_SUM
 * has no effect on the bits when the residual is float or absent, hence the shorter lists. Each takes
 * a copy of its struct: what the caller's holds could change with every store, for all a compiler knows.
 */
typedef float sum_fn(const struct row *, int64_t);
typedef void scale_fn(const struct scale *, const float *, int64_t);

#define SUM(x, residual, round_sum)                                                       \
    static float sum_##x##_##residual##_##round_sum(const struct row *row, int64_t hidden) { \
        const struct row copy = *row;                                                     \
        return sum_row(x, residual, round_sum, &copy, hidden);                            \
    }
#define SUMS(x) SUM(x, NONE, 0) SUM(x, F32, 0) SUM(x, F16, 0) SUM(x, F16, 1) SUM(x, BF16, 0) SUM(x, BF16, 1)
SUMS(F32) SUMS(F16) SUMS(BF16)

#define SUM_ROW(x)                                                                                     \
    {                                                                                                  \
        [NONE] = {sum_##x##_NONE_0, sum_##x##_NONE_0}, [F32] = {sum_##x##_F32_0, sum_##x##_F32_0},      \
        [F16] = {sum_##x##_F16_0, sum_##x##_F16_1}, [BF16] = {sum_##x##_BF16_0, sum_##x##_BF16_1},     \
    }
static sum_fn *const sums[4][4][2] = {[F32] = SUM_ROW(F32), [F16] = SUM_ROW(F16), [BF16] = SUM_ROW(BF16)};

#define SCALE(norm, weight, offset, out)                                                  \
    static void scale_##norm##_##weight##_##offset##_##out(const struct scale *s, const float *h, int64_t hidden) { \
        const struct scale copy = *s;                                                     \
        scale_row(norm, weight, offset, out, &copy, h, hidden);                           \
    }
#define SCALES_OUT(norm, weight, offset) \
    SCALE(norm, weight, offset, F32) SCALE(norm, weight, offset, F16) SCALE(norm, weight, offset, BF16)
#define SCALES(norm)                                                                      \
    SCALES_OUT(norm, NONE, 0)                                                             \
    SCALES_OUT(norm, F32, 0) SCALES_OUT(norm, F16, 0) SCALES_OUT(norm, BF16, 0)           \
    SCALES_OUT(norm, F32, 1) SCALES_OUT(norm, F16, 1) SCALES_OUT(norm, BF16, 1)
SCALES(NONE) SCALES(F16) SCALES(BF16)

#define SCALE_OUT(norm, weight, offset)                                                   \
    {                                                                                     \
        [F32] = scale_##norm##_##weight##_##offset##_F32, [F16] = scale_##norm##_##weight##_##offset##_F16, \
        [BF16] = scale_##norm##_##weight##_##offset##_BF16,                               \
    }
#define SCALE_ROW(norm)                                                                   \
    {                                                                                     \
        [NONE] = {SCALE_OUT(norm, NONE, 0), SCALE_OUT(norm, NONE, 0)},                    \
        [F32] = {SCALE_OUT(norm, F32, 0), SCALE_OUT(norm, F32, 1)},                       \
        [F16] = {SCALE_OUT(norm, F16, 0), SCALE_OUT(norm, F16, 1)},                       \
        [BF16] = {SCALE_OUT(norm, BF16, 0), SCALE_OUT(norm, BF16, 1)},                    \
    }
static scale_fn *const scales[4][4][2][4] = {[NONE] = SCALE_ROW(NONE), [F16] = SCALE_ROW(F16), [BF16] = SCALE_ROW(BF16)};

#if defined(BF16_BY_PARITY)
SUM(BF16P, NONE, 0) SUM(BF16P, BF16P, 0) SUM(BF16P, BF16P, 1)
SCALE(NONE, NONE, 0, BF16P) SCALE(NONE, BF16P, 0, BF16P) SCALE(NONE, BF16P, 1, BF16P)
SCALE(BF16P, NONE, 0, BF16P) SCALE(BF16P, BF16P, 0, BF16P) SCALE(BF16P, BF16P, 1, BF16P)

static int all_bf16(const struct fn_forward_job *job) {
    return job->x_kind == FN_BF16 && job->out_kind == FN_BF16 &&
           (job->residual_kind == FN_NONE || job->residual_kind == FN_BF16) &&
           (job->weight_kind == FN_NONE || job->weight_kind == FN_BF16);
}

static sum_fn *parity_sum(int residual, int round_sum) {
    if (!residual) return sum_BF16P_NONE_0;
    return round_sum ? sum_BF16P_BF16P_1 : sum_BF16P_BF16P_0;
}

static scale_fn *parity_scale(int norm, int weight, int offset) {
    if (!weight) return norm ? scale_BF16P_NONE_0_BF16P : scale_NONE_NONE_0_BF16P;
    if (norm) return offset ? scale_BF16P_BF16P_1_BF16P : scale_BF16P_BF16P_0_BF16P;
    return offset ? scale_NONE_BF16P_1_BF16P : scale_NONE_BF16P_0_BF16P;
}
#endif

#include "kernel_f64.h"

void FN_JOIN(fn_forward_rows, ISA)(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    if (job->x_kind == FN_F64) {
        forward_rows_f64(job, begin, end, scratch);
        return;
    }
    int round_sum = job->flags & FN_ROUND_SUM ? 1 : 0;
    int norm = job->flags & FN_ROUND_NORM && job->x_kind != FN_F32 ? job->x_kind : FN_NONE;
    float eps = (float)job->eps, offset = (float)job->weight_offset;
    sum_fn *sum = sums[job->x_kind][job->residual_kind][round_sum];
    scale_fn *scale = scales[norm][job->weight_kind][offset != 0][job->out_kind];
#if defined(BF16_BY_PARITY)
    if (all_bf16(job)) {
        sum = parity_sum(job->residual_kind, round_sum);
        scale = parity_scale(norm, job->weight_kind, offset != 0);
    }
#endif
    float *buffer = scratch;
    float *squares = buffer + (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT;
    for (int64_t m = begin; m < end; m++) {
        struct row row = {
            .x = job->x + m * job->x_stride,
            .residual = job->residual + m * job->residual_stride,
            .residual_out = job->residual_out + m * job->residual_out_stride,
            .h = buffer,
            .squares = squares,
            .sums = squares + FN_SEGMENT,
            .in_order = job->in_order,
        };
        float mean = sum(&row, job->hidden) / (float)job->hidden;
        struct scale s = {1.0f / sqrtf(mean + eps), offset, job->weight, job->out + m * job->out_stride};
        const float *h = buffer;
        if (job->residual_kind == FN_F32) h = row.residual_out;
        if (job->residual_kind == FN_NONE && job->x_kind == FN_F32) h = row.x;
        scale(&s, h, job->hidden);
        if (job->rstd) ((float *)job->rstd)[m] = s.rstd;
    }
}
