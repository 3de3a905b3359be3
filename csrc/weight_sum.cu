// The weight's gradient: what the blocks of rows add to it, added up by halving. A lane per column.
//
// Block b is warp b % WARPS's: the halves of its number above that are added in the lane, those below across warps.
#include "backward.cuh"

constexpr int IN_LANE = MOST_BLOCKS / WARPS;

extern "C" __global__ void BOUNDS weight_sum(const Arguments a) {
    const int column = blockIdx.x * LANES + lane();
    wait_for_kernels_before();
    A sums[IN_LANE];
#pragma unroll
    for (int i = 0; i < IN_LANE; i++) {
        const int block = i * WARPS + warp();
        const bool inside = block < a.blocks && column < a.hidden_size;
        sums[i] = inside ? a.partial[(long long)block * a.hidden_size + column] : (A)0;
    }
    let_next_kernel_begin();
    halve<IN_LANE>(sums);
    SHARED(A, shared, WARPS * LANES);
    shared[warp() * LANES + lane()] = sums[0];
    for (int half = WARPS / 2; half > 0; half /= 2) {
        block_barrier();
        if (warp() < half) shared[warp() * LANES + lane()] += (A)shared[(warp() + half) * LANES + lane()];
    }
    if (warp() == 0 && column < a.hidden_size) {
        const A total[1] = {shared[lane()]};
        DWeight rounded[1];
        narrow(rounded, total);
        a.dweight[column] = rounded[0];
    }
}
