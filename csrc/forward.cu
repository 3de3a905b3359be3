// y, residual_out and rstd of rows that fit the registers.
#include "forward.cuh"

// A part of a warp, the warps of a block, or those of a cluster hold each row.
extern "C" __global__ void BOUNDS forward(const Arguments a) {
    const int segment = BLOCKS_ROW ? (blockIdx.x % CLUSTER) * WARPS + warp() : 0;
    const long long first = BLOCKS_ROW ? blockIdx.x / CLUSTER : ((long long)blockIdx.x * WARPS + warp()) * ROWS_PER_WARP;
    if (CLUSTER > 1) cluster_arrive();
    if constexpr (PRESENT<Weight>) {
        int ahead = threadIdx.x * (128 / (int)sizeof(Weight)) + segment / WARPS * WARPS * SEGMENT;
        if (ahead < smaller(a.hidden_size, (segment / WARPS + 1) * WARPS * SEGMENT)) fetch_soon(a.weight + ahead);
    }
    wait_for_kernels_before();

    const Rows rows = rows_of_warp(a, first, a.rows, segment * SEGMENT, a.hidden_size);
    X x[VECTORS][VECTOR];
    Residual residual[VECTORS][VECTOR];
    Weight weight[VECTORS_IN_ROW][VECTOR];
    load_rows(x, a.x, a.x_strides, rows);
    load_rows(residual, a.residual, a.residual_strides, rows);
    load_weight(weight, a.weight, rows);
    let_next_kernel_begin();

    A h[VECTORS][VECTOR], squares[VECTORS][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        added(h[k], x[k], residual[k], rows.have(k), a.residual_out + rows.at(k, a.residual_out_strides));
#pragma unroll
        for (int v = 0; v < VECTOR; v++) squares[k][v] = h[k][v] * h[k][v];
    }
    A sum = sums_of_rows(squares);
    if constexpr (BLOCKS_ROW) {
        SHARED(A, sums, CLUSTER * WARPS);
        sum = sum_of_segments(sum, sums);
    }
    const A rstd = rstd_of(sum, a.hidden_size, a.eps);
    if (RSTD) {
        bool mine = BLOCKS_ROW ? threadIdx.x == 0 && segment == 0 : first + row_of_sum() < a.rows;
        if (mine) a.rstd[first + (BLOCKS_ROW ? 0 : row_of_sum())] = rstd;
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        A y[VECTOR];
        normalised(y, h[k], of_row(rstd, k / VECTORS_IN_ROW), weight[k % VECTORS_IN_ROW], a.weight_offset);
        store_if(rows.have(k), a.out + rows.at(k, a.out_strides), y);
    }
}
