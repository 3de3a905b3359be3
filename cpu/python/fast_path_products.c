/* Products of rows with a weight on the fast path, on a CPU: of floats, and of int8. */
#include "python/fast_path.h"

#include <string.h>

/* Python's arguments: the operands first, in their declared order. */
enum { X, WEIGHT, BIAS, OUT_DTYPE, OUT };
enum { Q, SCALE, WEIGHT_OF_INT8, WEIGHT_SCALE, BIAS_OF_INT8, ZERO_POINT, OUT_DTYPE_OF_INT8, OUT_OF_INT8 };

struct given {
    struct fn_call call;
    struct fn_declared job; /* follows the call in memory, as fn_run expects it */
    tensor operand[ZERO_POINT + 1];
    int weight; /* which operand it is */
};

/* Describes rows, the first operand, and a weight with rows of their length. Returns 0 if a thread would take half a second or more:
 * Python makes such a call, and looks for an interrupt meanwhile. */
static int describe(struct given *g, int operation, int weight) {
    struct fn_declared *const job = &g->job;
    memset(&g->call, 0, sizeof g->call);
    fn_take_rows(&g->call, &g->operand[0]);
    g->call.flags = FN_DECLARED_ONLY;
    job->operation = operation;
    g->weight = weight;
    job->rows = job->inner = g->call.rows, job->hidden = g->call.hidden, job->columns = g->operand[weight].shape[0];
    job->operand[0].outer_stride = job->inner * job->operand[0].stride;
    g->call.rows = fn_product_elements(job) / job->hidden; /* whether the call is short depends on all elements that it reads */
    return (double)job->rows * (double)job->columns * (double)job->hidden <= (double)FN_PRODUCT_OF_A_CALL;
}

/* These read the operands. They return 0 if the fast path does not take them, perhaps with a Python error. */
static int read_floats(PyObject *const *arguments, struct given *g) {
    const tensor *const x = &g->operand[X], *const weight = &g->operand[WEIGHT], *const bias = &g->operand[BIAS];
    struct fn_operand *const o = g->job.operand;
    memset(&g->job, 0, sizeof g->job);
    if (!fn_read_all(arguments, BIAS + 1, 1 << X | 1 << WEIGHT, DL_CPU, g->operand, o) || x->ndim == 0 || weight->ndim != 2) return 0;
    const int wide = o[X].kind == FN_F64;
    g->job.wide = wide;
    if (weight->shape[1] != x->shape[x->ndim - 1] || (o[WEIGHT].kind == FN_F64 && !wide)) return 0;
    if (o[BIAS].kind && (bias->ndim != 1 || bias->shape[0] != weight->shape[0] || (o[BIAS].kind == FN_F64 && !wide))) return 0;
    return describe(g, FN_LINEAR, WEIGHT);
}

/* A tensor of signed whole numbers of so many bits, which it gives this kind. */
static int read_whole(PyObject *object, int bits, int kind, tensor *t, struct fn_operand *o) {
    if (!fn_read_any(object, t, o) || t->dtype.code != DL_INT || t->dtype.bits != bits) return 0;
    o->kind = kind;
    return t->device.type == DL_CPU;
}
/* A number for each row of q, one behind the other; and for each row of the weight. */
static int for_rows(const struct given *g, int operand) {
    const tensor *const t = &g->operand[operand];
    return fn_same_rows(t, &g->operand[Q], 1) && fn_elements(t) >= 0;
}
static int for_columns(const struct given *g, int operand) {
    const tensor *const t = &g->operand[operand];
    const int flat = t->ndim == 1 || (operand == WEIGHT_SCALE && t->ndim == 2 && t->shape[1] == 1); /* or as quantize returns it */
    return flat && t->shape[0] == g->operand[WEIGHT_OF_INT8].shape[0] && fn_elements(t) >= 0;
}
static int read_int8(PyObject *const *arguments, struct given *g) {
    const tensor *const q = &g->operand[Q], *const weight = &g->operand[WEIGHT_OF_INT8];
    struct fn_operand *const o = g->job.operand;
    memset(&g->job, 0, sizeof g->job);
    if (!read_whole(arguments[Q], 8, FN_BYTE, &g->operand[Q], &o[Q]) || q->ndim == 0) return 0;
    if (!read_whole(arguments[WEIGHT_OF_INT8], 8, FN_BYTE, &g->operand[WEIGHT_OF_INT8], &o[WEIGHT_OF_INT8]) || weight->ndim != 2) return 0;
    for (int i = SCALE; i <= BIAS_OF_INT8; i++) {
        if (i == WEIGHT_OF_INT8 || (i == BIAS_OF_INT8 && arguments[i] == Py_None)) continue;
        if (!fn_read(arguments[i], &g->operand[i], &o[i]) || g->operand[i].device.type != DL_CPU) return 0;
        if (i == BIAS_OF_INT8 ? o[i].kind == FN_F64 : o[i].kind != FN_F32) return 0;
        if (!(i == SCALE ? for_rows(g, i) : for_columns(g, i))) return 0;
    }
    if (arguments[ZERO_POINT] != Py_None &&
        (!read_whole(arguments[ZERO_POINT], 32, FN_I32, &g->operand[ZERO_POINT], &o[ZERO_POINT]) || !for_rows(g, ZERO_POINT)))
        return 0;
    const int64_t hidden = q->shape[q->ndim - 1];
    return weight->shape[1] == hidden && hidden <= FN_INT8_LONGEST && describe(g, FN_INT8_LINEAR, WEIGHT_OF_INT8);
}

