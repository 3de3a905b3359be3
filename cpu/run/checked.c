/*
 * Which kinds of calls have been compared with the reference in this process, on platforms where no test has run: the fast
 * path refuses the others, so that Python compares them first (fusednorm/engine/self_check.py).
 *
 * A kind is told by the hash of all that decides which code runs: everything but addresses, strides and numbers such as eps,
 * of which alignments count, and numbers of rows by their power of two.
 */
#include <stdatomic.h>

#include "abi/attention.h"
#include "abi/fusednorm_cpu.h"
#include "abi/gate.h"
#include "abi/rotation.h"

enum { KINDS = 1 << 14, TRIES = 64 };

static _Atomic uint64_t table[KINDS]; /* 0: free */

static uint64_t mixed(uint64_t hash, int64_t value) {
    hash = (hash ^ (uint64_t)value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

static int64_t power_of(int64_t number) {
    int64_t power = 0;
    while (number > 0) number >>= 1, power++;
    return power;
}

/* Whether an address, and steps from it to other rows, are multiples of an element and of what the widest vectors have. */
static uint64_t with_alignment(uint64_t hash, uint64_t address, int64_t steps, int size) {
    const uint64_t bits = address | (uint64_t)(steps * size);
    return mixed(hash, (address != 0) + 2 * (bits % (uint64_t)size != 0) + 4 * (bits % 64 != 0));
}

static uint64_t with_operand(uint64_t hash, const struct fn_operand *o, int one_level) {
    hash = mixed(hash, o->kind);
    if (!o->kind || !o->address) return hash; /* absent, or passed on without memory of its own */
    return with_alignment(mixed(hash, o->stride == 0), o->address, o->stride | (one_level ? 0 : o->outer_stride), fn_element_size(o->kind));
}

static uint64_t with_operands(uint64_t hash, const struct fn_operand *o, int count, int64_t rows, int64_t inner) {
    hash = mixed(mixed(hash, power_of(rows)), inner == rows);
    for (int i = 0; i < count; i++) hash = with_operand(hash, &o[i], inner == rows);
    return hash;
}

static uint64_t with_quantizer(uint64_t hash, const struct fn_quantizer *q) {
    hash = mixed(mixed(mixed(hash, q->kind), q->flags), q->group);
    return mixed(with_alignment(hash, q->out, q->out_stride, 1), q->zero_point != 0);
}

/* `alone`: no norm is in the call, whose rows have no memory where they pass between both. */
static uint64_t with_gate(uint64_t hash, const struct fn_gate *g, int alone) {
    hash = mixed(mixed(mixed(mixed(hash, g->pass), g->activation), g->between), g->wide);
    hash = mixed(mixed(mixed(hash, g->flags), fn_gate_has_steps(g)), g->hidden);
    if (!alone) {
        for (int i = 0; i < FN_GATE_OPERANDS; i++) hash = mixed(hash, g->operand[i].kind);
        return with_operand(hash, &g->operand[FN_GATE], g->inner == g->rows);
    }
    const int count = g->pass == FN_FORWARD ? FN_GATE_OUT + 1 : FN_GATE_OPERANDS;
    const int first = g->pass == FN_FORWARD ? FN_GATED : FN_GATE_D;
    return with_operands(hash, g->operand + first, count - first, g->rows, g->inner);
}

static uint64_t with_rotation(uint64_t hash, const struct fn_rotation *r) {
    const int64_t fields[] = {r->flags, r->x_kind, r->out_kind, r->between, r->products, r->size, r->pairs, r->sets, r->position_size,
                              r->weight_offset != 0};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) hash = mixed(hash, fields[i]);
    const struct fn_operand tables[] = {r->cos, r->sin};
    hash = with_operands(hash, tables, r->pairs ? 2 : 0, r->rows, r->inner);
    for (int64_t i = 0; i < r->sets; i++) {
        const struct fn_heads *h = &r->heads[i];
        hash = mixed(mixed(hash, power_of(h->count)), h->weight_kind);
        hash = mixed(mixed(hash, h->weight_stride != 0), h->rstd != 0);
        hash = with_alignment(hash, h->x, h->x_stride | h->x_head_stride, fn_element_size(r->x_kind));
        hash = with_alignment(hash, h->out, h->out_stride | h->out_head_stride, fn_element_size(r->out_kind));
    }
    return hash;
}

static uint64_t with_attention(uint64_t hash, const struct fn_attention *a) {
    const int64_t fields[] = {a->kind, power_of(a->heads), a->heads == a->kv_heads, a->size, a->value_size, power_of(a->queries),
                              power_of(a->keys), a->causal, a->window != 0, a->softcap != 0, a->mask != 0, a->sinks_kind, a->pages_kind,
                              power_of(a->page_keys), power_of(a->sequences)};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) hash = mixed(hash, fields[i]);
    return hash;
}

