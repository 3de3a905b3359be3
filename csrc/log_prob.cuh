// Arguments and arithmetic of log-probabilities and of their gradient (docs/spec.md, section 11). The blocks of a cluster,
// or one block, have a row, of which each warp takes segments in turn. Constants that the compilation defines beside those
// of row.cuh:
//
//   WHOLE    whether the log-probabilities of all numbers are wanted
//   SELECTS  whether those of ids are; if neither, logsumexp is
//   ENTROPY  whether the entropy is too
//   CAPPED   whether there is a softcap
//
// A kernel of gradients defines BACKWARD. tests/logarithm.py and tests/tangent.py compute the constants.
#pragma once
#define MANY_REGISTERS  // with fewer the compiler spills
#include "exponential.cuh"
#include "row.cuh"

using X = X_TYPE;
using Out = OUT_TYPE;
using D = D_TYPE;
using EntropyD = ENTROPY_D_TYPE;
using Temperature = TEMPERATURE_TYPE;
using Id = ID_TYPE;

// Out has rows, or a number for each row or each id; in a backward pass it is the gradient of x.
struct Arguments : Levels {
    const X* x;
    Out* out;
    const D* d;
    const Id* ids;
    const Temperature* temperature;
    A *m, *s, *entropy;
    const EntropyD* entropy_d;
    Strides x_strides, out_strides, d_strides;
    long long count, ignore_index;  // the ids of a row, and the one that is ignored, if `ignores`
    int hidden_size, ignores;
    A cap;

    __device__ bool ignored(long long id) const { return ignores && id == ignore_index; }
    __device__ bool has(long long id) const { return id >= 0 && id < hidden_size; }
    __device__ int segments() const { return (hidden_size + SEGMENT - 1) / SEGMENT; }
    // Whether a row has the lane's vector `k` of a segment.
    __device__ bool inside(int segment, int k) const { return FULL || segment * SEGMENT + column_of(k) < hidden_size; }
};

__device__ inline A infinity() { return number_of_bits((2 * BIAS + 1) << MANTISSA); }
__device__ inline A not_a_number() { return number_of_bits((4 * BIAS + 3) << (MANTISSA - 1)); }

// The row of this block, and the block's number among those that have it.
__device__ inline long long row_of_block() { return blockIdx.x / CLUSTER; }
__device__ inline int rank() { return CLUSTER > 1 ? rank_in_cluster() : 0; }

// The warp's first segment, and how far it is from one to the next.
__device__ inline int first_segment() { return rank() * WARPS + warp(); }
constexpr int SEGMENTS_APART = CLUSTER * WARPS;

// One number of an operand.
template <class T> __device__ A number_at(const T* from, long long i) {
    if constexpr (PRESENT<T>) return wide(from[i]);
    else return 0;
}

// log(x), for an x from 1 to 2^31.
__device__ inline A logarithm(A x) {
    const Whole beyond = bits_of(x) - ROOT;
    const A k = (A)(IN_F64 ? (long long)beyond >> MANTISSA : (int)beyond >> MANTISSA);
    const A f = number_of_bits((beyond & (((Whole)1 << MANTISSA) - 1)) + ROOT) - 1;
    const A quotient = f / (f + 2), half = f * f * (A)0.5, z = quotient * quotient;
    const A p = POLYNOMIAL(LOGARITHM, z, z * z);
    return k * LN2_HIGH + (f - (half - ((half + p * z) * quotient + k * LN2_LOW))) + (x - x);
}

// tanh(x).
__device__ inline A tangent(A x) {
    constexpr Whole SIGN = (Whole)1 << (8 * sizeof(A) - 1);
    const Whole sign = bits_of(x) & SIGN;
    const A a = number_of_bits(bits_of(x) ^ sign), t = a * a;
    const A p = POLYNOMIAL(TANGENT, t, t * t);
    const A high = 1 - 2 / (exponential(2 * no_more(a, FLAT)).normal() + 1);
    return number_of_bits(bits_of(a < (A)0.75 ? p * t * a + a : high) | sign);
}

// A row of x, and the steps before its softmax.
struct Row {
    const X* x;
    A temperature, cap;

    __device__ Row(const Arguments& a, long long row)
        : x(a.x + a.begin_of(row, a.x_strides)), temperature(number_at(a.temperature, row)), cap(a.cap) {}

    __device__ void load(X (&to)[VECTORS][VECTOR], int segment, const Arguments& a) const {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) load_if(a.inside(segment, k), to[k], x + segment * SEGMENT + column_of(k));
    }

    // Its numbers as the softmax takes them, and the softcap's derivative.
    template <int COUNT> __device__ void find(A (&t)[COUNT], A (&slope)[COUNT], const X (&from)[COUNT]) const {
        widen(t, from);
        if constexpr (CAPPED) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const A th = tangent(t[i] / cap);
                t[i] = cap * th;
                slope[i] = (1 - th) * (1 + th);
            }
            round_to<X>(t);
        }
        if constexpr (PRESENT<Temperature>) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) t[i] /= temperature;
        }
    }
};

// exp(v). The last product alone may be subnormal.
__device__ inline A exp_of(A v) {
#if BACKWARD  // only an m that a caller made up is below a number
    return exponential(no_more(greater(v, LEAST), IN_F64 ? 710 : 89)).times(1);
#else
    constexpr int APART = IN_F64 ? 128 : 64;
    const bool low = v < LEAST_NORMAL;
    const Exponential x = exponential(greater(v, LEAST));
    const A last = low ? IN_F64 ? (A)0x1p-128 : (A)0x1p-64 : 1;
    return x.p * number_of_bits((x.exponent - (low ? BIAS - APART : BIAS)) << MANTISSA) * last;
#endif
}

// The sum of all segments, of which `sums` of every block of the row has all, or will have when the barrier is passed.
template <class SUMS> __device__ A sum_of_all(SUMS& sums, int segments) {
    if (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }
    return sum_of_all_segments(sums, segments);
}

// Gives all blocks of the row the sum of a segment, which all lanes have.
template <class SUMS> __device__ void give(SUMS& sums, int segment, A sum) {
    if constexpr (CLUSTER > 1) {
        if (lane() < CLUSTER) store_in_block(sums[segment], lane(), sum);
    } else {
        if (lane() == 0) sums[segment] = sum;
    }
}
