/*
 * Log-probabilities (docs/spec.md, section 11), included by declared_body.h behind gates, whose exponential and softcap they take.
 * Rows are read in segments, twice or three times, and nothing of their length is kept but the sums of segments.
 */

/* n numbers in float, in whole units; kind BF16P: by parity, where the processor takes that. */
static void widen_float(int64_t kind, const char *row, int64_t i, int n, float *x) {
    if (kind == BF16P) widen_tile(ALL_BF16, 0, 0, (const uint16_t *)row + i, n, x);
    else widen_any((int)kind, row + i * fn_element_size(kind), n, x);
}
static void narrow_float(int64_t kind, const float *x, int n, char *row, int64_t i) {
    narrow_any((int)kind, x, n, row + i * fn_element_size(kind));
}
static void widen_double(int64_t kind, const char *row, int64_t i, int n, double *x) {
    widen_to_f64((int)kind, row + i * fn_element_size(kind), x, n);
}
static void narrow_double(int64_t kind, const double *x, int n, char *row, int64_t i) {
    narrow_from_f64((int)kind, x, row + i * fn_element_size(kind), n);
}

/* One of the numbers of an operand, which follow each other or are all one. */
static double number_at(const struct fn_operand *o, int64_t i) {
    double value;
    widen_double(o->kind, (const char *)o->address, o->stride ? i : 0, 1, &value);
    return value;
}

/* So many bytes of a row to come, into the second cache. */
static void fetch_row(const char *row, int64_t begin, int64_t bytes) {
    for (int64_t i = begin; i < begin + bytes; i += FN_ALIGNMENT) FN_PREFETCH_2(row + i);
}

static float sum_segment_float(int by_parity, float *v) { return u_halve(by_parity, sum_units(v, FN_SEGMENT)); }
static double sum_segment_double(int by_parity, double *v) { return (void)by_parity, sum_f64(v, FN_SEGMENT); }

/*
 * Bits as whole numbers whose order is that of the numbers, and back. A NaN without a sign is above infinity; one with a sign
 * is below all, so the caller looks for it where the sum is a NaN.
 */
FN_INLINE int32_t order_float(float x) {
    const int32_t bits = (int32_t)bits_of_f32(x);
    return bits ^ (bits >> 31 & 0x7fffffff);
}
FN_INLINE int64_t order_double(double x) {
    const int64_t bits = (int64_t)bits_of_f64(x);
    return bits ^ (bits >> 63 & INT64_MAX);
}
FN_INLINE float of_order_float(int32_t place) { return f32_of_bits((uint32_t)(place ^ (place >> 31 & 0x7fffffff))); }
FN_INLINE double of_order_double(int64_t place) { return f64_of_bits((uint64_t)(place ^ (place >> 63 & INT64_MAX))); }

static int32_t greatest_float(const float *t, int64_t n, int32_t before) {
    int32_t most = before;
    FN_VECTORS(reduction(max : most))
    for (int64_t i = 0; i < n; i++) most = order_float(t[i]) > most ? order_float(t[i]) : most;
    return most;
}
static int64_t greatest_double(const double *t, int64_t n, int64_t before) {
    int64_t most = before;
    for (int64_t i = 0; i < n; i++) most = order_double(t[i]) > most ? order_double(t[i]) : most;
    return most;
}

/* The place of the greatest of numbers of 16 bits, in the order of their bits. */
static int16_t greatest_half(const uint16_t *x, int64_t n) {
    int16_t most = INT16_MIN;
    FN_VECTORS(reduction(max : most))
    for (int64_t i = 0; i < n; i++) {
        const int16_t bits = (int16_t)x[i], place = (int16_t)(bits ^ (bits >> 15 & 0x7fff));
        most = place > most ? place : most;
    }
    return most;
}

/* The same of a whole row as it lies in memory; 0 where that is not possible. */
static int greatest_in_memory_float(int64_t kind, const char *x, int64_t n, int32_t *most) {
    if ((uintptr_t)x % (uintptr_t)fn_element_size(kind)) return 0;
    if (kind == F32) {
        *most = greatest_float((const float *)x, n, INT32_MIN);
        return 1;
    }
    const int16_t place = greatest_half((const uint16_t *)x, n);
    const uint16_t bits = (uint16_t)(place ^ (place >> 15 & 0x7fff));
    *most = order_float(kind == F16 ? f32_from_f16(bits) : f32_from_bf16(bits));
    return 1;
}
static int greatest_in_memory_double(int64_t kind, const char *x, int64_t n, int64_t *most) {
    return (void)kind, (void)x, (void)n, (void)most, 0;
}

