/* Log-probabilities on the fast path, on a CPU. */
#include "python/fast_path.h"

#include <float.h>
#include <string.h>

/* Python's arguments. OPERATION: a number of enum fn_log_prob_of. KEPT: whether the results that gradients take are returned too. */
enum { LOGITS, IDS, TEMPERATURE, SOFTCAP, IGNORE_INDEX, OUT, OUT_DTYPE, OPERATION, KEPT };

/* The results: one or two, and those that gradients take, among them the entropy a second time. */
enum { MOST_RESULTS = 5 };

struct given {
    struct fn_call call;
    struct fn_log_prob job; /* follows the call in memory, as fn_run expects it */
    tensor logits, ids;
    double temperature; /* of all rows */
};

/* Whether an operand has a number for each row of logits, one after the other, or `several`: more of them. */
static int is_of_rows(const tensor *t, const tensor *logits, int several) {
    if (t->ndim != logits->ndim - 1 + several || fn_elements(t) < 0 || !fn_same_device(t, logits)) return 0;
    for (int i = 0; i < logits->ndim - 1; i++)
        if (t->shape[i] != logits->shape[i]) return 0;
    return 1;
}

static int read_ids(PyObject *object, struct given *g) {
    const tensor *t = &g->ids;
    if (!fn_read_memory(object, &g->ids, &g->job.operand[FN_LOG_PROB_IDS])) return 0;
    const int several = t->ndim == g->logits.ndim, bits = t->dtype.bits;
    if (t->dtype.code != DL_INT || (bits != 32 && bits != 64) || !is_of_rows(t, &g->logits, several)) return 0;
    g->job.id_size = bits / 8;
    g->job.count = several ? t->shape[t->ndim - 1] : 1;
    return 1;
}

/* A number greater than 0, or a tensor. */
static int read_temperature(PyObject *object, struct given *g) {
    struct fn_operand *o = &g->job.operand[FN_LOG_PROB_TEMPERATURE];
    const int wide = (int)g->job.wide;
    tensor t;
    if (object == Py_None) return 1;
    if (!PyObject_TypeCheck(object, fn_tensor_type)) {
        *o = (struct fn_operand){.kind = FN_F64, .address = (uintptr_t)&g->temperature};
        return fn_read_normal(object, wide, &g->temperature);
    }
    if (!fn_read(object, &t, o) || !is_of_rows(&t, &g->logits, 0)) return 0;
    o->stride = 1;
    return wide || o->kind != FN_F64;
}

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, struct given *g) {
    struct fn_log_prob *job = &g->job;
    memset(&g->call, 0, sizeof g->call);
    memset(job, 0, sizeof *job);
    job->operation = PyLong_AsLongLong(arguments[OPERATION]);
    if (!fn_read(arguments[LOGITS], &g->logits, &job->operand[FN_LOGITS]) || g->logits.ndim == 0) return 0;
    job->wide = job->operand[FN_LOGITS].kind == FN_F64;
    fn_take_rows(&g->call, &g->logits);
    g->call.flags = FN_LOG_PROB_ONLY;
    job->rows = job->inner = g->call.rows, job->hidden = g->call.hidden;
    if (job->operation < FN_SELECTED) return 1;
    if (!read_ids(arguments[IDS], g) || !read_temperature(arguments[TEMPERATURE], g)) return 0;
    if (arguments[SOFTCAP] != Py_None && !fn_read_normal(arguments[SOFTCAP], (int)job->wide, &job->softcap)) return 0;
    if (arguments[IGNORE_INDEX] != Py_None) {
        if (Py_TYPE(arguments[IGNORE_INDEX]) != &PyLong_Type) return 0;
        job->ignores = 1;
        job->ignore_index = PyLong_AsLongLong(arguments[IGNORE_INDEX]);
        if (PyErr_Occurred()) {
            PyErr_Clear(); /* an id that no int64 holds */
            return 0;
        }
    }
    return 1;
}

/* Python reports an id without an element. */
static int ids_have_elements(const struct fn_log_prob *job) {
    for (int64_t i = 0; i < job->rows * job->count; i++) {
        const int64_t id = fn_id_at(job, i);
        if ((id < 0 || id >= job->hidden) && !fn_is_ignored(job, id)) return 0;
    }
    return 1;
}

