// The gradients of rows that fit the registers, and their means, if they are centered and the weight has a gradient.
#include "backward.cuh"

extern "C" __global__ void BOUNDS backward_rows(const Arguments a) {
    const int segment = BLOCKS_ROW ? (blockIdx.x % CLUSTER) * WARPS + warp() : 0;
    const long long first = BLOCKS_ROW ? blockIdx.x / CLUSTER : ((long long)blockIdx.x * WARPS + warp()) * ROWS_PER_WARP;
    if (CLUSTER > 1) cluster_arrive();
    wait_for_kernels_before();

    const Rows rows = rows_of_warp(a, first, a.rows, segment * SEGMENT, a.hidden_size);
    Dy dy[VECTORS][VECTOR];
    H h[VECTORS][VECTOR];
    DTotal d_total[VECTORS][VECTOR];
    A rstd[ROWS_IN_LANE];
    Weight weight[VECTORS_IN_ROW][VECTOR];
    load_rows(dy, a.dy, a.dy_strides, rows);
    load_rows(h, a.h, a.h_strides, rows);
    load_rows(d_total, a.d_total, a.d_total_strides, rows);
    load_rstd(rstd, a.rstd, rows);
    load_weight(weight, a.weight, rows);
    let_next_kernel_begin();

    Means means[ROWS_IN_LANE];
    load_means(means, dy, h, weight, a.weight_offset, a.hidden_size);
    if (CENTER && a.partial) {
#pragma unroll
        for (int r = 0; r < ROWS_IN_LANE; r++) {
            const int row = row_of(r * VECTORS_IN_ROW);
            if (BLOCKS_ROW ? threadIdx.x == 0 && segment == 0 : row < rows.count) a.means()[first + row] = means[r].h;
        }
    }
    A wdy[VECTORS][VECTOR], xhat[VECTORS][VECTOR], products[VECTORS][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        weighted(wdy[k], xhat[k], products[k], dy[k], h[k], means[k / VECTORS_IN_ROW],
                 rstd[k / VECTORS_IN_ROW], weight[k % VECTORS_IN_ROW], a.weight_offset, rows.have_column(k));
    }
    const A c = sum_of_row<0>(products) / (A)a.hidden_size;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long at = rows.at(k, a.hidden_size);
        store_gradients(wdy[k], xhat[k], of_row(c, k / VECTORS_IN_ROW), rstd[k / VECTORS_IN_ROW], d_total[k],
                        rows.have(k), a.dx + at, a.dresidual + at);
    }
}
