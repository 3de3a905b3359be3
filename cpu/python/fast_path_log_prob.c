/* Log-probabilities on the fast path, on a CPU. */
#include "python/fast_path.h"

#include <float.h>
#include <string.h>

/*
 * Python's arguments. OPERATION: a number of enum fn_declared_of. Then those of a forward pass, where KEPT says whether the results
 * that gradients take are returned too, and those of a backward pass.
 */
enum { LOGITS, IDS, TEMPERATURE, SOFTCAP, IGNORE_INDEX, OPERATION, OF_PASS };
enum { OUT = OF_PASS, OUT_DTYPE, KEPT };
enum { D = OF_PASS, D_ENTROPY, M, S, ENTROPY, NEEDS };

/* The results: one or two, and those that gradients take, among them the entropy a second time. */
enum { MOST_RESULTS = 5 };

struct given {
    struct fn_call call;
    struct fn_declared job; /* follows the call in memory, as fn_run expects it */
    tensor logits, ids;
    double temperature; /* of all rows */
};

/* Whether a tensor has a number for each row of logits. */
static int is_of_rows(const tensor *t, const tensor *logits) {
    if (t->ndim < logits->ndim - 1 || !fn_same_device(t, logits)) return 0;
    for (int i = 0; i < logits->ndim - 1; i++)
        if (t->shape[i] != logits->shape[i]) return 0;
    return 1;
}

/* Or several, which follow each other. */
static int read_ids(PyObject *object, struct given *g) {
    const tensor *t = &g->ids;
    if (!fn_read_memory(object, &g->ids, &g->job.operand[FN_LOG_PROB_IDS])) return 0;
    const int several = t->ndim == g->logits.ndim, bits = t->dtype.bits;
    if (t->dtype.code != DL_INT || (bits != 32 && bits != 64) || fn_elements(t) < 0) return 0;
    g->job.operand[FN_LOG_PROB_IDS].kind = bits == 64 ? FN_I64 : FN_I32;
    g->job.operand[FN_LOG_PROB_IDS].stride = several ? t->shape[t->ndim - 1] : 1;
    return t->ndim == g->logits.ndim - 1 + several && is_of_rows(t, &g->logits);
}

/*
 * Reads a number for each row, or for each id, which follow each other or are all one. Returns 0 if the fast path does not take
 * them, perhaps with a Python error.
 */
static int read_numbers(PyObject *object, const struct given *g, int of_ids, struct fn_operand *o) {
    tensor t;
    if (!fn_read_memory(object, &t, o) || !o->kind || (o->kind == FN_F64 && !g->job.wide)) return 0;
    if (of_ids ? !fn_same_shape(&t, &g->ids) || !fn_same_device(&t, &g->logits) : t.ndim != g->logits.ndim - 1 || !is_of_rows(&t, &g->logits))
        return 0;
    o->stride = 0;
    for (int i = 0; i < t.ndim; i++)
        if (t.shape[i] != 1 && t.strides[i] != 0) o->stride = of_ids ? fn_ids_of_row(&g->job) : 1;
    return !o->stride || fn_elements(&t) >= 0;
}

