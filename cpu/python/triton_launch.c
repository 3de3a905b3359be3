/* The launcher of Triton's kernels for CPUs, called from Python and on the fast path. */
#include "launch/triton.h"
#include "python/fast_path.h"

int fn_run_triton_kernel(struct fn_call *c) { return fn_triton_has(c) ? fn_run_in_c(c, fn_triton_run) : 1; }

PyObject *fn_open_triton(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long address;
    long long most;
    if (!PyArg_ParseTuple(arguments, "KL", &address, &most)) return NULL;
    fn_triton_open((uintptr_t)address, most);
    Py_RETURN_NONE;
}

PyObject *fn_hold_triton(PyObject *module, PyObject *arguments) {
    (void)module;
    struct fn_call c[FN_PACKED];
    unsigned long long kernel;
    PyObject *call;
    if (!PyArg_ParseTuple(arguments, "O!K", &PyBytes_Type, &call, &kernel) || !fn_unpack(call, c)) return NULL;
    fn_lock();
    fn_triton_hold(c, (uintptr_t)kernel);
    fn_unlock();
    Py_RETURN_NONE;
}
