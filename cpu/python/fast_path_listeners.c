/* Whether a listener must see a call, as fusednorm/calls/must_be_seen.py tells. */
#include "python/fast_path.h"

/* What fusednorm/calls/must_be_seen.py asks: functions, and dictionary, name and value of variables. */
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

/* As fusednorm/calls/must_be_seen.py tells in detail. torch's own function mode for a default device, which a program leaves on, does not listen. */
int fn_is_heard(void) {
    if (listeners.trace) {
        if (listeners.dispatch_modes() || *listeners.trace()) return 1;
    } else {
        for (int i = 0; i < listeners.questions; i++) {
            int yes = fn_answer(&listeners.question[i]);
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
        PyObject *count = fn_call_function(&listeners.count_function_modes, NULL);
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

/* Keeps the tuples of fusednorm/calls/must_be_seen.py; whether they are of its form. */
int fn_open_listeners(PyObject *questions, PyObject *variables, PyObject *function_modes, PyObject *in_cpp) {
    unsigned long long address[3];
    if (!PyArg_ParseTuple(in_cpp, "KKK", &address[0], &address[1], &address[2])) return 0;
    listeners.dispatch_modes = (int64_t (*)(void))(uintptr_t)address[0];
    listeners.function_modes = (int64_t (*)(void))(uintptr_t)address[1];
    listeners.trace = (void *const *(*)(void))(uintptr_t)address[2];
    listeners.questions = (int)PyTuple_Size(questions), listeners.variables = (int)PyTuple_Size(variables);
    if (listeners.questions > MOST || listeners.variables > MOST || PyTuple_Size(function_modes) != 3) return 0;
    for (int i = 0; i < listeners.questions; i++) listeners.question[i] = fn_function_of(PyTuple_GetItem(questions, i), METH_NOARGS);
    for (int i = 0; i < listeners.variables; i++) {
        PyObject **variable = listeners.variable[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(variables, i), "O!OO", &PyDict_Type, &variable[0], &variable[1], &variable[2]))
            return 0;
        for (int j = 0; j < 3; j++) Py_INCREF(variable[j]);
    }
    listeners.count_function_modes = fn_function_of(PyTuple_GetItem(function_modes, 0), METH_NOARGS);
    listeners.function_mode_at = Py_NewRef(PyTuple_GetItem(function_modes, 1));
    listeners.default_device_mode = Py_NewRef(PyTuple_GetItem(function_modes, 2));
    return 1;
}
