/* The forward pass on the fast path: from Python's arguments to outputs. */
#include "launch/triton.h"
#include "python/fast_path.h"

#include <string.h>

/*
 * Python's arguments: the operands that users may give, then the others. ASK: whether a listener may have to see the call. Those
 * from FIRST_WEIGHT on are of a norm of x before the addition, which has the flags and the weight_offset of the norm after it.
 * Or the arguments of a quantizer or of a gate follow the others.
 */
enum { EPS = FN_RESIDUAL_OUT + 1, WEIGHT_OFFSET, ROUND_SUM, ROUND_NORM, RSTD, ASK, BIAS, X_SCALE, OUT_DTYPE, CENTER, ARGUMENTS };
enum { FIRST_WEIGHT = ARGUMENTS, FIRST_EPS, BETWEEN, NEXT_NORM };
#define OPERANDS_OF_NORM "x residual weight out residual_out "
#define FLAGS_OF_NORM " weight_offset round_sum round_norm rstd ask bias x_scale out_dtype center"

static fn_call_run forward;

enum { NORM, TWO_NORMS, QUANTIZER, GATE };
const struct fn_call_kind fn_call_kinds[] = {
    [NORM] = {"norm", OPERANDS_OF_NORM "eps" FLAGS_OF_NORM, ARGUMENTS, forward},
    [TWO_NORMS] = {"two_norms", "x residual next_weight out residual_out next_eps" FLAGS_OF_NORM " weight eps between next_norm",
                   ARGUMENTS + 4, forward},
    [QUANTIZER] = {"quantizer", "x residual weight normed_out residual_out eps" FLAGS_OF_NORM
                   " packed between normalises scale zero_point out scale_out zero_point_out", ARGUMENTS + 8, forward},
    [GATE] = {"gate", OPERANDS_OF_NORM "eps" FLAGS_OF_NORM " z activation order norm_before_gate between group_size out"
              " limit alpha up_offset clamp interleaved round_steps", ARGUMENTS + 13, forward},
    {"rotation",
     "q k q_weight k_weight cos sin positions q_out k_out eps weight_offset norm interleaved round_products between round_norm "
     "q_rstd k_rstd",
     18, fn_rotate},
    {"log_prob", "logits ids temperature softcap ignore_index operation out out_dtype kept", 9, fn_find_log_prob},
    {"log_prob_backward", "logits ids temperature softcap ignore_index operation d d_entropy m s entropy needs", 12,
     fn_find_log_prob_gradient},
    {"modulate", "y scale shift round_steps out out_dtype", 6, fn_modulate},
    {"modulate_backward", "y scale shift round_steps d needs", 6, fn_modulate_gradients},
    {"linear", "x weight bias out_dtype out", 5, fn_multiply},
    {"int8_linear", "q scale weight weight_scale bias zero_point out_dtype out", 8, fn_multiply_int8},
    {"attention", "q k v sinks mask scale causal window softcap out", 10, fn_attend_on_fast_path},
    {NULL, NULL, 0, NULL},
};

const struct fn_call_kind *fn_call_kind_named(const char *name) {
    const struct fn_call_kind *kind = fn_call_kinds;
    while (kind->name && strcmp(kind->name, name)) kind++;
    return kind->name ? kind : NULL;
}

/* Whether autograd would have to know of the call. An output in place was looked at as x or the residual. */
static int records_gradient(PyObject *const *arguments, const struct fn_call_kind *kind) {
    PyObject *operands[EPS + 3];
    int number = 0;
    for (int i = 0; i < EPS; i++)
        if (i < FN_OUT || arguments[i] != arguments[i - FN_OUT]) operands[number++] = arguments[i];
    operands[number++] = arguments[BIAS];
    if (kind == &fn_call_kinds[GATE]) {
        operands[number++] = arguments[ARGUMENTS];
        operands[number++] = arguments[ARGUMENTS + FN_GATE_OUT_ARGUMENT];
    }
    if (kind == &fn_call_kinds[QUANTIZER]) {
        operands[number++] = arguments[ARGUMENTS + FN_QUANTIZER_OUT_ARGUMENT];
        operands[number++] = arguments[ARGUMENTS + FN_QUANTIZER_SCALE_OUT_ARGUMENT];
    }
    if (kind == &fn_call_kinds[TWO_NORMS]) operands[number++] = arguments[FIRST_WEIGHT];
    return fn_records_gradient(operands, number);
}

