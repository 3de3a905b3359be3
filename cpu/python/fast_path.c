/*
 * The fast path from Python into the C library, and to kernels of CUDA's and Triton's: at decode sizes a call lasts as
 * long as its checks, and a Python attribute costs 50 ns. The fast path takes plain tensors whose rows are one stride
 * apart, without a gradient to record; on a GPU it needs a kernel that was loaded before. For any other call it returns
 * None, and Python makes the call.
 */
#include "python/fast_path.h"

#include <string.h>

#include "launch/triton.h"
#include "machine/pages.h"

fn_run_fn *fn_run_on_cpu;
fn_run_rotation_fn *fn_rotate_on_cpu;
static PyObject *plain_types, *get_num_threads, *empty_like, *new_empty, *requires_grad;

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

int fn_unpack(PyObject *bytes, struct fn_call *calls) {
    const size_t size = (size_t)PyBytes_Size(bytes);
    if (size >= sizeof *calls && size <= FN_PACKED * sizeof *calls) {
        memcpy(calls, PyBytes_AsString(bytes), size);
        const size_t count = calls->following ? FN_CHAIN : 1, of_calls = count * sizeof *calls;
        if (size >= of_calls) {
            const struct fn_call *last = &calls[count - 1];
            const size_t more = fn_quantizer_after(last) ? sizeof(struct fn_quantizer)
                                : fn_gate_after(last)    ? sizeof(struct fn_gate)
                                : last->flags & FN_ROTATION_ONLY ? sizeof(struct fn_rotation)
                                                         : 0;
            if (size == of_calls + more) return 1;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "a packed call has %zu bytes, and so has one that follows, a quantizer after them %zu, and a gate %zu; got %zu",
                 sizeof *calls, sizeof(struct fn_quantizer), sizeof(struct fn_gate), size);
    return 0;
}

/* As many as torch has, where more than one pays. */
int fn_threads(int64_t rows, int64_t elements) {
    if (rows == 1 || elements < FN_PARALLEL_ELEMENTS) return 1;
    PyObject *number = PyObject_CallNoArgs(get_num_threads);
    if (!number) return -1;
    int threads = (int)PyLong_AsLong(number);
    Py_DECREF(number);
    return threads;
}

int fn_run_in_c(struct fn_call *c, fn_run_fn *run) {
    if (!run) return 1;
    c->threads = fn_threads(c->rows, c->rows * c->hidden);
    if (c->threads < 0) return -1;
    /* Of short calls, letting go of the interpreter and waiting for it again would be the longer part. */
    PyThreadState *state = c->rows * c->hidden >= FN_PARALLEL_ELEMENTS ? PyEval_SaveThread() : NULL;
    int failed = run(c);
    if (state) PyEval_RestoreThread(state);
    return failed;
}

#ifdef Py_GIL_DISABLED
static PyMutex mutex;
void fn_lock(void) { PyMutex_Lock(&mutex); }
void fn_unlock(void) { PyMutex_Unlock(&mutex); }
#else
void fn_lock(void) {}
void fn_unlock(void) {}
#endif

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

/*
 * Python's arguments: the operands that users may give, then the others. Those from FIRST_WEIGHT on are of a norm of x
 * before the addition, if there is one: it has the flags and the weight_offset of the norm after the addition. Or the
 * arguments of a quantizer or of a gate follow the others.
 */
enum { EPS = FN_RESIDUAL_OUT + 1, WEIGHT_OFFSET, ROUND_SUM, ROUND_NORM, RSTD, ASK, BIAS, X_SCALE, ARGUMENTS };
enum { FIRST_WEIGHT = ARGUMENTS, FIRST_EPS, BETWEEN_IS_F32, NEXT_NORM, ARGUMENTS_OF_CHAIN };
enum { ARGUMENTS_OF_QUANTIZER = ARGUMENTS + FN_QUANTIZER_ARGUMENTS }; /* see fast_path_quantized.c */
enum { ARGUMENTS_OF_GATE = ARGUMENTS + FN_GATE_ARGUMENTS }; /* see fast_path_gated.c */

static function is_grad_enabled, is_inference_mode_enabled, increment_version;
static descrgetfunc get_requires_grad; /* of the descriptor `requires_grad`, which Python would look up each time */

/* 1 or 0, or -1 with a Python error set. */
static int truth(PyObject *new_reference) {
    if (!new_reference) return -1;
    int value = PyObject_IsTrue(new_reference);
    Py_DECREF(new_reference);
    return value;
}

static int answer(const function *question) { return truth(call_function(question, NULL)); }

static int requires_gradient(PyObject *operand) {
    if (operand == Py_None) return 0;
    if (!PyObject_TypeCheck(operand, fn_tensor_type)) return 1; /* Python says what it must be */
    return truth(get_requires_grad(requires_grad, operand, (PyObject *)fn_tensor_type));
}

int fn_records_gradient(PyObject *const *operands, Py_ssize_t count) {
    int records = answer(&is_grad_enabled);
    for (Py_ssize_t i = 0; records > 0 && i < count; i++) {
        const int needed = requires_gradient(operands[i]);
        if (needed) return needed;
    }
    return records < 0 ? records : 0;
}

/* Whether autograd would have to know of the call. An output in place was looked at as x or the residual. */
static int records_gradient(PyObject *const *arguments, Py_ssize_t count) {
    PyObject *operands[EPS + 2];
    int number = 0;
    for (int i = 0; i < EPS; i++)
        if (i < FN_OUT || arguments[i] != arguments[i - FN_OUT]) operands[number++] = arguments[i];
    operands[number++] = arguments[BIAS];
    if (count == ARGUMENTS_OF_GATE) operands[number++] = arguments[ARGUMENTS];
    if (count == ARGUMENTS_OF_CHAIN) operands[number++] = arguments[FIRST_WEIGHT];
    return fn_records_gradient(operands, number);
}

/* What fusednorm/calls/listeners.py asks: functions, and dictionary, name and value of variables. */
enum { MOST = 4 };
static struct {
    int questions, variables;
    function question[MOST];
    PyObject *variable[MOST][3];
    function count_function_modes;
    PyObject *function_mode_at, *default_device_mode;
    /* torch's C++ functions for the questions and the count; NULL where Python's functions must be called. */
    int64_t (*dispatch_modes)(void), (*function_modes)(void);
    void *const *(*trace)(void); /* where the pointer to the state of a trace is */
} listeners;

/* As fusednorm/calls/listeners.py tells in detail. torch's own function mode for a default device, which a program leaves on, does not listen. */
int fn_is_heard(void) {
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

/* Keeps the tuples of fusednorm/calls/listeners.py; whether they are of its form. */
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

/* None: Python must make the call. */
static PyObject *refuse(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

/* Whether the outputs' rows share memory with each other, or with an operand other than exactly x or the residual. */
static int overlap(const struct fn_call *c, const struct fn_call *first) {
    const struct fn_operand *o = c->operand;
    for (int out = FN_OUT; out <= FN_RESIDUAL_OUT; out++) {
        if (!o[out].kind) continue;
        fn_extent a = fn_extent_of(c, out);
        if (a.rows > 1 && a.step < a.bytes) return 1;
        for (int i = FN_X; i < out; i++) {
            if (!o[i].kind) continue;
            fn_extent b = fn_extent_of(c, i);
            int same = a.begin == b.begin && a.step == b.step && o[out].kind == o[i].kind;
            if (!(same && i < FN_WEIGHT) && !fn_apart(a, b)) return 1;
        }
        if (o[FN_BIAS].kind && !fn_apart(a, fn_extent_of(c, FN_BIAS))) return 1;
        if (first && first->operand[FN_WEIGHT].kind && !fn_apart(a, fn_extent_of(first, FN_WEIGHT))) return 1;
    }
    return 0;
}

/* Whether a weight or a bias fits x: a row for all heads, or a row for each of x's last dimension but one. */
static int fits(const tensor *t, const tensor *x, struct fn_call *c, int operand, int of_heads) {
    if (t->ndim == 1) {
        c->operand[operand].stride = 0;
        return t->shape[0] == c->hidden;
    }
    if (!of_heads || t->ndim != 2 || x->ndim < 2 || t->shape[1] != c->hidden || t->shape[0] != x->shape[x->ndim - 2]) return 0;
    c->heads = t->shape[0];
    return 1;
}

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, tensor *t, struct fn_call *c) {
    struct fn_operand *o = c->operand;
    if (Py_TYPE(arguments[EPS]) != &PyFloat_Type || Py_TYPE(arguments[WEIGHT_OFFSET]) != &PyFloat_Type ||
        Py_TYPE(arguments[X_SCALE]) != &PyFloat_Type)
        return 0;
    if (!PyBool_Check(arguments[ROUND_SUM]) || !PyBool_Check(arguments[ROUND_NORM])) return 0;
    if (!fn_read(arguments[FN_X], &t[FN_X], &o[FN_X]) || t[FN_X].ndim == 0) return 0;
    for (int i = FN_RESIDUAL; i < FN_FORWARD_OPERANDS_IN_C; i++) {
        PyObject *given = arguments[i == FN_RSTD ? RSTD : i == FN_BIAS ? BIAS : i];
        o[i] = (struct fn_operand){.kind = FN_NONE};
        if (given == Py_None) continue;
        int same = i == FN_OUT ? FN_X : FN_RESIDUAL; /* in place */
        if ((i == FN_OUT || i == FN_RESIDUAL_OUT) && given == arguments[same]) o[i] = o[same], t[i] = t[same];
        else if (!fn_read(given, &t[i], &o[i])) return 0;
        if (!fn_same_device(&t[i], &t[FN_X])) return 0;
        if (i != FN_WEIGHT && i < FN_RSTD && !fn_same_shape(&t[i], &t[FN_X])) return 0;
        if (o[i].kind == FN_F64 && o[FN_X].kind != FN_F64) return 0;
    }
    if (o[FN_RESIDUAL_OUT].kind && o[FN_RESIDUAL_OUT].kind != o[FN_RESIDUAL].kind) return 0;
    c->pass = FN_FORWARD;
    c->device = t[FN_X].device.id;
    c->hidden = t[FN_X].shape[t[FN_X].ndim - 1];
    c->rows = 1;
    for (int i = 0; i < t[FN_X].ndim - 1; i++) c->rows *= t[FN_X].shape[i];
    c->inner = c->rows;
    c->block = c->following = 0;
    c->heads = 1;
    const int public = arguments[ASK] == Py_True; /* the operators of torch.ops have one row for all heads */
    if (o[FN_WEIGHT].kind && !fits(&t[FN_WEIGHT], &t[FN_X], c, FN_WEIGHT, public)) return 0;
    if (o[FN_BIAS].kind && !fits(&t[FN_BIAS], &t[FN_X], c, FN_BIAS, public)) return 0;
    if (o[FN_RSTD].kind && (o[FN_RSTD].kind != (o[FN_X].kind == FN_F64 ? FN_F64 : FN_F32) || fn_elements(&t[FN_RSTD]) != c->rows))
        return 0;
    c->flags = (arguments[ROUND_SUM] == Py_True ? FN_ROUND_SUM : 0) |
               (arguments[ROUND_NORM] == Py_True ? FN_ROUND_NORM : 0);
    c->eps = PyFloat_AsDouble(arguments[EPS]);
    c->weight_offset = PyFloat_AsDouble(arguments[WEIGHT_OFFSET]);
    return 1;
}

/* A call before the one that is read already: it takes x, and its rows pass to the next one. */
static void put_before(const struct fn_call *next, struct fn_call *c, int64_t passed_kind) {
    struct fn_operand *o = c->operand;
    *c = *next;
    o[FN_RESIDUAL] = o[FN_WEIGHT] = o[FN_RESIDUAL_OUT] = o[FN_RSTD] = o[FN_BIAS] = (struct fn_operand){.kind = FN_NONE};
    o[FN_OUT] = (struct fn_operand){.kind = passed_kind, .stride = c->hidden};
    c->following = c->heads = 1;
}

/* Reads the arguments of a norm before the addition. Returns 0 as read_arguments does. */
static int read_first_norm(PyObject *const *arguments, const tensor *x, const struct fn_call *next, struct fn_call *c) {
    struct fn_operand *o = c->operand;
    if (Py_TYPE(arguments[FIRST_EPS]) != &PyFloat_Type || !PyBool_Check(arguments[BETWEEN_IS_F32])) return 0;
    put_before(next, c, arguments[BETWEEN_IS_F32] == Py_True ? FN_F32 : next->operand[FN_X].kind);
    if (arguments[FIRST_WEIGHT] != Py_None) {
        tensor t;
        if (!fn_read(arguments[FIRST_WEIGHT], &t, &o[FN_WEIGHT]) || !fn_same_device(&t, x)) return 0;
        if (!fits(&t, x, c, FN_WEIGHT, 0) || (o[FN_WEIGHT].kind == FN_F64 && o[FN_X].kind != FN_F64)) return 0;
    }
    c->eps = PyFloat_AsDouble(arguments[FIRST_EPS]);
    /* A float64 x, and a sum without a residual: Python reports the errors. */
    return next->operand[FN_RESIDUAL].kind && !(o[FN_X].kind == FN_F64 && o[FN_OUT].kind == FN_F32);
}

/* x times a factor before the addition. */
static void scale_first(double factor, const struct fn_call *next, struct fn_call *c) {
    put_before(next, c, next->operand[FN_X].kind);
    c->flags = FN_SCALE_ONLY;
    c->eps = factor;
}

PyObject *fn_empty_like(PyObject *x) { return PyObject_CallFunctionObjArgs(empty_like, x, NULL); }

/* Allocates the outputs that are not given. Returns 0, or nonzero if one is no plain tensor, or -1 with a Python error. */
static int allocate(PyObject *const *arguments, PyObject *outputs[2], struct fn_call *c, int normalises) {
    const int wanted[2] = {normalises, c->operand[FN_RESIDUAL].kind != FN_NONE};
    for (int i = FN_OUT; i <= FN_RESIDUAL_OUT; i++) {
        struct fn_operand *o = &c->operand[i];
        if (o->kind || !wanted[i - FN_OUT]) {
            outputs[i - FN_OUT] = Py_NewRef(arguments[i]);
            continue;
        }
        tensor t;
        PyObject *output = outputs[i - FN_OUT] = fn_empty_like(arguments[i - FN_OUT]);
        if (!output) return -1;
        if (!fn_read(output, &t, o)) return PyErr_Occurred() ? -1 : 1;
        if (t.device.type == DL_CPU) fn_expect_writes(o->address, c->rows * c->hidden * fn_element_size(o->kind));
    }
    return 0;
}

int fn_run_on_device(struct fn_call *c, const tensor *x, int triton) {
    if (triton) return fn_run_triton_kernel(c);
    if (x->device.type == DL_CPU) return fn_run_in_c(c, fn_run_on_cpu);
    void *stream;
    if (!fn_exchange_api->current_stream || fn_exchange_api->current_stream(DL_CUDA, x->device.id, &stream)) return 1;
    return fn_launch_cuda(c, stream) != FN_LAUNCHED;
}

int fn_refuses_writes(PyObject *const *outputs, const int *written, int count) {
    for (int i = 0; i < count; i++) {
        const int inference = written[i] ? fn_is_inference(outputs[i]) : 0;
        if (inference < 0) return -1;
        if (inference) {
            const int allowed = answer(&is_inference_mode_enabled);
            return allowed < 0 ? -1 : !allowed;
        }
    }
    return 0;
}

int fn_count_writes(PyObject *const *outputs, const int *written, int count) {
    int number = 0;
    for (int i = 0; i < count; i++) number += written[i];
    if (!number) return 0;
    PyObject *all = PyTuple_New(number);
    for (int i = count; all && i-- > 0;)
        if (written[i] && PyTuple_SetItem(all, --number, Py_NewRef(outputs[i]))) Py_CLEAR(all);
    PyObject *none = all ? call_function(&increment_version, all) : NULL;
    Py_XDECREF(all);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* `devices` has a bit for each type of device (as DLPack numbers them, and TRITON_CPU) whose tensors are taken. */
static PyObject *forward(PyObject *devices, PyObject *const *arguments, Py_ssize_t count) {
    struct fn_call calls[FN_CHAIN], *c = &calls[1], *first = NULL;
    struct fn_quantized quantized;
    struct fn_gated gated;
    tensor t[FN_FORWARD_OPERANDS_IN_C];
    if (count == FN_ROTATION_ARGUMENTS) return fn_rotate(arguments, PyLong_AsLong(devices));
    if (count != ARGUMENTS && count != ARGUMENTS_OF_CHAIN && count != ARGUMENTS_OF_QUANTIZER && count != ARGUMENTS_OF_GATE) {
        PyErr_Format(PyExc_TypeError, "forward takes %d, %d, %d, %d or %d arguments, got %zd", ARGUMENTS, FN_ROTATION_ARGUMENTS,
                     ARGUMENTS_OF_CHAIN, ARGUMENTS_OF_GATE, ARGUMENTS_OF_QUANTIZER, count);
        return NULL;
    }
    const int quantizes = count == ARGUMENTS_OF_QUANTIZER, gates = count == ARGUMENTS_OF_GATE;
    if (quantizes) c = &quantized.call;
    if (gates) c = &gated.call;
    if (!read_arguments(arguments, t, c)) return refuse();
    if (quantizes && !fn_read_quantizer(arguments + ARGUMENTS, &t[FN_X], &quantized)) return refuse();
    if (gates && !fn_read_gate(arguments + ARGUMENTS, &t[FN_X], &gated)) return refuse();
    const double x_scale = PyFloat_AsDouble(arguments[X_SCALE]);
    if (count == ARGUMENTS_OF_CHAIN) {
        first = calls;
        if (!read_first_norm(arguments, &t[FN_X], c, first)) return refuse();
    } else if (x_scale != 1) {
        first = calls;
        scale_first(x_scale, c, first);
    }
    const int32_t device = t[FN_X].device.type;
    const long taken = PyLong_AsLong(devices);
    const int triton = device == DL_CPU && taken >> TRITON_CPU & 1;
    if (device > DL_CUDA || !(triton || taken >> device & 1)) return refuse();
    if (triton && (first || c->heads > 1 || c->operand[FN_BIAS].kind)) return refuse();
    int others = arguments[ASK] == Py_True ? fn_is_heard() : 0;
    if (!others) others = records_gradient(arguments, count);
    /* A gate's output must not require a gradient, whether gradients are recorded or not. */
    if (!others && gates) others = requires_gradient(arguments[ARGUMENTS + FN_GATE_OUT_ARGUMENT]);
    if (others < 0) return NULL;
    if (others || (triton && !gates && !quantizes && !fn_triton_has(c))) return refuse();
    if (gates) return fn_run_gated(arguments + ARGUMENTS, arguments[FN_X], &t[FN_X], &gated, triton);

    PyObject *result = NULL, *outputs[2] = {NULL, NULL};
    const int written[2] = {c->operand[FN_OUT].kind != FN_NONE, c->operand[FN_RESIDUAL_OUT].kind != FN_NONE};
    int failed = allocate(arguments, outputs, c, count == ARGUMENTS || (!quantizes && arguments[NEXT_NORM] == Py_True));
    if (!failed) failed = overlap(c, first);
    if (!failed) failed = fn_refuses_writes(outputs, written, 2);
    if (!failed && quantizes) {
        result = fn_quantize(arguments + ARGUMENTS, arguments[FN_X], &t[FN_X], &quantized, outputs[1], written[1], triton);
        Py_XDECREF(outputs[0]);
        Py_XDECREF(outputs[1]);
        return result;
    }
    if (first) c->operand[FN_X] = first->operand[FN_OUT];
    if (!failed) failed = fn_run_on_device(first ? first : c, &t[FN_X], triton);
    if (!failed) failed = fn_count_writes(outputs, written, 2);
    if (!failed) result = PyTuple_Pack(2, outputs[0], outputs[1]);
    else if (failed > 0) result = refuse();
    Py_XDECREF(outputs[0]);
    Py_XDECREF(outputs[1]);
    return result;
}

static PyObject *open_fast_path(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *capsule, *types[2], *callables[6], *asked[4], *operands;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOO!O!O!O!O!", &capsule, &types[0], &types[1], &callables[0], &callables[1],
                          &callables[2], &callables[3], &callables[4], &callables[5], &PyTuple_Type, &asked[0], &PyTuple_Type,
                          &asked[1], &PyTuple_Type, &asked[2], &PyTuple_Type, &asked[3], &PyTuple_Type, &operands))
        return NULL;
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api")) Py_RETURN_FALSE; /* other packages set other objects under this name */
    const exchange_api *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found) return NULL;
    if (found->version.major != DL_MAJOR || !found->tensor_from) Py_RETURN_FALSE;
    requires_grad = PyObject_GetAttrString(types[0], "requires_grad");
    if (requires_grad) get_requires_grad = (descrgetfunc)PyType_GetSlot(Py_TYPE(requires_grad), Py_tp_descr_get);
    plain_types = PyTuple_Pack(2, types[0], types[1]); /* keeps them alive, as this module is never unloaded */
    if (!requires_grad || !get_requires_grad || !plain_types) return NULL;
    fn_tensor_type = (PyTypeObject *)types[0];
    fn_parameter_type = (PyTypeObject *)types[1];
    is_grad_enabled = function_of(callables[0], METH_NOARGS);
    get_num_threads = Py_NewRef(callables[1]);
    empty_like = Py_NewRef(callables[2]);
    new_empty = Py_NewRef(callables[3]);
    increment_version = function_of(callables[4], METH_O);
    is_inference_mode_enabled = function_of(callables[5], METH_NOARGS);
    if (!fn_open_operands(operands)) return NULL;
    if (!open_listeners(asked[0], asked[1], asked[2], asked[3])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "questions, variables or function modes of another form");
        return NULL;
    }
    fn_exchange_api = found;
    Py_RETURN_TRUE;
}

