/* The launchers of kernels for GPUs, called from Python. */
#include "launch/cuda.h"
#include "python/fast_path.h"

PyObject *fn_open_cuda(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long launch, current_device, push, pop;
    if (!PyArg_ParseTuple(arguments, "KKKK", &launch, &current_device, &push, &pop)) return NULL;
    fn_lock();
    fn_cuda_open((uintptr_t)launch, (uintptr_t)current_device, (uintptr_t)push, (uintptr_t)pop);
    fn_unlock();
    Py_RETURN_NONE;
}

PyObject *fn_hold_cuda(PyObject *module, PyObject *arguments) {
    (void)module;
    held given;
    launch wanted;
    struct fn_call calls[FN_PACKED];
    PyObject *packed, *kernels;
    unsigned long long context;
    memset(&given, 0, sizeof given);
    if (!PyArg_ParseTuple(arguments, "O!KO!", &PyBytes_Type, &packed, &context, &PyTuple_Type, &kernels) ||
        !fn_unpack(packed, calls))
        return NULL;
    if (!fn_cuda_read(calls, &wanted)) {
        PyErr_SetString(PyExc_ValueError, "an operand begins between two elements");
        return NULL;
    }
    given.key = wanted.key;
    given.context = (void *)(uintptr_t)context;
    for (; given.count < PyTuple_Size(kernels) && given.count < KERNELS; given.count++) {
        kernel *k = &given.kernels[given.count];
        unsigned long long function;
        if (!PyArg_ParseTuple(PyTuple_GetItem(kernels, given.count), "KIIIIpi", &function, &k->threads, &k->per_program,
                              &k->shared, &k->cluster, &k->early, &k->share))
            return NULL;
        k->function = (void *)(uintptr_t)function;
    }
    fn_lock();
    const int full = fn_cuda_hold(&given);
    fn_unlock();
    if (full) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

int fn_launch_cuda(const struct fn_call *calls, void *stream) {
    launch l;
    if (!fn_cuda_read(calls, &l)) return FN_NOT_HELD;
    fn_lock();
    const held found = fn_cuda_find(&l.key);
    fn_unlock();
    if (!found.count) return FN_NOT_HELD;
    /* A full queue makes the driver wait, perhaps for a callback that needs the interpreter. */
    PyThreadState *state = PyEval_SaveThread();
    const int failed = fn_cuda_start(&found, &l, stream);
    PyEval_RestoreThread(state);
    return failed;
}

PyObject *fn_launch_held(PyObject *module, PyObject *arguments) {
    (void)module;
    struct fn_call calls[FN_PACKED];
    PyObject *packed;
    unsigned long long stream;
    if (!PyArg_ParseTuple(arguments, "O!K", &PyBytes_Type, &packed, &stream) || !fn_unpack(packed, calls)) return NULL;
    return PyLong_FromLong(fn_launch_cuda(calls, (void *)(uintptr_t)stream));
}