/* Whether the outputs' rows share memory with each other, or with an operand other than exactly x or the residual. */
static int overlap(const struct fn_call *c, const struct fn_call *first) {
    enum { IN_PLACE = 2, OUT = 5, RESIDUAL_OUT };
    const fn_extent none = {.kind = FN_NONE}, first_weight = first ? fn_extent_of(first, FN_WEIGHT) : none;
    const fn_extent all[] = {fn_extent_of(c, FN_X),    fn_extent_of(c, FN_RESIDUAL), fn_extent_of(c, FN_WEIGHT),
                             fn_extent_of(c, FN_BIAS), first_weight,                 fn_extent_of(c, FN_OUT),
                             fn_extent_of(c, FN_RESIDUAL_OUT)};
    return !fn_may_write(all, OUT, IN_PLACE) || !fn_may_write(all, RESIDUAL_OUT, IN_PLACE);
}

/* Whether a weight or a bias fits x: a row for all heads, or a row for each of x's last dimension but one. */
static int fits(const tensor *t, const tensor *x, struct fn_call *c, int operand, int of_heads) {
    if (t->ndim == 1) {
        c->operand[operand].stride = 0;
        return t->shape[0] == c->hidden;
    }
    if (!of_heads || t->ndim != 2 || x->ndim < 2 || t->shape[1] != c->hidden || t->shape[0] != x->shape[x->ndim - 2]) return 0;
    c->heads = t->shape[0];
    return 1;
}

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, tensor *t, struct fn_call *c, double *x_scale) {
    struct fn_operand *o = c->operand;
    if (!PyBool_Check(arguments[ROUND_SUM]) || !PyBool_Check(arguments[ROUND_NORM]) || !PyBool_Check(arguments[CENTER])) return 0;
    if (!fn_read(arguments[FN_X], &t[FN_X], &o[FN_X]) || t[FN_X].ndim == 0) return 0;
    const int wide = o[FN_X].kind == FN_F64;
    if (!fn_read_float(arguments[EPS], wide, &c->eps) || !fn_read_float(arguments[WEIGHT_OFFSET], wide, &c->weight_offset) ||
        !fn_read_float(arguments[X_SCALE], wide, x_scale))
        return 0;
    for (int i = FN_RESIDUAL; i < FN_FORWARD_OPERANDS_IN_C; i++) {
        PyObject *given = arguments[i == FN_RSTD ? RSTD : i == FN_BIAS ? BIAS : i];
        o[i] = (struct fn_operand){.kind = FN_NONE};
        if (i == FN_RSTD && given == Py_True) { /* it is made with the outputs */
            o[i].kind = wide ? FN_F64 : FN_F32;
            continue;
        }
        if (given == Py_None) continue;
        int same = i == FN_OUT ? FN_X : FN_RESIDUAL; /* in place */
        if ((i == FN_OUT || i == FN_RESIDUAL_OUT) && given == arguments[same]) o[i] = o[same], t[i] = t[same];
        else if (!fn_read(given, &t[i], &o[i])) return 0;
        if (!fn_same_device(&t[i], &t[FN_X])) return 0;
        if (i != FN_WEIGHT && i < FN_RSTD && !fn_same_shape(&t[i], &t[FN_X])) return 0;
        if (o[i].kind == FN_F64 && o[FN_X].kind != FN_F64) return 0;
    }
    if (o[FN_RESIDUAL_OUT].kind && o[FN_RESIDUAL_OUT].kind != o[FN_RESIDUAL].kind) return 0;
    c->pass = FN_FORWARD;
    fn_take_rows(c, &t[FN_X]);
    c->block = c->following = 0;
    c->heads = 1;
    const int public = arguments[ASK] == Py_True; /* the operators of torch.ops have one row for all heads */
    if (o[FN_WEIGHT].kind && !fits(&t[FN_WEIGHT], &t[FN_X], c, FN_WEIGHT, public)) return 0;
    if (o[FN_BIAS].kind && !fits(&t[FN_BIAS], &t[FN_X], c, FN_BIAS, public)) return 0;
    if (o[FN_RSTD].kind && arguments[RSTD] != Py_True &&
        (o[FN_RSTD].kind != (wide ? FN_F64 : FN_F32) || fn_elements(&t[FN_RSTD]) != c->rows))
        return 0;
    c->flags = (arguments[ROUND_SUM] == Py_True ? FN_ROUND_SUM : 0) |
               (arguments[ROUND_NORM] == Py_True ? FN_ROUND_NORM : 0) | (arguments[CENTER] == Py_True ? FN_CENTER : 0);
    return 1;
}

