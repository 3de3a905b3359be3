/*
 * The fast path from Python into the C library, and to kernels of CUDA's and Triton's: at decode sizes a call lasts as
 * long as its checks, and a Python attribute costs 50 ns. The fast path takes plain tensors whose rows are one stride
 * apart, without a gradient to record; on a GPU it needs a kernel that was loaded before. For any other call it returns
 * None, and Python makes the call.
 */
#include "python/fast_path.h"

#include "machine/pages.h"

static PyObject *open_fast_path(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *capsule, *types[2], *callables[7], *asked[4], *operands, *dtypes, *of_norms;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOO!O!O!O!O!O!O!", &capsule, &types[0], &types[1], &callables[0], &callables[1],
                          &callables[2], &callables[3], &callables[4], &callables[5], &callables[6], &PyTuple_Type, &asked[0],
                          &PyTuple_Type, &asked[1], &PyTuple_Type, &asked[2], &PyTuple_Type, &asked[3], &PyTuple_Type,
                          &operands, &PyTuple_Type, &dtypes, &PyDict_Type, &of_norms))
        return NULL;
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api")) Py_RETURN_FALSE; /* other packages set other objects under this name */
    const exchange_api *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found) return NULL;
    if (found->version.major != DL_MAJOR || !found->tensor_from) Py_RETURN_FALSE;
    if (!fn_open_autograd(types[0], callables[0], callables[5], callables[6])) return NULL;
    fn_tensor_type = (PyTypeObject *)Py_NewRef(types[0]);
    fn_parameter_type = (PyTypeObject *)Py_NewRef(types[1]);
    fn_open_threads(callables[1]);
    fn_open_quantizer(dtypes);
    fn_open_outputs(callables[2], callables[3], callables[4], of_norms);
    if (!fn_open_operands(operands)) return NULL;
    if (!fn_open_listeners(asked[0], asked[1], asked[2], asked[3])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "questions, variables or function modes of another form");
        return NULL;
    }
    fn_exchange_api = found;
    Py_RETURN_TRUE;
}

/* Whether what is no tensor has torch call its own function, as a variable of a graph of torch.fx has. */
static int overrides(PyObject *argument) {
    PyTypeObject *type = Py_TYPE(argument);
    if (argument == Py_None || type == &PyBool_Type || type == &PyFloat_Type || type == &PyLong_Type || type == &PyUnicode_Type)
        return 0;
    return PyObject_HasAttrString((PyObject *)type, "__torch_function__");
}

/* Subclasses of tensors, those without memory and those whose gradients are recorded are not direct, and no call that is heard. */
static PyObject *is_direct(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    int others = fn_exchange_api ? fn_is_heard() : 1;
    for (Py_ssize_t i = 0; !others && i < count; i++) {
        tensor t;
        struct fn_operand operand;
        if (!PyObject_TypeCheck(arguments[i], fn_tensor_type)) {
            others = overrides(arguments[i]);
            continue;
        }
        others = fn_read_memory(arguments[i], &t, &operand) ? fn_records_gradient(&arguments[i], 1) : PyErr_Occurred() ? -1 : 1;
    }
    return others < 0 ? NULL : PyBool_FromLong(!others);
}

static PyObject *open_cpu(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long run;
    if (!PyArg_ParseTuple(arguments, "K", &run)) return NULL;
    fn_run_on_cpu = (fn_run_fn *)(uintptr_t)run;
    Py_RETURN_NONE;
}

/* The kinds of calls: the names of their arguments, by name. */
static PyObject *kinds_of_calls(void) {
    PyObject *kinds = PyDict_New();
    for (const struct fn_call_kind *kind = fn_call_kinds; kinds && kind->name; kind++) {
        PyObject *arguments = PyUnicode_FromString(kind->arguments);
        if (!arguments || PyDict_SetItemString(kinds, kind->name, arguments)) Py_CLEAR(kinds);
        Py_XDECREF(arguments);
    }
    return kinds;
}

