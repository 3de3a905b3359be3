// The gradients of rows times a function of other rows.
#include "gate.cuh"

extern "C" __global__ void BOUNDS gate_backward(const Arguments a) {
    const Place at(a);
    wait_for_kernels_before();
    D d[VECTOR];
    Y y[VECTOR];
    Z z[VECTOR];
    load_if(at.inside, d, a.d + at.in(a.d_strides));
    load_if(at.inside, y, a.y + at.in(a.y_strides));
    load_if(at.inside, z, a.z + at.in(a.z_strides));
    let_next_kernel_begin();
    A f[VECTOR], slope[VECTOR], dy[VECTOR], dz[VECTOR];
    activate(f, slope, z);
    round_to<BETWEEN_TYPE>(f);
    widen(dy, d);
    widen(dz, d);
    multiply_if(dz, y);
    round_to<BETWEEN_TYPE>(dz);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        dy[i] *= f[i];
        dz[i] *= slope[i];
    }
    store_if(at.inside, a.out + at.in(a.out_strides), dy);
    store_if(at.inside, a.dz + at.in(a.dz_strides), dz);
}
