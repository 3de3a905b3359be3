/* The backward pass on the fast path: from tensors to gradients that the caller has allocated. */
#include "python/fast_path.h"

/* Python's arguments: the type of device as DLPack numbers them, the operands, and these. */
enum { DEVICE, FIRST, BLOCK = FIRST + FN_BACKWARD_OPERANDS, WEIGHT_OFFSET, ARGUMENTS };

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, tensor *t, struct fn_call *c) {
    struct fn_operand *o = c->operand;
    for (int i = 0; i < FN_BACKWARD_OPERANDS; i++) {
        o[i] = (struct fn_operand){.kind = FN_NONE};
        if (arguments[FIRST + i] != Py_None && !fn_read(arguments[FIRST + i], &t[i], &o[i])) return 0;
    }
    if (!o[FN_DY].kind || !o[FN_H].kind || !t[FN_H].ndim || !o[FN_BACKWARD_RSTD].kind ||
        t[FN_H].device.type != PyLong_AsLong(arguments[DEVICE]))
        return 0;
    c->pass = FN_BACKWARD;
    c->flags = c->following = 0;
    c->device = t[FN_H].device.id;
    c->hidden = t[FN_H].shape[t[FN_H].ndim - 1];
    c->rows = 1;
    for (int i = 0; i < t[FN_H].ndim - 1; i++) c->rows *= t[FN_H].shape[i];
    c->inner = c->rows;
    /* On a CPU a weight and a bias may have a row for each head, which is each of h's last dimension but one. */
    const int on_cpu = t[FN_H].device.type == DL_CPU;
    c->heads = 1;
    for (int i = FN_BACKWARD_WEIGHT; on_cpu && i <= FN_DBIAS; i++)
        if ((i == FN_BACKWARD_WEIGHT || i == FN_DBIAS) && o[i].kind && t[i].ndim == 2) c->heads = t[i].shape[0];
    c->block = PyLong_AsLongLong(arguments[BLOCK]);
    c->eps = 0;
    c->weight_offset = PyFloat_AsDouble(arguments[WEIGHT_OFFSET]);
    if (PyErr_Occurred()) return 0;
    const int64_t wide = o[FN_BACKWARD_RSTD].kind == FN_F64, blocks = fn_blocks(c);
    if (!wide && o[FN_BACKWARD_RSTD].kind != FN_F32) return 0;
    if (o[FN_DWEIGHT].kind && o[FN_DWEIGHT].kind != o[FN_BACKWARD_WEIGHT].kind) return 0;
    for (int i = 0; i < FN_BACKWARD_OPERANDS; i++) {
        if (!o[i].kind) continue;
        if (o[i].kind == FN_F64 && !wide) return 0;
        if (!fn_same_device(&t[i], &t[FN_H])) return 0;
        if (i == FN_DY || i == FN_D_RESIDUAL_OUT) {
            if (!fn_same_shape(&t[i], &t[FN_H])) return 0;
        } else if (i != FN_H) { /* without gaps */
            const int of_rows = i == FN_DX || i == FN_DRESIDUAL || i == FN_BACKWARD_RSTD;
            const int64_t rows = of_rows ? c->rows : i == FN_PARTIAL && !on_cpu ? blocks : c->heads;
            if (fn_elements(&t[i]) != rows * (i == FN_BACKWARD_RSTD ? 1 : c->hidden)) return 0;
        }
    }
    return 1;
}

PyObject *fn_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    struct fn_call c;
    tensor t[FN_BACKWARD_OPERANDS];
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "backward takes %d arguments, got %zd", ARGUMENTS, count);
        return NULL;
    }
    if (!fn_exchange_api) Py_RETURN_FALSE;
    if (!read_arguments(arguments, t, &c)) return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    void *stream;
    int failed;
    if (t[FN_H].device.type != DL_CUDA) failed = fn_run_in_c(&c, fn_run_on_cpu);
    else
        failed = !fn_exchange_api->current_stream || fn_exchange_api->current_stream(DL_CUDA, (int32_t)c.device, &stream) ||
                 fn_launch_cuda(&c, stream) != FN_LAUNCHED;
    return failed < 0 ? NULL : PyBool_FromLong(!failed);
}