/* A call before the one that is read already: it takes x, and its rows pass to the next one. */
static void put_before(const struct fn_call *next, struct fn_call *c, int64_t passed_kind) {
    struct fn_operand *o = c->operand;
    *c = *next;
    o[FN_RESIDUAL] = o[FN_WEIGHT] = o[FN_RESIDUAL_OUT] = o[FN_RSTD] = o[FN_BIAS] = (struct fn_operand){.kind = FN_NONE};
    o[FN_OUT] = (struct fn_operand){.kind = passed_kind, .stride = c->hidden};
    c->following = c->heads = 1;
}

/* Reads the arguments of a norm before the addition. Returns 0 as read_arguments does. */
static int read_first_norm(PyObject *const *arguments, const tensor *x, const struct fn_call *next, struct fn_call *c) {
    struct fn_operand *o = c->operand;
    const int between = fn_between(arguments[BETWEEN]);
    if (between < 0) return 0;
    put_before(next, c, between ? FN_F32 : next->operand[FN_X].kind);
    if (!fn_read_float(arguments[FIRST_EPS], o[FN_X].kind == FN_F64, &c->eps)) return 0;
    if (arguments[FIRST_WEIGHT] != Py_None) {
        tensor t;
        if (!fn_read(arguments[FIRST_WEIGHT], &t, &o[FN_WEIGHT]) || !fn_same_device(&t, x)) return 0;
        if (!fits(&t, x, c, FN_WEIGHT, 0) || (o[FN_WEIGHT].kind == FN_F64 && o[FN_X].kind != FN_F64)) return 0;
    }
    /* A float64 x, and a sum without a residual: Python reports the errors. */
    return next->operand[FN_RESIDUAL].kind && !(o[FN_X].kind == FN_F64 && o[FN_OUT].kind == FN_F32);
}

/* x times a factor before the addition. */
static void scale_first(double factor, const struct fn_call *next, struct fn_call *c) {
    put_before(next, c, next->operand[FN_X].kind);
    c->flags = FN_SCALE_ONLY;
    c->eps = factor;
}

/* Allocates the outputs that are not given, the norm's in its dtype; returns as fn_take_output does. */
static int allocate(PyObject *const *arguments, const tensor *t, output outputs[2], struct fn_call *c, int normalises) {
    const int wanted[2] = {normalises, c->operand[FN_RESIDUAL].kind != FN_NONE};
    for (int i = 0; i < 2; i++) {
        struct fn_operand *o = &c->operand[FN_OUT + i];
        output *out = &outputs[i];
        if (o->kind || !wanted[i]) {
            out->object = Py_NewRef(arguments[FN_OUT + i]);
            out->given = o->kind != FN_NONE;
            continue;
        }
        PyObject *keywords = NULL;
        if (i == 0 && arguments[OUT_DTYPE] != Py_None && !(keywords = fn_keywords_of(arguments[OUT_DTYPE]))) return 1;
        const int failed = fn_take_output(out, Py_None, arguments[i], &t[i], 0, keywords);
        if (failed) return failed;
        if (out->o.kind == FN_F64 && c->operand[FN_X].kind != FN_F64) return 1;
        *o = out->o;
    }
    return 0;
}

