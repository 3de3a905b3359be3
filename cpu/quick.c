/*
 * The quick way from Python into the C library, and to a CUDA kernel: at decode sizes a call lasts as
 * long as its checks, and a Python attribute costs 50 ns. Here tensors are read through DLPack's C
 * exchange API, which torch publishes (torch.Tensor.__dlpack_c_exchange_api__, since 2.10). Only what
 * is usual is done: plain tensors whose rows are one stride apart, no gradient to record, on a GPU a
 * kernel that the long way has loaded before. Anything else returns None, and the caller goes the long
 * way, which finds out what it is.
 */
#include "pages.h"
#include "quick.h"

const exchange_api *fn_exchange_api;
static PyObject *plain_types, *get_num_threads, *empty_like, *requires_grad;
static PyTypeObject *tensor_type, *parameter_type;
static fn_forward_fn *forward_on_cpu;

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

/* Also that it is not empty, and has memory. If not, there may be a Python error. */
int fn_read(PyObject *object, operand *o) {
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return 0;
    if (fn_exchange_api->tensor_from(object, &o->t)) {
        /* Sparse, meta, of a type that DLPack lacks: Python reports the error. No memory, an interrupt: raised as it is. */
        if (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError) ||
            PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_BufferError))
            PyErr_Clear();
        return 0;
    }
    o->kind = kind_of(&o->t);
    o->stride = row_stride(&o->t);
    for (int i = 0; i < o->t.ndim; i++)
        if (o->t.shape[i] == 0) return 0;
    return o->stride >= 0 && fn_address(o);
}

int64_t fn_elements(const operand *o) {
    int64_t elements = 1;
    for (int i = o->t.ndim - 1; i >= 0; i--) {
        if (o->t.shape[i] != 1 && o->t.strides[i] != elements) return -1;
        elements *= o->t.shape[i];
    }
    return elements;
}

int fn_same_shape(const operand *a, const operand *b) {
    if (a->t.ndim != b->t.ndim) return 0;
    for (int i = 0; i < a->t.ndim; i++)
        if (a->t.shape[i] != b->t.shape[i]) return 0;
    return 1;
}

int fn_same_device(const operand *a, const operand *b) {
    return a->t.device.type == b->t.device.type && a->t.device.id == b->t.device.id;
}

/* As many as torch has, where it pays. */
int fn_threads(int64_t elements) {
    if (elements < FN_PARALLEL_ELEMENTS) return 1;
    PyObject *number = PyObject_CallNoArgs(get_num_threads);
    if (!number) return -1;
    int threads = (int)PyLong_AsLong(number);
    Py_DECREF(number);
    return threads;
}

/* A function of torch's with one argument or none. Where it is C's own, C calls it: Python would take as long again. */
typedef struct {
    PyObject *object;
    PyCFunction in_c; /* NULL where it is not */
} function;

static function function_of(PyObject *object, int flags) {
    function f = {Py_NewRef(object), NULL};
    if (PyCFunction_CheckExact(object) && PyCFunction_GetFlags(object) == flags) f.in_c = PyCFunction_GetFunction(object);
    return f;
}

static PyObject *call_function(const function *f, PyObject *argument) {
    if (f->in_c) return f->in_c(PyCFunction_GetSelf(f->object), argument);
    return argument ? PyObject_CallFunctionObjArgs(f->object, argument, NULL) : PyObject_CallNoArgs(f->object);
}

static function is_grad_enabled, increment_version;
static descrgetfunc get_requires_grad; /* of the descriptor `requires_grad`, which Python would look up each time */

/* 1 or 0, or -1 with a Python error set. */
static int truth(PyObject *new_reference) {
    if (!new_reference) return -1;
    int value = PyObject_IsTrue(new_reference);
    Py_DECREF(new_reference);
    return value;
}

static int answer(const function *question) { return truth(call_function(question, NULL)); }

/* Whether autograd would have to know of the call. An output in place was looked at as x or the residual. */
static int records_gradient(PyObject *const *operands, int count) {
    int records = answer(&is_grad_enabled);
    if (records <= 0) return records;
    for (int i = 0; i < count; i++) {
        if (operands[i] == Py_None || (i >= OUT && operands[i] == operands[i - OUT])) continue;
        records = truth(get_requires_grad(requires_grad, operands[i], (PyObject *)tensor_type));
        if (records) return records;
    }
    return 0;
}

