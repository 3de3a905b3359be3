/* Outputs: tensors that the caller gave, and new ones. */
#include "python/fast_path.h"

#include "machine/pages.h"

static PyObject *empty_like, *new_empty, *keywords_of_dtypes;

void fn_open_outputs(PyObject *like, PyObject *empty, PyObject *keywords) {
    empty_like = Py_NewRef(like);
    new_empty = Py_NewRef(empty);
    keywords_of_dtypes = Py_NewRef(keywords);
}

PyObject *fn_keywords_of(PyObject *dtype) {
    PyObject *known, *keywords;
    Py_ssize_t at = 0;
    while (PyDict_Next(keywords_of_dtypes, &at, &known, &keywords)) /* an object that is no dtype may have no hash */
        if (known == dtype) return keywords;
    return NULL;
}

/* A new tensor like x, as fn_take_output says; NULL with a Python error. */
static PyObject *make(PyObject *x, const tensor *x_tensor, int64_t last, PyObject *keywords) {
    if (!last && !keywords) return PyObject_CallFunctionObjArgs(empty_like, x, NULL);
    PyObject *arguments, *shape = last ? PyTuple_New(x_tensor->ndim) : NULL;
    for (int i = 0; shape && i < x_tensor->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(i < x_tensor->ndim - 1 ? x_tensor->shape[i] : last);
        if (!size || PyTuple_SetItem(shape, i, size)) Py_CLEAR(shape);
    }
    if (last) arguments = shape ? PyTuple_Pack(2, x, shape) : NULL;
    else arguments = PyTuple_Pack(1, x);
    PyObject *made = arguments ? PyObject_Call(last ? new_empty : empty_like, arguments, keywords) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(arguments);
    return made;
}

int fn_take_output(output *out, PyObject *given, PyObject *x, const tensor *x_tensor, int64_t last, PyObject *keywords) {
    out->given = given != Py_None;
    out->object = out->given ? Py_NewRef(given) : make(x, x_tensor, last, keywords);
    if (!out->object) return -1;
    if (!fn_read_any(out->object, &out->t, &out->o)) return PyErr_Occurred() ? -1 : 1;
    if (!out->given && out->t.device.type == DL_CPU)
        fn_expect_writes(out->o.address, fn_elements(&out->t) * (out->t.dtype.bits / 8));
    return !fn_same_device(&out->t, x_tensor);
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
