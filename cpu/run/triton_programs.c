/* Runs Triton's compiled kernels for CPUs; see triton_programs.h. */
#include "abi/triton_programs.h"

#include "run/run.h"

/*
 * Arguments stand once, in the order of the Triton function, each as POINTER, WHOLE, NUMBER (of the kernel's type) or
 * SINGLE (a float whatever that type is): a list gives the types of a kernel's parameters, and the values.
 */
#define POINTER_TYPE(value) void *,
#define WHOLE_TYPE(value) int64_t,
#define float_TYPE(value) float,
#define double_TYPE(value) double,
#define POINTER_VALUE(value) (void *)(value),
#define VALUE(value) value,
#define float_VALUE(value) (float)(value),
#define double_VALUE(value) (double)(value),
#define TYPES(LIST, REAL) LIST(POINTER_TYPE, WHOLE_TYPE, REAL##_TYPE, float_TYPE)
#define VALUES(LIST, REAL) LIST(POINTER_VALUE, VALUE, REAL##_VALUE, float_VALUE)

/* Runs one program of a grid of one dimension; every kernel ends with the program and the grid's size. */
#define CALL(LIST, REAL)                                                                                                   \
    ((void (*)(TYPES(LIST, REAL) uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t))g->kernel)(VALUES(LIST, REAL) \
        program, 0, 0, (uint32_t)g->programs, 1, 1)

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
#define FORWARD(POINTER, WHOLE, NUMBER, SINGLE)                                                                  \
    POINTER(at(x)) POINTER(at(residual)) POINTER(at(weight)) POINTER(at(out)) POINTER(at(sum)) POINTER(at(rstd)) \
    POINTER(at(bias)) POINTER(at(z)) WHOLE(x->stride) WHOLE(residual->stride) WHOLE(out->stride)                 \
    WHOLE(sum->stride) WHOLE(z->stride) WHOLE(c->inner) WHOLE(fn_jump_of(c, x)) WHOLE(fn_jump_of(c, residual))   \
    WHOLE(fn_jump_of(c, out)) WHOLE(fn_jump_of(c, sum)) WHOLE(fn_jump_of(c, z)) WHOLE(c->hidden)                 \
    WHOLE(rstd->kind != FN_NONE) WHOLE(weight->stride) WHOLE(bias->stride) WHOLE(c->heads) NUMBER(c->eps)        \
    NUMBER(c->weight_offset) NUMBER(g->x_scale)
    if (wide) CALL(FORWARD, double);
    else CALL(FORWARD, float);
}

static void run_quantizer(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_quantizer *q = g->quantizer;
    const struct fn_operand *x = &c->operand[FN_X], *residual = x + FN_RESIDUAL, *weight = x + FN_WEIGHT, *out = x + FN_OUT;
    const struct fn_operand *sum = x + FN_RESIDUAL_OUT, *bias = x + FN_BIAS;
    enum { SIZE = 4 }; /* of a scale, and of a zero point: their strides are in bytes */
#define QUANTIZE(POINTER, WHOLE, NUMBER, SINGLE)                                                                    \
    POINTER(at(x)) POINTER(at(residual)) POINTER(at(weight)) POINTER(at(out)) POINTER(at(sum)) POINTER(at(bias))    \
    POINTER(q->out) POINTER(q->scale) POINTER(q->zero_point) WHOLE(x->stride) WHOLE(residual->stride)               \
    WHOLE(out->stride) WHOLE(sum->stride) WHOLE(q->out_stride) WHOLE(q->scale_stride / SIZE)                        \
    WHOLE(q->scale_group_stride / SIZE) WHOLE(q->zero_point_stride / SIZE)                                          \
    WHOLE(q->zero_point_group_stride / SIZE) WHOLE(c->inner) WHOLE(fn_jump_of(c, x)) WHOLE(fn_jump_of(c, residual)) \
    WHOLE(fn_jump_of(c, out)) WHOLE(fn_jump_of(c, sum)) WHOLE(fn_jump(c, q->out_outer_stride, q->out_stride))       \
    WHOLE(fn_jump(c, q->scale_outer_stride, q->scale_stride) / SIZE)                                                \
    WHOLE(fn_jump(c, q->zero_point_outer_stride, q->zero_point_stride) / SIZE) WHOLE(c->hidden)                     \
    WHOLE(q->group ? q->group : c->hidden) WHOLE(weight->stride) WHOLE(bias->stride) WHOLE(c->heads) NUMBER(c->eps) \
    NUMBER(c->weight_offset) NUMBER(g->x_scale) SINGLE(q->qmin) SINGLE(q->qmax) SINGLE(q->amax_floor)               \
    SINGLE(q->amax_limit) SINGLE(q->scale_floor)
    if (x->kind == FN_F64) CALL(QUANTIZE, double);
    else CALL(QUANTIZE, float);
}

