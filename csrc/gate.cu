// Rows times a function of other rows, or that function alone where y is absent.
#include "gate_steps.cuh"

extern "C" __global__ void BOUNDS gate(const Arguments a) {
    const Place at(a);
    wait_for_kernels_before();
    Y y[VECTOR];
    Z z[VECTOR];
    load_both(at, y, z);
    let_next_kernel_begin();
    A f[VECTOR];
#if STEPS
    A u[VECTOR], unused[VECTOR];
    activate_in_steps<false>(f, unused, z);
    limit_and_add(u, y);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) f[i] = u[i] * within_limit(f[i]);
#else
    activate(f, z);
    round_to<BETWEEN_TYPE>(f);
    multiply_if(f, y);
#endif
    store_if(at.inside, a.out + at.in(a.out_strides), f);
}
