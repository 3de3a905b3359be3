/* Launches Triton's kernels for CPUs that backends/triton/cpu.py has compiled and loaded. */
#include "launch/triton.h"

#include <string.h>

#include "abi/gate.h"

enum { KINDS = FN_F64 + 1, FLAGS = (FN_ROUND_SUM | FN_ROUND_NORM) + 1 };

/*
 * Of plain norms: by the kinds of x, the residual, the weight and out, and by the flags: a kernel, or 0. Other threads read while
 * one writes, so what they read of both tables is stored with a release and loaded with an acquire.
 */
static uintptr_t kernels[KINDS][KINDS][KINDS][KINDS][FLAGS];

static fn_run_triton_fn *run_triton;
static int64_t longest; /* rows that these kernels take */

/* Of an operand. Outputs may be absent: they will be made like x and the residual. */
static int64_t kind_of(const struct fn_call *c, int operand) {
    const int like = operand == FN_OUT ? FN_X : operand == FN_RESIDUAL_OUT ? FN_RESIDUAL : operand;
    return c->operand[c->operand[operand].kind ? operand : like].kind;
}

static uintptr_t *kernel_of(const struct fn_call *c) {
    return &kernels[kind_of(c, FN_X)][kind_of(c, FN_RESIDUAL)][kind_of(c, FN_WEIGHT)][kind_of(c, FN_OUT)][c->flags];
}

/* Everything that decides which kernel another call takes. Without gaps, to be compared. */
struct key {
    int64_t kinds, flags, more;
    double limit, alpha, up_offset; /* of a gate: they are compiled in */
};

/* Kernels of other calls, in the order in which they came; none is ever changed. */
enum { MOST_HELD = 256 };
static struct held {
    struct key key;
    uintptr_t kernel;
} held[MOST_HELD];
static int count_held;

/* A norm without a quantizer or a gate, a bias, heads, or means to subtract. */
static int is_plain(const struct fn_call *c) {
    const int more = c->flags & FN_CENTER || c->heads > 1 || c->operand[FN_BIAS].kind;
    return !more && !fn_quantizer_after(c) && !fn_gate_after(c);
}

static struct key key_of(const struct fn_call *c) {
    const struct fn_quantizer *q = fn_quantizer_after(c);
    const struct fn_gate *g = fn_gate_after(c);
    const int64_t alone = c->flags & (FN_QUANTIZE_ONLY | FN_GATE_ONLY);
    struct key k = {.flags = alone ? alone : c->flags};
    k.flags |= (int64_t)(c->inner != c->rows) << 16 | (int64_t)(c->heads > 1) << 17;
    for (int i = 0; i < FN_FORWARD_OPERANDS_IN_C; i++)
        if (i != FN_RSTD && (!alone || (q && i == FN_X))) k.kinds |= kind_of(c, i) << 4 * i;
    if (q) k.more = q->kind | q->flags << 4 | (int64_t)(!alone && c->operand[FN_OUT].address) << 16;
    if (g) {
        for (int i = 0; i < FN_GATE_OPERANDS; i++) k.kinds |= g->operand[i].kind << 4 * (FN_FORWARD_OPERANDS_IN_C + i);
        k.more = g->activation | g->between << 4 | g->wide << 8 | g->flags << 12;
        k.limit = g->limit;
        k.alpha = g->alpha;
        k.up_offset = g->up_offset;
    }
    return k;
}

/* The kernel of another call, or 0. */
static uintptr_t held_for(const struct fn_call *c) {
    const struct key k = key_of(c);
    const int count = __atomic_load_n(&count_held, __ATOMIC_ACQUIRE);
    for (int i = 0; i < count; i++)
        if (memcmp(&held[i].key, &k, sizeof k) == 0) return held[i].kernel;
    return 0;
}

static uintptr_t kernel_for(const struct fn_call *c) { return __atomic_load_n(kernel_of(c), __ATOMIC_ACQUIRE); }

int fn_triton_has(const struct fn_call *c) {
    return c->hidden <= longest && (is_plain(c) ? kernel_for(c) : held_for(c));
}

int fn_triton_run(const struct fn_call *c) { return run_triton(is_plain(c) ? kernel_for(c) : held_for(c), c, c->rows); }

void fn_triton_open(uintptr_t run, int64_t most) {
    run_triton = (fn_run_triton_fn *)run;
    longest = most;
}

void fn_triton_hold(const struct fn_call *c, uintptr_t kernel) {
    if (is_plain(c)) {
        __atomic_store_n(kernel_of(c), kernel, __ATOMIC_RELEASE);
    } else if (!c->following && count_held < MOST_HELD && !held_for(c)) {
        held[count_held] = (struct held){key_of(c), kernel};
        __atomic_store_n(&count_held, count_held + 1, __ATOMIC_RELEASE);
    }
}
