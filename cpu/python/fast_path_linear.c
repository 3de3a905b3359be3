/* Products of rows with a weight on the fast path, on a CPU. */
#include "python/fast_path.h"

#include <string.h>

/* Python's arguments: the operands first. */
enum { X, WEIGHT, BIAS, OUT_DTYPE, OUT };

struct given {
    struct fn_call call;
    struct fn_declared job; /* follows the call in memory, as fn_run expects it */
    tensor operand[BIAS + 1];
};

/* Reads the operands. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_operands(PyObject *const *arguments, struct given *g) {
    struct fn_declared *job = &g->job;
    const tensor *const x = &g->operand[X], *const weight = &g->operand[WEIGHT], *const bias = &g->operand[BIAS];
    struct fn_operand *const o = job->operand;
    memset(&g->call, 0, sizeof g->call);
    memset(job, 0, sizeof *job);
    if (!fn_read_all(arguments, BIAS + 1, 1 << X | 1 << WEIGHT, DL_CPU, g->operand, o) || x->ndim == 0 || weight->ndim != 2) return 0;
    fn_take_rows(&g->call, x);
    g->call.flags = FN_DECLARED_ONLY;
    job->operation = FN_LINEAR;
    job->wide = o[X].kind == FN_F64;
    job->rows = job->inner = g->call.rows, job->hidden = g->call.hidden, job->columns = weight->shape[0];
    if (weight->shape[1] != job->hidden || (o[WEIGHT].kind == FN_F64 && !job->wide)) return 0;
    if (o[BIAS].kind && (bias->ndim != 1 || bias->shape[0] != job->columns || (o[BIAS].kind == FN_F64 && !job->wide))) return 0;
    o[X].outer_stride = job->inner * o[X].stride;
    /* A product that takes a thread half a second or more is made by Python, which looks for an interrupt meanwhile. */
    const double terms = (double)job->rows * (double)job->columns * (double)job->hidden;
    g->call.rows = fn_product_elements(job) / job->hidden; /* whether the call is short depends on all elements that it reads */
    return terms <= (double)FN_PRODUCT_OF_A_CALL;
}

/* Makes the result, or takes the one given. Returns as fn_take_output does. */
static int take_output(PyObject *const *arguments, const struct given *g, PyObject *keywords, output *out) {
    const tensor *const x = &g->operand[X];
    int64_t sizes[8];
    if (arguments[OUT] != Py_None) return fn_take_output(out, arguments[OUT], arguments[X], x, 0, NULL);
    if (x->ndim > (int)(sizeof sizes / sizeof *sizes)) return 1;
    for (int i = 0; i < x->ndim - 1; i++) sizes[i] = x->shape[i];
    sizes[x->ndim - 1] = g->job.columns;
    return fn_make_numbers(out, arguments[X], x, sizes, x->ndim, keywords);
}

PyObject *fn_multiply(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind;
    struct given g;
    if (!read_operands(arguments, &g) || !(devices >> DL_CPU & 1)) return fn_refuse();
    int others = fn_is_heard();
    if (!others) {
        PyObject *const operands[] = {arguments[X], arguments[WEIGHT], arguments[BIAS], arguments[OUT]};
        others = fn_records_gradient(operands, 4);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    PyObject *const dtype = arguments[OUT_DTYPE], *keywords = NULL;
    if (others || (dtype != Py_None && (arguments[OUT] != Py_None || !(keywords = fn_keywords_of(dtype))))) return fn_refuse();
    output out = {.object = NULL};
    struct fn_operand *const o = g.job.operand;
    int failed = take_output(arguments, &g, keywords, &out);
    if (!failed)
        failed = !out.o.kind || !fn_same_rows(&out.t, &g.operand[X], g.job.columns) || (out.o.kind == FN_F64 && !g.job.wide);
    if (!failed && out.given) {
        const fn_extent all[] = {fn_extent_of_rows(&o[X], g.job.rows, g.job.hidden), fn_extent_of_rows(&o[WEIGHT], g.job.columns, g.job.hidden),
                                 fn_extent_of_rows(&o[BIAS], 1, g.job.columns), fn_extent_of_rows(&out.o, g.job.rows, g.job.columns)};
        failed = !fn_may_write(all, 3, 0);
    }
    if (!failed) failed = fn_refuses_writes(&out, 1);
    if (!failed) {
        out.o.outer_stride = g.job.inner * out.o.stride;
        o[FN_LINEAR_OUT] = out.o;
        failed = fn_run_on_device(&g.call, &g.operand[X], 0);
    }
    return fn_hand_out(&out, 1, failed);
}