/* What fusednorm/listeners.py asks: functions, and dictionary, name and value of variables. */
enum { MOST = 4 };
static struct {
    int questions, variables;
    function question[MOST];
    PyObject *variable[MOST][3];
    function count_function_modes;
    PyObject *function_mode_at, *default_device_mode;
    /* What torch's C++ answers to the questions and to the count; NULL where it has to be asked by way of Python. */
    int64_t (*dispatch_modes)(void), (*function_modes)(void);
    void *const *(*trace)(void); /* where the pointer to the state of a trace is */
} listeners;

/*
 * Whether somebody listens who must see the operation, as fusednorm/listeners.py tells in detail; -1 with a
 * Python error. torch's own function mode for a default device, which a program leaves on, does not listen.
 */
static int somebody_listens(void) {
    if (listeners.trace) {
        if (listeners.dispatch_modes() || *listeners.trace()) return 1;
    } else {
        for (int i = 0; i < listeners.questions; i++) {
            int yes = answer(&listeners.question[i]);
            if (yes) return yes;
        }
    }
    for (int i = 0; i < listeners.variables; i++) {
        PyObject *const *variable = listeners.variable[i];
        /* The same object, which False and small integers are; anything else is answered in Python. */
        if (PyDict_GetItemWithError(variable[0], variable[1]) != variable[2]) return PyErr_Occurred() ? -1 : 1;
    }
    int64_t modes;
    if (listeners.function_modes) {
        modes = listeners.function_modes();
    } else {
        PyObject *count = call_function(&listeners.count_function_modes, NULL);
        if (!count) return -1;
        modes = PyLong_AsLongLong(count);
        Py_DECREF(count);
    }
    if (modes != 1) return modes != 0;
    PyObject *zero = PyLong_FromLong(0);
    PyObject *mode = zero ? PyObject_CallFunctionObjArgs(listeners.function_mode_at, zero, NULL) : NULL;
    Py_XDECREF(zero);
    if (!mode) return -1;
    int ours = (PyObject *)Py_TYPE(mode) == listeners.default_device_mode;
    Py_DECREF(mode);
    return !ours;
}

/* Keeps the tuples of fusednorm/listeners.py; whether they are of its form. */
static int open_listeners(PyObject *questions, PyObject *variables, PyObject *function_modes, PyObject *in_cpp) {
    unsigned long long address[3];
    if (!PyArg_ParseTuple(in_cpp, "KKK", &address[0], &address[1], &address[2])) return 0;
    listeners.dispatch_modes = (int64_t (*)(void))(uintptr_t)address[0];
    listeners.function_modes = (int64_t (*)(void))(uintptr_t)address[1];
    listeners.trace = (void *const *(*)(void))(uintptr_t)address[2];
    listeners.questions = (int)PyTuple_Size(questions), listeners.variables = (int)PyTuple_Size(variables);
    if (listeners.questions > MOST || listeners.variables > MOST || PyTuple_Size(function_modes) != 3) return 0;
    for (int i = 0; i < listeners.questions; i++) listeners.question[i] = function_of(PyTuple_GetItem(questions, i), METH_NOARGS);
    for (int i = 0; i < listeners.variables; i++) {
        PyObject **variable = listeners.variable[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(variables, i), "O!OO", &PyDict_Type, &variable[0], &variable[1], &variable[2]))
            return 0;
        for (int j = 0; j < 3; j++) Py_INCREF(variable[j]);
    }
    listeners.count_function_modes = function_of(PyTuple_GetItem(function_modes, 0), METH_NOARGS);
    listeners.function_mode_at = Py_NewRef(PyTuple_GetItem(function_modes, 1));
    listeners.default_device_mode = Py_NewRef(PyTuple_GetItem(function_modes, 2));
    return 1;
}