static PyObject *open_cpu(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long run, rotate;
    if (!PyArg_ParseTuple(arguments, "KK", &run, &rotate)) return NULL;
    fn_run_on_cpu = (fn_run_fn *)(uintptr_t)run;
    fn_rotate_on_cpu = (fn_run_rotation_fn *)(uintptr_t)rotate;
    Py_RETURN_NONE;
}

static PyMethodDef forward_method = {
    "forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL,
    "forward(x, residual, weight, out, residual_out, eps, weight_offset, round_sum, round_norm, rstd, ask, bias, x_scale[, "
    "first_weight, first_eps, between_is_float32, next_norm | packed, between_is_float32, normalises, scale, out, scale_out | gate, "
    "activation, how, group_size, out])\n"
    "forward(q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out, eps, weight_offset, norm, interleaved, "
    "round_products, between_is_float32, round_norm)\n--\n\nThe outputs (any operand but x and q may be None), or None "
    "if nothing was done and Python must make the call. The last arguments of the first form ask for a norm of x before the "
    "addition, and say whether a norm follows the addition; or they ask for a quantizer; or for a gate, and then the output "
    "alone is returned. The second form rotates heads."};

static PyObject *forward_on(PyObject *module, PyObject *arguments) {
    (void)module;
    int cpu, cuda, triton_cpu;
    if (!PyArg_ParseTuple(arguments, "ppp", &cpu, &cuda, &triton_cpu)) return NULL;
    if (!fn_exchange_api || (cpu && !fn_run_on_cpu)) {
        PyErr_SetString(PyExc_RuntimeError, "the fast path is not open");
        return NULL;
    }
    PyObject *devices =
        PyLong_FromLong((cpu ? 1 << DL_CPU : 0) | (cuda ? 1 << DL_CUDA : 0) | (triton_cpu ? 1 << TRITON_CPU : 0));
    if (!devices) return NULL;
    PyObject *function = PyCFunction_NewEx(&forward_method, devices, NULL);
    Py_DECREF(devices);
    return function;
}

