/*
 * The entries of the fast path: functions for Python, each with the arguments of a kind of call in an order of its own. A
 * public function has one, and so has the operator that compiled graphs call in its place.
 */
#include "python/fast_path.h"

#include <string.h>

static const char entry_of[] = "fusednorm entry";
enum { MOST = 28 }; /* arguments */

struct entry {
    const struct fn_call_kind *kind;
    int count, place[MOST];           /* of each argument among those of the kind; -1: C does not know it */
    int returned;                     /* the only result that is returned; -1: all */
    PyObject *filled, *fill[MOST];    /* a tuple, and what is in it: it stands for arguments of the kind that are not given */
    PyObject *names, *usual;          /* tuples: those of the arguments, and what one must be that C does not know */
    PyObject *request;                /* whose devices are taken; None: of the request in force */
    PyObject *recorded;               /* what makes a call whose gradients are recorded; None: as for the next */
    PyObject *otherwise;              /* what makes a call that the fast path refuses; None: None is returned */
};

static function current_request;
static PyObject *devices_of_requests;

/* The types of devices that are taken, as bits; -1 with a Python error. */
static long devices_of(const struct entry *e) {
    if (!devices_of_requests) return 0;
    PyObject *request = e->request != Py_None ? Py_NewRef(e->request) : fn_call_function(&current_request, NULL);
    if (!request) return -1;
    PyObject *devices = PyDict_GetItemWithError(devices_of_requests, request);
    Py_DECREF(request);
    return devices ? PyLong_AsLong(devices) : PyErr_Occurred() ? -1 : 0;
}

/* The place of a named argument; -1 if there is none of that name. */
static int named(const struct entry *e, PyObject *name) {
    for (int i = 0; i < e->count; i++)
        if (PyUnicode_Compare(PyTuple_GetItem(e->names, i), name) == 0) return i;
    return -1;
}

/* Puts arguments where the kind has them; 0 if there is one that the fast path does not know. */
static int put(const struct entry *e, PyObject *const *given, Py_ssize_t count, PyObject *names, PyObject **arguments) {
    const Py_ssize_t more = names ? PyTuple_Size(names) : 0;
    if (count > e->count) return 0;
    memcpy(arguments, e->fill, (size_t)e->kind->count * sizeof *arguments);
    for (Py_ssize_t i = 0; i < count + more; i++) {
        const int at = i < count ? (int)i : named(e, PyTuple_GetItem(names, i - count));
        if (at < 0) return 0;
        if (e->place[at] >= 0) arguments[e->place[at]] = given[i];
        else if (given[i] != PyTuple_GetItem(e->usual, at)) return 0;
    }
    return 1;
}

/* Calls a function of Python's with these arguments. */
static PyObject *call(PyObject *callable, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    PyObject *result = NULL, *by_position = PyTuple_New(count), *by_name = names ? PyDict_New() : NULL;
    int failed = !by_position || (names && !by_name);
    for (Py_ssize_t i = 0; !failed && i < count; i++) failed = PyTuple_SetItem(by_position, i, Py_NewRef(given[i]));
    for (Py_ssize_t i = 0; !failed && names && i < PyTuple_Size(names); i++)
        failed = PyDict_SetItem(by_name, PyTuple_GetItem(names, i), given[count + i]);
    if (!failed) result = PyObject_Call(callable, by_position, by_name);
    Py_XDECREF(by_position);
    Py_XDECREF(by_name);
    return result;
}

static PyObject *enter(PyObject *capsule, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    const struct entry *e = PyCapsule_GetPointer(capsule, entry_of);
    PyObject *arguments[MOST], *result = NULL;
    const long devices = devices_of(e);
    if (devices < 0) return NULL;
    if (devices && put(e, given, count, names, arguments)) result = e->kind->run(e->kind, arguments, devices, e->recorded != Py_None);
    else result = Py_NewRef(Py_None);
    if (result == Py_NotImplemented) {
        Py_DECREF(result);
        return call(e->recorded, given, count, names);
    }
    if (result == Py_None && e->otherwise != Py_None) {
        Py_DECREF(result);
        return call(e->otherwise, given, count, names);
    }
    if (!result || result == Py_None || e->returned < 0) return result;
    PyObject *only = Py_NewRef(PyTuple_GetItem(result, e->returned));
    Py_DECREF(result);
    return only;
}

static PyMethodDef method = {
    "entry", (PyCFunction)(void (*)(void))enter, METH_FASTCALL | METH_KEYWORDS,
    "The results of a call, or None if the fast path did nothing, and Python must make the call."};

static void release(PyObject *capsule) {
    struct entry *e = PyCapsule_GetPointer(capsule, entry_of);
    Py_XDECREF(e->filled);
    Py_XDECREF(e->names);
    Py_XDECREF(e->usual);
    Py_XDECREF(e->request);
    Py_XDECREF(e->recorded);
    Py_XDECREF(e->otherwise);
    PyMem_Free(e);
}

PyObject *fn_new_entry(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *kind;
    PyObject *places, *filled, *names, *usual, *request, *recorded, *otherwise;
    int returned;
    if (!PyArg_ParseTuple(arguments, "sO!O!O!O!iOOO", &kind, &PyTuple_Type, &names, &PyTuple_Type, &places, &PyTuple_Type, &usual,
                          &PyTuple_Type, &filled, &returned, &request, &recorded, &otherwise))
        return NULL;
    const struct fn_call_kind *found = fn_call_kind_named(kind);
    const Py_ssize_t count = PyTuple_Size(places);
    if (!found || count > MOST || found->count > MOST || PyTuple_Size(names) != count || PyTuple_Size(usual) != count ||
        PyTuple_Size(filled) != found->count) {
        PyErr_Format(PyExc_ValueError, "there is no entry for calls of kind %s with %zd arguments", kind, count);
        return NULL;
    }
    struct entry *e = PyMem_Malloc(sizeof *e);
    PyObject *capsule = e ? PyCapsule_New(e, entry_of, release) : PyErr_NoMemory();
    if (!capsule) {
        PyMem_Free(e);
        return NULL;
    }
    *e = (struct entry){.kind = found, .count = (int)count, .returned = returned, .filled = Py_NewRef(filled),
                        .names = Py_NewRef(names), .usual = Py_NewRef(usual), .request = Py_NewRef(request),
                        .recorded = Py_NewRef(recorded), .otherwise = Py_NewRef(otherwise)};
    for (int i = 0; i < found->count; i++) e->fill[i] = PyTuple_GetItem(filled, i);
    for (int i = 0; i < e->count; i++) e->place[i] = (int)PyLong_AsLong(PyTuple_GetItem(places, i));
    PyObject *function = PyErr_Occurred() ? NULL : PyCFunction_NewEx(&method, capsule, NULL);
    Py_DECREF(capsule);
    return function;
}

PyObject *fn_follow(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *request, *devices;
    if (!PyArg_ParseTuple(arguments, "OO!", &request, &PyDict_Type, &devices)) return NULL;
    current_request = fn_function_of(request, METH_NOARGS);
    devices_of_requests = Py_NewRef(devices);
    Py_RETURN_NONE;
}