/* Makes rstd behind the outputs that there are, and says in `count` how many there are then; returns as fn_take_output does. */
static int make_rstd(PyObject *x, const tensor *t, output outputs[3], struct fn_call *c, int *count) {
    *count = 2 + (c->operand[FN_RESIDUAL].kind != FN_NONE);
    output *rstd = &outputs[*count - 1];
    Py_CLEAR(rstd->object); /* None, in place of a sum */
    const int failed = fn_make_numbers(rstd, x, t, t->shape, t->ndim - 1, fn_keywords_of_sums(c->operand[FN_X].kind));
    c->operand[FN_RSTD].address = failed ? 0 : rstd->o.address;
    return failed;
}

/* `devices` has a bit for each type of device (as DLPack numbers them, and TRITON_CPU) whose tensors are taken. */
static PyObject *forward(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    struct fn_call calls[FN_CHAIN], *c = &calls[1], *first = NULL;
    struct fn_quantized quantized;
    struct fn_gated gated;
    tensor t[FN_FORWARD_OPERANDS_IN_C];
    const int quantizes = kind == &fn_call_kinds[QUANTIZER], gates = kind == &fn_call_kinds[GATE], two_norms = kind == &fn_call_kinds[TWO_NORMS];
    if (quantizes) c = &quantized.call;
    if (gates) c = &gated.call;
    if (two_norms && arguments[EPS] == Py_None) arguments[EPS] = arguments[FIRST_EPS];
    if (arguments[OUT_DTYPE] != Py_None && (quantizes || gates || arguments[FN_OUT] != Py_None)) return fn_refuse();
    double x_scale;
    if (!read_arguments(arguments, t, c, &x_scale)) return fn_refuse();
    if (quantizes && !fn_read_quantizer(arguments + ARGUMENTS, &t[FN_X], &quantized)) return fn_refuse();
    if (gates && !fn_read_gate(arguments + ARGUMENTS, &t[FN_X], &gated)) return fn_refuse();
    if (two_norms) {
        first = calls;
        if (!read_first_norm(arguments, &t[FN_X], c, first)) return fn_refuse();
    } else if (x_scale != 1) {
        first = calls;
        scale_first(x_scale, c, first);
    }
    const int32_t device = t[FN_X].device.type;
    const int triton = device == DL_CPU && devices >> TRITON_CPU & 1;
    if (device > DL_CUDA || !(triton || devices >> device & 1)) return fn_refuse();
    if (triton && first) return fn_refuse();
    int others = arguments[ASK] == Py_True ? fn_is_heard() : 0;
    if (!others) {
        others = records_gradient(arguments, kind);
        if (others > 0 && may_record) return Py_NewRef(Py_NotImplemented);
    }
    if (others < 0) return NULL;
    if (others || (triton && !gates && !quantizes && !fn_triton_has(c))) return fn_refuse();
    if (gates) return fn_run_gated(arguments + ARGUMENTS, arguments[FN_X], &t[FN_X], &gated, triton);

    output outputs[3] = {{.object = NULL}};
    int count = 2, failed = allocate(arguments, t, outputs, c, !quantizes && (!two_norms || arguments[NEXT_NORM] == Py_True));
    if (!failed) failed = (outputs[0].given || outputs[1].given) && overlap(c, first);
    if (!failed && arguments[RSTD] == Py_True) failed = make_rstd(arguments[FN_X], &t[FN_X], outputs, c, &count);
    if (!failed) failed = fn_refuses_writes(outputs, count);
    if (!failed && quantizes) return fn_quantize(arguments + ARGUMENTS, arguments[FN_X], &t[FN_X], &quantized, outputs, triton);
    if (first) c->operand[FN_X] = first->operand[FN_OUT];
    if (!failed) failed = fn_run_on_device(first ? first : c, &t[FN_X], triton);
    return fn_hand_out(outputs, count, failed);
}
