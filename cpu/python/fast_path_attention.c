/* Attention on the fast path, on a CPU. */
#include "python/fast_path.h"

#include <math.h>
#include <string.h>

/* Python's arguments: the operands first. */
enum { Q, K, V, SINKS, MASK, SCALE, CAUSAL, WINDOW, SOFTCAP, OUT };
enum { BATCH, HEADS, ROWS, SIZE, DIMENSIONS };

struct given {
    struct fn_call call;
    union {
        struct fn_attention job;
        struct fn_declared as_declared;
    } of; /* follows the call in memory, as fn_run expects it */
    tensor q, k, v, sinks, mask;
};

/* Reads [B, H, rows, size], whose last elements are adjacent. Returns 0 as fn_read does. */
static int read_rows(PyObject *object, tensor *t, int64_t *kind, struct fn_attended *to) {
    struct fn_operand o;
    if (!fn_read_memory(object, t, &o) || t->ndim != DIMENSIONS || t->device.type != DL_CPU) return 0;
    if (t->strides[SIZE] != 1 && t->shape[SIZE] != 1) return 0;
    to->address = (int64_t)o.address;
    for (int i = 0; i < SIZE; i++) to->stride[i] = t->strides[i] * fn_element_size(o.kind);
    if (*kind == FN_NONE) *kind = o.kind;
    return o.kind == *kind && o.kind != FN_NONE && o.kind != FN_F64;
}

static int read_mask(PyObject *object, struct given *g) {
    struct fn_operand o;
    tensor *const mask = &g->mask;
    const int64_t wanted[] = {g->q.shape[BATCH], g->q.shape[HEADS], g->q.shape[ROWS], g->k.shape[ROWS]};
    enum { DL_BOOL = 6 };
    if (object == Py_None) return 1;
    if (!fn_read_memory(object, mask, &o) || mask->ndim != DIMENSIONS || mask->device.type != DL_CPU) return 0;
    if (mask->dtype.code != DL_BOOL || mask->dtype.bits != 8) return 0;
    g->of.job.mask = (int64_t)((uintptr_t)mask->data + mask->byte_offset);
    for (int i = 0; i < DIMENSIONS; i++) {
        if (mask->shape[i] != wanted[i] && mask->shape[i] != 1) return 0;
        g->of.job.mask_stride[i] = mask->shape[i] == wanted[i] ? mask->strides[i] : 0;
    }
    return 1;
}

static int read_flags(PyObject *const *arguments, struct fn_attention *job) {
    if (arguments[SCALE] == Py_None) {
        PyObject *const scale = PyFloat_FromDouble(pow((double)job->size, -0.5));
        const int failed = !scale || !fn_read_float(scale, 0, &job->scale);
        Py_XDECREF(scale);
        if (failed) return 0;
    } else if (!fn_read_number(arguments[SCALE], 0, &job->scale) || !isfinite(job->scale))
        return 0;
    if (arguments[CAUSAL] != Py_True && arguments[CAUSAL] != Py_False) return 0;
    job->causal = arguments[CAUSAL] == Py_True;
    if (arguments[WINDOW] != Py_None) {
        if (!PyLong_CheckExact(arguments[WINDOW])) return 0;
        job->window = PyLong_AsLongLong(arguments[WINDOW]);
        if (job->window < 1) {
            PyErr_Clear(); /* Python names a window that is refused */
            return 0;
        }
        if (job->window > job->queries + job->keys) job->window = job->queries + job->keys;
    }
    return arguments[SOFTCAP] == Py_None || fn_read_normal(arguments[SOFTCAP], 0, &job->softcap);
}

