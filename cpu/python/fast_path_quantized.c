/* A quantizer on the fast path: the rows of a norm, or of x, to 8-bit numbers and their scales. */
#include "python/fast_path.h"

#include <math.h>
#include <string.h>

#include "machine/pages.h"

/*
 * Python's arguments, after those of every forward pass. PACKED: how to quantize, as fusednorm/calls/c_abi.py packs it for rows
 * of each kind. BETWEEN_IS_F32: whether the rows of the norm are float. NORMALISES: whether there is a norm. SCALE is given,
 * or the scales are written to SCALE_OUT.
 */
enum { PACKED, BETWEEN_IS_F32, NORMALISES, SCALE, OUT, SCALE_OUT };

/* DLPack's codes for what a quantizer writes, in the order of enum fn_byte_kind. */
static const uint8_t codes[] = {0, 1, 10, 12};

static PyObject *dtypes[5]; /* keywords for each kind, and for scales */

PyObject *fn_open_quantizer(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *found[5];
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!O!", &PyDict_Type, &found[0], &PyDict_Type, &found[1], &PyDict_Type, &found[2],
                          &PyDict_Type, &found[3], &PyDict_Type, &found[4]))
        return NULL;
    for (int i = 0; i < 5; i++) dtypes[i] = Py_NewRef(found[i]);
    Py_RETURN_NONE;
}

static int is_of(const tensor *t, int64_t kind) {
    return t->dtype.code == codes[kind] && t->dtype.bits == 8 && t->dtype.lanes == 1;
}

/* Whether scales have a row for each of x's, of so many groups. */
static int fits(const tensor *t, const tensor *x, int64_t groups) {
    if (t->ndim != x->ndim || t->shape[t->ndim - 1] != groups) return 0;
    for (int i = 0; i < t->ndim - 1; i++)
        if (t->shape[i] != x->shape[i]) return 0;
    return 1;
}

static int64_t groups_of(const struct fn_quantizer *q, const struct fn_call *c) { return q->group ? c->hidden / q->group : 1; }

int fn_read_quantizer(PyObject *const *arguments, const tensor *x, struct fn_quantized *given) {
    struct fn_call *c = &given->call;
    struct fn_quantizer *q = &given->quantizer;
    const Py_ssize_t size = (Py_ssize_t)offsetof(struct fn_quantizer, inner);
    const int between = arguments[BETWEEN_IS_F32] == Py_True;
    if (between && c->operand[FN_X].kind == FN_F64) return 0; /* Python reports it */
    given->passed_kind = between ? FN_F32 : c->operand[FN_X].kind;
    PyObject *packed = PyTuple_GetItem(arguments[PACKED], (Py_ssize_t)given->passed_kind);
    if (!packed || PyBytes_Size(packed) != size) return 0;
    memset(q, 0, sizeof *q);
    memcpy(q, PyBytes_AsString(packed), (size_t)size);
    /* Zero points, and what Python reports: groups that do not fit, a missing scale. */
    if (q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE) || (q->group && c->hidden % q->group)) return 0;
    if ((arguments[SCALE] != Py_None) != !!(q->flags & FN_GIVEN_SCALE)) return 0;
    q->inner = c->rows;
    if (q->flags & FN_GIVEN_SCALE) {
        tensor t;
        struct fn_operand o;
        float value;
        if (arguments[SCALE_OUT] != Py_None || !fn_read(arguments[SCALE], &t, &o) || o.kind != FN_F32) return 0;
        if (!fn_same_device(&t, x) || fn_elements(&t) != 1) return 0;
        if (x->device.type == DL_CPU) { /* a GPU would have to be waited for */
            memcpy(&value, (const void *)o.address, sizeof value);
            if (!(value > 0 && value < INFINITY)) return 0;
        }
        q->scale = o.address;
    }
    c->flags |= arguments[NORMALISES] == Py_True ? FN_QUANTIZED : FN_QUANTIZE_ONLY;
    return 1;
}

/* Whether an output that is given lies apart from the operands, and from an output before it. */
static int lies_apart(const struct fn_call *c, fn_extent output, const fn_extent *other) {
    if (output.rows > 1 && output.step < output.bytes) return 0;
    for (int i = FN_X; i <= FN_RESIDUAL_OUT; i++)
        if (c->operand[i].kind && !fn_apart(output, fn_extent_of(c, i))) return 0;
    return !other || fn_apart(output, *other);
}

PyObject *fn_quantize(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_quantized *given,
                      PyObject *residual_out, int residual_written, int triton) {
    struct fn_call *c = &given->call;
    struct fn_quantizer *q = &given->quantizer;
    const int64_t groups = groups_of(q, c);
    const int computed = !(q->flags & FN_GIVEN_SCALE), out_given = arguments[OUT] != Py_None;
    const int scale_given = computed && arguments[SCALE_OUT] != Py_None;
    tensor t;
    struct fn_operand o;
    fn_extent extent, other;
    PyObject *result = NULL, *scale = NULL, *shape = NULL;
    int failed = 1;
    PyObject *out = fn_output(arguments[OUT], x, NULL, dtypes[q->kind]);
    if (!out || !fn_read_any(out, &t, &o) || !is_of(&t, q->kind) || !fn_same_shape(&t, x_tensor) ||
        !fn_same_device(&t, x_tensor))
        goto end;
    q->out = o.address, q->out_stride = o.stride;
    if (!out_given && x_tensor->device.type == DL_CPU) fn_expect_writes(o.address, c->rows * c->hidden);
    extent = (fn_extent){o.address, c->rows, o.stride, c->hidden};
    if (out_given && !lies_apart(c, extent, NULL)) goto end;
    if (computed) {
        shape = scale_given ? NULL : fn_shape(x_tensor, groups);
        if (!scale_given && !shape) goto end;
        scale = fn_output(arguments[SCALE_OUT], x, shape, dtypes[4]);
        if (!scale || !fn_read(scale, &t, &o) || o.kind != FN_F32 || !fits(&t, x_tensor, groups) ||
            !fn_same_device(&t, x_tensor))
            goto end;
        q->scale = o.address, q->scale_stride = 4 * o.stride, q->scale_group_stride = 4;
        other = (fn_extent){o.address, c->rows, 4 * o.stride, 4 * groups};
        if ((scale_given || out_given) && !lies_apart(c, other, &extent)) goto end;
    } else {
        scale = Py_NewRef(arguments[SCALE]);
        other = (fn_extent){q->scale, 1, 4, 4};
        if (out_given && !fn_apart(extent, other)) goto end;
        if (residual_written && !fn_apart(fn_extent_of(c, FN_RESIDUAL_OUT), other)) goto end;
    }
    if (c->flags & FN_QUANTIZED) c->operand[FN_OUT] = (struct fn_operand){.kind = given->passed_kind, .stride = c->hidden};
    PyObject *const outputs[] = {out, scale, residual_out};
    const int written[] = {out_given, scale_given, residual_written};
    if (fn_refuses_writes(outputs, written, 2)) goto end; /* the sum was looked at before */
    failed = fn_run_on_device(c, x_tensor, triton);
    if (failed) goto end;
    failed = fn_count_writes(outputs, written, 3);
    if (!failed) result = residual_out == Py_None ? PyTuple_Pack(2, out, scale) : PyTuple_Pack(3, out, scale, residual_out);
end:
    Py_XDECREF(out);
    Py_XDECREF(scale);
    Py_XDECREF(shape);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}
