/*
 * The operands of the fast path: tensors are read through DLPack's C exchange API, which torch publishes
 * (torch.Tensor.__dlpack_c_exchange_api__, since 2.10).
 */
#include "fast_path.h"

const exchange_api *fn_exchange_api;
PyTypeObject *fn_tensor_type, *fn_parameter_type;

static int kind_of(const tensor *t) {
    if (t->dtype.code == DL_BFLOAT) return t->dtype.bits == 16 ? FN_BF16 : FN_NONE;
    if (t->dtype.code != DL_FLOAT) return FN_NONE;
    return t->dtype.bits == 16 ? FN_F16 : t->dtype.bits == 32 ? FN_F32 : t->dtype.bits == 64 ? FN_F64 : FN_NONE;
}

/* The stride that leads from each row to the next, as in fusednorm/layout.py; -1 if there is none. */
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
    return o->address != 0;
}

int fn_read_any(PyObject *object, tensor *t, struct fn_operand *o) {
    return fn_read_memory(object, t, o) && (o->stride = row_stride(t)) >= 0;
}

int fn_read(PyObject *object, tensor *t, struct fn_operand *o) { return fn_read_any(object, t, o) && o->kind; }

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

int fn_same_device(const tensor *a, const tensor *b) {
    return a->device.type == b->device.type && a->device.id == b->device.id;
}

fn_extent fn_extent_of_rows(const struct fn_operand *o, int64_t rows, int64_t hidden) {
    const int64_t item = fn_element_size(o->kind);
    return (fn_extent){o->address, rows, o->stride * item, hidden * item};
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
