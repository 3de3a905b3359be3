/* Reads log-probabilities, whose arguments are those of csrc/log_prob.cuh. */
#include "launch/cuda.h"
#include "abi/declared.h"

/* Appends the address of numbers, which a kernel reads or writes one by one. */
static void append_numbers(arguments *to, const struct fn_operand *o) {
    append(to, &o->address, sizeof o->address);
    to->between |= o->kind && o->address % (uintptr_t)fn_element_size(o->kind) != 0;
}

int fn_cuda_log_prob(const struct fn_call *call, launch *l) {
    const struct fn_declared *const p = (const struct fn_declared *)(call + 1);
    const struct fn_log_prob of = fn_log_prob_of(p);
    const struct fn_operand *const x = &p->operand[FN_LOGITS];
    const struct fn_operand *const operands[] = {x,    of.out, of.d,       x + FN_LOG_PROB_IDS, x + FN_LOG_PROB_TEMPERATURE,
                                                 of.m, of.s,   of.entropy, of.d_entropy};
    enum { OPERANDS = sizeof operands / sizeof *operands };
    const int whole = p->operation == FN_LOG_SOFTMAX, of_rows = whole ? 3 : p->pass == FN_BACKWARD ? 2 : 1;
    const int32_t hidden = (int32_t)p->hidden, ignores = p->given >> FN_LOG_PROB_IGNORE_INDEX & 1;
    const double softcap = p->flag[FN_LOG_PROB_SOFTCAP].number;
    arguments to = begin_arguments(l, p->rows, p->inner);
    for (int i = 0; i < OPERANDS; i++) {
        const struct fn_operand *o = operands[i];
        if (i < of_rows) append_address(&to, o->address, o->stride | o->outer_stride, o->kind);
        else append_numbers(&to, o);
        l->key.kinds |= o->kind << 4 * i;
    }
    for (int i = 0; i < 3; i++) append_strides(&to, operands[i]->outer_stride, operands[i]->stride);
    append_integer(&to, fn_ids_of_row(p));
    append_integer(&to, p->flag[FN_LOG_PROB_IGNORE_INDEX].whole);
    append(&to, &hidden, sizeof hidden);
    append(&to, &ignores, sizeof ignores);
    append_real(&to, softcap, (int)p->wide);
    l->key.hidden = l->hidden = p->hidden;
    l->rows = p->rows;
    l->block = 0;
    l->key.device = (int32_t)call->device;
    l->key.options = LOG_PROB | (to.inner ? TWO_LEVELS : 0) | (p->pass == FN_BACKWARD ? BACKWARD : 0);
    l->key.gate = (int32_t)(p->operation | (int64_t)(softcap != 0) << 8);
    return end_arguments(&to);
}
