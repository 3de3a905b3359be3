/*
 * The operands of the fast path: tensors are read through DLPack's C exchange API, which torch publishes
 * (torch.Tensor.__dlpack_c_exchange_api__, since 2.10).
 */
#include "python/fast_path.h"

const exchange_api *fn_exchange_api;
PyTypeObject *fn_tensor_type, *fn_parameter_type;

/* torch's C++ functions, which take a pointer to its tensor. Without them Python's functions of the same names are asked. */
static struct {
    Py_ssize_t place; /* of torch's tensor in Python's object; 0: C++ cannot be asked */
    _Bool (*is_neg)(const void *), (*is_inference)(const void *);
    int32_t (*storage_size)(const void *, int64_t *), (*storage_offset)(const void *, int64_t *);
    PyObject *in_memory_as_is, *is_inference_in_python;
} torch;

int fn_open_operands(PyObject *found) {
    unsigned long long address[4];
    if (!PyArg_ParseTuple(found, "n(KKKK)OO", &torch.place, &address[0], &address[1], &address[2], &address[3],
                          &torch.in_memory_as_is, &torch.is_inference_in_python))
        return 0;
    torch.is_neg = (_Bool (*)(const void *))(uintptr_t)address[0];
    torch.is_inference = (_Bool (*)(const void *))(uintptr_t)address[1];
    torch.storage_size = (int32_t (*)(const void *, int64_t *))(uintptr_t)address[2];
    torch.storage_offset = (int32_t (*)(const void *, int64_t *))(uintptr_t)address[3];
    Py_INCREF(torch.in_memory_as_is);
    Py_INCREF(torch.is_inference_in_python);
    return 1;
}

static int ask(PyObject *question, PyObject *object) { return fn_truth(PyObject_CallFunctionObjArgs(question, object, NULL)); }

int fn_is_inference(PyObject *object) {
    return torch.place ? torch.is_inference((char *)object + torch.place) : ask(torch.is_inference_in_python, object);
}

/* Whether memory holds all elements as they are: no lazy negative bit, and a storage that nobody has made shorter. */
static int in_memory_as_is(PyObject *object, const tensor *t) {
    if (!torch.place) return ask(torch.in_memory_as_is, object) > 0;
    const void *const of_torch = (char *)object + torch.place;
    int64_t size, last;
    if (torch.is_neg(of_torch) || torch.storage_size(of_torch, &size) || torch.storage_offset(of_torch, &last)) return 0;
    for (int i = 0; i < t->ndim; i++) last += (t->shape[i] - 1) * t->strides[i];
    return (last + 1) * (t->dtype.bits / 8) <= size;
}

static int kind_of(const tensor *t) {
    if (t->dtype.code == DL_BFLOAT) return t->dtype.bits == 16 ? FN_BF16 : FN_NONE;
    if (t->dtype.code != DL_FLOAT) return FN_NONE;
    return t->dtype.bits == 16 ? FN_F16 : t->dtype.bits == 32 ? FN_F32 : t->dtype.bits == 64 ? FN_F64 : FN_NONE;
}

/* The stride that leads from each row to the next, as in fusednorm/calls/memory.py; -1 if there is none. */
static int64_t row_stride(const tensor *t) {
    int last = t->ndim - 1;
    if (last < 0) return 1;
    if (t->strides[last] != 1 && t->shape[last] != 1) return -1;
    int64_t stride = -1, following = 0;
    for (int i = last - 1; i >= 0; i--) {
        if (t->shape[i] == 1) continue;
        if (stride < 0) stride = t->strides[i];
        else if (t->strides[i] != following) return -1;
        following = t->strides[i] * t->shape[i];
    }
    return stride < 0 ? t->shape[last] : stride;
}