/* A number greater than 0, or a tensor. */
static int read_temperature(PyObject *object, struct given *g) {
    struct fn_operand *o = &g->job.operand[FN_LOG_PROB_TEMPERATURE];
    if (object == Py_None) return 1;
    if (PyObject_TypeCheck(object, fn_tensor_type)) return read_numbers(object, g, 0, o);
    *o = (struct fn_operand){.kind = FN_F64, .address = (uintptr_t)&g->temperature};
    return fn_read_normal(object, (int)g->job.wide, &g->temperature);
}

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, struct given *g) {
    struct fn_declared *job = &g->job;
    memset(&g->call, 0, sizeof g->call);
    memset(job, 0, sizeof *job);
    job->operation = PyLong_AsLongLong(arguments[OPERATION]);
    if (!fn_read(arguments[LOGITS], &g->logits, &job->operand[FN_LOGITS]) || g->logits.ndim == 0) return 0;
    job->wide = job->operand[FN_LOGITS].kind == FN_F64;
    fn_take_rows(&g->call, &g->logits);
    g->call.flags = FN_DECLARED_ONLY;
    job->rows = job->inner = g->call.rows, job->hidden = g->call.hidden;
    if (job->operation < FN_SELECTED) return 1;
    if (!read_ids(arguments[IDS], g) || !read_temperature(arguments[TEMPERATURE], g)) return 0;
    if (arguments[SOFTCAP] != Py_None && !fn_read_normal(arguments[SOFTCAP], (int)job->wide, &job->flag[FN_LOG_PROB_SOFTCAP].number)) return 0;
    if (arguments[IGNORE_INDEX] != Py_None) {
        if (Py_TYPE(arguments[IGNORE_INDEX]) != &PyLong_Type) return 0;
        job->given |= 1 << FN_LOG_PROB_IGNORE_INDEX;
        job->flag[FN_LOG_PROB_IGNORE_INDEX].whole = PyLong_AsLongLong(arguments[IGNORE_INDEX]);
        if (PyErr_Occurred()) {
            PyErr_Clear(); /* an id that no int64 holds */
            return 0;
        }
    }
    return 1;
}

/* Python reports an id without an element. */
static int ids_have_elements(const struct fn_declared *job) {
    for (int64_t i = 0; i < job->rows * fn_ids_of_row(job); i++) {
        const int64_t id = fn_id_at(job, i);
        if ((id < 0 || id >= job->hidden) && !fn_is_ignored(job, id)) return 0;
    }
    return 1;
}

/* And a temperature that is not greater than 0 and finite: by its bits, because the thread may flush subnormals. */
static int temperatures_are_positive(const struct fn_declared *job) {
    const struct fn_operand *o = &job->operand[FN_LOG_PROB_TEMPERATURE];
    const int size = fn_element_size(o->kind);
    const int64_t infinite = o->kind == FN_F64   ? INT64_C(0x7ff) << 52
                             : o->kind == FN_F16 ? 0x7c00
                             : o->kind == FN_F32 ? 0x7f800000
                                                 : 0x7f80;
    for (int64_t i = 0; o->kind && i < (o->stride ? job->rows : 1); i++) {
        const char *const at = (const char *)o->address + i * size;
        int64_t bits;
        int32_t of_float;
        int16_t of_half;
        if (size == 8) memcpy(&bits, at, sizeof bits);
        else if (size == 4) bits = (memcpy(&of_float, at, sizeof of_float), of_float);
        else bits = (memcpy(&of_half, at, sizeof of_half), of_half);
        if (bits <= 0 || bits >= infinite) return 0;
    }
    return 1;
}

static int is_taken(const struct given *g, long devices) {
    return g->logits.device.type == DL_CPU && devices >> DL_CPU & 1;
}

/* Whether autograd would have to know of a call with so many of these operands, in which there is room for the temperature. */
static int records_gradient(PyObject **operands, int count, PyObject *temperature) {
    if (PyObject_TypeCheck(temperature, fn_tensor_type)) operands[count++] = temperature;
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
    struct fn_declared *job = &g->job;
    const int whole = job->operation == FN_LOG_SOFTMAX, entropy = job->operation == FN_SELECTED_AND_ENTROPY;
    const int kept = arguments[KEPT] == Py_True;
    int operand[MOST_RESULTS] = {FN_LOG_PROB_OUT};
    *count = 1;
    if (entropy) operand[(*count)++] = FN_LOG_PROB_ENTROPY;
    if (kept) operand[(*count)++] = FN_LOG_PROB_M, operand[(*count)++] = FN_LOG_PROB_S;
    if (kept && entropy) operand[(*count)++] = FN_LOG_PROB_ENTROPY;
    PyObject *const keywords = fn_keywords_of_sums(job->operand[FN_LOGITS].kind);
    for (int i = 0; i < *count; i++) {
        const tensor *like = i == 0 && fn_ids_of_row(job) ? &g->ids : &g->logits;
        const int sizes = like == &g->ids ? g->ids.ndim : g->logits.ndim - 1;
        const int failed = i == 0 && whole ? take_rows(arguments, g, &results[0])
                                           : fn_make_numbers(&results[i], arguments[LOGITS], &g->logits, like->shape, sizes, keywords);
        if (failed) return failed;
        job->operand[operand[i]] = results[i].o;
    }
    return 0;
}

