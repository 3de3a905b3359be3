// Numbers and scales of rows that fit the registers.
#define MANY_REGISTERS  // with fewer the compiler spills
#include "quantize.cuh"

// A part of a warp, the warps of a block, or those of a cluster hold each row, as in forward.cu.
extern "C" __global__ void BOUNDS quantize(const Arguments a) {
    const int segment = BLOCKS_ROW ? (blockIdx.x % CLUSTER) * WARPS + warp() : 0;
    const long long first = BLOCKS_ROW ? blockIdx.x / CLUSTER : ((long long)blockIdx.x * WARPS + warp()) * ROWS_PER_WARP;
    if (CLUSTER > 1 && OF_WARPS) cluster_arrive();
    wait_for_kernels_before();
    const Rows rows = rows_of_warp(a, first, a.rows, segment * SEGMENT, a.hidden_size);
    float y[VECTORS][VECTOR];
    load_floats(y, a, rows);
    let_next_kernel_begin();
    quantize_rows(y, rows, a);
}
