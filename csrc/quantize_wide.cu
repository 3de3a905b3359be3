// Numbers and scales of rows that do not fit the registers. A block per row reads it segment by segment; twice where the
// row has one scale, which is computed.
#define MANY_REGISTERS  // with fewer the compiler spills
#include "quantize.cuh"

extern "C" __global__ void BOUNDS quantize_wide(const Arguments a) {
    const int segments = (a.hidden_size + SEGMENT - 1) / SEGMENT;
    wait_for_kernels_before();
    let_next_kernel_begin();
    for (Passes passes(a, blockIdx.x); passes.left > 0; passes.end()) {
        for (int segment = warp(); segment < segments; segment += WARPS) {
            const Rows rows = rows_of_warp(a, blockIdx.x, a.rows, segment * SEGMENT, a.hidden_size);
            float y[VECTORS][VECTOR];
            load_floats(y, a, rows);
            passes.take(y, segment);
        }
    }
}
