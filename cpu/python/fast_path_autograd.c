/* Gradients, inference mode and versions of tensors: autograd's part of a call. */
#include "python/fast_path.h"

static function is_grad_enabled, is_inference_mode_enabled, increment_version;
static PyObject *requires_grad;
static descrgetfunc get_requires_grad; /* of the descriptor `requires_grad`, which Python would look up each time */

int fn_open_autograd(PyObject *tensor_type, PyObject *grad_enabled, PyObject *increment, PyObject *inference_enabled) {
    requires_grad = PyObject_GetAttrString(tensor_type, "requires_grad");
    if (requires_grad) get_requires_grad = (descrgetfunc)PyType_GetSlot(Py_TYPE(requires_grad), Py_tp_descr_get);
    is_grad_enabled = fn_function_of(grad_enabled, METH_NOARGS);
    increment_version = fn_function_of(increment, METH_O);
    is_inference_mode_enabled = fn_function_of(inference_enabled, METH_NOARGS);
    return requires_grad && get_requires_grad;
}

/* Whether an operand, which may be None, requires a gradient; -1 with a Python error. */
static int requires_gradient(PyObject *operand) {
    if (operand == Py_None) return 0;
    if (!PyObject_TypeCheck(operand, fn_tensor_type)) return 1; /* Python says what it must be */
    return fn_truth(get_requires_grad(requires_grad, operand, (PyObject *)fn_tensor_type));
}

int fn_records_gradient(PyObject *const *operands, Py_ssize_t count) {
    int records = fn_answer(&is_grad_enabled);
    for (Py_ssize_t i = 0; records > 0 && i < count; i++) {
        const int needed = requires_gradient(operands[i]);
        if (needed) return needed;
    }
    return records < 0 ? records : 0;
}

int fn_refuses_writes(const output *outputs, int count) {
    for (int i = 0; i < count; i++) {
        const int inference = outputs[i].given ? fn_is_inference(outputs[i].object) : 0;
        if (inference < 0) return -1;
        if (inference) {
            const int allowed = fn_answer(&is_inference_mode_enabled);
            return allowed < 0 ? -1 : !allowed;
        }
    }
    return 0;
}

int fn_count_writes(const output *outputs, int count) {
    int number = 0;
    for (int i = 0; i < count; i++) number += outputs[i].given;
    if (!number) return 0;
    PyObject *all = PyTuple_New(number);
    for (int i = count; all && i-- > 0;)
        if (outputs[i].given && PyTuple_SetItem(all, --number, Py_NewRef(outputs[i].object))) Py_CLEAR(all);
    PyObject *none = all ? fn_call_function(&increment_version, all) : NULL;
    Py_XDECREF(all);
    Py_XDECREF(none);
    return none ? 0 : -1;
}
