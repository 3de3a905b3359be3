/*
 * A gate, as fusednorm/calls/c_abi.py packs it: out = y * f(z), or f(z) where y is absent, or the gradients. All fields have 8
 * bytes.
 */
#ifndef FUSEDNORM_GATE_H
#define FUSEDNORM_GATE_H

#include "abi/call.h"

/* The operands: y, z and out; or d, y, z and the gradients of y and z, of which one may be absent. */
enum { FN_GATE_D, FN_GATED, FN_GATE, FN_GATE_OUT, FN_GATED_D = FN_GATE_OUT, FN_GATE_DZ, FN_GATE_OPERANDS };

struct fn_gate {
    int64_t pass, activation;
    int64_t between; /* the kind that f(z) and its gradient are rounded to, or FN_NONE */
    int64_t wide; /* whether all is computed in float64 */
    int64_t threads, rows, inner, hidden; /* as in struct fn_call */
    int64_t flags; /* enum fn_gate_flag */
    /* Of f's argument, or with FN_CLAMP_AFTER of its value; and of y, upwards and downwards. 0: there is none. Softcap's cap. */
    double limit;
    double alpha, up_offset; /* f(z) is z * sigmoid(alpha * z); what is added to y */
    struct fn_operand operand[FN_GATE_OPERANDS];
};

/* Beside enum fn_gate_flag, for kernels: the output bypasses the caches. */
enum { FN_PAST_CACHES = 8 };

/* Whether there is more than y * f(z). Softcap, of which there is no y, has its cap and its roundings in f. */
static inline int fn_gate_has_steps(const struct fn_gate *g) {
    if (g->activation == FN_SOFTCAP) return 0;
    return g->limit != 0 || g->alpha != 1 || g->up_offset != 0 || g->flags & FN_ROUND_STEPS;
}

/* Elements from one of an operand to the next one. */
static inline int fn_gate_step(const struct fn_gate *g, int operand) {
    const int alone = operand == FN_GATE_D || (operand == FN_GATE_OUT && g->pass == FN_FORWARD);
    return g->flags & FN_IN_TURNS && !alone ? 2 : 1;
}

_Static_assert(sizeof(struct fn_gate) <= sizeof(struct fn_call), "FN_PACKED has room for both");

/* The gate that follows the last call of a chain in memory; NULL if there is none. */
static inline const struct fn_gate *fn_gate_after(const struct fn_call *last) {
    return last->flags & (FN_GATE_AFTER | FN_GATE_BEFORE | FN_GATE_ONLY) ? (const struct fn_gate *)(last + 1) : NULL;
}

/* Memory that is read or written after a gate, and fetched meanwhile: at each place `item` bytes for an element of the gate. */
enum { FN_AHEAD = 5 };

struct fn_ahead {
    int count;
    struct {
        const char *at;
        int64_t item;
    } place[FN_AHEAD];
};

/*
 * Computes n elements, which begin at `at` of each operand (NULL where it is absent) and follow each other. `kept` is NULL,
 * or, in float (double where the gate is wide), room for the function's values and slopes: a forward pass leaves them there,
 * for each tile its values and then its slopes, and a backward pass finds them there.
 */
typedef void fn_gate_run(const struct fn_gate *gate, char *const *at, int64_t n, void *kept, const struct fn_ahead *ahead);

#endif
