/* Outputs: tensors that the caller gave, and new ones. */
#include "python/fast_path.h"

#include "machine/pages.h"

static PyObject *empty_like, *new_empty, *empty_on_cpu, *keywords_of_dtypes;

void fn_open_outputs(PyObject *like, PyObject *empty, PyObject *on_cpu, PyObject *keywords) {
    empty_like = Py_NewRef(like);
    new_empty = Py_NewRef(empty);
    empty_on_cpu = Py_NewRef(on_cpu);
    keywords_of_dtypes = Py_NewRef(keywords);
}

PyObject *fn_keywords_of(PyObject *dtype) {
    PyObject *known, *keywords;
    Py_ssize_t at = 0;
    while (PyDict_Next(keywords_of_dtypes, &at, &known, &keywords)) /* an object that is no dtype may have no hash */
        if (known == dtype) return keywords;
    return NULL;
}

/* A tuple of these numbers, and `last` behind them unless that is 0; NULL with a Python error. */
static PyObject *tuple_of(const int64_t *numbers, int count, int64_t last) {
    const int all = count + (last != 0);
    PyObject *made = PyTuple_New(all);
    for (int i = 0; made && i < all; i++) {
        PyObject *number = PyLong_FromLongLong(i < count ? numbers[i] : last);
        if (!number || PyTuple_SetItem(made, i, number)) Py_CLEAR(made);
    }
    return made;
}

/* The dtype that keywords name, or that of x without keywords; NULL with a Python error. */
static PyObject *dtype_of(PyObject *x, PyObject *keywords) {
    static PyObject *name;
    if (!name) name = PyUnicode_InternFromString("dtype");
    return keywords ? Py_XNewRef(PyDict_GetItem(keywords, name)) : PyObject_GetAttr(x, name);
}

/* A new tensor on a CPU, past torch's dispatcher, which takes half as long; NULL with a Python error. Takes over all references. */
static PyObject *make_on_cpu(PyObject *shape, PyObject *strides, PyObject *dtype) {
    PyObject *made = dtype && shape && strides ? PyObject_CallFunctionObjArgs(empty_on_cpu, shape, strides, dtype, NULL) : NULL;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return made;
}

/* Whether torch makes tensors on a CPU past its dispatcher. */
static int is_on_cpu(const tensor *x) { return empty_on_cpu != Py_None && x->device.type == DL_CPU; }

enum { MOST_DIMENSIONS = 8 };

/* A new tensor of x's dtype or that of the keywords: of these sizes, and `last` behind them unless that is 0. NULL with a Python error. */
static PyObject *make(PyObject *x, const tensor *x_tensor, const int64_t *sizes, int count, int64_t last, PyObject *keywords) {
    PyObject *shape = tuple_of(sizes, count, last);
    if (is_on_cpu(x_tensor) && count <= MOST_DIMENSIONS) {
        int64_t strides[MOST_DIMENSIONS], stride = last ? last : 1;
        for (int i = count - 1; i >= 0; i--) {
            strides[i] = stride;
            stride *= sizes[i] > 1 ? sizes[i] : 1; /* as torch has those of no elements */
        }
        return make_on_cpu(shape, tuple_of(strides, count, last != 0), dtype_of(x, keywords));
    }
    PyObject *arguments = shape ? PyTuple_Pack(2, x, shape) : NULL;
    PyObject *made = arguments ? PyObject_Call(new_empty, arguments, keywords) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(arguments);
    return made;
}

/* Whether x lies element after element. */
static int is_packed(const tensor *x) {
    int64_t stride = 1;
    for (int i = x->ndim - 1; i >= 0; i--) {
        if (x->shape[i] != 1 && x->strides[i] != stride) return 0;
        stride *= x->shape[i];
    }
    return 1;
}

static PyObject *make_like(PyObject *x, const tensor *x_tensor, PyObject *keywords) {
    if (is_on_cpu(x_tensor) && is_packed(x_tensor)) {
        PyObject *const strides = tuple_of(x_tensor->strides, x_tensor->ndim, 0);
        return make_on_cpu(tuple_of(x_tensor->shape, x_tensor->ndim, 0), strides, dtype_of(x, keywords));
    }
    if (!keywords) return PyObject_CallFunctionObjArgs(empty_like, x, NULL);
    PyObject *arguments = PyTuple_Pack(1, x), *made = arguments ? PyObject_Call(empty_like, arguments, keywords) : NULL;
    Py_XDECREF(arguments);
    return made;
}

/* Reads an output's tensor, or NULL with a Python error; returns as fn_take_output does. */
static int read_output(output *out, const tensor *x_tensor) {
    if (!out->object) return -1;
    if (!fn_read_any(out->object, &out->t, &out->o)) return PyErr_Occurred() ? -1 : 1;
    if (!out->given && out->t.device.type == DL_CPU)
        fn_expect_writes(out->o.address, fn_elements(&out->t) * (out->t.dtype.bits / 8));
    return !fn_same_device(&out->t, x_tensor);
}

int fn_take_output(output *out, PyObject *given, PyObject *x, const tensor *x_tensor, int64_t last, PyObject *keywords) {
    out->given = given != Py_None;
    if (out->given) out->object = Py_NewRef(given);
    else out->object = last ? make(x, x_tensor, x_tensor->shape, x_tensor->ndim - 1, last, keywords) : make_like(x, x_tensor, keywords);
    return read_output(out, x_tensor);
}

int fn_make_numbers(output *out, PyObject *x, const tensor *x_tensor, const int64_t *sizes, int count, PyObject *keywords) {
    out->given = 0;
    out->object = make(x, x_tensor, sizes, count, 0, keywords);
    return read_output(out, x_tensor);
}

PyObject *fn_expect_writes_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (!fn_takes("expect_writes", count, 2)) return NULL;
    const unsigned long long begin = PyLong_AsUnsignedLongLong(arguments[0]);
    const long long bytes = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    fn_expect_writes((uintptr_t)begin, bytes);
    Py_RETURN_NONE;
}

PyObject *fn_hand_out(output *outputs, int count, int failed) {
    PyObject *result = NULL;
    if (!failed) failed = fn_count_writes(outputs, count);
    if (!failed) result = count == 1 ? Py_NewRef(outputs->object) : PyTuple_New(count);
    for (int i = 0; count > 1 && result && i < count; i++)
        if (PyTuple_SetItem(result, i, Py_NewRef(outputs[i].object))) Py_CLEAR(result);
    for (int i = 0; i < count; i++) Py_XDECREF(outputs[i].object);
    return result ? result : fn_refuse();
}