/* exp(v) of any number. An m that a caller made up may be below t. */
FN_INLINE float exp_of_float(float v) {
    const struct exponential_float x = exponential_float(chosen_float(v > 89.0f, 89.0f, v));
    return x.p * x.first * x.second;
}
FN_INLINE double exp_of_double(double v) {
    const struct exponential_double x = exponential_double(chosen_double(v > 710.0, 710.0, v));
    return x.p * x.first * x.second;
}

/*
 * exp(w) for a w within 87 of 0 is p(r), times one factor 2^k: a product, and no sum of bits, because a NaN must stay one.
 */
FN_INLINE float reduced(float w, float *factor) {
    const float shifted = w * log2_e_float + rounder_float, k = shifted - rounder_float;
    *factor = f32_of_bits((bits_of_f32(shifted) + bias_float) << mantissa_float);
    return (w - k * ln2_high_float) - k * ln2_low_float;
}
FN_INLINE float of_reduced(float r) {
    const float *const c = coefficients_float, square = r * r;
    return (((c[5] * r + c[4]) * square + (c[3] * r + c[2])) * square + (c[1] * r + c[0])) * square + r + 1;
}
FN_INLINE float near_exponential(float w) {
    float factor;
    const float p = of_reduced(reduced(w, &factor));
    return p * factor;
}

/*
 * exp(t - m) of n numbers. Nearly always all are normal numbers; else those that are 0, as of masked logits, are taken apart,
 * and where others are not normal all are computed again with two factors. One loop in place of the first two waits for its long
 * chains of operations: Zen 5 took a third longer.
 */
static FN_NOINLINE void exponentials_float(const float *restrict t, float m, int n, float *restrict e) {
    const float lowest = -87.0f, zero = -104.0f;
    _Alignas(64) float r[FN_SEGMENT];
    uint32_t farthest = 0, care = 0;
    FN_VECTORS(reduction(max : farthest))
    for (int i = 0; i < n; i++) {
        const float v = t[i] - m;
        const uint32_t distance = bits_of_f32(v) & 0x7fffffff;
        farthest = distance > farthest ? distance : farthest;
        r[i] = reduced(v, &e[i]);
    }
    if (farthest <= bits_of_f32(-lowest)) {
        FN_VECTORS()
        for (int i = 0; i < n; i++) e[i] = of_reduced(r[i]) * e[i];
        return;
    }
    FN_VECTORS(reduction(| : care))
    for (int i = 0; i < n; i++) {
        const float v = t[i] - m;
        const int low = v < lowest;
        e[i] = chosen_float(low, 0, near_exponential(chosen_float(low, lowest, v)));
        care |= (uint32_t)((low & (v > zero)) | (v > 0));
    }
    if (!care) return;
    FN_VECTORS()
    for (int i = 0; i < n; i++) e[i] = exp_of_float(t[i] - m);
}
static FN_NOINLINE void exponentials_double(const double *restrict t, double m, int n, double *restrict e) {
    for (int i = 0; i < n; i++) e[i] = exp_of_double(t[i] - m);
}

#define REAL float
#define OF(name) name##_float
#define PLACE int32_t
#define LEAST_PLACE INT32_MIN
#include "kernels/log_prob_rows.h"

#define REAL double
#define OF(name) name##_double
#define PLACE int64_t
#define LEAST_PLACE INT64_MIN
#include "kernels/log_prob_rows.h"

static void log_prob_row(const struct fn_declared *job, int64_t m, const struct fn_row_work *work) {
    const int whole = job->operation == FN_LOG_SOFTMAX, backward = job->pass == FN_BACKWARD;
    const int out = backward ? FN_DLOGITS : job->operation == FN_SUMS ? FN_SUMS_OUT : FN_LOG_PROB_OUT;
    const char *const x = fn_row_of(job, FN_LOGITS, m);
    char *const to = whole || backward ? fn_row_of(job, out, m) : (char *)job->operand[out].address;
    const char *const from = whole && backward ? fn_row_of(job, FN_LOG_PROB_D, m) : NULL;
    if (job->wide) log_prob_row_double(job, m, x, to, from, work);
    else log_prob_row_float(job, m, x, to, from, work);
}
