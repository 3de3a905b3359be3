/* Runs a call of any kind. */
#include "run/run.h"

int fn_run(const struct fn_call *call) {
    if (call->flags & FN_GATE_ONLY) {
        struct fn_gate gate = *(const struct fn_gate *)(call + 1);
        gate.threads = call->threads;
        fn_run_gate(&gate);
        return 0;
    }
    if (call->flags & FN_ROTATION_ONLY) {
        struct fn_rotation rotation = *(const struct fn_rotation *)(call + 1);
        rotation.threads = call->threads;
        return fn_run_rotation(&rotation);
    }
    if (call->flags & FN_DECLARED_ONLY) {
        struct fn_declared job = *(const struct fn_declared *)(call + 1);
        job.threads = call->threads;
        return fn_run_declared(&job);
    }
    return call->pass == FN_BACKWARD ? fn_backward(call) : fn_forward(call, 1 + (int)call->following);
}