/* Reads the operands. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_operands(PyObject *const *arguments, struct given *g) {
    struct fn_attention *const job = &g->of.job;
    memset(&g->call, 0, sizeof g->call);
    memset(&g->of, 0, sizeof g->of);
    if (!read_rows(arguments[Q], &g->q, &job->kind, &job->q) || !read_rows(arguments[K], &g->k, &job->kind, &job->k) ||
        !read_rows(arguments[V], &g->v, &job->kind, &job->v))
        return 0;
    const int64_t *const q = g->q.shape, *const k = g->k.shape, *const v = g->v.shape;
    if (k[BATCH] != q[BATCH] || v[BATCH] != q[BATCH] || v[HEADS] != k[HEADS] || v[ROWS] != k[ROWS] || k[SIZE] != q[SIZE]) return 0;
    if (q[HEADS] % k[HEADS] || q[SIZE] > FN_ATTENTION_SIZE) return 0;
    job->operation = FN_ATTENTION;
    job->sequences = q[BATCH], job->heads = q[HEADS], job->kv_heads = k[HEADS], job->size = q[SIZE], job->value_size = v[SIZE];
    job->queries = job->last = q[ROWS], job->keys = k[ROWS];
    if (arguments[SINKS] != Py_None) {
        struct fn_operand o;
        if (!fn_read(arguments[SINKS], &g->sinks, &o) || g->sinks.ndim != 1 || g->sinks.shape[0] != job->heads) return 0;
        if (g->sinks.device.type != DL_CPU || o.kind == FN_F64 || (g->sinks.strides[0] != 1 && job->heads != 1)) return 0;
        job->sinks_kind = o.kind, job->sinks = (int64_t)o.address;
    }
    if (!read_mask(arguments[MASK], g) || !read_flags(arguments, job)) return 0;
    /* A call that takes a thread half a second or more is made by Python, which looks for an interrupt meanwhile. */
    const double pairs = (double)job->sequences * (double)job->heads * (double)job->queries * (double)job->keys * (double)(job->size + job->value_size);
    g->call.flags = FN_DECLARED_ONLY;
    g->call.hidden = job->size;
    g->call.rows = g->call.inner = (int64_t)(pairs < (double)FN_ATTENTION_OF_A_CALL ? pairs : 0) / 8 / job->size; /* see fn_run_attention */
    return pairs <= (double)FN_ATTENTION_OF_A_CALL;
}

/* The memory of a tensor, from its first element to its last one. */
static fn_extent memory_of(const struct fn_attended *o, const tensor *t) {
    int64_t bytes = t->dtype.bits / 8, size = bytes;
    for (int i = 0; i < t->ndim; i++) size += (t->shape[i] - 1) * t->strides[i] * bytes;
    return (fn_extent){FN_F32, (uintptr_t)o->address, 1, size, size};
}

/* Makes the result, or takes the one given, which is dense. Returns as fn_take_output does. */
static int take_output(PyObject *const *arguments, struct given *g, output *out) {
    struct fn_attention *const job = &g->of.job;
    const int64_t sizes[] = {job->sequences, job->heads, job->queries, job->value_size};
    int failed;
    if (arguments[OUT] == Py_None) failed = fn_make_numbers(out, arguments[Q], &g->q, sizes, DIMENSIONS, NULL);
    else failed = fn_take_output(out, arguments[OUT], arguments[Q], &g->q, 0, NULL);
    if (failed) return failed;
    if (out->o.kind != job->kind || !fn_same_rows(&out->t, &g->q, job->value_size) || fn_elements(&out->t) < 0) return 1;
    job->out.address = (int64_t)out->o.address;
    for (int i = 0; i < SIZE; i++) job->out.stride[i] = out->t.strides[i] * fn_element_size(job->kind);
    if (!out->given) return 0;
    const fn_extent written = memory_of(&job->out, &out->t);
    const struct fn_attended sinks = {.address = job->sinks}, mask = {.address = job->mask};
    if (!fn_apart(written, memory_of(&job->q, &g->q)) || !fn_apart(written, memory_of(&job->k, &g->k)) ||
        !fn_apart(written, memory_of(&job->v, &g->v)))
        return 1;
    if (job->sinks_kind && !fn_apart(written, memory_of(&sinks, &g->sinks))) return 1;
    return job->mask && !fn_apart(written, memory_of(&mask, &g->mask));
}

PyObject *fn_attend_on_fast_path(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind;
    struct given g;
    if (!read_operands(arguments, &g) || !(devices >> DL_CPU & 1)) return fn_refuse();
    int others = fn_is_heard();
    if (!others) {
        PyObject *const operands[] = {arguments[Q], arguments[K], arguments[V], arguments[SINKS], arguments[OUT]};
        others = fn_records_gradient(operands, 5);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    if (others) return fn_refuse();
    output out = {.object = NULL};
    int failed = take_output(arguments, &g, &out);
    if (!failed) failed = fn_refuses_writes(&out, 1);
    if (!failed) failed = fn_run_on_device(&g.call, &g.q, 0);
    return fn_hand_out(&out, 1, failed);
}
