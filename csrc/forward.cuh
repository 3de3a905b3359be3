// Arguments and arithmetic of all kernels of the forward pass.
#pragma once
#include "row.cuh"

using X = X_TYPE;
using Residual = RESIDUAL_TYPE;
using ResidualOut = RESIDUAL_OUT_TYPE;
using Weight = WEIGHT_TYPE;
using Out = OUT_TYPE;

// NORM_BEFORE_ADD: there is a norm of x before the addition. These are its weight, and the rows that pass from it to the
// addition. The weight above is then of the norm after the addition; without that norm there is no Out.
using FirstWeight = FIRST_WEIGHT_TYPE;
using Between = BETWEEN_TYPE;

// AROUND: there is something around the norm. SCALED: x is multiplied before the addition. OF_HEADS: row i takes row
// i % heads of the weight and of the bias. There is never a norm before the addition too.
using Bias = BIAS_TYPE;

// CENTER: rows are normalised less their means. There is never a norm before the addition too.

// QUANTIZED: rows are quantized, as quantize.cuh says. There is then no norm before the addition, and AROUND is 1, so that
// all arguments lie where the launcher puts them.

// GATED: a gate comes AFTER_NORM, which passes rows of type Between to it, or BEFORE_NORM. There is then no residual, and
// AROUND is 1, as for a quantizer. The gate itself is in activations.cuh.
constexpr int AFTER_NORM = 1, BEFORE_NORM = 2;
using Z = Z_TYPE;

// One of two types.
template <bool FIRST, class T, class OTHER> struct either {
    using type = T;
};
template <class T, class OTHER> struct either<false, T, OTHER> {
    using type = OTHER;
};

// The rows that meet the residual.
using Added = either<NORM_BEFORE_ADD, Between, X>::type;

struct Arguments : Levels {
    const X* x;
    const Residual* residual;
    const Weight* weight;
    Out* out;
    ResidualOut* residual_out;
    A* rstd;
    Strides x_strides, residual_strides, out_strides, residual_out_strides;
    long long rows;
    int hidden_size;
    A eps, weight_offset;
#if NORM_BEFORE_ADD
    const FirstWeight* first_weight;
    A first_eps;
    __device__ const FirstWeight* weight_of_first() const { return first_weight; }
    __device__ A eps_of_first() const { return first_eps; }
#else
    __device__ const FirstWeight* weight_of_first() const { return nullptr; }
    __device__ A eps_of_first() const { return 0; }
#endif
#if AROUND
    const Bias* bias;
    long long heads, weight_stride, bias_stride;  // a stride is 0 where all heads have one row
    A x_scale;
    __device__ const Weight* weight_of(long long row) const {
        return OF_HEADS ? weight + row % heads * weight_stride : weight;
    }
    __device__ const Bias* bias_of(long long row) const { return OF_HEADS ? bias + row % heads * bias_stride : bias; }
    __device__ A scale_of_x() const { return x_scale; }
#else
    __device__ const Weight* weight_of(long long) const { return weight; }
    __device__ const Bias* bias_of(long long) const { return nullptr; }
    __device__ A scale_of_x() const { return 1; }
#endif
#if GATED
    const Z* z;
    Strides z_strides;
    __device__ const Z* gates_of(long long row) const { return z + begin_of(row, z_strides); }
#else
    __device__ const Z* gates_of(long long) const { return nullptr; }
#endif
#if QUANTIZED
    unsigned char* numbers;
    float* scale;  // computed for each group of each row, or one that is given, as the zero point
    int* zero_point;
    Strides numbers_strides, scale_strides, zero_point_strides;
    long long scale_group_stride, zero_point_group_stride;  // from a group to the row's next one
    float qmin, qmax, amax_floor, amax_limit, scale_floor;
#endif
};

// x times a number, rounded to its type, if it is to be scaled.
__device__ inline void scale_first(X (&x)[VECTOR], const Arguments& a) {
    if constexpr (SCALED) {
        A scaled[VECTOR];
        widen(scaled, x);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) scaled[v] *= a.scale_of_x();
        narrow(x, scaled);
    }
}

// h, the row that is normalised: the residual plus x, or plus x after its norm; or x alone. Stores the rounded sum if `stored`.
template <class T, class R, class S>
__device__ void added(A (&h)[VECTOR], const T (&x)[VECTOR], const R (&residual)[VECTOR], bool stored, S* residual_out) {
    widen(h, x);
    if constexpr (PRESENT<R>) {
        S total[VECTOR];
        add(h, residual);
        narrow(total, h);
        if (stored) store(residual_out, total);
        if (ROUND_SUM) widen(h, total);
    }
}

// y: h times rstd, rounded to T if ROUND_NORM, times the gain.
template <class T, class W>
__device__ void normalised(A (&y)[VECTOR], const A (&h)[VECTOR], A rstd, const W (&weight)[VECTOR], A offset) {
#pragma unroll
    for (int v = 0; v < VECTOR; v++) y[v] = h[v] * rstd;
    if (ROUND_NORM) round_to<T>(y);
    multiply_by_gain(y, weight, offset);
}

// y: x after the norm before the addition, rounded.
template <class T, class W>
__device__ void normalised_first(T (&y)[VECTOR], const X (&x)[VECTOR], A rstd, const W (&weight)[VECTOR], A offset) {
    A h[VECTOR], n[VECTOR];
    widen(h, x);
    normalised<X>(n, h, rstd, weight, offset);
    narrow(y, n);
}
