/* Reads a forward or a backward pass, with all that may be around a norm. */
#include "launch/cuda.h"
#include "abi/gate.h"

/*
 * The arguments of a kernel: the operands' addresses, then strides and numbers. As in csrc/forward.cuh and
 * csrc/backward.cuh; test_cuda.py holds the offsets of both against each other.
 */
typedef struct {
    int operands;
    unsigned of_rows; /* a bit for each operand that has a row for each row of the call */
    unsigned decide; /* a bit for each operand whose kind decides which kernels a call takes */
} form;

static const form forms[] = {
    [FN_FORWARD] = {FN_FORWARD_OPERANDS, 1 << FN_X | 1 << FN_RESIDUAL | 1 << FN_OUT | 1 << FN_RESIDUAL_OUT,
                    1 << FN_X | 1 << FN_RESIDUAL | 1 << FN_WEIGHT | 1 << FN_OUT | 1 << FN_RESIDUAL_OUT},
    [FN_BACKWARD] = {FN_BACKWARD_OPERANDS, 1 << FN_DY | 1 << FN_D_RESIDUAL_OUT | 1 << FN_H,
                     1 << FN_DY | 1 << FN_D_RESIDUAL_OUT | 1 << FN_H | 1 << FN_BACKWARD_RSTD | 1 << FN_BACKWARD_WEIGHT |
                         1 << FN_DX | 1 << FN_DRESIDUAL | 1 << FN_DWEIGHT},
};

/*
 * A call, and the norm of x before its addition, or the scaling of x, and the quantizer of its rows, or a gate after it or
 * before it, which are NULL where there is none. Of a chain, the call is the last one with the x of the first one, because
 * one kernel takes both; and with a gate, the call has the x and the out of both. `between`: the kind that the norm passes
 * to the gate.
 */
typedef struct {
    const struct fn_call *call, *first, *scaling;
    const struct fn_quantizer *quantizer;
    const struct fn_gate *gate;
    int64_t between;
    struct fn_call of_chain;
} work;

static void read_work(const struct fn_call *calls, work *w) {
    w->call = calls;
    w->first = w->scaling = NULL;
    w->quantizer = fn_quantizer_after(calls->following ? calls + 1 : calls);
    w->gate = fn_gate_after(calls);
    if (w->gate) {
        w->of_chain = *calls;
        w->call = &w->of_chain;
        w->between = calls->flags & FN_GATE_AFTER ? calls->operand[FN_OUT].kind : FN_NONE;
        if (calls->flags & FN_GATE_AFTER) w->of_chain.operand[FN_OUT] = w->gate->operand[FN_GATE_OUT];
        else w->of_chain.operand[FN_X] = w->gate->operand[FN_GATED];
    }
    if (!calls->following) return;
    w->of_chain = calls[1];
    w->of_chain.operand[FN_X] = calls->operand[FN_X];
    w->call = &w->of_chain;
    if (calls->flags & FN_SCALE_ONLY) w->scaling = calls;
    else w->first = calls;
}

/* The bias of a forward pass; of kind FN_NONE in other passes too. */
static struct fn_operand bias_of(const struct fn_call *c) {
    return c->pass == FN_FORWARD ? c->operand[FN_BIAS] : (struct fn_operand){.kind = FN_NONE};
}

static int has_heads(const struct fn_call *c) { return c->pass == FN_FORWARD && c->heads > 1; }

static int is_wide(const struct fn_call *c) {
    return c->operand[c->pass == FN_FORWARD ? FN_X : FN_BACKWARD_RSTD].kind == FN_F64;
}

/* The bytes of an element of the narrowest type, which a vector of numbers has as many of. */
static int64_t narrowest(const struct fn_call *c) {
    int64_t least = fn_element_size(c->operand[FN_X].kind);
    for (int i = FN_RESIDUAL; i < FN_FORWARD_OPERANDS_IN_C; i++) {
        const int64_t item = fn_element_size(c->operand[i].kind);
        if (item && item < least) least = item;
    }
    return least;
}

