/* The backward pass on the fast path: from tensors to gradients that the caller has allocated. */
#include "python/fast_path.h"

/* Python's arguments: the type of device as DLPack numbers them, the operands, and these. */
enum { DEVICE, FIRST, BLOCK = FIRST + FN_BACKWARD_OPERANDS, WEIGHT_OFFSET, CENTER, ARGUMENTS };

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, tensor *t, struct fn_call *c) {
    struct fn_operand *o = c->operand;
    const unsigned required = 1 << FN_DY | 1 << FN_H | 1 << FN_BACKWARD_RSTD;
    const long device = PyLong_AsLong(arguments[DEVICE]);
    if (!fn_read_all(arguments + FIRST, FN_BACKWARD_OPERANDS, required, device, t, o) || !t[FN_H].ndim) return 0;
    c->pass = FN_BACKWARD;
    c->flags = arguments[CENTER] == Py_True ? FN_CENTER : 0;
    c->following = 0;
    fn_take_rows(c, &t[FN_H]);
    /* On a CPU a weight and a bias may have a row for each head, which is each of h's last dimension but one. */
    const int on_cpu = device == DL_CPU;
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
        if (i == FN_DY || i == FN_D_RESIDUAL_OUT) {
            if (!fn_same_shape(&t[i], &t[FN_H])) return 0;
        } else if (i != FN_H) { /* without gaps */
            const int of_rows = i == FN_DX || i == FN_DRESIDUAL || i == FN_BACKWARD_RSTD;
            const int64_t rows = of_rows ? c->rows : i == FN_PARTIAL && !on_cpu ? blocks : c->heads;
            const int64_t means = i == FN_PARTIAL && !on_cpu && c->flags & FN_CENTER ? c->rows : 0;
            if (fn_elements(&t[i]) != rows * (i == FN_BACKWARD_RSTD ? 1 : c->hidden) + means) return 0;
        }
    }
    return 1;
}

PyObject *fn_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    struct fn_call c;
    tensor t[FN_BACKWARD_OPERANDS];
    if (!fn_takes("backward", count, ARGUMENTS)) return NULL;
    if (!fn_exchange_api || !read_arguments(arguments, t, &c)) return fn_was_made(1);
    return fn_was_made(fn_run_on_device(&c, &t[FN_H], 0));
}
