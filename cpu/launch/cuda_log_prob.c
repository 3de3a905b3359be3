/* Reads log-probabilities, whose arguments are those of csrc/log_prob.cuh. */
#include "launch/cuda.h"
#include "abi/declared.h"

/* Appends the address of numbers, of `size` bytes each, which a kernel reads or writes one by one. */
static void append_numbers(arguments *to, uintptr_t address, int64_t size) {
    append(to, &address, sizeof address);
    to->between |= size && address % (uintptr_t)size != 0;
}

int fn_cuda_log_prob(const struct fn_call *call, launch *l) {
    const struct fn_declared *const p = (const struct fn_declared *)(call + 1);
    static const int operands[] = {FN_LOGITS, FN_LOG_PROB_OUT, FN_LOG_PROB_D, FN_LOG_PROB_IDS, FN_LOG_PROB_TEMPERATURE,
                                   FN_LOG_PROB_M, FN_LOG_PROB_S, FN_LOG_PROB_H, FN_LOG_PROB_DH};
    const int whole = p->operation == FN_LOG_SOFTMAX, of_rows = whole ? 3 : p->pass == FN_BACKWARD ? 2 : 1;
    const int32_t hidden = (int32_t)p->hidden, ignores = (int32_t)p->ignores;
    arguments to = begin_arguments(l, p->rows, p->inner);
    for (int i = 0; i < FN_DECLARED_OPERANDS; i++) {
        const struct fn_operand *o = &p->operand[operands[i]];
        const int64_t size = operands[i] == FN_LOG_PROB_IDS ? p->id_size : fn_element_size(o->kind);
        if (i < of_rows) append_address(&to, o->address, o->stride | o->outer_stride, o->kind);
        else append_numbers(&to, o->address, size);
        l->key.kinds |= o->kind << 4 * i;
    }
    for (int i = 0; i < 3; i++) append_strides(&to, p->operand[operands[i]].outer_stride, p->operand[operands[i]].stride);
    append_integer(&to, p->count);
    append_integer(&to, p->ignore_index);
    append(&to, &hidden, sizeof hidden);
    append(&to, &ignores, sizeof ignores);
    append_real(&to, p->number[FN_LOG_PROB_SOFTCAP], (int)p->wide);
    l->key.hidden = l->hidden = p->hidden;
    l->rows = p->rows;
    l->block = 0;
    l->key.device = (int32_t)call->device;
    l->key.options = LOG_PROB | (to.inner ? TWO_LEVELS : 0) | (p->pass == FN_BACKWARD ? BACKWARD : 0);
    l->key.gate = (int32_t)(p->operation | p->id_size << 4 | (int64_t)(p->number[FN_LOG_PROB_SOFTCAP] != 0) << 8);
    return end_arguments(&to);
}