static PyMethodDef methods[] = {
    {"open", open_fast_path, METH_VARARGS,
     "open(exchange API, Tensor, Parameter, is_grad_enabled, get_num_threads, empty_like, new_empty, increment_version, "
     "is_inference_mode_enabled, questions, variables, function modes, addresses in C++, what is asked of operands)\n--\n\n"
     "Whether this version of the exchange API is understood."},
    {"open_cpu", open_cpu, METH_VARARGS, "open_cpu(addresses of fn_run and fn_run_rotation)\n--\n\nLets CPU tensors through."},
    {"open_quantizer", fn_open_quantizer, METH_VARARGS,
     "open_quantizer(keywords of int8, uint8, float8_e4m3fn, float8_e5m2 and float32)\n--\n\nLets "
     "calls with a quantizer through."},
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
     "weight_offset)\n--\n\nWhether the gradients were written; if not, Python must make the call."},
    {"norm_gated_backward", (PyCFunction)(void (*)(void))fn_norm_gated_backward_on_fast_path, METH_FASTCALL,
     "norm_gated_backward(d, x, z, rstd, weight, dx, dz, dweight, activation, order, round_norm, weight_offset)\n--\n\n"
     "Whether the gradients of a norm with a gate were written."},
    {"gate_backward", (PyCFunction)(void (*)(void))fn_gate_backward_on_fast_path, METH_FASTCALL,
     "gate_backward(type of device, d, y, z, dy, dz, activation, number of the dtype between)\n--\n\nWhether the gradients of "
     "a gate were written; if not, Python must make the call."},
    {"forward_on", forward_on, METH_VARARGS,
     "forward_on(cpu, cuda, triton_cpu)\n--\n\nA function `forward` for tensors on these devices."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_fast_path", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__fast_path(void) {
    PyObject *module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    /* Static variables are written while the module that opens the fast path is imported; cuda_launch.c locks its kernels. */
    if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0) Py_CLEAR(module);
#endif
    return module;
}
