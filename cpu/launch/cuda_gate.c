/* Reads a gate, whose arguments are those of csrc/gate.cuh. */
#include "launch/cuda.h"
#include "abi/gate.h"

int fn_cuda_gate(const struct fn_call *call, launch *l) {
    const struct fn_gate *const g = (const struct fn_gate *)(call + 1);
    const int two_levels = g->inner != g->rows;
    const int32_t hidden = (int32_t)g->hidden;
    int packed = !two_levels;
    uint64_t low = FN_MOST_ALIGNED;
    size_t at = 0;
    memset(&l->key, 0, sizeof l->key);
    if (two_levels) append(l->arguments, &at, &g->inner, sizeof(int64_t));
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int item = fn_element_size(o->kind);
        if (item && o->address % (uintptr_t)item != 0) return 0;
        low |= o->address | (uint64_t)((o->stride | o->outer_stride) * item);
        packed &= !item || o->stride == g->hidden;
        l->key.kinds |= o->kind << 4 * i;
        append(l->arguments, &at, &o->address, sizeof(uintptr_t));
    }
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int64_t jump = o->outer_stride - g->inner * o->stride;
        append(l->arguments, &at, &o->stride, sizeof(int64_t));
        if (two_levels) append(l->arguments, &at, &jump, sizeof(int64_t));
    }
    append(l->arguments, &at, &g->rows, sizeof(int64_t));
    append(l->arguments, &at, &hidden, sizeof hidden);
    l->key.hidden = l->hidden = g->hidden;
    l->rows = g->rows;
    l->block = 0;
    l->key.device = (int32_t)call->device;
    l->key.options = GATE_ONLY | (two_levels ? TWO_LEVELS : 0) | (g->pass == FN_BACKWARD ? BACKWARD : 0);
    l->key.options |= packed ? SIDE_BY_SIDE : 0;
    l->key.alignment = (int32_t)(low & -low);
    l->key.gate = (int32_t)(1 + g->activation + (g->between << 4));
    return at <= ARGUMENT_BYTES;
}
