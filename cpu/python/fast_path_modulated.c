/* Modulated rows on the fast path, on a CPU. */
#include "python/fast_path.h"

#include <string.h>

/* Python's arguments: the operands first; D and NEEDS are those of a backward pass. */
enum { Y, SCALE, SHIFT, ROUND_STEPS, OUT, OUT_DTYPE, D = OUT, NEEDS };

struct given {
    struct fn_call call;
    struct fn_declared job; /* follows the call in memory, as fn_run expects it */
    tensor operand[SHIFT + 1];
    fn_extent extent[OUT]; /* of operands, as they lie in memory */
};

/*
 * Reads scale or shift: rows like those of y, or one for each sample. `rows` receives those of y that share one. Returns 0 as
 * fn_read does.
 */
static int read_samples(PyObject *object, struct given *g, int operand, int64_t *rows) {
    struct fn_operand *o = &g->job.operand[operand];
    const tensor *y = &g->operand[Y], *t = &g->operand[operand];
    int kept = 0;
    int64_t samples = 1;
    if (!fn_read(object, &g->operand[operand], o) || !fn_same_device(t, y) || (o->kind == FN_F64 && !g->job.wide)) return 0;
    if (t->ndim < 1 || t->ndim > y->ndim || t->shape[t->ndim - 1] != g->job.hidden) return 0;
    while (kept < t->ndim - 1 && t->shape[kept] == y->shape[kept]) samples *= t->shape[kept++];
    /* The dimensions of rows of a sample are not there, or in their places are ones. */
    if (kept < t->ndim - 1 && t->ndim != y->ndim) return 0;
    for (int i = kept; i < t->ndim - 1; i++)
        if (t->shape[i] != 1) return 0;
    g->extent[operand] = fn_extent_of_rows(o, samples, g->job.hidden);
    *rows = g->job.rows / samples;
    return 1;
}

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, struct given *g) {
    struct fn_declared *job = &g->job;
    int64_t rows[SHIFT + 1] = {1};
    memset(&g->call, 0, sizeof g->call);
    memset(job, 0, sizeof *job);
    if (!PyBool_Check(arguments[ROUND_STEPS])) return 0;
    if (!fn_read(arguments[Y], &g->operand[Y], &job->operand[FN_MODULATE_Y]) || g->operand[Y].ndim == 0) return 0;
    fn_take_rows(&g->call, &g->operand[Y]);
    g->call.flags = FN_DECLARED_ONLY;
    job->operation = FN_MODULATE;
    job->flag[FN_MODULATE_ROUND_STEPS].whole = arguments[ROUND_STEPS] == Py_True;
    job->wide = job->operand[FN_MODULATE_Y].kind == FN_F64;
    job->rows = job->inner = g->call.rows, job->hidden = g->call.hidden;
    g->extent[Y] = fn_extent_of_rows(&job->operand[FN_MODULATE_Y], job->rows, job->hidden);
    for (int i = SCALE; i <= SHIFT; i++) {
        if (!read_samples(arguments[i], g, i, &rows[i])) return 0;
        if (rows[i] == 1 || rows[i] == job->rows) continue;
        if (job->inner != job->rows && job->inner != rows[i]) return 0; /* samples of two lengths */
        job->inner = rows[i];
    }
    for (int i = Y; i <= SHIFT; i++) {
        struct fn_operand *o = &job->operand[i];
        o->outer_stride = rows[i] == 1 ? job->inner * o->stride : rows[i] == job->rows ? 0 : o->stride;
        if (rows[i] > 1) o->stride = 0;
    }
    return 1;
}

PyObject *fn_modulate(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind;
    struct given g;
    if (!read_arguments(arguments, &g) || g.operand[Y].device.type != DL_CPU || !(devices >> DL_CPU & 1)) return fn_refuse();
    int others = fn_is_heard();
    if (!others) {
        /* An output in place was looked at as y. */
        PyObject *const operands[] = {arguments[Y], arguments[SCALE], arguments[SHIFT],
                                      arguments[OUT] == arguments[Y] ? Py_None : arguments[OUT]};
        others = fn_records_gradient(operands, 4);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    PyObject *const dtype = arguments[OUT_DTYPE], *keywords = NULL;
    if (others || (dtype != Py_None && (arguments[OUT] != Py_None || !(keywords = fn_keywords_of(dtype))))) return fn_refuse();
    output out;
    int failed = fn_take_output(&out, arguments[OUT], arguments[Y], &g.operand[Y], 0, keywords);
    if (!failed) failed = !out.o.kind || !fn_same_shape(&out.t, &g.operand[Y]) || (out.o.kind == FN_F64 && !g.job.wide);
    if (!failed && out.given) {
        const fn_extent all[] = {g.extent[Y], g.extent[SCALE], g.extent[SHIFT], fn_extent_of_rows(&out.o, g.job.rows, g.job.hidden)};
        failed = !fn_may_write(all, 3, 1);
    }
    if (!failed) failed = fn_refuses_writes(&out, 1);
    if (!failed) {
        out.o.outer_stride = g.job.inner * out.o.stride;
        g.job.operand[FN_MODULATE_OUT] = out.o;
        failed = fn_run_on_device(&g.call, &g.operand[Y], 0);
    }
    return fn_hand_out(&out, 1, failed);
}

PyObject *fn_modulate_gradients(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind, (void)may_record;
    enum { GRADIENTS = SHIFT + 1 };
    struct given g;
    struct fn_operand *o = g.job.operand;
    tensor d;
    if (!read_arguments(arguments, &g) || g.operand[Y].device.type != DL_CPU || !(devices >> DL_CPU & 1)) return fn_refuse();
    if (!fn_read(arguments[D], &d, &o[FN_MODULATE_D]) || !fn_same_shape(&d, &g.operand[Y]) || !fn_same_device(&d, &g.operand[Y])) return fn_refuse();
    int others = (o[FN_MODULATE_D].kind == FN_F64 && !g.job.wide) || !PyList_Check(arguments[NEEDS]) || PyList_Size(arguments[NEEDS]) != GRADIENTS;
    for (int i = 0; !others && i < GRADIENTS; i++) others = PyList_GetItem(arguments[NEEDS], i) != Py_True;
    if (!others) others = fn_is_heard();
    PyObject *const operands[] = {arguments[Y], arguments[SCALE], arguments[SHIFT], arguments[D]};
    if (!others) others = fn_records_gradient(operands, 4);
    if (others) return fn_refuse();
    o[FN_MODULATE_D].outer_stride = g.job.inner * o[FN_MODULATE_D].stride;
    output gradients[GRADIENTS] = {{.object = NULL}};
    int failed = 0;
    for (int i = 0; !failed && i < GRADIENTS; i++) {
        failed = fn_take_output(&gradients[i], Py_None, arguments[i], &g.operand[i], 0, NULL);
        if (!failed) failed = fn_elements(&gradients[i].t) < 0;
        o[FN_MODULATE_DY + i] = gradients[i].o;
        o[FN_MODULATE_DY + i].outer_stride = i == Y ? g.job.inner * g.job.hidden : g.job.rows / g.extent[i].rows;
        if (i != Y) o[FN_MODULATE_DY + i].stride = 1;
    }
    g.job.pass = FN_BACKWARD;
    g.job.operation = FN_MODULATE_BACKWARD;
    g.job.sums = 1 << FN_MODULATE_DSCALE | 1 << FN_MODULATE_DSHIFT;
    if (!failed) failed = fn_run_on_device(&g.call, &g.operand[Y], 0);
    return fn_hand_out(gradients, GRADIENTS, failed);
}
