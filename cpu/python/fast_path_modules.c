/* Norms of torch's modules: whether a trace of a module's code still holds, and its parameters, for a call in its place. */
#include "python/fast_path.h"

enum { OF_MODULE = 4 };
static struct {
    PyObject *of_all, *of_module[OF_MODULE]; /* hooks: dictionaries of torch's, and the names of a module's own */
    PyObject *forward, *parameters, *weight, *bias, *dtype; /* names, and torch.Tensor.dtype */
    descrgetfunc get_dtype;                                 /* which Python would look up each time */
    function autocast;
} modules;

PyObject *fn_open_modules(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *of_all, *of_module, *autocast;
    if (!PyArg_ParseTuple(arguments, "O!O!O", &PyTuple_Type, &of_all, &PyTuple_Type, &of_module, &autocast)) return NULL;
    if (PyTuple_Size(of_module) != OF_MODULE || !fn_tensor_type) Py_RETURN_FALSE;
    for (int i = 0; i < OF_MODULE; i++) modules.of_module[i] = Py_NewRef(PyTuple_GetItem(of_module, i));
    modules.of_all = Py_NewRef(of_all);
    modules.autocast = fn_function_of(autocast, METH_NOARGS);
    modules.forward = PyUnicode_InternFromString("forward");
    modules.parameters = PyUnicode_InternFromString("_parameters");
    modules.weight = PyUnicode_InternFromString("weight");
    modules.bias = PyUnicode_InternFromString("bias");
    modules.dtype = PyObject_GetAttrString((PyObject *)fn_tensor_type, "dtype");
    if (!modules.dtype) return NULL;
    modules.get_dtype = (descrgetfunc)PyType_GetSlot(Py_TYPE(modules.dtype), Py_tp_descr_get);
    return PyBool_FromLong(modules.forward && modules.parameters && modules.weight && modules.bias && modules.get_dtype);
}

/* Whether a call of the module only calls the forward pass of its class; -1 with a Python error. */
static int is_bare(PyObject *attributes) {
    for (int i = 0; i < OF_MODULE; i++) {
        PyObject *hooks = PyDict_GetItemWithError(attributes, modules.of_module[i]);
        if (!hooks || PyDict_Size(hooks)) return PyErr_Occurred() ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(modules.of_all); i++)
        if (PyDict_Size(PyTuple_GetItem(modules.of_all, i))) return PyErr_Occurred() ? -1 : 0;
    const int replaced = PyDict_Contains(attributes, modules.forward);
    return replaced < 0 ? -1 : !replaced;
}

/* The dtype of a plain tensor, None for None; NULL for any other object, perhaps with a Python error. */
static PyObject *dtype_of(PyObject *object) {
    if (object == Py_None) return Py_NewRef(object);
    if (Py_TYPE(object) != fn_tensor_type && Py_TYPE(object) != fn_parameter_type) return NULL;
    return modules.get_dtype(modules.dtype, object, (PyObject *)fn_tensor_type);
}

/* (form, weight, bias) for an x of this dtype, which is that of `beside` unless that is NULL; NULL if there is no form. */
static PyObject *taken(PyObject *forms, PyObject *weight, PyObject *bias, PyObject *x, PyObject *beside) {
    PyObject *of_x = dtype_of(x), *of_weight = dtype_of(weight), *of_bias = dtype_of(bias);
    PyObject *other = beside ? dtype_of(beside) : NULL;
    PyObject *result = NULL;
    if (of_x && of_weight && of_bias && (!beside || other == of_x)) {
        PyObject *dtypes = PyTuple_Pack(3, of_x, of_weight, of_bias);
        PyObject *form = dtypes ? PyDict_GetItemWithError(forms, dtypes) : NULL;
        if (form) result = PyTuple_Pack(3, form, weight, bias);
        Py_XDECREF(dtypes);
    }
    Py_XDECREF(of_x);
    Py_XDECREF(of_weight);
    Py_XDECREF(of_bias);
    Py_XDECREF(other);
    return result;
}

PyObject *fn_taken(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    enum { ATTRIBUTES, VALUES, FORMS, X, BESIDE, ALL };
    (void)module;
    if (count != BESIDE && !fn_takes("taken", count, ALL)) return NULL;
    PyObject *name, *value, *attributes = given[ATTRIBUTES], *beside = count == ALL ? given[BESIDE] : NULL;
    for (Py_ssize_t at = 0; PyDict_Next(given[VALUES], &at, &name, &value);)
        if (PyDict_GetItemWithError(attributes, name) != value) return fn_refuse(); /* Python compares them */
    if (fn_answer(&modules.autocast) || (beside && is_bare(attributes) != 1)) return fn_refuse();
    PyObject *parameters = PyDict_GetItemWithError(attributes, modules.parameters);
    PyObject *weight = parameters ? PyDict_GetItemWithError(parameters, modules.weight) : NULL;
    if (!weight) return fn_refuse(); /* Python looks elsewhere */
    PyObject *bias = PyDict_GetItemWithError(parameters, modules.bias);
    bias = Py_NewRef(bias ? bias : Py_None);
    Py_INCREF(weight);
    PyObject *result = taken(given[FORMS], weight, bias, given[X], beside);
    Py_DECREF(weight);
    Py_DECREF(bias);
    return result ? result : fn_refuse();
}
