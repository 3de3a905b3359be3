// The weight's gradient: the sums of the blocks of rows, added by halving. A lane has one column.
//
// A lane adds at most IN_LANE blocks, so `together` warps share their columns: the fewer blocks of rows there are, the
// fewer warps share, and the more columns a block of threads has. Of these warps, warp w sums blocks w, w + together,
// w + 2 * together, ...: the upper levels of the tree in registers, the lower ones across warps in shared memory.
#include "backward.cuh"

extern "C" __global__ void BOUNDS weight_sum(const Arguments a) {
    const int blocks = (int)a.blocks;
    int levels = 0;  // of the tree, across warps
#pragma unroll
    for (int most = IN_LANE; most < WARPS * IN_LANE; most *= 2) levels += blocks > most;
    const int together = 1 << levels, mine = warp() & (together - 1);
    const int column = (blockIdx.x * (WARPS >> levels) + (warp() >> levels)) * LANES + lane();
    const bool inside = column < a.hidden_size;
    const int count = inside ? (blocks - mine + together - 1) >> levels : 0;
    wait_for_kernels_before();
    A sums[IN_LANE];
    const A* partial = a.partial + (long long)mine * a.hidden_size + column;
#pragma unroll
    for (int i = 0; i < IN_LANE; i++) {
        sums[i] = i < count ? *partial : (A)0;
        partial += (long long)together * a.hidden_size;
    }
    let_next_kernel_begin();
    halve<IN_LANE>(sums);
    SHARED(A, shared, THREADS);
    if (levels > 0) {
        shared[threadIdx.x] = sums[0];
        for (int half = together / 2; half > 0; half >>= 1) {
            block_barrier();
            if (mine < half) shared[threadIdx.x] += (A)shared[threadIdx.x + half * LANES];
        }
        if (mine == 0) sums[0] = shared[threadIdx.x];
    }
    if (mine == 0 && inside) {
        const A total[1] = {sums[0]};
        DWeight rounded[1];
        narrow(rounded, total);
        a.dweight[column] = rounded[0];
    }
}
