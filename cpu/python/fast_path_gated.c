/* A gate on the fast path, alone or with a norm: rows times a function of other rows; and its gradients. */
#include "python/fast_path.h"

#include <math.h>
#include <string.h>

/*
 * Python's arguments, after those of every forward pass. ORDER: a number of enum fn_gate_order; of a norm and a gate None, and
 * NORM_FIRST says which is first. With FN_AND_MUL, Z has the rows, or it is None, and x holds both. GROUP: the elements of a
 * row that are normalised together, or None. From LIMIT on there are optional steps, of FN_AND_MUL; softcap has LIMIT, its
 * cap, and ROUNDS.
 */
enum { Z, ACTIVATION, ORDER, NORM_FIRST, BETWEEN, GROUP, OUT, LIMIT, ALPHA, UP_OFFSET, CLAMP, INTERLEAVED, ROUNDS };
_Static_assert((int)OUT == (int)FN_GATE_OUT_ARGUMENT, "fast_path_forward.c looks at the output");

static int activation_of(PyObject *name) {
    static const char *const names[] = {FN_ACTIVATION_NAMES};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[i]) == 0) return i;
    return -1;
}

/* Reads the optional steps. Returns 0 for what Python reports, or converts. */
static int read_steps(PyObject *const *arguments, struct fn_gate *g) {
    static PyObject *before, *after; /* interned, as constants of a program are */
    if (!before) before = PyUnicode_InternFromString("before"), after = PyUnicode_InternFromString("after");
    PyObject *const numbers[] = {arguments[LIMIT], arguments[ALPHA], arguments[UP_OFFSET]};
    double *const to[] = {&g->limit, &g->alpha, &g->up_offset};
    for (int i = numbers[0] == Py_None; i < 3; i++)
        if (!fn_read_number(numbers[i], (int)g->wide, to[i])) return 0;
    if (numbers[0] != Py_None && !(g->limit > 0 && g->limit < INFINITY)) return 0;
    if (!(g->alpha >= 1 && g->alpha < INFINITY && g->up_offset - g->up_offset == 0)) return 0;
    if (arguments[CLAMP] != before) {
        if (arguments[CLAMP] != after) return 0;
        g->flags = FN_CLAMP_AFTER;
    }
    if (arguments[ROUNDS] != Py_False) {
        if (arguments[ROUNDS] != Py_True || arguments[BETWEEN] != Py_None) return 0;
        g->flags |= FN_ROUND_STEPS;
    }
    return arguments[INTERLEAVED] == Py_False || (arguments[INTERLEAVED] == Py_True && arguments[Z] == Py_None);
}

/* Reads the cap of softcap and its roundings. Returns 0 as read_steps. */
static int read_softcap(PyObject *const *arguments, int64_t kind, struct fn_gate *g) {
    if (!fn_read_normal(arguments[LIMIT], (int)g->wide, &g->limit)) return 0;
    if (!PyBool_Check(arguments[ROUNDS])) return 0;
    if (arguments[ROUNDS] == Py_True && (kind == FN_F16 || kind == FN_BF16)) g->between = kind;
    return 1;
}