static void fill_in_key(const work *w, key *k) {
    const struct fn_call *c = w->call;
    const form *f = &forms[c->pass];
    int at = 0;
    k->hidden = c->hidden;
    for (int i = 0; i < f->operands; i++)
        if (f->decide >> i & 1) k->kinds |= c->operand[i].kind << 4 * at++;
    if (w->first) k->kinds |= (w->first->operand[FN_WEIGHT].kind | w->first->operand[FN_OUT].kind << 4) << 4 * at;
    k->kinds |= bias_of(c).kind << 4 * (at + 2);
    if (w->gate) {
        k->kinds |= (w->between | w->gate->operand[FN_GATE].kind << 12) << 4 * (at + 1);
        k->gate = 1 + (int32_t)w->gate->activation;
    }
    k->device = (int32_t)c->device;
    const int normalises = !(c->flags & FN_QUANTIZE_ONLY); /* without a norm its flags say nothing */
    k->options = normalises ? (int32_t)c->flags & (FN_ROUND_SUM | FN_ROUND_NORM) : 0;
    k->options |= (c->weight_offset != 0 ? OFFSET : 0) | (c->inner != c->rows ? TWO_LEVELS : 0);
    k->options |= c->flags & FN_CENTER ? CENTER : 0;
    k->options |= (has_heads(c) ? OF_HEADS : 0) | (w->scaling ? SCALED : 0);
    if (c->pass == FN_BACKWARD) k->options |= BACKWARD;
    else if (c->operand[FN_RSTD].kind) k->options |= RSTD;
    if (w->quantizer) {
        k->group = w->quantizer->group;
        k->quantizer = 1 | (!normalises || c->operand[FN_OUT].address ? 2 : 0) | (int32_t)w->quantizer->kind << 2;
        k->quantizer |= (int32_t)w->quantizer->flags << 4 | normalises << 16;
    }
}

/* Appends the arguments of a quantizer. Strides are given in bytes, and scales and zero points have four. */
static void append_quantizer(arguments *to, const struct fn_quantizer *q, int64_t narrowest) {
    const double reals[] = {q->qmin, q->qmax, q->amax_floor, q->amax_limit, q->scale_floor};
    append(to, &q->out, sizeof(uintptr_t));
    append(to, &q->scale, sizeof(uintptr_t));
    append(to, &q->zero_point, sizeof(uintptr_t));
    to->between |= (q->scale | q->zero_point) % 4 != 0;
    to->alignment |= (q->out | (uint64_t)(q->out_stride | q->out_outer_stride)) * (uint64_t)narrowest;
    append_strides(to, q->out_outer_stride, q->out_stride);
    append_strides(to, q->scale_outer_stride / 4, q->scale_stride / 4);
    append_strides(to, q->zero_point_outer_stride / 4, q->zero_point_stride / 4);
    append_integer(to, q->scale_group_stride / 4);
    append_integer(to, q->zero_point_group_stride / 4);
    for (int i = 0; i < 5; i++) append_real(to, reals[i], 0);
}

/* Writes a kernel's arguments: the structures `Arguments` of csrc/forward.cuh and csrc/backward.cuh. */
static void write(const work *w, arguments *to) {
    const struct fn_call *c = w->call;
    const struct fn_operand *o = c->operand;
    const form *f = &forms[c->pass];
    const int backward = c->pass == FN_BACKWARD;
    const int64_t numbers[] = {c->rows, c->block, fn_blocks(c)};
    const int32_t hidden = (int32_t)c->hidden;
    const double reals[] = {c->eps, c->weight_offset};
    for (int i = 0; i < f->operands; i++) {
        const int64_t of_heads = has_heads(c) && i == FN_WEIGHT ? o[i].stride : 0;
        append_address(to, o[i].address, f->of_rows >> i & 1 ? o[i].stride | o[i].outer_stride : of_heads, o[i].kind);
    }
    for (int i = 0; i < f->operands; i++)
        if (f->of_rows >> i & 1) append_strides(to, o[i].outer_stride, o[i].stride);
    for (int i = 0; i < (backward ? 3 : 1); i++) append_integer(to, numbers[i]);
    append(to, &hidden, sizeof hidden);
    for (int i = backward; i < 2; i++) append_real(to, reals[i], is_wide(c));
    if (w->first) {
        const struct fn_operand *weight = &w->first->operand[FN_WEIGHT];
        append_address(to, weight->address, weight->stride, weight->kind);
        append_real(to, w->first->eps, is_wide(c));
    } else if (!backward) { /* a kernel without anything around the norm reads none of it */
        append_address(to, o[FN_BIAS].address, o[FN_BIAS].stride, o[FN_BIAS].kind);
        append_integer(to, c->heads);
        append_integer(to, o[FN_WEIGHT].stride);
        append_integer(to, o[FN_BIAS].stride);
        append_real(to, w->scaling ? w->scaling->eps : 1, is_wide(c));
    }
    if (w->gate) {
        const struct fn_operand *z = &w->gate->operand[FN_GATE];
        append_address(to, z->address, z->stride | z->outer_stride, z->kind);
        append_strides(to, z->outer_stride, z->stride);
    }
    if (w->quantizer) append_quantizer(to, w->quantizer, narrowest(c));
}

int fn_cuda_norm(const struct fn_call *calls, launch *l) {
    work w;
    read_work(calls, &w);
    arguments to = begin_arguments(l, w.call->rows, w.call->inner);
    write(&w, &to);
    fill_in_key(&w, &l->key);
    l->rows = w.call->rows;
    l->hidden = w.call->hidden;
    l->block = w.call->block;
    return end_arguments(&to);
}
