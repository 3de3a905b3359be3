/* Runs Triton's compiled kernels for CPUs; see triton_programs.h. */
#include "triton_programs.h"

#include "fusednorm_cpu.h"
#include "ieee.h"

/* The arguments of a kernel: operands, strides and other integers, numbers such as `eps`, and the program. */
#define FORWARD(REAL) \
    void (*)(void *, void *, void *, void *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, \
             int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, REAL, REAL, REAL, uint32_t, uint32_t, \
             uint32_t, uint32_t, uint32_t, uint32_t)
#define BACKWARD(REAL) \
    void (*)(void *, void *, void *, void *, void *, void *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, \
             int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, REAL, uint32_t, uint32_t, uint32_t, uint32_t, \
             uint32_t, uint32_t)

struct grid {
    uintptr_t kernel;
    const struct fn_call *call;
    double x_scale; /* x is multiplied by it first, if the kernel scales x */
    int64_t programs;
};

static void run_forward(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *o = c->operand;
    void *p[FN_FORWARD_OPERANDS_IN_C];
    for (int i = 0; i < FN_FORWARD_OPERANDS_IN_C; i++) p[i] = (void *)o[i].address;
#define CALL(REAL) \
    ((FORWARD(REAL))g->kernel)( \
        p[FN_X], p[FN_RESIDUAL], p[FN_WEIGHT], p[FN_OUT], p[FN_RESIDUAL_OUT], p[FN_RSTD], p[FN_BIAS], o[FN_X].stride, \
        o[FN_RESIDUAL].stride, o[FN_OUT].stride, o[FN_RESIDUAL_OUT].stride, c->inner, fn_jump(c, FN_X), \
        fn_jump(c, FN_RESIDUAL), fn_jump(c, FN_OUT), fn_jump(c, FN_RESIDUAL_OUT), c->hidden, o[FN_RSTD].kind != FN_NONE, \
        o[FN_WEIGHT].stride, o[FN_BIAS].stride, c->heads, (REAL)c->eps, (REAL)c->weight_offset, (REAL)g->x_scale, program, \
        0, 0, (uint32_t)g->programs, 1, 1)
    if (o[FN_X].kind == FN_F64) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_backward(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *o = c->operand;
    void *p[FN_BACKWARD_OPERANDS];
    for (int i = 0; i < FN_BACKWARD_OPERANDS; i++) p[i] = (void *)o[i].address;
#define CALL(REAL) \
    ((BACKWARD(REAL))g->kernel)(p[FN_DY], p[FN_D_RESIDUAL_OUT], p[FN_H], p[FN_BACKWARD_RSTD], p[FN_BACKWARD_WEIGHT], \
                                p[FN_DX], p[FN_DRESIDUAL], p[FN_PARTIAL], p[FN_DWEIGHT], o[FN_DY].stride, \
                                o[FN_D_RESIDUAL_OUT].stride, o[FN_H].stride, c->inner, fn_jump(c, FN_DY), \
                                fn_jump(c, FN_D_RESIDUAL_OUT), fn_jump(c, FN_H), c->rows, c->block, fn_blocks(c), \
                                c->hidden, (REAL)c->weight_offset, program, 0, 0, (uint32_t)g->programs, 1, 1)
    if (o[FN_BACKWARD_RSTD].kind == FN_F64) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_thread(void *argument, int thread, int threads) {
    const struct grid *g = argument;
    int64_t begin = fn_first_row(g->programs, thread, threads), end = fn_first_row(g->programs, thread + 1, threads);
    fn_fp_state state = fn_enter_ieee();
    for (int64_t program = begin; program < end; program++)
        if (g->call->pass == FN_FORWARD) run_forward(g, (uint32_t)program);
        else run_backward(g, (uint32_t)program);
    fn_leave_ieee(state);
}

int fn_run_triton(uintptr_t kernel, const struct fn_call *call, int64_t programs) {
    struct grid g = {.kernel = kernel, .call = call, .x_scale = 1, .programs = programs};
    struct fn_call scaled;
    if (call->following) { /* the first call of a chain scales x: one kernel takes both calls */
        scaled = call[1];
        scaled.operand[FN_X] = call->operand[FN_X];
        g.call = &scaled;
        g.x_scale = call->eps;
    }
    call = g.call;
    if (programs > INT32_MAX) return 1;
    int threads = call->threads < programs ? (int)call->threads : (int)programs;
    fn_parallel(run_thread, &g, call->rows * call->hidden < FN_PARALLEL_ELEMENTS ? 1 : threads);
    return 0;
}