int fn_read_gate(PyObject *const *arguments, const tensor *x, struct fn_gated *given) {
    struct fn_call *c = &given->call;
    struct fn_gate *g = &given->gate;
    struct fn_operand other;
    const int64_t kind = c->operand[FN_X].kind;
    const int between = fn_between(arguments[BETWEEN]);
    if (between < 0 || !(arguments[ORDER] == Py_None ? PyBool_Check(arguments[NORM_FIRST]) : PyLong_Check(arguments[ORDER]))) return 0;
    memset(g, 0, sizeof *g);
    if (arguments[ORDER] != Py_None) given->how = (int)PyLong_AsLong(arguments[ORDER]);
    else given->how = arguments[NORM_FIRST] == Py_True ? FN_NORM_FIRST : FN_GATE_FIRST;
    given->between = between;
    if (between && given->how == FN_GATE_FIRST) return 0;
    g->activation = activation_of(arguments[ACTIVATION]);
    g->wide = kind == FN_F64;
    g->alpha = 1;
    if (given->how == FN_AND_MUL && !read_steps(arguments, g)) return 0;
    if (g->activation == FN_SOFTCAP && (given->how != FN_FUNCTION || !read_softcap(arguments, kind, g))) return 0;
    /* What Python reports; and a weight with a row for each head, which no function with a gate takes. */
    if (g->activation < 0 || (given->between && g->wide) || c->operand[FN_WEIGHT].stride) return 0;
    if (given->how == FN_AND_MUL && !given->between && (kind == FN_F16 || kind == FN_BF16)) g->between = kind;
    if (given->how == FN_AND_MUL && arguments[Z] == Py_None) {
        if (c->hidden % 2) return 0;
        c->hidden /= 2;
        other = c->operand[FN_X];
        if (arguments[INTERLEAVED] == Py_True) g->flags |= FN_IN_TURNS;
        other.address += (uintptr_t)((g->flags & FN_IN_TURNS ? 1 : c->hidden) * fn_element_size(kind));
    } else if (given->how == FN_FUNCTION) {
        g->operand[FN_GATE] = c->operand[FN_X];
        given->groups = 1;
        return 1;
    } else {
        tensor t;
        if (!fn_read(arguments[Z], &t, &other) || !fn_same_device(&t, x) || !fn_same_shape(&t, x)) return 0;
        if (other.kind == FN_F64 && !g->wide) return 0;
    }
    g->operand[given->how == FN_AND_MUL ? FN_GATE : FN_GATED] = c->operand[FN_X];
    g->operand[given->how == FN_AND_MUL ? FN_GATED : FN_GATE] = other;
    given->groups = 1;
    if (arguments[GROUP] != Py_None) {
        const int is_int = PyLong_Check(arguments[GROUP]) && !PyBool_Check(arguments[GROUP]);
        const int64_t size = is_int ? PyLong_AsLongLong(arguments[GROUP]) : 0;
        if (size < 1 || c->hidden % size) return 0;
        given->groups = c->hidden / size;
    }
    return 1;
}

/* Whether an output that is given lies apart from the weight and from each row operand, unless it is that operand. */
static int may_be_written(const struct fn_gated *given, const struct fn_operand *out) {
    enum { IN_PLACE = 2, OUTPUT };
    const struct fn_call *c = &given->call;
    const struct fn_operand *rows[] = {&given->gate.operand[FN_GATED], &given->gate.operand[FN_GATE], out};
    fn_extent of[3];
    if (given->gate.flags & FN_IN_TURNS) return 0; /* Python reports what it may not be */
    for (int i = 0; i < 3; i++) of[i] = fn_extent_of_rows(rows[i], c->rows, c->hidden);
    const fn_extent all[] = {of[0], of[1], fn_extent_of(c, FN_WEIGHT), of[2]};
    return fn_may_write(all, OUTPUT, IN_PLACE);
}

/* The strides of an operand's groups, of which the rows are to be normalised. */
static void put_in_groups(struct fn_operand *o, int64_t inner, int64_t groups, int64_t size) {
    if (!o->kind) return;
    o->outer_stride = inner == groups ? o->stride : 0;
    o->stride = size;
}

/* Fills in what the order of a norm and a gate decides, and groups. */
static void put_together(struct fn_gated *given, const struct fn_operand *out) {
    struct fn_call *c = &given->call;
    struct fn_gate *g = &given->gate;
    const int64_t kind = c->operand[FN_X].kind, groups = given->groups, size = c->hidden / groups;
    g->operand[FN_GATE_OUT] = c->operand[FN_OUT] = *out;
    if (given->how == FN_NORM_FIRST) {
        c->flags |= FN_GATE_AFTER;
        c->operand[FN_OUT] = (struct fn_operand){.kind = given->between ? FN_F32 : kind, .stride = c->hidden};
        g->operand[FN_GATED] = c->operand[FN_OUT];
    } else if (given->how == FN_GATE_FIRST) {
        c->flags |= FN_GATE_BEFORE;
        c->operand[FN_X].kind = g->wide ? FN_F64 : FN_F32;
        c->operand[FN_X].stride = c->hidden;
        g->operand[FN_GATE_OUT] = c->operand[FN_X];
    } else {
        c->flags = FN_GATE_ONLY;
    }
    if (groups > 1) {
        int packed = 1;
        for (int i = FN_GATED; i <= FN_GATE_OUT; i++) packed &= g->operand[i].stride == c->hidden;
        packed &= c->operand[FN_X].stride == c->hidden && out->stride == c->hidden;
        c->rows *= groups;
        c->inner = packed ? c->rows : groups;
        for (int i = FN_GATED; i <= FN_GATE_OUT; i++) put_in_groups(&g->operand[i], c->inner, groups, size);
        put_in_groups(&c->operand[FN_X], c->inner, groups, size);
        put_in_groups(&c->operand[FN_OUT], c->inner, groups, size);
        if (c->operand[FN_WEIGHT].kind) {
            c->operand[FN_WEIGHT].stride = size;
            c->heads = groups;
        }
        c->hidden = size;
    }
    g->rows = c->rows, g->inner = c->inner, g->hidden = c->hidden;
}