int fn_read_memory(PyObject *object, tensor *t, struct fn_operand *o) {
    if (Py_TYPE(object) != fn_tensor_type && Py_TYPE(object) != fn_parameter_type) return 0;
    if (fn_exchange_api->tensor_from(object, t)) {
        /* Sparse, meta, of a type that DLPack lacks: Python reports the error. No memory, an interrupt: raised as it is. */
        if (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError) ||
            PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_BufferError))
            PyErr_Clear();
        return 0;
    }
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return 0;
    *o = (struct fn_operand){.kind = kind_of(t)};
    if (t->data) o->address = (uintptr_t)t->data + t->byte_offset;
    return o->address && in_memory_as_is(object, t);
}

int fn_read_any(PyObject *object, tensor *t, struct fn_operand *o) {
    return fn_read_memory(object, t, o) && (o->stride = row_stride(t)) >= 0;
}

int fn_read(PyObject *object, tensor *t, struct fn_operand *o) { return fn_read_any(object, t, o) && o->kind; }

int fn_read_all(PyObject *const *objects, int count, unsigned required, long device_type, tensor *t, struct fn_operand *o) {
    for (int i = 0; i < count; i++) {
        o[i] = (struct fn_operand){.kind = FN_NONE};
        if (objects[i] == Py_None && !(required >> i & 1)) continue;
        if (!fn_read(objects[i], &t[i], &o[i]) || t[i].device.type != device_type || !fn_same_device(&t[i], &t[0])) return 0;
    }
    return 1;
}

int64_t fn_elements(const tensor *t) {
    int64_t elements = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->strides[i] != elements) return -1;
        elements *= t->shape[i];
    }
    return elements;
}

int fn_same_shape(const tensor *a, const tensor *b) {
    if (a->ndim != b->ndim) return 0;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

int fn_same_rows(const tensor *a, const tensor *b, int64_t last) {
    if (a->ndim != b->ndim || a->shape[a->ndim - 1] != last) return 0;
    for (int i = 0; i < a->ndim - 1; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

int fn_same_device(const tensor *a, const tensor *b) {
    return a->device.type == b->device.type && a->device.id == b->device.id;
}

void fn_take_rows(struct fn_call *c, const tensor *x) {
    c->device = x->device.id;
    c->hidden = x->shape[x->ndim - 1];
    c->rows = 1;
    for (int i = 0; i < x->ndim - 1; i++) c->rows *= x->shape[i];
    c->inner = c->rows;
}

fn_extent fn_extent_of_rows(const struct fn_operand *o, int64_t rows, int64_t hidden) {
    return (fn_extent){o->kind, o->address, rows, fn_step(o), hidden * fn_element_size(o->kind)};
}

fn_extent fn_extent_of(const struct fn_call *c, int i) {
    const struct fn_operand *o = &c->operand[i];
    return fn_extent_of_rows(o, i != FN_WEIGHT && i != FN_BIAS ? c->rows : o->stride ? c->heads : 1, c->hidden);
}

/* One lies before the other, or they are columns of one matrix. */
int fn_apart(fn_extent a, fn_extent b) {
    if (a.begin + (a.rows - 1) * a.step + a.bytes <= b.begin) return 1;
    if (b.begin + (b.rows - 1) * b.step + b.bytes <= a.begin) return 1;
    if (a.step != b.step || a.step == 0) return 0;
    int64_t between = (int64_t)(b.begin - a.begin) % a.step;
    if (between < 0) between += a.step;
    return a.bytes <= between && between + b.bytes <= a.step;
}

int fn_may_write(const fn_extent *all, int out, int in_place) {
    const fn_extent a = all[out];
    if (!a.kind) return 1;
    if (a.rows > 1 && a.step < a.bytes) return 0;
    for (int i = 0; i < out; i++) {
        const fn_extent b = all[i];
        const int same = i < in_place && a.begin == b.begin && a.step == b.step && a.kind == b.kind;
        if (b.kind && !same && !fn_apart(a, b)) return 0;
    }
    return 1;
}
