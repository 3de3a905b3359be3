// What the kernels of the backward pass share.
#pragma once
#include "row.cuh"

using Dy = DY_TYPE;
using DTotal = D_TOTAL_TYPE;  // of the gradient that came for residual_out
using H = H_TYPE;
using Weight = WEIGHT_TYPE;
using Dx = DX_TYPE;
using DResidual = DRESIDUAL_TYPE;
using DWeight = DWEIGHT_TYPE;

struct Arguments {
    const Dy* dy;
    const DTotal* d_total;
    const H* h;
    const A* rstd;
    const Weight* weight;
    Dx* dx;
    DResidual* dresidual;
    A* partial;  // [blocks, hidden_size]: what each block of rows adds to the weight's gradient
    DWeight* dweight;
    long long dy_stride, d_total_stride, h_stride, rows, block, blocks;
    int hidden_size;
    A weight_offset;
};

// dy times the weight, h times rstd, and the products whose sum is wanted: +0 outside, where rstd may be infinite.
template <class W>
__device__ void weighted(A (&wdy)[VECTOR], A (&xhat)[VECTOR], A (&products)[VECTOR], const Dy (&dy)[VECTOR],
                         const H (&h)[VECTOR], A rstd, const W (&weight)[VECTOR], A weight_offset, bool inside) {
    widen(wdy, dy);
    if constexpr (PRESENT<W>) {
        A g[VECTOR];
        gain(g, weight, weight_offset);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) wdy[v] *= g[v];
    }
    widen(xhat, h);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        xhat[v] *= rstd;
        products[v] = inside ? wdy[v] * xhat[v] : (A)0;
    }
}

// The gradient of the row that was normalised, and of what it is the sum of; rounded and stored.
template <class T>
__device__ void store_gradients(const A (&wdy)[VECTOR], const A (&xhat)[VECTOR], A c, A rstd, const T (&d_total)[VECTOR],
                                bool inside, Dx* dx, DResidual* dresidual) {
    A d[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; v++) d[v] = (wdy[v] - xhat[v] * c) * rstd;
    if constexpr (PRESENT<T>) {
        A more[VECTOR];
        widen(more, d_total);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) d[v] += more[v];
    }
    store_if(inside, dx, d);
    store_if(inside, dresidual, d);
}
