/* Runs a call where its tensors are. */
#include "python/fast_path.h"

fn_run_fn *fn_run_on_cpu;

int fn_run_on_device(struct fn_call *c, const tensor *x, int triton) {
    if (triton) return fn_run_triton_kernel(c);
    if (x->device.type == DL_CPU) return fn_run_in_c(c, fn_run_on_cpu);
    void *stream;
    if (!fn_exchange_api->current_stream || fn_exchange_api->current_stream(DL_CUDA, x->device.id, &stream)) return 1;
    return fn_launch_cuda(c, stream) != FN_LAUNCHED;
}
