/* Reads a gate, whose arguments are those of csrc/gate.cuh. */
#include "launch/cuda.h"
#include "abi/gate.h"

int fn_cuda_gate(const struct fn_call *call, launch *l) {
    const struct fn_gate *const g = (const struct fn_gate *)(call + 1);
    const int32_t hidden = (int32_t)g->hidden;
    arguments to = begin_arguments(l, g->rows, g->inner);
    int packed = !to.inner;
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int step = fn_gate_step(g, i), with_z = step == 2 && (i == FN_GATED || i == FN_GATED_D);
        /* Where they take turns, y is read with z, whose address is the one that counts. */
        append_address(&to, o->address, o->stride | o->outer_stride, with_z ? FN_NONE : o->kind);
        packed &= !o->kind || o->stride == step * g->hidden;
        l->key.kinds |= o->kind << 4 * i;
    }
    for (int i = 0; i < FN_GATE_OPERANDS; i++) append_strides(&to, g->operand[i].outer_stride, g->operand[i].stride);
    append_integer(&to, g->rows);
    append(&to, &hidden, sizeof hidden);
    l->key.hidden = l->hidden = g->hidden;
    l->rows = g->rows;
    l->block = 0;
    l->key.device = (int32_t)call->device;
    l->key.options = GATE_ONLY | (to.inner ? TWO_LEVELS : 0) | (g->pass == FN_BACKWARD ? BACKWARD : 0);
    l->key.options |= packed ? SIDE_BY_SIDE : 0;
    l->key.gate = (int32_t)(1 + g->activation + (g->between << 4));
    l->key.gate_flags = (int32_t)g->flags;
    if (fn_gate_has_steps(g)) {
        l->key.limit = g->limit;
        l->key.alpha = g->alpha;
        l->key.up_offset = g->up_offset;
    }
    return end_arguments(&to);
}
