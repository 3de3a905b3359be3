/* A quantizer on the fast path: the rows of a norm, or of x, to 8-bit numbers and their scales. */
#include "python/fast_path.h"

#include <math.h>
#include <string.h>

/*
 * Python's arguments, after those of every forward pass. PACKED: how to quantize, as fusednorm/calls/c_abi.py packs it for rows
 * of each kind. BETWEEN: the dtype of the norm's rows. NORMALISES: whether there is a norm. SCALE and ZERO_POINT are given, or
 * written to the outputs. The norm's own output receives its rows too.
 */
enum { PACKED, BETWEEN, NORMALISES, SCALE, ZERO_POINT, OUT, SCALE_OUT, ZERO_POINT_OUT };
_Static_assert((int)OUT == (int)FN_QUANTIZER_OUT_ARGUMENT && (int)SCALE_OUT == (int)FN_QUANTIZER_SCALE_OUT_ARGUMENT,
               "fast_path_forward.c looks at these outputs");

/* DLPack's codes for what a quantizer writes, in the order of enum fn_byte_kind. */
static const uint8_t codes[] = {0, 1, 10, 12};

enum { FLOAT_SCALES = 4, WHOLE_POINTS };
static PyObject *dtypes; /* keywords for each kind, for scales and for zero points */

void fn_open_quantizer(PyObject *keywords) { dtypes = Py_NewRef(keywords); }

static int is_of(const tensor *t, uint8_t code, uint8_t bits) {
    return t->dtype.code == code && t->dtype.bits == bits && t->dtype.lanes == 1;
}

PyObject *fn_keywords_of_float(void) { return PyTuple_GetItem(dtypes, FLOAT_SCALES); }

PyObject *fn_keywords_of_sums(int64_t kind) { return kind == FN_F64 || kind == FN_F32 ? NULL : fn_keywords_of_float(); }

int fn_between(PyObject *dtype) {
    if (dtype == Py_None) return 0;
    return dtype == PyDict_GetItemString(fn_keywords_of_float(), "dtype") ? 1 : -1;
}

/* Reads the only number of a scale or a zero point that is given; 0 if there is none, or Python reports its value. */
static int read_given(PyObject *given, const tensor *x, uint8_t code, uintptr_t *address) {
    tensor t;
    struct fn_operand o;
    if (!fn_read_any(given, &t, &o) || !is_of(&t, code, 32) || !fn_same_device(&t, x) || fn_elements(&t) != 1) return 0;
    *address = o.address;
    if (x->device.type != DL_CPU) return 1; /* a GPU would have to be waited for */
    float scale;
    int32_t point;
    memcpy(&scale, (const void *)o.address, sizeof scale);
    memcpy(&point, (const void *)o.address, sizeof point);
    return code == DL_FLOAT ? scale > 0 && scale < INFINITY : point > -(1 << 30) && point < 1 << 30;
}

int fn_read_quantizer(PyObject *const *arguments, const tensor *x, struct fn_quantized *given) {
    struct fn_call *c = &given->call;
    struct fn_quantizer *q = &given->quantizer;
    const Py_ssize_t size = (Py_ssize_t)offsetof(struct fn_quantizer, inner);
    const int between = fn_between(arguments[BETWEEN]);
    if (between < 0 || (between && (c->operand[FN_X].kind == FN_F64 || c->operand[FN_OUT].kind))) return 0; /* Python reports it */
    given->passed_kind = between ? FN_F32 : c->operand[FN_X].kind;
    if (c->operand[FN_OUT].kind && c->operand[FN_OUT].kind != given->passed_kind) return 0;
    PyObject *packed = PyTuple_GetItem(arguments[PACKED], (Py_ssize_t)given->passed_kind);
    if (!packed || PyBytes_Size(packed) != size) return 0;
    memset(q, 0, sizeof *q);
    memcpy(q, PyBytes_AsString(packed), (size_t)size);
    if (q->group && c->hidden % q->group) return 0; /* Python reports it, and what is missing or given in vain */
    const int is_given = !!(q->flags & FN_GIVEN_SCALE);
    given->points = !!(q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE));
    if ((arguments[SCALE] != Py_None) != is_given || (arguments[ZERO_POINT] != Py_None) != (is_given && given->points)) return 0;
    if (arguments[SCALE_OUT] != Py_None && is_given) return 0;
    if (arguments[ZERO_POINT_OUT] != Py_None && (is_given || !given->points)) return 0;
    q->inner = c->rows;
    if (is_given && !read_given(arguments[SCALE], x, DL_FLOAT, &q->scale)) return 0;
    if (is_given && given->points && !read_given(arguments[ZERO_POINT], x, DL_INT, &q->zero_point)) return 0;
    c->flags |= arguments[NORMALISES] == Py_True ? FN_QUANTIZED : FN_QUANTIZE_ONLY;
    return 1;
}

/* Takes or makes what is written for each group. Returns as take_outputs. */
static int take_of_groups(PyObject *given, PyObject *x, const tensor *x_tensor, int64_t groups, int of, output *out) {
    const int failed = fn_take_output(out, given, x, x_tensor, groups, PyTuple_GetItem(dtypes, of));
    return failed ? failed : !is_of(&out->t, of == FLOAT_SCALES ? DL_FLOAT : DL_INT, 32) || !fn_same_rows(&out->t, x_tensor, groups);
}

