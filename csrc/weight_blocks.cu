// What a block of rows adds to the weight's gradient, a vector of columns per thread: its rows' products, in row order.
#include "backward.cuh"

constexpr int TOGETHER = 8;  // rows that are on their way at a time

// Up to `count` rows from `first` on.
template <bool ALL>
__device__ void add_rows(A (&total)[VECTOR], const Arguments& a, long long first, int count, int column) {
    Dy dy[TOGETHER][VECTOR];
    H h[TOGETHER][VECTOR];
    A rstd[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
        const long long row = first + i;
        load_if(ALL || i < count, dy[i], a.dy + row * a.dy_stride + column);
        load_if(ALL || i < count, h[i], a.h + row * a.h_stride + column);
        rstd[i] = ALL || i < count ? a.rstd[row] : (A)0;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
        if (!ALL && i >= count) break;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) total[v] += wide(dy[i][v]) * (wide(h[i][v]) * rstd[i]);
    }
}

extern "C" __global__ void BOUNDS weight_blocks(const Arguments a) {
    const int tiles = (a.hidden_size + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    const long long block = blockIdx.x / tiles, begin = block * a.block;
    const long long end = begin + a.block < a.rows ? begin + a.block : a.rows;
    const int column = (blockIdx.x % tiles * THREADS + threadIdx.x) * VECTOR;
    wait_for_kernels_before();
    if (column >= a.hidden_size) return;
    A total[VECTOR] = {};
    long long row = begin;
    for (; row + TOGETHER <= end; row += TOGETHER) add_rows<true>(total, a, row, TOGETHER, column);
    if (row < end) add_rows<false>(total, a, row, (int)(end - row), column);
    let_next_kernel_begin();
    store_if(true, a.partial + block * a.hidden_size + column, total);
}