PyObject *fn_run_gated(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_gated *given, int triton) {
    struct fn_call *c = &given->call;
    const int halves = c->hidden != x_tensor->shape[x_tensor->ndim - 1];
    output out;
    int failed = fn_take_output(&out, arguments[OUT], x, x_tensor, halves ? c->hidden : 0, NULL);
    if (!failed) failed = !out.o.kind || !fn_same_rows(&out.t, x_tensor, c->hidden) || (out.o.kind == FN_F64 && !given->gate.wide);
    if (!failed) failed = out.given && !may_be_written(given, &out.o);
    if (!failed) failed = fn_refuses_writes(&out, 1);
    if (!failed) {
        put_together(given, &out.o);
        failed = fn_run_on_device(c, x_tensor, triton);
    }
    return fn_hand_out(&out, 1, failed);
}

/*
 * Python's arguments of a backward pass: the type of device as DLPack numbers them, the operands in the order d, y, z, dy,
 * dz, the function, the kind between, and the optional steps: their flags (enum fn_gate_flag) and numbers.
 */
enum { DEVICE, FIRST, BACKWARD_ACTIVATION = FIRST + FN_GATE_OPERANDS, BACKWARD_BETWEEN };
enum { BACKWARD_FLAGS = BACKWARD_BETWEEN + 1, BACKWARD_LIMIT, BACKWARD_ALPHA, BACKWARD_OFFSET, BACKWARD_ARGUMENTS };

PyObject *fn_gate_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    struct fn_gated given;
    struct fn_call *c = &given.call;
    struct fn_gate *g = &given.gate;
    tensor t[FN_GATE_OPERANDS];
    if (!fn_takes("gate_backward", count, BACKWARD_ARGUMENTS)) return NULL;
    memset(&given, 0, sizeof given);
    g->pass = FN_BACKWARD;
    g->flags = PyLong_AsLongLong(arguments[BACKWARD_FLAGS]);
    g->limit = PyFloat_AsDouble(arguments[BACKWARD_LIMIT]);
    g->alpha = PyFloat_AsDouble(arguments[BACKWARD_ALPHA]);
    g->up_offset = PyFloat_AsDouble(arguments[BACKWARD_OFFSET]);
    g->activation = activation_of(arguments[BACKWARD_ACTIVATION]);
    g->between = PyLong_AsLongLong(arguments[BACKWARD_BETWEEN]);
    const long device = PyLong_AsLong(arguments[DEVICE]);
    const unsigned required = 1 << FN_GATE_D | 1 << FN_GATE;
    int taken = fn_exchange_api && (device != DL_CPU || fn_run_on_cpu) && g->activation >= 0 && !PyErr_Occurred();
    taken = taken && fn_read_all(arguments + FIRST, FN_GATE_OPERANDS, required, device, t, g->operand) && t[0].ndim;
    for (int i = 0; taken && i < FN_GATE_OPERANDS; i++) taken = !g->operand[i].kind || fn_same_shape(&t[i], &t[0]);
    if (!taken) return fn_was_made(1);
    g->wide = g->operand[FN_GATED].kind == FN_F64 || g->operand[FN_GATE].kind == FN_F64;
    c->flags = FN_GATE_ONLY;
    fn_take_rows(c, &t[0]);
    g->rows = g->inner = c->rows, g->hidden = c->hidden;
    return fn_was_made(fn_run_on_device(c, &t[0], 0));
}

