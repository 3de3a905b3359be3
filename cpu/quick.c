/*
 * The quick way from Python into the C library: at decode sizes a call lasts as long as its checks, and
 * a Python attribute costs 50 ns. Here tensors are read through DLPack's C exchange API, which torch
 * publishes (torch.Tensor.__dlpack_c_exchange_api__, since 2.10). Only what is usual is done:
 * plain CPU tensors without gaps, and no gradient to record. Anything else returns None, and the
 * caller goes the long way, which finds out what it is.
 */
#include <Python.h>
#include <stdint.h>

#include "fusednorm_cpu.h"

/* DLPack 1.3, as far as it is used here (dmlc.github.io/dlpack/latest/c_api.html). */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides in elements */
    uint64_t byte_offset;
} tensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*tensor_from)(void *object, tensor *out); /* borrows; sets a Python error and returns -1 */
} exchange_api;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

static const exchange_api *api;
static PyObject *plain_types, *is_grad_enabled, *get_num_threads, *empty_like, *increment_version, *requires_grad;
static PyTypeObject *tensor_type, *parameter_type;
static fn_forward_contiguous_fn *forward_contiguous;

static int kind_of(const tensor *t) {
    if (t->dtype.code == DL_BFLOAT) return t->dtype.bits == 16 ? FN_BF16 : FN_NONE;
    if (t->dtype.code != DL_FLOAT) return FN_NONE;
    return t->dtype.bits == 16 ? FN_F16 : t->dtype.bits == 32 ? FN_F32 : t->dtype.bits == 64 ? FN_F64 : FN_NONE;
}

/* Whether the object is a plain tensor in this processor's memory, without gaps, and not empty. */
static int read_tensor(PyObject *object, tensor *t, int *kind) {
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return 0;
    if (api->tensor_from(object, t)) {
        PyErr_Clear(); /* sparse, meta, of a type that DLPack lacks: the long way has words for it */
        return 0;
    }
    *kind = kind_of(t);
    int64_t elements = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->strides[i] != elements) return 0;
        elements *= t->shape[i];
    }
    return *kind && t->device.type == DL_CPU && elements > 0;
}

