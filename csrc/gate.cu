// Rows times a function of other rows.
#include "gate.cuh"

extern "C" __global__ void BOUNDS gate(const Arguments a) {
    const Place at(a);
    wait_for_kernels_before();
    Y y[VECTOR];
    Z z[VECTOR];
    load_if(at.inside, y, a.y + at.in(a.y_strides));
    load_if(at.inside, z, a.z + at.in(a.z_strides));
    let_next_kernel_begin();
    A f[VECTOR], out[VECTOR];
    activate(f, z);
    round_to<BETWEEN_TYPE>(f);
    widen(out, y);
    multiply(out, f);
    store_if(at.inside, a.out + at.in(a.out_strides), out);
}