/* Whether autograd would have to know of the call; logits that are written to were looked at. */
static int records_gradient(PyObject *const *arguments) {
    PyObject *operands[4] = {arguments[LOGITS], arguments[IDS]};
    int count = 2;
    if (PyObject_TypeCheck(arguments[TEMPERATURE], fn_tensor_type)) operands[count++] = arguments[TEMPERATURE];
    if (arguments[OUT] != arguments[LOGITS]) operands[count++] = arguments[OUT];
    return fn_records_gradient(operands, count);
}

/* Takes or makes rows of log_softmax. Returns as fn_take_output does. */
static int take_rows(PyObject *const *arguments, struct given *g, output *out) {
    PyObject *const dtype = arguments[OUT_DTYPE], *keywords = NULL;
    if (dtype != Py_None && (arguments[OUT] != Py_None || !(keywords = fn_keywords_of(dtype)))) return 1;
    const int failed = fn_take_output(out, arguments[OUT], arguments[LOGITS], &g->logits, 0, keywords);
    if (failed) return failed;
    if (!out->o.kind || !fn_same_shape(&out->t, &g->logits) || (out->o.kind == FN_F64 && !g->job.wide)) return 1;
    const fn_extent all[] = {fn_extent_of_rows(&g->job.operand[FN_LOGITS], g->job.rows, g->job.hidden),
                             fn_extent_of_rows(&out->o, g->job.rows, g->job.hidden)};
    return out->given && !fn_may_write(all, 1, 1);
}

/* Takes or makes all results, whose number is in `count`. Returns as fn_take_output does. */
static int take_results(PyObject *const *arguments, struct given *g, output *results, int *count) {
    enum { NUMBERS = FN_LOG_PROB_H + 1 };
    struct fn_log_prob *job = &g->job;
    const int whole = job->operation == FN_LOG_SOFTMAX, entropy = job->operation == FN_SELECTED_AND_ENTROPY;
    const int kept = arguments[KEPT] == Py_True;
    int operand[MOST_RESULTS] = {FN_LOG_PROB_OUT};
    *count = 1;
    if (entropy) operand[(*count)++] = FN_LOG_PROB_H;
    if (kept) operand[(*count)++] = FN_LOG_PROB_M, operand[(*count)++] = FN_LOG_PROB_S;
    if (kept && entropy) operand[(*count)++] = FN_LOG_PROB_H;
    PyObject *const keywords = job->wide || job->operand[FN_LOGITS].kind == FN_F32 ? NULL : fn_keywords_of_float();
    for (int i = 0; i < *count; i++) {
        const tensor *like = i == 0 && job->count ? &g->ids : &g->logits;
        const int sizes = like == &g->ids ? g->ids.ndim : g->logits.ndim - 1;
        const int failed = i == 0 && whole ? take_rows(arguments, g, &results[0])
                                           : fn_make_numbers(&results[i], arguments[LOGITS], &g->logits, like->shape, sizes, keywords);
        if (failed) return failed;
        job->operand[operand[i]] = results[i].o;
    }
    return 0;
}

PyObject *fn_find_log_prob(PyObject *const *arguments, long devices, int may_record) {
    struct given g;
    if (!read_arguments(arguments, &g)) return fn_refuse();
    if (g.logits.device.type != DL_CPU || !(devices >> DL_CPU & 1)) return fn_refuse();
    int others = fn_is_heard();
    if (!others) {
        others = records_gradient(arguments);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    if (others || !ids_have_elements(&g.job)) return fn_refuse();
    output results[MOST_RESULTS] = {{.object = NULL}};
    int count, failed = take_results(arguments, &g, results, &count);
    if (!failed) failed = fn_refuses_writes(results, count);
    if (!failed) failed = fn_run_on_device(&g.call, &g.logits, 0);
    if (!failed && count == MOST_RESULTS) /* an operator returns no tensor twice */
        memcpy((void *)results[1].o.address, (const void *)results[4].o.address,
               (size_t)(g.job.rows * fn_element_size(results[1].o.kind)));
    return fn_hand_out(results, count, failed);
}
