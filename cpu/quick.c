/*
 * The quick way from Python into the C library, and to a CUDA kernel: at decode sizes a call lasts as
 * long as its checks, and a Python attribute costs 50 ns. Here tensors are read through DLPack's C
 * exchange API, which torch publishes (torch.Tensor.__dlpack_c_exchange_api__, since 2.10). Only what
 * is usual is done: plain tensors without gaps, no gradient to record, on a GPU a kernel that the long
 * way has loaded before. Anything else returns None, and the caller goes the long way, which finds out
 * what it is.
 */
#include "quick.h"

#include "fusednorm_cpu.h"

static const exchange_api *api;
static PyObject *plain_types, *is_grad_enabled, *get_num_threads, *empty_like, *increment_version, *requires_grad;
static PyTypeObject *tensor_type, *parameter_type;
static fn_forward_contiguous_fn *forward_contiguous;

static int kind_of(const tensor *t) {
    if (t->dtype.code == DL_BFLOAT) return t->dtype.bits == 16 ? FN_BF16 : FN_NONE;
    if (t->dtype.code != DL_FLOAT) return FN_NONE;
    return t->dtype.bits == 16 ? FN_F16 : t->dtype.bits == 32 ? FN_F32 : t->dtype.bits == 64 ? FN_F64 : FN_NONE;
}

/* Whether the object is a plain tensor without gaps, and not empty. */
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
    return *kind && elements > 0;
}

static int same_shape(const tensor *a, const tensor *b) {
    if (a->ndim != b->ndim) return 0;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

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

enum { EPS = OPERANDS, WEIGHT_OFFSET, ROUND_SUM, ROUND_NORM, ARGUMENTS };

/* Runs a kernel of the C library, on as many threads as torch has; nonzero if it refuses, or -1 with a Python error. */
static int run(const call *c) {
    int threads = 1;
    if (c->rows > 1 && c->rows * c->hidden >= FN_PARALLEL_ELEMENTS) {
        PyObject *number = PyObject_CallNoArgs(get_num_threads);
        if (!number) return -1;
        threads = (int)PyLong_AsLong(number);
        Py_DECREF(number);
    }
    uintptr_t a[OPERANDS];
    for (int i = 0; i < OPERANDS; i++) a[i] = c->kind[i] ? address(&c->t[i]) : 0;
    int code = FN_CODE(c->kind[X], c->kind[RESIDUAL], c->kind[WEIGHT], c->kind[OUT], c->flags);
    /* Of short calls, letting go of the interpreter and waiting for it again would be the longer part. */
    PyThreadState *state = c->rows * c->hidden >= FN_PARALLEL_ELEMENTS ? PyEval_SaveThread() : NULL;
    int failed = forward_contiguous(code, a[X], a[RESIDUAL], a[WEIGHT], a[OUT], a[RESIDUAL_OUT], c->rows, c->hidden,
                                    c->eps, c->weight_offset, threads);
    if (state) PyEval_RestoreThread(state);
    return failed;
}

/* `devices` is a number with a bit for each type of device (as DLPack numbers them) whose tensors are taken. */
static PyObject *forward(PyObject *devices, PyObject *const *arguments, Py_ssize_t count) {
    call c;
    int given[OPERANDS];
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "forward takes %d arguments, got %zd", ARGUMENTS, count);
        return NULL;
    }
    if (Py_TYPE(arguments[EPS]) != &PyFloat_Type || Py_TYPE(arguments[WEIGHT_OFFSET]) != &PyFloat_Type)
        return long_way();
    if (!PyBool_Check(arguments[ROUND_SUM]) || !PyBool_Check(arguments[ROUND_NORM])) return long_way();
    given[X] = 1;
    if (!read_tensor(arguments[X], &c.t[X], &c.kind[X])) return long_way();
    if (c.t[X].device.type > DL_CUDA || !(PyLong_AsLong(devices) >> c.t[X].device.type & 1)) return long_way();
    for (int i = RESIDUAL; i < OPERANDS; i++) {
        given[i] = arguments[i] != Py_None;
        c.kind[i] = FN_NONE;
        if (!given[i]) continue;
        if (i == OUT && arguments[OUT] == arguments[X]) c.t[OUT] = c.t[X], c.kind[OUT] = c.kind[X];
        else if (i == RESIDUAL_OUT && arguments[i] == arguments[RESIDUAL])
            c.t[i] = c.t[RESIDUAL], c.kind[i] = c.kind[RESIDUAL];
        else if (!read_tensor(arguments[i], &c.t[i], &c.kind[i])) return long_way();
        if (c.t[i].device.type != c.t[X].device.type || c.t[i].device.id != c.t[X].device.id) return long_way();
        if (i != WEIGHT && !same_shape(&c.t[i], &c.t[X])) return long_way();
        if (c.kind[i] == FN_F64 && c.kind[X] != FN_F64) return long_way();
    }
    if (c.t[X].ndim < 1 || (given[RESIDUAL_OUT] && c.kind[RESIDUAL_OUT] != c.kind[RESIDUAL]))
        return long_way();
    c.hidden = c.t[X].shape[c.t[X].ndim - 1];
    c.rows = 1;
    for (int i = 0; i < c.t[X].ndim - 1; i++) c.rows *= c.t[X].shape[i];
    /* Of one element a tensor may be a lazy negative and yet contiguous. */
    if (c.hidden == 1 || (given[WEIGHT] && (c.t[WEIGHT].ndim != 1 || c.t[WEIGHT].shape[0] != c.hidden)))
        return long_way();

    int records = records_gradient(arguments, OPERANDS);
    if (records < 0) return NULL;
    if (records) return long_way();
    c.flags = (arguments[ROUND_SUM] == Py_True ? FN_ROUND_SUM : 0) |
              (arguments[ROUND_NORM] == Py_True ? FN_ROUND_NORM : 0);
    c.eps = PyFloat_AsDouble(arguments[EPS]);
    c.weight_offset = PyFloat_AsDouble(arguments[WEIGHT_OFFSET]);

    PyObject *result = NULL, *outputs[2] = {NULL, NULL};
    int failed = 0;
    for (int i = OUT; i <= RESIDUAL_OUT; i++) {
        PyObject **output = &outputs[i - OUT];
        if (given[i] || (i == RESIDUAL_OUT && !given[RESIDUAL])) {
            *output = Py_NewRef(arguments[i]);
        } else {
            *output = PyObject_CallFunctionObjArgs(empty_like, arguments[i - OUT], NULL);
            if (!*output) goto end;
            failed |= !read_tensor(*output, &c.t[i], &c.kind[i]);
        }
    }
    if (!failed) failed = c.t[X].device.type == DL_CUDA ? fn_launch(api, &c) : run(&c);
    if (failed < 0) goto end;
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
    if (!PyArg_ParseTuple(arguments, "OOOOOOO", &capsule, &types[0], &types[1], &callables[0], &callables[1],
                          &callables[2], &callables[3]))
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
    api = found;
    Py_RETURN_TRUE;
}