/* None: the caller must go beyond the fast path. */
static PyObject *long_way(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

/* Python's arguments: the operands that users may give, then these. */
enum { EPS = RESIDUAL_OUT + 1, WEIGHT_OFFSET, ROUND_SUM, ROUND_NORM, ROOTS, ASK, ARGUMENTS };

/* An operand's memory: rows of `bytes` bytes, `step` bytes apart. */
typedef struct {
    uintptr_t begin;
    int64_t rows, step, bytes;
} extent;

static extent extent_of(const call *c, int i) {
    const operand *o = &c->o[i];
    int64_t item = fn_item_bytes(o);
    return (extent){fn_address(o), i == WEIGHT ? 1 : c->rows, o->stride * item, c->hidden * item};
}

/* Whether two operands share no memory, as far as that is quickly told: apart, or columns of one matrix. */
static int apart(extent a, extent b) {
    if (a.begin + (a.rows - 1) * a.step + a.bytes <= b.begin) return 1;
    if (b.begin + (b.rows - 1) * b.step + b.bytes <= a.begin) return 1;
    if (a.step != b.step || a.step == 0) return 0;
    int64_t between = (int64_t)(b.begin - a.begin) % a.step;
    if (between < 0) between += a.step;
    return a.bytes <= between && between + b.bytes <= a.step;
}

/* Whether the outputs' rows share memory with each other, or with an operand other than exactly x or the residual. */
static int overlap(const call *c) {
    for (int out = OUT; out <= RESIDUAL_OUT; out++) {
        if (!c->o[out].kind) continue;
        extent a = extent_of(c, out);
        if (a.rows > 1 && a.step < a.bytes) return 1;
        for (int i = X; i < out; i++) {
            if (!c->o[i].kind) continue;
            extent b = extent_of(c, i);
            int same = a.begin == b.begin && a.step == b.step && c->o[out].kind == c->o[i].kind;
            if (!(same && i < WEIGHT) && !apart(a, b)) return 1;
        }
    }
    return 0;
}

/* Runs a kernel of the C library; nonzero if it refuses, or -1 with a Python error. */
static int run(const call *c) {
    int threads = c->rows > 1 ? fn_threads(c->rows * c->hidden) : 1;
    if (threads < 0) return -1;
    const operand *o = c->o;
    /* Of short calls, letting go of the interpreter and waiting for it again would be the longer part. */
    PyThreadState *state = c->rows * c->hidden >= FN_PARALLEL_ELEMENTS ? PyEval_SaveThread() : NULL;
    int failed = forward_on_cpu(o[X].kind, o[RESIDUAL].kind, o[WEIGHT].kind, o[OUT].kind, c->flags, fn_address(&o[X]),
                                fn_address(&o[RESIDUAL]), fn_address(&o[WEIGHT]), fn_address(&o[OUT]),
                                fn_address(&o[RESIDUAL_OUT]), fn_address(&o[RSTD]), c->rows, c->hidden, o[X].stride,
                                o[RESIDUAL].stride, o[OUT].stride, o[RESIDUAL_OUT].stride, c->eps, c->weight_offset,
                                threads);
    if (state) PyEval_RestoreThread(state);
    return failed;
}

/* `devices` is a number with a bit for each type of device (as DLPack numbers them, and PROGRAMS) whose tensors are taken. */
static PyObject *forward(PyObject *devices, PyObject *const *arguments, Py_ssize_t count) {
    call c;
    operand *o = c.o;
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "forward takes %d arguments, got %zd", ARGUMENTS, count);
        return NULL;
    }
    if (Py_TYPE(arguments[EPS]) != &PyFloat_Type || Py_TYPE(arguments[WEIGHT_OFFSET]) != &PyFloat_Type)
        return long_way();
    if (!PyBool_Check(arguments[ROUND_SUM]) || !PyBool_Check(arguments[ROUND_NORM])) return long_way();
    if (!fn_read(arguments[X], &o[X]) || o[X].t.ndim == 0) return long_way();
    const long taken = PyLong_AsLong(devices);
    const int on_cpu = o[X].t.device.type == DL_CPU, programs = on_cpu && taken >> PROGRAMS & 1;
    if (o[X].t.device.type > DL_CUDA || !(programs || taken >> o[X].t.device.type & 1)) return long_way();
    for (int i = RESIDUAL; i < OPERANDS; i++) {
        PyObject *given = arguments[i == RSTD ? ROOTS : i];
        o[i].kind = FN_NONE;
        o[i].stride = 0;
        if (given == Py_None) continue;
        int same = i == OUT ? X : RESIDUAL; /* in place */
        if ((i == OUT || i == RESIDUAL_OUT) && given == arguments[same]) o[i] = o[same];
        else if (!fn_read(given, &o[i])) return long_way();
        if (!fn_same_device(&o[i], &o[X])) return long_way();
        if (i != WEIGHT && i != RSTD && !fn_same_shape(&o[i], &o[X])) return long_way();
        if (o[i].kind == FN_F64 && o[X].kind != FN_F64) return long_way();
    }
    if (o[RESIDUAL_OUT].kind && o[RESIDUAL_OUT].kind != o[RESIDUAL].kind) return long_way();
    c.hidden = o[X].t.shape[o[X].t.ndim - 1];
    c.rows = 1;
    for (int i = 0; i < o[X].t.ndim - 1; i++) c.rows *= o[X].t.shape[i];
    /* Of one element a tensor may be a lazy negative and yet contiguous. */
    if (c.hidden == 1 || (o[WEIGHT].kind && (o[WEIGHT].t.ndim != 1 || o[WEIGHT].t.shape[0] != c.hidden)))
        return long_way();
    if (o[RSTD].kind &&
        (o[RSTD].kind != (o[X].kind == FN_F64 ? FN_F64 : FN_F32) || fn_elements(&o[RSTD]) != c.rows))
        return long_way();

    int others = arguments[ASK] == Py_True ? somebody_listens() : 0;
    if (!others) others = records_gradient(arguments, EPS);
    if (others < 0) return NULL;
    if (others) return long_way();
    c.flags = (arguments[ROUND_SUM] == Py_True ? FN_ROUND_SUM : 0) |
              (arguments[ROUND_NORM] == Py_True ? FN_ROUND_NORM : 0);
    c.eps = PyFloat_AsDouble(arguments[EPS]);
    c.weight_offset = PyFloat_AsDouble(arguments[WEIGHT_OFFSET]);
    const uintptr_t program = programs ? fn_held_program(&c) : 0;
    if (programs && !program) return long_way();

    PyObject *result = NULL, *outputs[2] = {NULL, NULL};
    int written[2] = {o[OUT].kind, o[RESIDUAL_OUT].kind};
    int failed = 0;
    for (int i = OUT; i <= RESIDUAL_OUT; i++) {
        PyObject **output = &outputs[i - OUT];
        if (written[i - OUT] || (i == RESIDUAL_OUT && !o[RESIDUAL].kind)) {
            *output = Py_NewRef(arguments[i]);
        } else {
            *output = PyObject_CallFunctionObjArgs(empty_like, arguments[i - OUT], NULL);
            if (!*output) goto end;
            failed |= !fn_read(*output, &o[i]);
            if (PyErr_Occurred()) goto end;
            if (!failed && o[i].t.device.type == DL_CPU)
                fn_expect_writes(fn_address(&o[i]), c.rows * c.hidden * fn_item_bytes(&o[i]));
        }
    }
    failed = failed || overlap(&c);
    if (!failed) failed = program ? fn_run_program(&c, program) : on_cpu ? run(&c) : fn_launch(&c);
    if (failed < 0) goto end;
    if (failed) {
        result = long_way();
        goto end;
    }
    if (written[0] || written[1]) { /* as every operation of torch's does that writes to a tensor */
        PyObject *both = written[0] && written[1] ? PyTuple_Pack(2, outputs[0], outputs[1])
                                                  : PyTuple_Pack(1, outputs[written[0] ? 0 : 1]);
        PyObject *none = both ? call_function(&increment_version, both) : NULL;
        Py_XDECREF(both);
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
    PyObject *capsule, *types[2], *callables[4], *asked[4];
    if (!PyArg_ParseTuple(arguments, "OOOOOOOO!O!O!O!", &capsule, &types[0], &types[1], &callables[0], &callables[1],
                          &callables[2], &callables[3], &PyTuple_Type, &asked[0], &PyTuple_Type, &asked[1],
                          &PyTuple_Type, &asked[2], &PyTuple_Type, &asked[3]))
        return NULL;
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api")) Py_RETURN_FALSE; /* add-ons to older torch set others */
    const exchange_api *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found) return NULL;
    if (found->version.major != DL_MAJOR || !found->tensor_from) Py_RETURN_FALSE;
    requires_grad = PyObject_GetAttrString(types[0], "requires_grad");
    if (requires_grad) get_requires_grad = (descrgetfunc)PyType_GetSlot(Py_TYPE(requires_grad), Py_tp_descr_get);
    plain_types = PyTuple_Pack(2, types[0], types[1]); /* keeps them alive, as this module is never unloaded */
    if (!requires_grad || !get_requires_grad || !plain_types) return NULL;
    tensor_type = (PyTypeObject *)types[0];
    parameter_type = (PyTypeObject *)types[1];
    is_grad_enabled = function_of(callables[0], METH_NOARGS);
    get_num_threads = Py_NewRef(callables[1]);
    empty_like = Py_NewRef(callables[2]);
    increment_version = function_of(callables[3], METH_O);
    if (!open_listeners(asked[0], asked[1], asked[2], asked[3])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "questions, variables or function modes of another form");
        return NULL;
    }
    fn_exchange_api = found;
    Py_RETURN_TRUE;
}

