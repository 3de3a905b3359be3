// The sum of each block of rows' shares of the weight's gradient, added in row order. A thread has a vector of columns.
#define MANY_REGISTERS
#include "backward.cuh"

constexpr int TOGETHER = 8;  // rows that are loaded before the first is added

template <int COUNT> __device__ void add_rows(A (&total)[VECTOR], const Arguments& a, long long first, int column) {
    Dy dy[COUNT][VECTOR];
    H h[COUNT][VECTOR];
    A rstd[COUNT], mean[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        load(dy[i], a.dy + a.begin_of(first + i, a.dy_strides) + column);
        load(h[i], a.h + a.begin_of(first + i, a.h_strides) + column);
        rstd[i] = a.rstd[first + i];
        mean[i] = CENTER ? a.means()[first + i] : (A)0;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        A xhat[VECTOR], shares[VECTOR];
        normalised(xhat, h[i], mean[i], rstd[i]);
        shares_of(shares, dy[i], xhat);
        add(total, shares);
    }
}

// Adds the rows from `first` to `end`, fewer than twice COUNT.
template <int COUNT>
__device__ void add_last_rows(A (&total)[VECTOR], const Arguments& a, long long first, long long end, int column) {
    const bool enough = first + COUNT <= end;
    if (enough) add_rows<COUNT>(total, a, first, column);
    if constexpr (COUNT > 1) add_last_rows<COUNT / 2>(total, a, enough ? first + COUNT : first, end, column);
}

extern "C" __global__ void BOUNDS weight_blocks(const Arguments a) {
    const int tiles = (a.hidden_size + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    const long long block = blockIdx.x / tiles, begin = block * a.block;
    const long long end = begin + a.block < a.rows ? begin + a.block : a.rows;
    const int column = (blockIdx.x % tiles * THREADS + threadIdx.x) * VECTOR;
    const bool inside = column < a.hidden_size;
    wait_for_kernels_before();
    A total[VECTOR] = {};
    if (inside) {
        long long row = begin;
#pragma unroll 1
        for (; row + TOGETHER <= end; row += TOGETHER) add_rows<TOGETHER>(total, a, row, column);
        add_last_rows<TOGETHER / 2>(total, a, row, end, column);
    }
    let_next_kernel_begin();
    store_together(inside, a.partial + block * a.hidden_size + column, total);
}
