// Rows times a function of other rows, or that function alone where y is absent.
#include "gate.cuh"

extern "C" __global__ void BOUNDS gate(const Arguments a) {
    const Place at(a);
    wait_for_kernels_before();
    Y y[VECTOR];
    Z z[VECTOR];
    load_if(at.inside, y, a.y + at.in(a.y_strides));
    load_if(at.inside, z, a.z + at.in(a.z_strides));
    let_next_kernel_begin();
    A f[VECTOR];
    activate(f, z);
    round_to<BETWEEN_TYPE>(f);
    multiply_if(f, y);
    store_if(at.inside, a.out + at.in(a.out_strides), f);
}
