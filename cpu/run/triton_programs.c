/* Runs Triton's compiled kernels for CPUs; see triton_programs.h. */
#include "abi/triton_programs.h"

#include "abi/fusednorm_cpu.h"
#include "abi/gate.h"
#include "machine/ieee.h"

/*
 * The arguments of a kernel: operands, strides and other integers, numbers such as `eps`, and the program. P3 is three
 * pointers, I4 four integers.
 */
#define P3 void *, void *, void *
#define P5 P3, void *, void *
#define P8 P5, P3
#define P9 P8, void *
#define I4 int64_t, int64_t, int64_t, int64_t
#define I8 I4, I4
#define I12 I8, I4
#define I16 I12, I4
#define PROGRAM uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t
#define FORWARD(REAL) void (*)(P8, I16, REAL, REAL, REAL, PROGRAM)
#define BACKWARD(REAL) void (*)(P9, I8, int64_t, int64_t, int64_t, REAL, PROGRAM)
#define QUANTIZE(REAL) \
    void (*)(P9, I16, I4, int64_t, int64_t, REAL, REAL, REAL, float, float, float, float, float, PROGRAM)

struct grid {
    uintptr_t kernel;
    const struct fn_call *call;
    const struct fn_quantizer *quantizer; /* that takes the call's rows, or NULL */
    const struct fn_gate *gate; /* beside the call, or NULL */
    double x_scale; /* x is multiplied by it first, if the kernel scales x */
    int64_t programs;
};

/* Row i of an operand begins i * stride + i / inner * jump elements after its address. */
static int64_t jump(const struct fn_call *c, int64_t outer_stride, int64_t stride) {
    return c->inner == c->rows ? 0 : outer_stride - c->inner * stride;
}
static int64_t jump_of(const struct fn_call *c, const struct fn_operand *o) { return jump(c, o->outer_stride, o->stride); }

static void run_forward(const struct grid *g, uint32_t program) {
    static const struct fn_operand none;
    const struct fn_call *c = g->call;
    const struct fn_operand *o = c->operand, *x = &o[FN_X], *out = &o[FN_OUT], *z = g->gate ? &g->gate->operand[FN_GATE] : &none;
    if (c->flags & FN_GATE_BEFORE) x = &g->gate->operand[FN_GATED];
    if (c->flags & FN_GATE_AFTER) out = &g->gate->operand[FN_GATE_OUT];
    void *p[FN_FORWARD_OPERANDS_IN_C];
    for (int i = 0; i < FN_FORWARD_OPERANDS_IN_C; i++) p[i] = (void *)o[i].address;
#define CALL(REAL) \
    ((FORWARD(REAL))g->kernel)( \
        (void *)x->address, p[FN_RESIDUAL], p[FN_WEIGHT], (void *)out->address, p[FN_RESIDUAL_OUT], p[FN_RSTD], p[FN_BIAS], \
        (void *)z->address, x->stride, o[FN_RESIDUAL].stride, out->stride, o[FN_RESIDUAL_OUT].stride, z->stride, c->inner, \
        jump_of(c, x), fn_jump(c, FN_RESIDUAL), jump_of(c, out), fn_jump(c, FN_RESIDUAL_OUT), jump_of(c, z), c->hidden, \
        o[FN_RSTD].kind != FN_NONE, o[FN_WEIGHT].stride, o[FN_BIAS].stride, c->heads, (REAL)c->eps, (REAL)c->weight_offset, \
        (REAL)g->x_scale, program, 0, 0, (uint32_t)g->programs, 1, 1)
    if (o[FN_X].kind == FN_F64) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_quantizer(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_quantizer *q = g->quantizer;
    const struct fn_operand *o = c->operand;
    enum { SIZE = 4 }; /* of a scale, and of a zero point: their strides are in bytes */
    void *p[FN_FORWARD_OPERANDS_IN_C];
    for (int i = 0; i < FN_FORWARD_OPERANDS_IN_C; i++) p[i] = (void *)o[i].address;
#define CALL(REAL) \
    ((QUANTIZE(REAL))g->kernel)( \
        p[FN_X], p[FN_RESIDUAL], p[FN_WEIGHT], p[FN_OUT], p[FN_RESIDUAL_OUT], p[FN_BIAS], (void *)q->out, (void *)q->scale, \
        (void *)q->zero_point, o[FN_X].stride, o[FN_RESIDUAL].stride, o[FN_OUT].stride, o[FN_RESIDUAL_OUT].stride, \
        q->out_stride, q->scale_stride / SIZE, q->scale_group_stride / SIZE, q->zero_point_stride / SIZE, \
        q->zero_point_group_stride / SIZE, c->inner, fn_jump(c, FN_X), fn_jump(c, FN_RESIDUAL), fn_jump(c, FN_OUT), \
        fn_jump(c, FN_RESIDUAL_OUT), jump(c, q->out_outer_stride, q->out_stride), \
        jump(c, q->scale_outer_stride, q->scale_stride) / SIZE, \
        jump(c, q->zero_point_outer_stride, q->zero_point_stride) / SIZE, c->hidden, q->group ? q->group : c->hidden, \
        o[FN_WEIGHT].stride, o[FN_BIAS].stride, c->heads, (REAL)c->eps, (REAL)c->weight_offset, (REAL)g->x_scale, \
        (float)q->qmin, (float)q->qmax, (float)q->amax_floor, (float)q->amax_limit, (float)q->scale_floor, program, 0, 0, \
        (uint32_t)g->programs, 1, 1)
    if (o[FN_X].kind == FN_F64) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_gate(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *d = &g->gate->operand[FN_GATE_D], *y = d + FN_GATED, *z = d + FN_GATE, *out = d + FN_GATE_OUT;
    const struct fn_operand *dz = d + FN_GATE_DZ;
    void *const to = (void *)out->address; /* or the gradient of y */
    if (c->pass == FN_FORWARD)
        ((void (*)(P3, I8, PROGRAM))g->kernel)((void *)y->address, (void *)z->address, to, y->stride, z->stride, out->stride,
                                               c->inner, jump_of(c, y), jump_of(c, z), jump_of(c, out), c->hidden, program,
                                               0, 0, (uint32_t)g->programs, 1, 1);
    else
        ((void (*)(P5, I12, PROGRAM))g->kernel)(
            (void *)d->address, (void *)y->address, (void *)z->address, to, (void *)dz->address, d->stride, y->stride,
            z->stride, out->stride, dz->stride, c->inner, jump_of(c, d), jump_of(c, y), jump_of(c, z), jump_of(c, out),
            jump_of(c, dz), c->hidden, program, 0, 0, (uint32_t)g->programs, 1, 1);
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
    void (*run)(const struct grid *, uint32_t) = g->call->pass == FN_FORWARD ? run_forward : run_backward;
    if (g->quantizer) run = run_quantizer;
    if (g->call->flags & FN_GATE_ONLY) run = run_gate;
    for (int64_t program = begin; program < end; program++) run(g, (uint32_t)program);
    fn_leave_ieee(state);
}

int fn_run_triton(uintptr_t kernel, const struct fn_call *call, int64_t programs) {
    const struct fn_call *last = call + call->following;
    struct grid g = {.kernel = kernel, .call = call, .x_scale = 1, .programs = programs};
    g.quantizer = fn_quantizer_after(last);
    g.gate = fn_gate_after(last);
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