static PyObject *open_cpu(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long forward_address, backward_address;
    if (!PyArg_ParseTuple(arguments, "KK", &forward_address, &backward_address)) return NULL;
    forward_on_cpu = (fn_forward_fn *)(uintptr_t)forward_address;
    fn_backward_on_cpu = (fn_backward_fn *)(uintptr_t)backward_address;
    Py_RETURN_NONE;
}

static PyMethodDef forward_method = {
    "forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL,
    "forward(x, residual, weight, out, residual_out, eps, weight_offset, round_sum, round_norm, rstd)\n--\n\n"
    "The outputs (any operand but x may be None), or None if nothing was done and the call must go the long way."};

static PyObject *way(PyObject *module, PyObject *arguments) {
    (void)module;
    int cpu, cuda, triton_cpu;
    if (!PyArg_ParseTuple(arguments, "ppp", &cpu, &cuda, &triton_cpu)) return NULL;
    if (!fn_exchange_api || (cpu && !forward_on_cpu)) {
        PyErr_SetString(PyExc_RuntimeError, "the quick way is not open");
        return NULL;
    }
    PyObject *devices = PyLong_FromLong((cpu ? 1 << DL_CPU : 0) | (cuda ? 1 << DL_CUDA : 0) | (triton_cpu ? 1 << PROGRAMS : 0));
    if (!devices) return NULL;
    PyObject *function = PyCFunction_NewEx(&forward_method, devices, NULL);
    Py_DECREF(devices);
    return function;
}

