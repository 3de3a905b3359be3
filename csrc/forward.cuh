// Arguments and arithmetic of all kernels of the forward pass.
#pragma once
#include "row.cuh"

using X = X_TYPE;
using Residual = RESIDUAL_TYPE;
using ResidualOut = RESIDUAL_OUT_TYPE;
using Weight = WEIGHT_TYPE;
using Out = OUT_TYPE;

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
};

// h, the row that is normalised: x plus the residual, or x alone. Stores the rounded sum if `stored`.
template <class R, class S>
__device__ void added(A (&h)[VECTOR], const X (&x)[VECTOR], const R (&residual)[VECTOR], bool stored, S* residual_out) {
    widen(h, x);
    if constexpr (PRESENT<R>) {
        A more[VECTOR];
        S total[VECTOR];
        widen(more, residual);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) h[v] += more[v];
        narrow(total, h);
        if (stored) store(residual_out, total);
        if (ROUND_SUM) widen(h, total);
    }
}

// y: h times rstd, rounded if ROUND_NORM, times the gain.
template <class W>
__device__ void normalised(A (&y)[VECTOR], const A (&h)[VECTOR], A rstd, const W (&weight)[VECTOR], A offset) {
#pragma unroll
    for (int v = 0; v < VECTOR; v++) y[v] = h[v] * rstd;
    if (ROUND_NORM) {
        X rounded[VECTOR];
        narrow(rounded, y);
        widen(y, rounded);
    }
    if constexpr (PRESENT<W>) {
        A g[VECTOR];
        gain(g, weight, offset);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) y[v] *= g[v];
    }
}