enum { NUMBERS, SCALES, POINTS, SUM, RESULTS };

/* Takes or makes the results. Returns 0, or nonzero if they do not fit, or -1 with a Python error. */
static int take_outputs(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_quantized *given, output *outputs) {
    struct fn_call *c = &given->call;
    struct fn_quantizer *q = &given->quantizer;
    const int64_t groups = q->group ? c->hidden / q->group : 1;
    output *out = &outputs[NUMBERS], *scales = &outputs[SCALES], *points = &outputs[POINTS];
    int failed = fn_take_output(out, arguments[OUT], x, x_tensor, 0, PyTuple_GetItem(dtypes, (Py_ssize_t)q->kind));
    if (failed) return failed;
    if (!is_of(&out->t, codes[q->kind], 8) || !fn_same_shape(&out->t, x_tensor)) return 1;
    q->out = out->o.address, q->out_stride = out->o.stride;
    if (q->flags & FN_GIVEN_SCALE) {
        scales->object = Py_NewRef(arguments[SCALE]);
        return 0;
    }
    failed = take_of_groups(arguments[SCALE_OUT], x, x_tensor, groups, FLOAT_SCALES, scales);
    if (failed) return failed;
    q->scale = scales->o.address, q->scale_stride = 4 * scales->o.stride, q->scale_group_stride = 4;
    if (!given->points) return 0;
    failed = take_of_groups(arguments[ZERO_POINT_OUT], x, x_tensor, groups, WHOLE_POINTS, points);
    if (failed) return failed;
    q->zero_point = points->o.address, q->zero_point_stride = 4 * points->o.stride, q->zero_point_group_stride = 4;
    return 0;
}

/* Whether what is written shares memory with each other or with an operand, where the caller gave one of them. */
static int overlap(const struct fn_quantized *given, const output *outputs) {
    enum { NORMED = 4, TOTAL, GIVEN_SCALE, GIVEN_POINT, OF_NUMBERS, OF_SCALES, OF_POINTS };
    enum { BYTE = -1 }; /* numbers have none of the kinds, but they are there */
    const struct fn_call *c = &given->call;
    const struct fn_quantizer *q = &given->quantizer;
    const int64_t groups = q->group ? c->hidden / q->group : 1;
    const int computed = !(q->flags & FN_GIVEN_SCALE);
    const fn_extent none = {.kind = FN_NONE}, one_scale = {FN_F32, q->scale, 1, 4, 4}, one_point = {FN_F32, q->zero_point, 1, 4, 4};
    const fn_extent scales = {FN_F32, q->scale, c->rows, q->scale_stride, 4 * groups};
    const fn_extent points = {FN_F32, q->zero_point, c->rows, q->zero_point_stride, 4 * groups};
    const fn_extent all[] = {fn_extent_of(c, FN_X), fn_extent_of(c, FN_RESIDUAL), fn_extent_of(c, FN_WEIGHT),
                             fn_extent_of(c, FN_BIAS), fn_extent_of(c, FN_OUT), fn_extent_of(c, FN_RESIDUAL_OUT), computed ? none : one_scale,
                             computed || !given->points ? none : one_point, {BYTE, q->out, c->rows, q->out_stride, c->hidden},
                             computed ? scales : none, computed && given->points ? points : none};
    int some = 0;
    for (int i = OF_NUMBERS; i <= OF_POINTS; i++) {
        some |= outputs[i - OF_NUMBERS].given;
        if (some && !fn_may_write(all, i, 0)) return 1;
    }
    for (int i = NORMED; i <= TOTAL && !computed; i++)
        if (all[i].kind && (!fn_apart(all[i], one_scale) || (given->points && !fn_apart(all[i], one_point)))) return 1;
    return 0;
}

PyObject *fn_quantize(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_quantized *given,
                      output *of_norm, int triton) {
    struct fn_call *c = &given->call;
    const int sums = c->operand[FN_RESIDUAL].kind != FN_NONE, normed = of_norm[0].given;
    output outputs[RESULTS] = {[SUM] = of_norm[1]};
    int failed = (triton || x_tensor->device.type != DL_CPU) && (normed || given->points); /* no such kernel is held */
    if (!failed) failed = take_outputs(arguments, x, x_tensor, given, outputs);
    if (!failed) failed = overlap(given, outputs);
    if (!failed) failed = fn_refuses_writes(outputs, SUM); /* those of the norm were looked at before */
    if (!failed && normed) failed = fn_count_writes(of_norm, 1);
    if (!failed && c->flags & FN_QUANTIZED && !normed)
        c->operand[FN_OUT] = (struct fn_operand){.kind = given->passed_kind, .stride = c->hidden};
    if (!failed) failed = fn_run_on_device(c, x_tensor, triton);
    Py_DECREF(of_norm[0].object);
    if (!sums) Py_DECREF(of_norm[1].object); /* None, which is no result here */
    int count = 2;
    if (outputs[POINTS].object) count++;
    if (sums) outputs[count++] = outputs[SUM];
    return fn_hand_out(outputs, count, failed);
}