static PyMethodDef methods[] = {
    {"open", open_way, METH_VARARGS,
     "open(exchange API, Tensor, Parameter, is_grad_enabled, get_num_threads, empty_like, increment_version, "
     "questions, variables, function modes, addresses in C++)\n--\n\n"
     "Whether this version of the exchange API is understood."},
    {"open_cpu", open_cpu, METH_VARARGS, "open_cpu(addresses of fn_forward and fn_backward)\n--\n\nLets CPU tensors through."},
    {"open_cuda", fn_open_cuda, METH_VARARGS,
     "open_cuda(addresses of cuLaunchKernelEx, cuCtxGetDevice, cuCtxPushCurrent and cuCtxPopCurrent)\n--\n\n"
     "Lets tensors on NVIDIA GPUs through; forgets the kernels held."},
    {"hold", fn_hold, METH_VARARGS,
     "hold(device, its primary context, kinds of the operands, options, hidden size, alignment, kernels)\n--\n\n"
     "Has calls of this kind launch these. See quick_cuda.c for the numbers."},
    {"open_programs", fn_open_programs, METH_VARARGS,
     "open_programs(address of fn_run_forward, the longest rows)\n--\n\nLets CPU tensors through to Triton's kernels."},
    {"hold_program", fn_hold_program, METH_VARARGS,
     "hold_program(kinds of x, residual, weight and out, flags, kernel)\n--\n\nHas calls of this kind run this kernel."},
    {"backward", (PyCFunction)(void (*)(void))fn_backward_quickly, METH_FASTCALL,
     "backward(type of device, dy, d_total, h, rstd, weight, dx, dresidual, partial, dweight, rows of a block, "
     "weight_offset)\n--\n\nWhether the gradients were written; if not, the call must go the long way."},
    {"way", way, METH_VARARGS, "way(cpu, cuda, triton_cpu)\n--\n\nA function `forward` for tensors on these devices."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_quick", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__quick(void) {
    PyObject *module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    /* What is static is written while the module that opens the way is imported; quick_cuda.c locks its kernels. */
    if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0) Py_CLEAR(module);
#endif
    return module;
}
