/* The backward pass on the quick way: from tensors to gradients that the caller has allocated. */
#include "quick.h"

fn_backward_fn *fn_backward_on_cpu;

/* Runs the kernels of the C library; nonzero if they refuse, or -1 with a Python error. */
static int run(const gradient_call *c) {
    if (!fn_backward_on_cpu) return 1;
    int threads = fn_threads(c->rows * c->hidden);
    if (threads < 0) return -1;
    const operand *o = c->o;
    PyThreadState *state = c->rows * c->hidden >= FN_PARALLEL_ELEMENTS ? PyEval_SaveThread() : NULL;
    int failed = fn_backward_on_cpu(o[ROOT].kind == FN_F64, o[DY].kind, o[D_TOTAL].kind, o[H].kind, o[GAIN].kind,
                                    o[DX].kind, o[DRESIDUAL].kind, fn_address(&o[DY]), fn_address(&o[D_TOTAL]),
                                    fn_address(&o[H]), fn_address(&o[ROOT]), fn_address(&o[GAIN]), fn_address(&o[DX]),
                                    fn_address(&o[DRESIDUAL]), fn_address(&o[DWEIGHT]), c->rows, c->hidden,
                                    o[DY].stride, o[D_TOTAL].stride, o[H].stride, c->weight_offset, threads);
    if (state) PyEval_RestoreThread(state);
    return failed;
}

/* Python's arguments: the type of device as DLPack numbers them, the operands, and these. */
enum { DEVICE, FIRST, BLOCK = FIRST + GRADIENT_OPERANDS, OFFSET, ARGUMENTS };

PyObject *fn_backward_quickly(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    gradient_call c;
    operand *o = c.o;
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "backward takes %d arguments, got %zd", ARGUMENTS, count);
        return NULL;
    }
    if (!fn_exchange_api) Py_RETURN_FALSE;
    for (int i = 0; i < GRADIENT_OPERANDS; i++) {
        o[i].kind = FN_NONE;
        o[i].stride = 0;
        if (arguments[FIRST + i] == Py_None || fn_read(arguments[FIRST + i], &o[i])) continue;
        return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    }
    if (!o[DY].kind || !o[H].kind || !o[H].t.ndim || !o[ROOT].kind || o[H].t.device.type != PyLong_AsLong(arguments[DEVICE]))
        Py_RETURN_FALSE;
    c.hidden = o[H].t.shape[o[H].t.ndim - 1];
    c.rows = 1;
    for (int i = 0; i < o[H].t.ndim - 1; i++) c.rows *= o[H].t.shape[i];
    c.block = PyLong_AsLongLong(arguments[BLOCK]);
    c.blocks = c.block > 0 ? (c.rows + c.block - 1) / c.block : 0;
    c.weight_offset = PyFloat_AsDouble(arguments[OFFSET]);
    if (PyErr_Occurred()) return NULL;
    /* Of one element a tensor may be a lazy negative and yet contiguous. */
    if (c.hidden == 1) Py_RETURN_FALSE;
    if (o[ROOT].kind != FN_F32 && o[ROOT].kind != FN_F64) Py_RETURN_FALSE;
    if (o[DWEIGHT].kind && o[DWEIGHT].kind != o[GAIN].kind) Py_RETURN_FALSE;
    for (int i = 0; i < GRADIENT_OPERANDS; i++) {
        if (!o[i].kind) continue;
        if (o[i].kind == FN_F64 && o[ROOT].kind != FN_F64) Py_RETURN_FALSE;
        if (!fn_same_device(&o[i], &o[H])) Py_RETURN_FALSE;
        if (i == DY || i == D_TOTAL) {
            if (!fn_same_shape(&o[i], &o[H])) Py_RETURN_FALSE;
        } else if (i != H) { /* without gaps */
            int64_t elements = i == DX || i == DRESIDUAL ? c.rows * c.hidden : i == ROOT ? c.rows : c.hidden;
            if (fn_elements(&o[i]) != (i == PARTIAL ? c.blocks * c.hidden : elements)) Py_RETURN_FALSE;
        }
    }
    int failed = o[H].t.device.type == DL_CUDA ? fn_launch_backward(&c) : run(&c);
    return failed < 0 ? NULL : PyBool_FromLong(!failed);
}
