/* The interpreter: its functions, called from C, and its lock; and calls that Python has packed. */
#include "python/fast_path.h"

#include <string.h>

static PyObject *get_num_threads;

void fn_open_threads(PyObject *found) { get_num_threads = Py_NewRef(found); }

function fn_function_of(PyObject *object, int flags) {
    function f = {Py_NewRef(object), NULL};
    if (PyCFunction_CheckExact(object) && PyCFunction_GetFlags(object) == flags) f.in_c = PyCFunction_GetFunction(object);
    return f;
}

PyObject *fn_call_function(const function *f, PyObject *argument) {
    if (f->in_c) return f->in_c(PyCFunction_GetSelf(f->object), argument);
    return argument ? PyObject_CallFunctionObjArgs(f->object, argument, NULL) : PyObject_CallNoArgs(f->object);
}

int fn_truth(PyObject *new_reference) {
    if (!new_reference) return -1;
    int value = PyObject_IsTrue(new_reference);
    Py_DECREF(new_reference);
    return value;
}

int fn_answer(const function *question) { return fn_truth(fn_call_function(question, NULL)); }

PyObject *fn_refuse(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

PyObject *fn_was_made(int failed) { return PyErr_Occurred() ? NULL : PyBool_FromLong(!failed); }

int fn_takes(const char *function, Py_ssize_t count, int wanted) {
    if (count != wanted) PyErr_Format(PyExc_TypeError, "%s takes %d arguments, got %zd", function, wanted, count);
    return count == wanted;
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
                                : last->flags & FN_DECLARED_ONLY ? sizeof(struct fn_declared)
                                                         : 0;
            if (size == of_calls + more) return 1;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "a packed call has %zu bytes, and so has one that follows, a quantizer after them %zu, and a gate %zu; got %zu",
                 sizeof *calls, sizeof(struct fn_quantizer), sizeof(struct fn_gate), size);
    return 0;
}

/* As many as torch has; the library takes fewer where a call of this kind has less to divide. */
static int threads_of_torch(void) {
    PyObject *number = PyObject_CallNoArgs(get_num_threads);
    if (!number) return -1;
    int threads = (int)PyLong_AsLong(number);
    Py_DECREF(number);
    return threads;
}

int fn_run_in_c(struct fn_call *c, fn_run_fn *run) {
    if (!run) return 1;
    /* Of short calls, asking torch, letting go of the interpreter and waiting for it again would be the longer part. */
    const int is_short = c->rows * c->hidden < FN_PARALLEL_ELEMENTS;
    c->threads = is_short ? 1 : threads_of_torch();
    if (c->threads < 0) return -1;
    PyThreadState *state = is_short ? NULL : PyEval_SaveThread();
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
