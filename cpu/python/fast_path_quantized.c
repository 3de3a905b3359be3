/* A quantizer on the fast path: the rows of a norm, or of x, to 8-bit numbers and their scales. */
#include "python/fast_path.h"

#include <math.h>
#include <string.h>

/*
 * Python's arguments, after those of every forward pass. PACKED: how to quantize, as fusednorm/calls/c_abi.py packs it for rows
 * of each kind. BETWEEN_IS_F32: whether the rows of the norm are float. NORMALISES: whether there is a norm. SCALE is given,
 * or the scales are written to SCALE_OUT.
 */
enum { PACKED, BETWEEN_IS_F32, NORMALISES, SCALE, OUT, SCALE_OUT };

/* DLPack's codes for what a quantizer writes, in the order of enum fn_byte_kind. */
static const uint8_t codes[] = {0, 1, 10, 12};

static PyObject *dtypes; /* keywords for each kind, and for scales */

void fn_open_quantizer(PyObject *keywords) { dtypes = Py_NewRef(keywords); }

static int is_of(const tensor *t, int64_t kind) {
    return t->dtype.code == codes[kind] && t->dtype.bits == 8 && t->dtype.lanes == 1;
}

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

/* Takes or makes the numbers and the scales. Returns 0, or nonzero if they do not fit, or -1 with a Python error. */
static int take_outputs(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_quantized *given, output *outputs) {
    struct fn_call *c = &given->call;
    struct fn_quantizer *q = &given->quantizer;
    const int64_t groups = q->group ? c->hidden / q->group : 1;
    output *out = &outputs[0], *scale = &outputs[1];
    int failed = fn_take_output(out, arguments[OUT], x, x_tensor, 0, PyTuple_GetItem(dtypes, (Py_ssize_t)q->kind));
    if (failed) return failed;
    if (!is_of(&out->t, q->kind) || !fn_same_shape(&out->t, x_tensor)) return 1;
    q->out = out->o.address, q->out_stride = out->o.stride;
    if (q->flags & FN_GIVEN_SCALE) {
        scale->object = Py_NewRef(arguments[SCALE]);
        return 0;
    }
    failed = fn_take_output(scale, arguments[SCALE_OUT], x, x_tensor, groups, PyTuple_GetItem(dtypes, 4));
    if (failed) return failed;
    if (scale->o.kind != FN_F32 || !fn_same_rows(&scale->t, x_tensor, groups)) return 1;
    q->scale = scale->o.address, q->scale_stride = fn_step(&scale->o), q->scale_group_stride = 4;
    return 0;
}

/* Whether the numbers or the scales share memory with each other or with an operand, where the caller gave one of them. */
static int overlap(const struct fn_call *c, const struct fn_quantizer *q, const output *outputs) {
    enum { RESIDUAL_OUT = 4, GIVEN_SCALE, NUMBERS, SCALES };
    enum { BYTE = -1 }; /* numbers have none of the kinds, but they are there */
    const int64_t groups = q->group ? c->hidden / q->group : 1;
    const fn_extent none = {.kind = FN_NONE}, one_scale = {FN_F32, q->scale, 1, 4, 4};
    const fn_extent scales = {FN_F32, q->scale, c->rows, q->scale_stride, 4 * groups};
    const int computed = !(q->flags & FN_GIVEN_SCALE);
    const fn_extent all[] = {fn_extent_of(c, FN_X), fn_extent_of(c, FN_RESIDUAL), fn_extent_of(c, FN_WEIGHT),
                             fn_extent_of(c, FN_OUT), fn_extent_of(c, FN_RESIDUAL_OUT), computed ? none : one_scale,
                             {BYTE, q->out, c->rows, q->out_stride, c->hidden}, computed ? scales : none};
    if (outputs[0].given && !fn_may_write(all, NUMBERS, 0)) return 1;
    if ((outputs[0].given || outputs[1].given) && !fn_may_write(all, SCALES, 0)) return 1;
    return outputs[2].given && !computed && !fn_apart(all[RESIDUAL_OUT], one_scale);
}

PyObject *fn_quantize(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_quantized *given,
                      output *residual_out, int triton) {
    struct fn_call *c = &given->call;
    output outputs[] = {{.object = NULL}, {.object = NULL}, *residual_out};
    int failed = take_outputs(arguments, x, x_tensor, given, outputs);
    if (!failed) failed = overlap(c, &given->quantizer, outputs);
    if (!failed) failed = fn_refuses_writes(outputs, 2); /* the sum was looked at before */
    if (!failed && c->flags & FN_QUANTIZED)
        c->operand[FN_OUT] = (struct fn_operand){.kind = given->passed_kind, .stride = c->hidden};
    if (!failed) failed = fn_run_on_device(c, x_tensor, triton);
    const int sums = c->operand[FN_RESIDUAL].kind != FN_NONE;
    if (!sums) Py_DECREF(residual_out->object); /* None, which is no result here */
    return fn_hand_out(outputs, 2 + sums, failed);
}