/* Python's arguments of a norm with a gate in a backward pass: tensors, of which some may be None, and these. */
enum { OF_D, OF_X, OF_Z, OF_RSTD, OF_WEIGHT, OF_DX, OF_DZ, OF_DWEIGHT, TENSORS };
enum { NORM_GATED_ACTIVATION = TENSORS, NORM_BEFORE_GATE, BETWEEN_THEM, ROUNDS_NORM, OFFSET, NORM_GATED_ARGUMENTS };

/* Reads the tensors. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_tensors(PyObject *const *arguments, struct fn_operand *o, struct fn_call *c) {
    tensor t[TENSORS];
    const unsigned required = 1 << OF_D | 1 << OF_X | 1 << OF_Z | 1 << OF_RSTD;
    const tensor *x = &t[OF_X];
    if (!fn_read_all(arguments, TENSORS, required, DL_CPU, t, o) || !x->ndim) return 0;
    fn_take_rows(c, x);
    c->heads = 1;
    if (o[OF_WEIGHT].kind && t[OF_WEIGHT].ndim == 2) c->heads = t[OF_WEIGHT].shape[0];
    for (int i = 0; i < TENSORS; i++) {
        if (!o[i].kind) continue;
        const int of_weight = i == OF_WEIGHT || i == OF_DWEIGHT;
        if (i == OF_RSTD ? fn_elements(&t[i]) != c->rows : of_weight ? fn_elements(&t[i]) != c->heads * c->hidden
                                                                     : !fn_same_shape(&t[i], x))
            return 0;
    }
    return c->rows % c->heads == 0;
}

PyObject *fn_norm_gated_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    struct fn_gated given;
    struct fn_call *c = &given.call;
    struct fn_gate *g = &given.gate;
    struct fn_operand o[TENSORS];
    if (!fn_takes("norm_gated_backward", count, NORM_GATED_ARGUMENTS)) return NULL;
    memset(&given, 0, sizeof given);
    const int norm_first = arguments[NORM_BEFORE_GATE] == Py_True, between = fn_between(arguments[BETWEEN_THEM]);
    c->weight_offset = PyFloat_AsDouble(arguments[OFFSET]);
    g->activation = activation_of(arguments[NORM_GATED_ACTIVATION]);
    if (PyErr_Occurred()) return NULL;
    if (!fn_exchange_api || !fn_run_on_cpu || g->activation < 0 || between < 0 || !read_tensors(arguments, o, c))
        return fn_was_made(1);
    c->pass = g->pass = FN_BACKWARD;
    g->alpha = 1;
    g->rows = g->inner = c->rows, g->hidden = c->hidden;
    g->wide = o[OF_RSTD].kind == FN_F64;
    if (arguments[ROUNDS_NORM] == Py_True) c->flags = FN_ROUND_NORM;
    const int64_t passed_kind = !norm_first ? (g->wide ? FN_F64 : FN_F32) : between ? FN_F32 : o[OF_X].kind;
    const struct fn_operand passed = {.kind = passed_kind, .stride = c->hidden}, absent = {.kind = FN_NONE};
    c->operand[FN_BACKWARD_RSTD] = o[OF_RSTD];
    c->operand[FN_BACKWARD_WEIGHT] = o[OF_WEIGHT];
    c->operand[FN_DWEIGHT] = o[OF_DWEIGHT];
    g->operand[FN_GATE] = o[OF_Z];
    g->operand[FN_GATE_DZ] = o[OF_DZ];
    if (norm_first) {
        c->flags |= FN_GATE_AFTER;
        c->operand[FN_DY] = passed, c->operand[FN_H] = o[OF_X], c->operand[FN_DX] = o[OF_DX];
        g->operand[FN_GATE_D] = o[OF_D], g->operand[FN_GATED] = g->operand[FN_GATED_D] = passed;
    } else {
        c->flags |= FN_GATE_BEFORE;
        c->operand[FN_DY] = o[OF_D], c->operand[FN_H] = passed;
        c->operand[FN_DX] = o[OF_DX].kind || o[OF_DZ].kind ? passed : absent;
        g->operand[FN_GATE_D] = passed, g->operand[FN_GATED] = o[OF_X], g->operand[FN_GATED_D] = o[OF_DX];
    }
    return fn_was_made(fn_run_in_c(c, fn_run_on_cpu));
}
