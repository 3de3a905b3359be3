/* The fast path to Triton's kernels for CPUs that backends/triton_cpu.py has compiled and loaded. */
#include "quick.h"

enum { KINDS = FN_F64 + 1, FLAGS = (FN_ROUND_SUM | FN_ROUND_NORM) + 1 };

/* By the kinds of x, the residual, the weight and out, and by the flags: a kernel, or 0. Each is written once. */
static uintptr_t kernels[KINDS][KINDS][KINDS][KINDS][FLAGS];

static fn_run_forward_fn *run_forward;
static int64_t longest; /* rows that these kernels take */

static uintptr_t *kernel_of(const int *kinds, int flags) {
    return &kernels[kinds[0]][kinds[1]][kinds[2]][kinds[3]][flags];
}

/* `out` may be absent: it will be made like x. */
uintptr_t fn_held_program(const call *c) {
    const operand *o = c->o;
    const int kinds[] = {o[X].kind, o[RESIDUAL].kind, o[WEIGHT].kind, o[OUT].kind ? o[OUT].kind : o[X].kind};
    return c->hidden <= longest ? *kernel_of(kinds, c->flags) : 0;
}

int fn_run_program(const call *c, uintptr_t kernel) {
    const operand *o = c->o;
    int threads = c->rows > 1 ? fn_threads(c->rows * c->hidden) : 1;
    if (threads < 0) return -1;
    uintptr_t operands[OPERANDS];
    for (int i = 0; i < OPERANDS; i++) operands[i] = fn_address(&o[i]);
    const int64_t numbers[] = {o[X].stride, o[RESIDUAL].stride, o[OUT].stride, o[RESIDUAL_OUT].stride, c->hidden,
                               o[RSTD].kind != FN_NONE};
    /* Of short calls, letting go of the interpreter and waiting for it again would be the longer part. */
    PyThreadState *state = c->rows * c->hidden >= FN_PARALLEL_ELEMENTS ? PyEval_SaveThread() : NULL;
    int failed = run_forward(kernel, o[X].kind == FN_F64, operands, numbers, c->eps, c->weight_offset, c->rows, threads);
    if (state) PyEval_RestoreThread(state);
    return failed;
}

PyObject *fn_open_programs(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long address;
    long long most;
    if (!PyArg_ParseTuple(arguments, "KL", &address, &most)) return NULL;
    run_forward = (fn_run_forward_fn *)(uintptr_t)address;
    longest = most;
    Py_RETURN_NONE;
}

PyObject *fn_hold_program(PyObject *module, PyObject *arguments) {
    (void)module;
    int kinds[4], flags;
    unsigned long long kernel;
    if (!PyArg_ParseTuple(arguments, "(iiii)iK", &kinds[0], &kinds[1], &kinds[2], &kinds[3], &flags, &kernel)) return NULL;
    *kernel_of(kinds, flags) = (uintptr_t)kernel;
    Py_RETURN_NONE;
}