static PyMethodDef methods[] = {
    {"open", open_fast_path, METH_VARARGS,
     "open(exchange API, Tensor, Parameter, is_grad_enabled, get_num_threads, empty_like, new_empty, (shape, strides, dtype) -> "
     "a tensor on a CPU, or None, increment_version, is_inference_mode_enabled, questions, variables, function modes, addresses in C++, what is asked of operands, keywords "
     "of int8, uint8, float8_e4m3fn, float8_e5m2, float32 and int32, keywords of a norm's dtypes)\n--\n\nWhether this version of the "
     "exchange API is understood."},
    {"follow", fn_follow, METH_VARARGS,
     "follow(request, devices)\n--\n\nKeeps the function that tells the request in force, and bits of devices by request."},
    {"entry", fn_new_entry, METH_VARARGS,
     "entry(kind, names, places, usual, fill, returned, request, recorded, otherwise)\n--\n\nA function for calls of a kind; see "
     "fast_path_entries.c."},
    {"open_modules", fn_open_modules, METH_VARARGS,
     "open_modules(dictionaries of hooks of all modules, names of a module's own, whether there is autocast)\n--\n\n"
     "Whether norms of modules are understood."},
    {"taken", (PyCFunction)(void (*)(void))fn_taken, METH_FASTCALL,
     "taken(attributes of a module, values by name, forms by dtypes, x[, a tensor beside x])\n--\n\nThe form, the weight "
     "and the bias of a norm; None if Python must look."},
    {"open_cpu", open_cpu, METH_VARARGS, "open_cpu(address of fn_run)\n--\n\nLets CPU tensors through."},
    {"open_cuda", fn_open_cuda, METH_VARARGS,
     "open_cuda(addresses of cuLaunchKernelEx, cuCtxGetDevice, cuCtxPushCurrent and cuCtxPopCurrent)\n--\n\n"
     "Lets tensors on NVIDIA GPUs through; forgets the kernels held."},
    {"hold_cuda", fn_hold_cuda, METH_VARARGS,
     "hold_cuda(call, context, alignment, kernels)\n--\n\nHas calls of this kind launch these kernels. The call is packed "
     "as struct fn_call of call.h; see launch/cuda.h for a kernel's numbers."},
    {"launch_cuda", fn_launch_held, METH_VARARGS,
     "launch_cuda(call, stream)\n--\n\nLaunches the kernels held for a call: 0, -1 if there are none, or the driver's status."},
    {"open_triton", fn_open_triton, METH_VARARGS,
     "open_triton(address of fn_run_triton, the longest rows)\n--\n\nLets CPU tensors through to Triton's kernels."},
    {"hold_triton", fn_hold_triton, METH_VARARGS,
     "hold_triton(call, kernel)\n--\n\nHas calls of this kind run this kernel. The call is packed as struct fn_call of call.h."},
    {"backward", (PyCFunction)(void (*)(void))fn_backward_on_fast_path, METH_FASTCALL,
     "backward(type of device, dy, d_residual_out, h, rstd, weight, dx, dresidual, partial, dweight, rows of a block, "
     "weight_offset, center)\n--\n\nWhether the gradients were written; if not, Python must make the call."},
    {"norm_gated_backward", (PyCFunction)(void (*)(void))fn_norm_gated_backward_on_fast_path, METH_FASTCALL,
     "norm_gated_backward(d, x, z, rstd, weight, dx, dz, dweight, activation, norm_before_gate, between, round_norm, "
     "weight_offset)\n--\n\n"
     "Whether the gradients of a norm with a gate were written."},
    {"gate_backward", (PyCFunction)(void (*)(void))fn_gate_backward_on_fast_path, METH_FASTCALL,
     "gate_backward(type of device, d, y, z, dy, dz, activation, number of the dtype between)\n--\n\nWhether the gradients of "
     "a gate were written; if not, Python must make the call."},
    {"expect_writes", (PyCFunction)(void (*)(void))fn_expect_writes_of, METH_FASTCALL,
     "expect_writes(address, bytes)\n--\n\nAsks for huge pages for new memory of NEW_BYTES or more."},
    {"is_direct", (PyCFunction)(void (*)(void))is_direct, METH_FASTCALL,
     "is_direct(*arguments of an operator)\n--\n\nWhether the operator may run past torch's dispatcher."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_fast_path", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__fast_path(void) {
    PyObject *module = PyModule_Create(&definition), *kinds = module ? kinds_of_calls() : NULL;
    if (module && PyModule_AddObjectRef(module, "kinds", kinds)) Py_CLEAR(module);
    Py_XDECREF(kinds);
    if (module && PyModule_AddIntConstant(module, "NEW_BYTES", FN_NEW_BYTES)) Py_CLEAR(module);
#ifdef Py_GIL_DISABLED
    /* Static variables are written while the module that opens the fast path is imported; cuda_launch.c locks its kernels. */
    if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0) Py_CLEAR(module);
#endif
    return module;
}