static PyObject *open_cpu(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long function;
    if (!PyArg_ParseTuple(arguments, "K", &function)) return NULL;
    forward_contiguous = (fn_forward_contiguous_fn *)(uintptr_t)function;
    Py_RETURN_NONE;
}

static PyMethodDef forward_method = {
    "forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL,
    "forward(x, residual, weight, out, residual_out, eps, weight_offset, round_sum, round_norm)\n--\n\n"
    "The outputs (a residual or an output may be None), or None if nothing was done and the call must go the long way."};

static PyObject *way(PyObject *module, PyObject *arguments) {
    (void)module;
    int cpu, cuda;
    if (!PyArg_ParseTuple(arguments, "pp", &cpu, &cuda)) return NULL;
    if (!api || (cpu && !forward_contiguous)) {
        PyErr_SetString(PyExc_RuntimeError, "the quick way is not open");
        return NULL;
    }
    PyObject *devices = PyLong_FromLong((cpu ? 1 << DL_CPU : 0) | (cuda ? 1 << DL_CUDA : 0));
    if (!devices) return NULL;
    PyObject *function = PyCFunction_NewEx(&forward_method, devices, NULL);
    Py_DECREF(devices);
    return function;
}

static PyMethodDef methods[] = {
    {"open", open_way, METH_VARARGS,
     "open(exchange API, Tensor, Parameter, is_grad_enabled, get_num_threads, empty_like, increment_version)\n--\n\n"
     "Whether this version of the exchange API is understood."},
    {"open_cpu", open_cpu, METH_VARARGS, "open_cpu(address of fn_forward_contiguous)\n--\n\nLets CPU tensors through."},
    {"open_cuda", fn_open_cuda, METH_VARARGS,
     "open_cuda(address of cuLaunchKernelEx)\n--\n\nLets tensors on NVIDIA GPUs through; forgets the kernels held."},
    {"hold", fn_hold, METH_VARARGS,
     "hold(device, (kinds of x, residual, weight, out), flags, hidden size, whether there is an offset, alignment, "
     "function, threads, rows and bytes of shared memory of a block, blocks of a cluster, whether to begin early)\n--\n\n"
     "Has calls of this kind launch the function; False if there is no place for it."},
    {"way", way, METH_VARARGS, "way(cpu, cuda)\n--\n\nA function `forward` for tensors on these devices."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_quick", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__quick(void) { return PyModule_Create(&definition); }
