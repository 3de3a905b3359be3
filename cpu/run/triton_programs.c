/* Runs Triton's compiled kernels for CPUs; see triton_programs.h. */
#include "abi/triton_programs.h"

#include "run/run.h"

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
#define LOG_PROB(REAL) void (*)(P8, P3, I8, int64_t, int64_t, int64_t, REAL, PROGRAM)

struct grid {
    uintptr_t kernel;
    const struct fn_call *call;
    const struct fn_quantizer *quantizer; /* that takes the call's rows, or NULL */
    const struct fn_gate *gate; /* beside the call, or NULL */
    double x_scale; /* x is multiplied by it first, if the kernel scales x */
    int64_t programs;
};

static void *at(const struct fn_operand *o) { return (void *)o->address; }

static void run_forward(const struct grid *g, uint32_t program) {
    static const struct fn_operand none;
    const struct fn_call *c = g->call;
    const struct fn_operand *x = &c->operand[FN_X], *residual = x + FN_RESIDUAL, *weight = x + FN_WEIGHT, *out = x + FN_OUT;
    const struct fn_operand *sum = x + FN_RESIDUAL_OUT, *rstd = x + FN_RSTD, *bias = x + FN_BIAS, *z = &none;
    const int wide = x->kind == FN_F64;
    if (g->gate) z = &g->gate->operand[FN_GATE];
    if (c->flags & FN_GATE_BEFORE) x = &g->gate->operand[FN_GATED];
    if (c->flags & FN_GATE_AFTER) out = &g->gate->operand[FN_GATE_OUT];
#define CALL(REAL) \
    ((FORWARD(REAL))g->kernel)( \
        at(x), at(residual), at(weight), at(out), at(sum), at(rstd), at(bias), at(z), x->stride, residual->stride, out->stride, \
        sum->stride, z->stride, c->inner, fn_jump_of(c, x), fn_jump_of(c, residual), fn_jump_of(c, out), fn_jump_of(c, sum), \
        fn_jump_of(c, z), c->hidden, rstd->kind != FN_NONE, weight->stride, bias->stride, c->heads, (REAL)c->eps, \
        (REAL)c->weight_offset, (REAL)g->x_scale, program, 0, 0, (uint32_t)g->programs, 1, 1)
    if (wide) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_quantizer(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_quantizer *q = g->quantizer;
    const struct fn_operand *x = &c->operand[FN_X], *residual = x + FN_RESIDUAL, *weight = x + FN_WEIGHT, *out = x + FN_OUT;
    const struct fn_operand *sum = x + FN_RESIDUAL_OUT, *bias = x + FN_BIAS;
    enum { SIZE = 4 }; /* of a scale, and of a zero point: their strides are in bytes */
#define CALL(REAL) \
    ((QUANTIZE(REAL))g->kernel)( \
        at(x), at(residual), at(weight), at(out), at(sum), at(bias), (void *)q->out, (void *)q->scale, (void *)q->zero_point, \
        x->stride, residual->stride, out->stride, sum->stride, q->out_stride, q->scale_stride / SIZE, \
        q->scale_group_stride / SIZE, q->zero_point_stride / SIZE, q->zero_point_group_stride / SIZE, c->inner, \
        fn_jump_of(c, x), fn_jump_of(c, residual), fn_jump_of(c, out), fn_jump_of(c, sum), \
        fn_jump(c, q->out_outer_stride, q->out_stride), fn_jump(c, q->scale_outer_stride, q->scale_stride) / SIZE, \
        fn_jump(c, q->zero_point_outer_stride, q->zero_point_stride) / SIZE, c->hidden, q->group ? q->group : c->hidden, \
        weight->stride, bias->stride, c->heads, (REAL)c->eps, (REAL)c->weight_offset, (REAL)g->x_scale, (float)q->qmin, \
        (float)q->qmax, (float)q->amax_floor, (float)q->amax_limit, (float)q->scale_floor, program, 0, 0, \
        (uint32_t)g->programs, 1, 1)
    if (x->kind == FN_F64) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_gate(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *d = &g->gate->operand[FN_GATE_D], *y = d + FN_GATED, *z = d + FN_GATE, *out = d + FN_GATE_OUT;
    const struct fn_operand *dz = d + FN_GATE_DZ; /* and out is the gradient of y */
    if (c->pass == FN_FORWARD)
        ((void (*)(P3, I8, PROGRAM))g->kernel)(at(y), at(z), at(out), y->stride, z->stride, out->stride, c->inner,
                                               fn_jump_of(c, y), fn_jump_of(c, z), fn_jump_of(c, out), c->hidden, program,
                                               0, 0, (uint32_t)g->programs, 1, 1);
    else
        ((void (*)(P5, I12, PROGRAM))g->kernel)(
            at(d), at(y), at(z), at(out), at(dz), d->stride, y->stride, z->stride, out->stride, dz->stride, c->inner,
            fn_jump_of(c, d), fn_jump_of(c, y), fn_jump_of(c, z), fn_jump_of(c, out), fn_jump_of(c, dz), c->hidden, program,
            0, 0, (uint32_t)g->programs, 1, 1);
}

static void run_backward(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *dy = &c->operand[FN_DY], *d_sum = dy + FN_D_RESIDUAL_OUT, *h = dy + FN_H;
    const struct fn_operand *rstd = dy + FN_BACKWARD_RSTD;
#define CALL(REAL) \
    ((BACKWARD(REAL))g->kernel)( \
        at(dy), at(d_sum), at(h), at(rstd), at(dy + FN_BACKWARD_WEIGHT), at(dy + FN_DX), at(dy + FN_DRESIDUAL), \
        at(dy + FN_PARTIAL), at(dy + FN_DWEIGHT), dy->stride, d_sum->stride, h->stride, c->inner, fn_jump_of(c, dy), \
        fn_jump_of(c, d_sum), fn_jump_of(c, h), c->rows, c->block, fn_blocks(c), c->hidden, (REAL)c->weight_offset, program, \
        0, 0, (uint32_t)g->programs, 1, 1)
    if (rstd->kind == FN_F64) CALL(double);
    else CALL(float);
#undef CALL
}

/* Rows and numbers that have their place have one address: a kernel takes those that it knows. */
static void run_log_prob(const struct grid *g, uint32_t program) {
    const struct fn_declared *job = (const struct fn_declared *)(g->call + 1);
    const struct fn_call *c = g->call;
    const struct fn_log_prob of = fn_log_prob_of(job);
    const struct fn_operand *x = &job->operand[FN_LOGITS], *out = of.out, *d = of.d;
    const int64_t ignores = job->given >> FN_LOG_PROB_IGNORE_INDEX & 1;
#define CALL(REAL) \
    ((LOG_PROB(REAL))g->kernel)( \
        at(x), at(x + FN_LOG_PROB_IDS), at(x + FN_LOG_PROB_TEMPERATURE), at(out), at(out), at(of.m), \
        at(of.s), at(of.entropy), at(d), at(d), at(of.d_entropy), x->stride, out->stride, \
        d->stride, c->inner, fn_jump_of(c, x), fn_jump_of(c, out), fn_jump_of(c, d), c->hidden, fn_ids_of_row(job), \
        job->flag[FN_LOG_PROB_IGNORE_INDEX].whole, ignores, (REAL)job->flag[FN_LOG_PROB_SOFTCAP].number, program, 0, 0, (uint32_t)g->programs, 1, 1)
    if (job->wide) CALL(double);
    else CALL(float);
#undef CALL
}

static void run_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct grid *g = argument;
    (void)buffer;
    void (*run)(const struct grid *, uint32_t) = g->call->pass == FN_FORWARD ? run_forward : run_backward;
    if (g->quantizer) run = run_quantizer;
    if (g->call->flags & FN_GATE_ONLY) run = run_gate;
    if (g->call->flags & FN_DECLARED_ONLY) run = run_log_prob;
    for (int64_t program = begin; program < end; program++) run(g, (uint32_t)program);
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
    return fn_divide(run_share, &g, programs, call->rows * call->hidden, call->threads, 0);
}
