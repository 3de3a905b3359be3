/* The fast path to Triton's kernels for CPUs that backends/triton_cpu.py has compiled and loaded. */
#include "fast_path.h"
#include "triton_programs.h"

enum { KINDS = FN_F64 + 1, FLAGS = (FN_ROUND_SUM | FN_ROUND_NORM) + 1 };

/* By the kinds of x, the residual, the weight and out, and by the flags: a kernel, or 0. Each is written once. */
static uintptr_t kernels[KINDS][KINDS][KINDS][KINDS][FLAGS];

static fn_run_triton_fn *run_triton;
static int64_t longest; /* rows that these kernels take */

/* `out` may be absent: it will be made like x. */
static uintptr_t *kernel_of(const struct fn_call *c) {
    const struct fn_operand *o = c->operand;
    const int64_t out = o[FN_OUT].kind ? o[FN_OUT].kind : o[FN_X].kind;
    return &kernels[o[FN_X].kind][o[FN_RESIDUAL].kind][o[FN_WEIGHT].kind][out][c->flags];
}

int fn_has_triton_kernel(const struct fn_call *c) { return c->hidden <= longest && *kernel_of(c); }

static int run_kernel(const struct fn_call *c) { return run_triton(*kernel_of(c), c, c->rows); }

int fn_run_triton_kernel(struct fn_call *c) { return fn_run_in_c(c, run_kernel); }

PyObject *fn_open_triton(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long address;
    long long most;
    if (!PyArg_ParseTuple(arguments, "KL", &address, &most)) return NULL;
    run_triton = (fn_run_triton_fn *)(uintptr_t)address;
    longest = most;
    Py_RETURN_NONE;
}

PyObject *fn_hold_triton(PyObject *module, PyObject *arguments) {
    (void)module;
    struct fn_call c[FN_PACKED];
    unsigned long long kernel;
    PyObject *call;
    if (!PyArg_ParseTuple(arguments, "O!K", &PyBytes_Type, &call, &kernel) || !fn_unpack(call, c)) return NULL;
    *kernel_of(c) = (uintptr_t)kernel;
    Py_RETURN_NONE;
}