static uint64_t with_declared(uint64_t hash, const struct fn_declared *job) {
    hash = mixed(mixed(hash, job->pass), job->operation);
    if (job->operation == FN_ATTENTION) return with_attention(hash, (const struct fn_attention *)job);
    const int64_t fields[] = {job->wide, job->hidden, job->size != 0, job->sums, power_of(job->columns)};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) hash = mixed(hash, fields[i]);
    for (int i = 0; i < FN_DECLARED_FLAGS; i++) hash = mixed(hash, job->flag[i].whole != 0);
    return with_operands(hash, job->operand, FN_DECLARED_OPERANDS, job->rows, job->inner);
}

static uint64_t with_call(uint64_t hash, const struct fn_call *c) {
    hash = mixed(mixed(mixed(hash, c->pass), c->flags & ~(c->flags & FN_QUANTIZE_ONLY ? FN_ROUND_SUM : 0)), c->hidden);
    if (c->flags & FN_SCALE_ONLY) return with_operands(hash, c->operand, FN_OUT + 1, c->rows, c->inner);
    hash = mixed(mixed(hash, c->heads > 1), c->weight_offset != 0);
    const int count = c->flags & FN_QUANTIZE_ONLY ? FN_X + 1 : c->pass == FN_BACKWARD ? FN_BACKWARD_OPERANDS : FN_FORWARD_OPERANDS_IN_C;
    return with_operands(hash, c->operand, count, c->rows, c->inner);
}

/* Never 0. */
static uint64_t kind_of(const struct fn_call *c) {
    uint64_t hash = 1;
    if (c->flags & FN_GATE_ONLY) hash = with_gate(hash, (const struct fn_gate *)(c + 1), 1);
    else if (c->flags & FN_ROTATION_ONLY) hash = with_rotation(2, (const struct fn_rotation *)(c + 1));
    else if (c->flags & FN_DECLARED_ONLY) hash = with_declared(3, (const struct fn_declared *)(c + 1));
    else {
        const struct fn_call *last = c + c->following;
        for (; c <= last; c++) hash = with_call(hash, c);
        if (fn_quantizer_after(last)) hash = with_quantizer(hash, fn_quantizer_after(last));
        else if (fn_gate_after(last)) hash = with_gate(hash, fn_gate_after(last), 0);
    }
    return hash ? hash : 1;
}

void fn_note_checked(const void *packed) {
    const uint64_t kind = kind_of(packed);
    for (uint64_t i = 0; i < TRIES; i++) {
        uint64_t found = 0;
        _Atomic uint64_t *place = &table[(kind + i) % KINDS];
        if (atomic_compare_exchange_strong(place, &found, kind) || found == kind) return;
    }
}

int fn_run_if_checked(const struct fn_call *call) {
    const uint64_t kind = kind_of(call);
    for (uint64_t i = 0; i < TRIES; i++) {
        const uint64_t found = atomic_load_explicit(&table[(kind + i) % KINDS], memory_order_relaxed);
        if (found == kind) return fn_run(call);
        if (!found) return 1;
    }
    return 1;
}
