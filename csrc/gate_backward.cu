// The gradients of rows times a function of other rows.
#include "gate_steps.cuh"

extern "C" __global__ void BOUNDS gate_backward(const Arguments a) {
    const Place at(a);
    wait_for_kernels_before();
    D d[VECTOR];
    Y y[VECTOR];
    Z z[VECTOR];
    load_if(at.inside, d, a.d + at.in(a.d_strides));
    load_both(at, y, z);
    let_next_kernel_begin();
    A dy[VECTOR], dz[VECTOR];
    widen(dy, d);
    widen(dz, d);
#if STEPS
    differentiate_in_steps(dy, dz, y, z);
#else
    A f[VECTOR], slope[VECTOR];
    activate(f, slope, z);
    round_to<BETWEEN_TYPE>(f);
    multiply_if(dz, y);
    round_to<BETWEEN_TYPE>(dz);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        dy[i] *= f[i];
        dz[i] *= slope[i];
    }
#endif
    store_both(at, dy, dz);
}