PyObject *fn_find_log_prob(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind;
    struct given g;
    if (!read_arguments(arguments, &g) || !is_taken(&g, devices)) return fn_refuse();
    int others = fn_is_heard();
    if (!others) {
        /* Logits that are written to were looked at. */
        PyObject *operands[] = {arguments[LOGITS], arguments[OUT] == arguments[LOGITS] ? Py_None : arguments[OUT], Py_None};
        others = records_gradient(operands, 2, arguments[TEMPERATURE]);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    if (others || !ids_have_elements(&g.job) || !temperatures_are_positive(&g.job)) return fn_refuse();
    output results[MOST_RESULTS] = {{.object = NULL}};
    int count, failed = take_results(arguments, &g, results, &count);
    if (!failed) failed = fn_refuses_writes(results, count);
    if (!failed) failed = fn_run_on_device(&g.call, &g.logits, 0);
    if (!failed && count == MOST_RESULTS) /* an operator returns no tensor twice */
        memcpy((void *)results[1].o.address, (const void *)results[4].o.address,
               (size_t)(g.job.rows * fn_element_size(results[1].o.kind)));
    return fn_hand_out(results, count, failed);
}

/* Reads what else a backward pass takes. Returns 0 if the fast path does not take it, perhaps with a Python error. */
static int read_gradients(PyObject *const *arguments, struct given *g) {
    struct fn_declared *job = &g->job;
    struct fn_operand *o = job->operand;
    const int entropy = job->operation == FN_SELECTED_AND_ENTROPY;
    const int64_t kept_kind = job->wide ? FN_F64 : FN_F32;
    static const int kept[] = {FN_LOG_PROB_KEPT_M, FN_LOG_PROB_KEPT_S, FN_LOG_PROB_KEPT_ENTROPY};
    tensor t;
    if (!PyList_Check(arguments[NEEDS]) || PyList_Size(arguments[NEEDS]) != 1 || PyList_GetItem(arguments[NEEDS], 0) != Py_True) return 0;
    for (int i = 0; i < 2 + entropy; i++) {
        struct fn_operand *numbers = &o[kept[i]];
        if (!read_numbers(arguments[M + i], g, 0, numbers) || numbers->kind != kept_kind || (!numbers->stride && job->rows > 1)) return 0;
    }
    if (entropy && !read_numbers(arguments[D_ENTROPY], g, 0, &o[FN_LOG_PROB_D_ENTROPY])) return 0;
    if (job->operation != FN_LOG_SOFTMAX) return read_numbers(arguments[D], g, job->operation >= FN_SELECTED, &o[FN_LOG_PROB_D]);
    if (!fn_read(arguments[D], &t, &o[FN_LOG_PROB_D]) || !fn_same_device(&t, &g->logits)) return 0;
    return fn_same_shape(&t, &g->logits) && (o[FN_LOG_PROB_D].kind != FN_F64 || job->wide);
}

PyObject *fn_find_log_prob_gradient(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind, (void)may_record;
    struct given g;
    if (!read_arguments(arguments, &g) || !read_gradients(arguments, &g) || !is_taken(&g, devices)) return fn_refuse();
    PyObject *operands[] = {arguments[LOGITS], arguments[D], arguments[D_ENTROPY], arguments[M],
                            arguments[S],      arguments[ENTROPY], Py_None};
    int others = fn_is_heard();
    if (!others) others = records_gradient(operands, 6, arguments[TEMPERATURE]);
    if (others) return fn_refuse();
    output dx;
    int failed = fn_take_output(&dx, Py_None, arguments[LOGITS], &g.logits, 0, NULL);
    if (!failed) {
        g.job.pass = FN_BACKWARD;
        g.job.operand[FN_DLOGITS] = dx.o;
        failed = fn_run_on_device(&g.call, &g.logits, 0);
    }
    return fn_hand_out(&dx, 1, failed);
}
