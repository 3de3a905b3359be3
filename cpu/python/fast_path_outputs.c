/* New tensors, for the outputs that the caller did not give. */
#include "python/fast_path.h"

static PyObject *empty_like, *new_empty;

void fn_open_outputs(PyObject *like, PyObject *empty) {
    empty_like = Py_NewRef(like);
    new_empty = Py_NewRef(empty);
}

PyObject *fn_output(PyObject *given, PyObject *x, PyObject *shape, PyObject *keywords) {
    if (given != Py_None) return Py_NewRef(given);
    PyObject *arguments = shape ? PyTuple_Pack(2, x, shape) : PyTuple_Pack(1, x);
    PyObject *made = arguments ? PyObject_Call(shape ? new_empty : empty_like, arguments, keywords) : NULL;
    Py_XDECREF(arguments);
    return made;
}

PyObject *fn_shape(const tensor *x, int64_t last) {
    PyObject *shape = PyTuple_New(x->ndim);
    for (int i = 0; shape && i < x->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(i < x->ndim - 1 ? x->shape[i] : last);
        if (!size || PyTuple_SetItem(shape, i, size)) Py_CLEAR(shape);
    }
    return shape;
}

PyObject *fn_empty_like(PyObject *x) { return PyObject_CallFunctionObjArgs(empty_like, x, NULL); }