static int same_shape(const tensor *a, const tensor *b) {
    if (a->ndim != b->ndim) return 0;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

static uintptr_t address(const tensor *t) { return (uintptr_t)t->data + t->byte_offset; }

/* 1 or 0, or -1 with a Python error set. */
static int truth(PyObject *new_reference) {
    if (!new_reference) return -1;
    int value = PyObject_IsTrue(new_reference);
    Py_DECREF(new_reference);
    return value;
}

/* Whether autograd would have to know of the call. */
static int records_gradient(PyObject *const *operands, int count) {
    int records = truth(PyObject_CallNoArgs(is_grad_enabled));
    if (records <= 0) return records;
    for (int i = 0; i < count; i++) {
        if (operands[i] == Py_None) continue;
        records = truth(PyObject_GetAttr(operands[i], requires_grad));
        if (records) return records;
    }
    return 0;
}

static PyObject *long_way(void) { Py_RETURN_NONE; }

enum { X, RESIDUAL, WEIGHT, OUT, RESIDUAL_OUT, OPERANDS, EPS = OPERANDS, WEIGHT_OFFSET, ROUND_SUM, ROUND_NORM, ARGUMENTS };

static PyObject *forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    tensor t[OPERANDS];
    int kind[OPERANDS] = {FN_NONE}, given[OPERANDS];
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "forward takes %d arguments, got %zd", ARGUMENTS, count);
        return NULL;
    }
    if (!api) return long_way();
    if (Py_TYPE(arguments[EPS]) != &PyFloat_Type || Py_TYPE(arguments[WEIGHT_OFFSET]) != &PyFloat_Type)
        return long_way();
    for (int i = 0; i < OPERANDS; i++) {
        given[i] = arguments[i] != Py_None;
        if (!given[i]) continue;
        if (i == OUT && arguments[OUT] == arguments[X]) t[OUT] = t[X], kind[OUT] = kind[X];
        else if (i == RESIDUAL_OUT && arguments[i] == arguments[RESIDUAL]) t[i] = t[RESIDUAL], kind[i] = kind[RESIDUAL];
        else if (!read_tensor(arguments[i], &t[i], &kind[i])) return long_way();
        if (i != WEIGHT && i != X && !same_shape(&t[i], &t[X])) return long_way();
        if (kind[i] == FN_F64 && kind[X] != FN_F64) return long_way();
    }
    if (!given[X] || t[X].ndim < 1 || (given[RESIDUAL_OUT] && kind[RESIDUAL_OUT] != kind[RESIDUAL])) return long_way();
    int64_t hidden = t[X].shape[t[X].ndim - 1], rows = 1;
    for (int i = 0; i < t[X].ndim - 1; i++) rows *= t[X].shape[i];
    /* Of one element a tensor may be a lazy negative and yet contiguous. */
    if (hidden == 1 || (given[WEIGHT] && (t[WEIGHT].ndim != 1 || t[WEIGHT].shape[0] != hidden))) return long_way();

    int records = records_gradient(arguments, OPERANDS), round_sum = PyObject_IsTrue(arguments[ROUND_SUM]);
    int round_norm = PyObject_IsTrue(arguments[ROUND_NORM]);
    if (records < 0 || round_sum < 0 || round_norm < 0) return NULL;
    if (records) return long_way();
    int threads = 1;
    if (rows > 1 && rows * hidden >= FN_PARALLEL_ELEMENTS) {
        PyObject *number = PyObject_CallNoArgs(get_num_threads);
        if (!number) return NULL;
        threads = (int)PyLong_AsLong(number);
        Py_DECREF(number);
    }

    PyObject *result = NULL, *outputs[2] = {NULL, NULL};
    int failed = 0;
    for (int i = OUT; i <= RESIDUAL_OUT; i++) {
        PyObject **output = &outputs[i - OUT];
        if (given[i] || (i == RESIDUAL_OUT && !given[RESIDUAL])) {
            *output = Py_NewRef(arguments[i]);
        } else {
            *output = PyObject_CallFunctionObjArgs(empty_like, arguments[i - OUT], NULL);
            if (!*output) goto end;
            failed |= !read_tensor(*output, &t[i], &kind[i]);
        }
    }
    if (!failed) {
        int code = FN_CODE(kind[X], kind[RESIDUAL], kind[WEIGHT], kind[OUT],
                           (round_sum ? FN_ROUND_SUM : 0) | (round_norm ? FN_ROUND_NORM : 0));
        double eps = PyFloat_AsDouble(arguments[EPS]), offset = PyFloat_AsDouble(arguments[WEIGHT_OFFSET]);
        /* Of short calls, letting go of the interpreter and waiting for it again would be the longer part. */
        PyThreadState *state = rows * hidden >= FN_PARALLEL_ELEMENTS ? PyEval_SaveThread() : NULL;
        failed = forward_contiguous(code, address(&t[X]), given[RESIDUAL] ? address(&t[RESIDUAL]) : 0,
                                    given[WEIGHT] ? address(&t[WEIGHT]) : 0, address(&t[OUT]),
                                    given[RESIDUAL] ? address(&t[RESIDUAL_OUT]) : 0, rows, hidden, eps, offset, threads);
        if (state) PyEval_RestoreThread(state);
    }
    if (failed) {
        result = long_way();
        goto end;
    }
    if (given[OUT] || given[RESIDUAL_OUT]) { /* as every operation of torch's does that writes to a tensor */
        PyObject *written = given[OUT] && given[RESIDUAL_OUT] ? PyTuple_Pack(2, outputs[0], outputs[1])
                                                              : PyTuple_Pack(1, outputs[given[OUT] ? 0 : 1]);
        PyObject *none = written ? PyObject_CallFunctionObjArgs(increment_version, written, NULL) : NULL;
        Py_XDECREF(written);
        if (!none) goto end;
        Py_DECREF(none);
    }
    result = PyTuple_Pack(2, outputs[0], outputs[1]);
end:
    Py_XDECREF(outputs[0]);
    Py_XDECREF(outputs[1]);
    return result;
}

static PyObject *open_way(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *capsule, *types[2], *callables[4];
    unsigned long long function;
    if (!PyArg_ParseTuple(arguments, "KOOOOOOO", &function, &capsule, &types[0], &types[1], &callables[0],
                          &callables[1], &callables[2], &callables[3]))
        return NULL;
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api")) Py_RETURN_FALSE; /* add-ons to older torch set others */
    const exchange_api *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found) return NULL;
    if (found->version.major != DL_MAJOR || !found->tensor_from) Py_RETURN_FALSE;
    requires_grad = PyUnicode_InternFromString("requires_grad");
    plain_types = PyTuple_Pack(2, types[0], types[1]); /* keeps them alive, as this module is never unloaded */
    if (!requires_grad || !plain_types) return NULL;
    tensor_type = (PyTypeObject *)types[0];
    parameter_type = (PyTypeObject *)types[1];
    is_grad_enabled = Py_NewRef(callables[0]);
    get_num_threads = Py_NewRef(callables[1]);
    empty_like = Py_NewRef(callables[2]);
    increment_version = Py_NewRef(callables[3]);
    forward_contiguous = (fn_forward_contiguous_fn *)(uintptr_t)function;
    api = found;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL,
     "forward(x, residual, weight, out, residual_out, eps, weight_offset, round_sum, round_norm)\n--\n\n"
     "The outputs (a residual or an output may be None), or None if nothing was done and the call must go the long way."},
    {"open", open_way, METH_VARARGS,
     "open(address of fn_forward_contiguous, exchange API, Tensor, Parameter, is_grad_enabled, get_num_threads, "
     "empty_like, increment_version)\n--\n\nWhether this version of the exchange API is understood."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_quick", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__quick(void) { return PyModule_Create(&definition); }