/* Makes the result, or takes the one given. Returns as fn_take_output does. */
static int take_output(PyObject *const *arguments, PyObject *given, const struct given *g, PyObject *keywords, output *out) {
    const tensor *const x = &g->operand[0];
    int64_t sizes[8];
    if (given != Py_None) return fn_take_output(out, given, arguments[0], x, 0, NULL);
    if (x->ndim > (int)(sizeof sizes / sizeof *sizes)) return 1;
    for (int i = 0; i < x->ndim - 1; i++) sizes[i] = x->shape[i];
    sizes[x->ndim - 1] = g->job.columns;
    return fn_make_numbers(out, arguments[0], x, sizes, x->ndim, keywords);
}

/* Whether the result may be written: it has the shape and shares no memory with the operands, the last of which is this one. */
static int may_write(const struct given *g, int last, const output *out) {
    const struct fn_declared *const job = &g->job;
    const struct fn_operand *const o = job->operand;
    if (!out->o.kind || !fn_same_rows(&out->t, &g->operand[0], job->columns) || (out->o.kind == FN_F64 && !job->wide)) return 0;
    fn_extent all[ZERO_POINT + 2];
    for (int i = 0; i <= last; i++) {
        if (i == 0) all[i] = fn_extent_of_rows(&o[i], job->rows, job->hidden);
        else if (i == g->weight) all[i] = fn_extent_of_rows(&o[i], job->columns, job->hidden);
        else all[i] = fn_extent_of_rows(&o[i], 1, o[i].kind ? fn_elements(&g->operand[i]) : 0);
    }
    all[last + 1] = fn_extent_of_rows(&out->o, job->rows, job->columns);
    return !out->given || fn_may_write(all, last + 1, 0);
}

/* Makes the result or takes the one given, which follows the last operand, and makes the call. */
static PyObject *multiply(PyObject *const *arguments, struct given *g, int last, PyObject *given, PyObject *keywords) {
    output out = {.object = NULL};
    int failed = take_output(arguments, given, g, keywords, &out);
    if (!failed) failed = !may_write(g, last, &out);
    if (!failed) failed = fn_refuses_writes(&out, 1);
    if (!failed) {
        out.o.outer_stride = g->job.inner * out.o.stride;
        g->job.operand[last + 1] = out.o;
        failed = fn_run_on_device(&g->call, &g->operand[0], 0);
    }
    return fn_hand_out(&out, 1, failed);
}

PyObject *fn_multiply(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind;
    struct given g;
    if (!read_floats(arguments, &g) || !(devices >> DL_CPU & 1)) return fn_refuse();
    int others = fn_is_heard();
    if (!others) {
        PyObject *const operands[] = {arguments[X], arguments[WEIGHT], arguments[BIAS], arguments[OUT]};
        others = fn_records_gradient(operands, 4);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    PyObject *const dtype = arguments[OUT_DTYPE], *const given = arguments[OUT], *keywords = NULL;
    if (others || (dtype != Py_None && (given != Py_None || !(keywords = fn_keywords_of(dtype))))) return fn_refuse();
    return multiply(arguments, &g, BIAS, given, keywords);
}

PyObject *fn_multiply_int8(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind, (void)may_record;
    struct given g;
    if (!read_int8(arguments, &g) || !(devices >> DL_CPU & 1)) return fn_refuse();
    PyObject *const dtype = arguments[OUT_DTYPE_OF_INT8], *const given = arguments[OUT_OF_INT8];
    PyObject *const operands[] = {arguments[SCALE], arguments[WEIGHT_SCALE], arguments[BIAS_OF_INT8], given};
    PyObject *const keywords = dtype == Py_None ? fn_keywords_of_float() : fn_keywords_of(dtype);
    if (fn_is_heard() || fn_records_gradient(operands, 4) || !keywords || (dtype != Py_None && given != Py_None)) return fn_refuse();
    return multiply(arguments, &g, ZERO_POINT, given, keywords);
}
