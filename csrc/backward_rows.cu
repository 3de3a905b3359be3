// The gradients of rows that registers hold.
#include "backward.cuh"

extern "C" __global__ void BOUNDS backward_rows(const Arguments a) {
    const int segment = BLOCKS_ROW ? (blockIdx.x % CLUSTER) * WARPS + warp() : 0;
    const long long first = BLOCKS_ROW ? blockIdx.x / CLUSTER : ((long long)blockIdx.x * WARPS + warp()) * ROWS_PER_WARP;
    if (CLUSTER > 1) cluster_arrive();
    wait_for_kernels_before();

    Dy dy[VECTORS][VECTOR];
    H h[VECTORS][VECTOR];
    DTotal d_total[VECTORS][VECTOR];
    A rstd[ROWS_IN_LANE];
    bool inside[VECTORS];
    long long row[VECTORS];
    int column[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        row[k] = first + row_of(k);
        column[k] = segment * SEGMENT + column_of(k);
        inside[k] = (FULL || column[k] < a.hidden_size) && (BLOCKS_ROW || row[k] < a.rows);
        load_if(inside[k], dy[k], a.dy + row[k] * a.dy_stride + column[k]);
        load_if(inside[k], h[k], a.h + row[k] * a.h_stride + column[k]);
        load_if(inside[k], d_total[k], a.d_total + row[k] * a.d_total_stride + column[k]);
    }
#pragma unroll
    for (int r = 0; r < ROWS_IN_LANE; r++) {
        rstd[r] = BLOCKS_ROW || row[r * VECTORS_IN_ROW] < a.rows ? a.rstd[row[r * VECTORS_IN_ROW]] : (A)0;
    }
    A wdy[VECTORS][VECTOR], xhat[VECTORS][VECTOR], products[VECTORS][VECTOR];
    Weight weight[VECTORS_IN_ROW][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS_IN_ROW; k++) {
        load_if(FULL || column[k] < a.hidden_size, weight[k], a.weight + column[k]);
    }
    let_next_kernel_begin();
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        weighted(wdy[k], xhat[k], products[k], dy[k], h[k], rstd[k / VECTORS_IN_ROW], weight[k % VECTORS_IN_ROW],
                 a.weight_offset, inside[k]);
    }
    A sum = sums_of_rows(products);
    if constexpr (BLOCKS_ROW) {
        SHARED(A, sums, CLUSTER * WARPS);
        sum = sum_of_segments(sum, sums);
    }
    const A c = sum / (A)a.hidden_size;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long at = row[k] * a.hidden_size + column[k];
        store_gradients(wdy[k], xhat[k], of_row(c, k / VECTORS_IN_ROW), rstd[k / VECTORS_IN_ROW], d_total[k], inside[k],
                        a.dx + at, a.dresidual + at);
    }
}
