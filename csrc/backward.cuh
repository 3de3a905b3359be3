// Arguments and arithmetic of all kernels of the backward pass.
#pragma once
#include "row.cuh"

using Dy = DY_TYPE;
using DTotal = D_TOTAL_TYPE;  // the gradient of residual_out
using H = H_TYPE;
using Weight = WEIGHT_TYPE;
using Dx = DX_TYPE;
using DResidual = DRESIDUAL_TYPE;
using DWeight = DWEIGHT_TYPE;

struct Arguments : Levels {
    const Dy* dy;
    const DTotal* d_total;
    const H* h;
    const A* rstd;
    const Weight* weight;
    Dx* dx;
    DResidual* dresidual;
    A* partial;  // [blocks, hidden_size]: what each block of rows adds to the weight's gradient
    DWeight* dweight;
    Strides dy_strides, d_total_strides, h_strides;
    long long rows, block, blocks;
    int hidden_size;
    A weight_offset;
    __device__ A* means() const { return partial + blocks * hidden_size; }  // of h, [rows]; if there is `partial`
};

// CENTER: rows were normalised less their means. What is subtracted then: the means of h and of wdy.
struct Means {
    A h, wdy;
};

// Loads rstd of the lane's rows.
__device__ inline void load_rstd(A (&to)[ROWS_IN_LANE], const A* from, const Rows& rows) {
#pragma unroll
    for (int r = 0; r < ROWS_IN_LANE; r++) {
        const int row = row_of(r * VECTORS_IN_ROW);
        to[r] = BLOCKS_ROW || row < rows.count ? from[rows.first + row] : (A)0;
    }
}

// xhat: h, less its mean, times rstd.
template <class T> __device__ void normalised(A (&xhat)[VECTOR], const T (&h)[VECTOR], A mean, A rstd) {
    widen(xhat, h);
    if (CENTER) subtract(xhat, mean);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) xhat[v] *= rstd;
}

// wdy: dy times the gain.
template <class W>
__device__ void weigh(A (&wdy)[VECTOR], const Dy (&dy)[VECTOR], const W (&weight)[VECTOR], A weight_offset) {
    widen(wdy, dy);
    multiply_by_gain(wdy, weight, weight_offset);
}

// wdy, less its mean, and xhat; and products: wdy times xhat, whose sum is needed; +0 beyond the row's end, where 0 *
// rstd would be NaN if rstd is infinite. For a row number beyond the last row they are never used.
template <class W>
__device__ void weighted(A (&wdy)[VECTOR], A (&xhat)[VECTOR], A (&products)[VECTOR], const Dy (&dy)[VECTOR],
                         const H (&h)[VECTOR], Means means, A rstd, const W (&weight)[VECTOR], A weight_offset,
                         bool inside) {
    weigh(wdy, dy, weight, weight_offset);
    normalised(xhat, h, means.h, rstd);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) products[v] = inside ? wdy[v] * xhat[v] : (A)0;
    if (CENTER) subtract(wdy, means.wdy);
}

// The means of the lane's rows in registers, if CENTER.
template <class T, class U, class W>
__device__ void load_means(Means (&to)[ROWS_IN_LANE], const T (&dy)[VECTORS][VECTOR], const U (&h)[VECTORS][VECTOR],
                           const W (&weight)[VECTORS_IN_ROW][VECTOR], A weight_offset, int hidden_size) {
    if constexpr (CENTER) {
        A wide[VECTORS][VECTOR], wdy[VECTORS][VECTOR];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            widen(wide[k], h[k]);
            weigh(wdy[k], dy[k], weight[k % VECTORS_IN_ROW], weight_offset);
        }
        A sums[2] = {sums_of_rows(wide), sums_of_rows(wdy)};
        if constexpr (BLOCKS_ROW) {
            SHARED(A, of_segments, 2 * CLUSTER * WARPS);
            add_segments(sums, of_segments);
            if (CLUSTER > 1) cluster_arrive();
        }
        const A of_h = sums[0] / (A)hidden_size, of_wdy = sums[1] / (A)hidden_size;
#pragma unroll
        for (int r = 0; r < ROWS_IN_LANE; r++) to[r] = {of_row(of_h, r), of_row(of_wdy, r)};
    }
}

// A row's share of the weight's gradient: dy times xhat.
template <class T> __device__ void shares_of(A (&shares)[VECTOR], const T (&dy)[VECTOR], const A (&xhat)[VECTOR]) {
    widen(shares, dy);
    multiply(shares, xhat);
}

// As store_if, for all lanes of a warp together. Memory is written in sectors of 32 bytes. Where a vector takes several
// accesses of 16 bytes, two neighbouring lanes exchange every second part, so that each access writes whole sectors.
// Results must not share memory with an operand, because a lane writes parts of its neighbour's vector.
template <class T> __device__ void store_together(bool inside, T* to, const A (&from)[VECTOR]) {
    constexpr int PARTS = PRESENT<T> ? VECTOR * (int)sizeof(T) / AT_ONCE<T> : 0;
    if constexpr (PARTS > 1 && AT_ONCE<T> == 16) {
        T rounded[VECTOR];
        Words<16> parts[PARTS];
        narrow(rounded, from);
        memcpy(parts, rounded, sizeof parts);
        const bool second = lane() & 1, others = FULL ? inside : exchanged((int)inside, 1);
        auto* const at = reinterpret_cast<Words<16>*>(to) + (second ? 1 - PARTS : 0);
#pragma unroll
        for (int i = 0; i < PARTS; i += 2) {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                unsigned &low = parts[i].word[w], &high = parts[i + 1].word[w];
                const unsigned got = exchanged(second ? low : high, 1);
                (second ? low : high) = got;
            }
            // The two lanes now hold two adjacent parts of the first lane's vector, then two of the second lane's.
            if (second ? others : inside) at[i] = parts[i];
            if (second ? inside : others) at[PARTS + i] = parts[i + 1];
        }
    } else {
        store_if(inside, to, from);
    }
}

// The gradient of h, the row that was normalised, rounded and stored as the gradient of x and of the residual.
template <class T>
__device__ void store_gradients(const A (&wdy)[VECTOR], const A (&xhat)[VECTOR], A c, A rstd, const T (&d_total)[VECTOR],
                                bool inside, Dx* dx, DResidual* dresidual) {
    A d[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; v++) d[v] = (wdy[v] - xhat[v] * c) * rstd;
    add(d, d_total);
    store_together(inside, dx, d);
    store_together(inside, dresidual, d);
}
