/*
 * The kernels, written once. A file kernel_<isa>.c defines ISA and the operations below for its
 * instruction set and then includes this file. Work is done in pairs of vectors, because a register
 * of 16-bit values widens to two registers of float.
 *
 *   LANES                      floats in a vector
 *   V, H2                      a vector of LANES floats; one of 2 * LANES 16-bit values
 *   v_set1 v_add v_mul         each one correctly rounded IEEE operation
 *   v_load v_store             unaligned
 *   v_load_n v_store_n         only the first n of LANES; a load fills up with +0
 *   v_halve                    v[:n/2] + v[n/2:] until one value is left
 *   h2_load h2_store h2_load_n h2_store_n      the same for 2 * LANES 16-bit values
 *   f16_lo f16_hi h2_f16       widen each half; narrow two vectors to nearest even
 *   bf16_lo bf16_hi h2_bf16    likewise
 *
 * and, where widening by parity is cheaper than widening by halves, BF16_BY_PARITY and
 *
 *   bf16_even bf16_odd         widen the even and the odd elements
 *   h2_bf16_parity             narrow them back; a NaN must have zero low bits (see kind BF16P)
 *
 * Sums of a segment follow the spec's tree: v = v[:n/2] + v[n/2:]. Elements that are 128 or more apart
 * are added as whole vectors, down to 2 * LANES apart in `col`, and the rest in `sum_pair`.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "fusednorm_cpu.h"
#include "half.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

#define FN_JOIN_(a, b) a##_##b
#define FN_JOIN(a, b) FN_JOIN_(a, b)

enum { PAIR = 2 * LANES };

typedef struct {
    V a, b;
} P;

/*
 * BF16P: bfloat16 taken apart by parity, a pair holding the even and the odd elements. Used only
 * when every 16-bit operand of the call is bfloat16 and none is float: then all operands agree on
 * the order, and every NaN that meets h2_bf16_parity was widened from bfloat16 or made by the
 * processor, so that its low 16 bits are zero.
 */
enum { NONE = FN_NONE, F32 = FN_F32, F16 = FN_F16, BF16 = FN_BF16, BF16P };

FN_INLINE P p_add(P x, P y) { return (P){v_add(x.a, y.a), v_add(x.b, y.b)}; }
FN_INLINE P p_mul(P x, P y) { return (P){v_mul(x.a, y.a), v_mul(x.b, y.b)}; }
FN_INLINE P p_set1(float value) { return (P){v_set1(value), v_set1(value)}; }

FN_INLINE P widen(int kind, H2 h) {
    if (kind == F16) return (P){f16_lo(h), f16_hi(h)};
#if defined(BF16_BY_PARITY)
    if (kind == BF16P) return (P){bf16_even(h), bf16_odd(h)};
#endif
    return (P){bf16_lo(h), bf16_hi(h)};
}

FN_INLINE H2 narrow(int kind, P p) {
    if (kind == F16) return h2_f16(p.a, p.b);
#if defined(BF16_BY_PARITY)
    if (kind == BF16P) return h2_bf16_parity(p.a, p.b);
#endif
    return h2_bf16(p.a, p.b);
}

/* `n` is the number of elements left in the row; PAIR stands for "at least that many". */
FN_INLINE P load(int kind, const void *row, int64_t i, int n) {
    if (kind == F32) {
        const float *p = (const float *)row + i;
        if (n == PAIR) return (P){v_load(p), v_load(p + LANES)};
        if (n <= LANES) return (P){v_load_n(p, n), v_set1(0)};
        return (P){v_load(p), v_load_n(p + LANES, n - LANES)};
    }
    const uint16_t *p = (const uint16_t *)row + i;
    return widen(kind, n == PAIR ? h2_load(p) : h2_load_n(p, n));
}

/* Rounds, stores, and returns what was stored. */
FN_INLINE P store(int kind, void *row, int64_t i, int n, P value) {
    if (kind == F32) {
        float *p = (float *)row + i;
        if (n == PAIR) {
            v_store(p, value.a);
            v_store(p + LANES, value.b);
        } else if (n <= LANES) {
            v_store_n(p, n, value.a);
        } else {
            v_store(p, value.a);
            v_store_n(p + LANES, n - LANES, value.b);
        }
        return value;
    }
    uint16_t *p = (uint16_t *)row + i;
    H2 h = narrow(kind, value);
    if (n == PAIR) h2_store(p, h);
    else h2_store_n(p, n, h);
    return widen(kind, h);
}

/* The last levels of the tree: elements LANES apart and nearer. By parity the nearest come last. */
FN_INLINE float sum_pair(int by_parity, P p) {
    if (by_parity) return v_halve(p.a) + v_halve(p.b);
    return v_halve(v_add(p.a, p.b));
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
};