static void run_gate(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *d = &g->gate->operand[FN_GATE_D], *y = d + FN_GATED, *z = d + FN_GATE, *out = d + FN_GATE_OUT;
    const struct fn_operand *dz = d + FN_GATE_DZ; /* and out is the gradient of y */
#define GATE(POINTER, WHOLE, NUMBER, SINGLE)                                                            \
    POINTER(at(y)) POINTER(at(z)) POINTER(at(out)) WHOLE(y->stride) WHOLE(z->stride) WHOLE(out->stride) \
    WHOLE(c->inner) WHOLE(fn_jump_of(c, y)) WHOLE(fn_jump_of(c, z)) WHOLE(fn_jump_of(c, out)) WHOLE(c->hidden)
#define GATE_BACKWARD(POINTER, WHOLE, NUMBER, SINGLE)                                                               \
    POINTER(at(d)) POINTER(at(y)) POINTER(at(z)) POINTER(at(out)) POINTER(at(dz)) WHOLE(d->stride) WHOLE(y->stride) \
    WHOLE(z->stride) WHOLE(out->stride) WHOLE(dz->stride) WHOLE(c->inner) WHOLE(fn_jump_of(c, d))                   \
    WHOLE(fn_jump_of(c, y)) WHOLE(fn_jump_of(c, z)) WHOLE(fn_jump_of(c, out)) WHOLE(fn_jump_of(c, dz)) WHOLE(c->hidden)
    if (c->pass == FN_FORWARD) CALL(GATE, float); /* these kernels take no number */
    else CALL(GATE_BACKWARD, float);
}

static void run_backward(const struct grid *g, uint32_t program) {
    const struct fn_call *c = g->call;
    const struct fn_operand *dy = &c->operand[FN_DY], *d_sum = dy + FN_D_RESIDUAL_OUT, *h = dy + FN_H;
    const struct fn_operand *rstd = dy + FN_BACKWARD_RSTD;
#define BACKWARD(POINTER, WHOLE, NUMBER, SINGLE)                                                                     \
    POINTER(at(dy)) POINTER(at(d_sum)) POINTER(at(h)) POINTER(at(rstd)) POINTER(at(dy + FN_BACKWARD_WEIGHT))         \
    POINTER(at(dy + FN_DX)) POINTER(at(dy + FN_DRESIDUAL)) POINTER(at(dy + FN_PARTIAL)) POINTER(at(dy + FN_DWEIGHT)) \
    WHOLE(dy->stride) WHOLE(d_sum->stride) WHOLE(h->stride) WHOLE(c->inner) WHOLE(fn_jump_of(c, dy))                 \
    WHOLE(fn_jump_of(c, d_sum)) WHOLE(fn_jump_of(c, h)) WHOLE(c->rows) WHOLE(c->block) WHOLE(fn_blocks(c))           \
    WHOLE(c->hidden) NUMBER(c->weight_offset)
    if (rstd->kind == FN_F64) CALL(BACKWARD, double);
    else CALL(BACKWARD, float);
}

/* Rows and numbers that have their place have one address: a kernel takes those that it knows. */
static void run_log_prob(const struct grid *g, uint32_t program) {
    const struct fn_declared *job = (const struct fn_declared *)(g->call + 1);
    const struct fn_call *c = g->call;
    const struct fn_log_prob of = fn_log_prob_of(job);
    const struct fn_operand *x = &job->operand[FN_LOGITS], *out = of.out, *d = of.d;
    const int64_t ignores = job->given >> FN_LOG_PROB_IGNORE_INDEX & 1;
#define LOG_PROB(POINTER, WHOLE, NUMBER, SINGLE)                                                               \
    POINTER(at(x)) POINTER(at(x + FN_LOG_PROB_IDS)) POINTER(at(x + FN_LOG_PROB_TEMPERATURE)) POINTER(at(out))  \
    POINTER(at(out)) POINTER(at(of.m)) POINTER(at(of.s)) POINTER(at(of.entropy)) POINTER(at(d)) POINTER(at(d)) \
    POINTER(at(of.d_entropy)) WHOLE(x->stride) WHOLE(out->stride) WHOLE(d->stride) WHOLE(c->inner)             \
    WHOLE(fn_jump_of(c, x)) WHOLE(fn_jump_of(c, out)) WHOLE(fn_jump_of(c, d)) WHOLE(c->hidden)                 \
    WHOLE(fn_ids_of_row(job)) WHOLE(job->flag[FN_LOG_PROB_IGNORE_INDEX].whole) WHOLE(ignores)                  \
    NUMBER(job->flag[FN_LOG_PROB_SOFTCAP].number)
    if (job->wide) CALL(LOG_PROB, double);
    else CALL(LOG_PROB, float);
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