/* The row to be normalised, h: residual_out as float (round_sum), or the sum before rounding. */
FN_INLINE P add_residual(int x, int residual, int round_sum, const struct row *row, int64_t i, int n) {
    P h = load(x, row->x, i, n);
    if (residual != NONE) {
        h = p_add(h, load(residual, row->residual, i, n));
        P rounded = store(residual, row->residual_out, i, n, h);
        if (round_sum) h = rounded;
    }
    if ((residual == NONE ? x : residual) != F32) store(F32, row->h, i, PAIR, h);
    return h;
}

FN_INLINE P square_at(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    P h = add_residual(x, residual, round_sum, row, i, PAIR);
    return p_mul(h, h);
}

FN_INLINE float sum_segment(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    P col[128 / PAIR];
    for (int c = 0; c < 128 / PAIR; c++, i += PAIR) {
#define SQUARE(k) square_at(x, residual, round_sum, row, i + 128 * (k))
        P p04 = p_add(SQUARE(0), SQUARE(4)), p26 = p_add(SQUARE(2), SQUARE(6));
        P even = p_add(p04, p26);
        P p15 = p_add(SQUARE(1), SQUARE(5)), p37 = p_add(SQUARE(3), SQUARE(7));
        P odd = p_add(p15, p37);
        col[c] = p_add(even, odd);
#undef SQUARE
    }
    for (int width = 64 / PAIR; width > 0; width /= 2)
        for (int c = 0; c < width; c++) col[c] = p_add(col[c], col[c + width]);
    return sum_pair(x == BF16P, col[0]);
}

/* A segment of n < FN_SEGMENT elements. Levels of the tree that would only add padding are skipped. */
FN_INLINE float sum_short_segment(int x, int residual, int round_sum, const struct row *row, int64_t begin, int n) {
    int done = 0, width = PAIR;
    while (width < n) width *= 2;
    for (; done <= n - PAIR; done += PAIR)
        store(F32, row->squares, done, PAIR, square_at(x, residual, round_sum, row, begin + done));
    if (done < n) {
        P h = add_residual(x, residual, round_sum, row, begin + done, n - done);
        store(F32, row->squares, done, PAIR, p_mul(h, h));
        done += PAIR;
    }
    for (; done < width; done += PAIR) store(F32, row->squares, done, PAIR, p_set1(0));
    while (width > PAIR) {
        width /= 2;
        for (int i = 0; i < width; i += PAIR) {
            P sum = p_add(load(F32, row->squares, i, PAIR), load(F32, row->squares, i + width, PAIR));
            store(F32, row->squares, i, PAIR, sum);
        }
    }
    return sum_pair(x == BF16P, load(F32, row->squares, 0, PAIR));
}

/* First pass over a row: residual_out, h, and the sum of the squares of h. */
FN_INLINE float sum_row(int x, int residual, int round_sum, const struct row *row, int64_t hidden) {
    int64_t segments = hidden / FN_SEGMENT, begin = segments * FN_SEGMENT;
    for (int64_t s = 0; s < segments; s++)
        row->sums[s] = sum_segment(x, residual, round_sum, row, s * FN_SEGMENT);
    if (begin < hidden)
        row->sums[segments++] = sum_short_segment(x, residual, round_sum, row, begin, (int)(hidden - begin));
    return halve_sums(row->sums, segments);
}

struct scale {
    float rstd, offset;
    const void *weight;
    void *out;
};

FN_INLINE void scale_pair(int norm, int weight, int offset, int out, const struct scale *s, const float *h, int64_t i, int n) {
    /* By parity h is always the buffer, which has room for whole pairs, and holds n elements in both halves. */
    P y = p_mul(load(F32, h, i, out == BF16P ? PAIR : n), p_set1(s->rstd));
    if (norm != NONE) y = widen(norm, narrow(norm, y));
    if (weight != NONE) {
        P g = load(weight, s->weight, i, n);
        if (offset) g = p_add(g, p_set1(s->offset));
        y = p_mul(y, g);
    }
    store(out, s->out, i, n, y);
}

/* Second pass over a row: out. `norm` is the type that h * rstd is rounded to, or NONE. */
FN_INLINE void scale_row(int norm, int weight, int offset, int out, const struct scale *s, const float *h, int64_t hidden) {
    int64_t i = 0;
    for (; i <= hidden - PAIR; i += PAIR) scale_pair(norm, weight, offset, out, s, h, i, PAIR);
    if (i < hidden) scale_pair(norm, weight, offset, out, s, h, i, (int)(hidden - i));
}

/*
 * One function per combination of types, so that each is compiled with its types known. ROUND_SUM
 * has no effect on the bits when the residual is float or absent, hence the shorter lists.
 */
typedef float sum_fn(const struct row *, int64_t);
typedef void scale_fn(const struct scale *, const float *, int64_t);

#define SUM(x, residual, round_sum)                                                       \
    static float sum_##x##_##residual##_##round_sum(const struct row *row, int64_t hidden) { \
        return sum_row(x, residual, round_sum, row, hidden);                              \
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
        scale_row(norm, weight, offset, out, s, h, hidden);                               \
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
