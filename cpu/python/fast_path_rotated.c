/* Heads on the fast path: q, or q and k, normalised and rotated on a CPU, or by a CUDA kernel that is held. */
#include "python/fast_path.h"

#include <string.h>

/* Python's arguments. K and its weight are None where q alone is rotated. */
enum {
    Q, K, Q_WEIGHT, K_WEIGHT, COS, SIN, POSITIONS, Q_OUT, K_OUT, TENSORS,
    EPS = TENSORS, WEIGHT_OFFSET, NORM, INTERLEAVED, ROUND_PRODUCTS, BETWEEN, ROUND_NORM, Q_RSTD, K_RSTD
};

/* The operands whose rows are rows of heads; tables and positions may have one row for several. */
enum { IN_ROWS = 7 };
static const int in_rows[IN_ROWS] = {Q, K, Q_OUT, K_OUT, COS, SIN, POSITIONS};

/* What was read of Python's arguments. */
struct given {
    tensor t[TENSORS];
    struct fn_operand o[TENSORS]; /* without an address where the operand is absent; the strides of rows in two levels */
};

static int has(const struct given *g, int operand) { return g->o[operand].address != 0; }

static int64_t last_of(const tensor *t, int back) { return t->shape[t->ndim - back]; }

/* Whether the numbers of an operand's last dimension are adjacent. */
static int is_dense(const tensor *t) { return t->ndim > 0 && t->strides[t->ndim - 1] == 1; }

/*
 * The stride of a dimension before the heads, counted from the last such dimension; 0 where one row is for several, of an
 * absent operand, and of tables whose rows positions choose.
 */
static int64_t stride_of(const struct given *g, int operand, int back) {
    const tensor *t = &g->t[operand];
    const int is_table = operand == COS || operand == SIN;
    if (!has(g, operand) || (is_table && has(g, POSITIONS))) return 0;
    const int after = operand == POSITIONS ? 0 : is_table ? 1 : 2, at = t->ndim - 1 - after - back;
    return at < 0 || t->shape[at] == 1 ? 0 : t->strides[at];
}

/* Whether rows of a table, or positions, expand to those of q. */
static int expands(const tensor *t, int after, const tensor *q) {
    if (t->ndim - after > q->ndim - 2) return 0;
    for (int i = t->ndim - after - 1, k = q->ndim - 3; i >= 0; i--, k--)
        if (t->shape[i] != 1 && t->shape[i] != q->shape[k]) return 0;
    return 1;
}

/* Rows of heads in at most two levels that hold for all operands; whether there are such levels. */
static int find_levels(struct given *g, struct fn_rotation *r) {
    const tensor *q = &g->t[Q];
    int64_t size[2] = {1, 1};
    int levels = 0;
    for (int back = 0; back < q->ndim - 2; back++) {
        const int64_t length = q->shape[q->ndim - 3 - back];
        if (length == 1) continue;
        int follows = levels > 0;
        for (int k = 0; k < IN_ROWS && follows; k++) {
            const struct fn_operand *o = &g->o[in_rows[k]];
            follows = stride_of(g, in_rows[k], back) == (levels == 1 ? o->stride : o->outer_stride) * size[levels - 1];
        }
        if (follows) {
            size[levels - 1] *= length;
            continue;
        }
        if (levels == 2) return 0;
        for (int k = 0; k < IN_ROWS; k++) {
            struct fn_operand *o = &g->o[in_rows[k]];
            *(levels == 0 ? &o->stride : &o->outer_stride) = stride_of(g, in_rows[k], back);
        }
        size[levels++] = length;
    }
    if (has(g, POSITIONS))
        for (int i = COS; i <= SIN; i++) g->o[i].stride = g->t[i].strides[0];
    r->inner = size[0];
    r->rows = size[0] * size[1];
    return 1;
}

static int fits(const tensor *weight, const tensor *x) {
    if (weight->ndim == 1) return last_of(weight, 1) == last_of(x, 1);
    return weight->ndim == 2 && last_of(weight, 1) == last_of(x, 1) && last_of(weight, 2) == last_of(x, 2);
}

/* Whether q and k, their weights and the tables fit each other; Python reports it where they do not. */
static int all_fit(const struct given *g) {
    const tensor *t = g->t, *q = &t[Q];
    if (q->ndim < 2 || q->shape[q->ndim - 1] < 2) return 0;
    for (int i = Q; i < TENSORS; i++)
        if (has(g, i) && !fn_same_device(&t[i], q)) return 0;
    if (has(g, K)) {
        if (t[K].ndim != q->ndim || last_of(&t[K], 1) != last_of(q, 1) || g->o[K].kind != g->o[Q].kind) return 0;
        for (int i = 0; i < q->ndim - 2; i++)
            if (t[K].shape[i] != q->shape[i]) return 0;
    }
    for (int set = 0; set < FN_SETS; set++) {
        const int x = Q + set, weight = Q_WEIGHT + set, out = Q_OUT + set;
        if (!has(g, x) && (has(g, weight) || has(g, out))) return 0;
        if (has(g, x) && !is_dense(&t[x])) return 0;
        if (has(g, out) && (!is_dense(&t[out]) || g->o[out].kind != g->o[x].kind || !fn_same_shape(&t[out], &t[x]))) return 0;
        if (!has(g, weight)) continue;
        if (!g->o[weight].kind || fn_elements(&t[weight]) < 0 || !fits(&t[weight], &t[x])) return 0;
        if (g->o[weight].kind == FN_F64 && g->o[x].kind != FN_F64) return 0;
    }
    if (has(g, COS) != has(g, SIN) || (has(g, POSITIONS) && !has(g, COS))) return 0;
    if (!has(g, COS)) return 1;
    const int64_t pairs = t[COS].ndim ? last_of(&t[COS], 1) : 0;
    if (pairs < 1 || 2 * pairs > last_of(q, 1) || !fn_same_shape(&t[SIN], &t[COS])) return 0;
    for (int i = COS; i <= SIN; i++)
        if (!g->o[i].kind || !is_dense(&t[i]) || (has(g, POSITIONS) ? t[i].ndim != 2 : !expands(&t[i], 1, q))) return 0;
    if (!has(g, POSITIONS)) return 1;
    const tensor *p = &t[POSITIONS];
    return p->dtype.code == DL_INT && p->dtype.lanes == 1 && (p->dtype.bits == 32 || p->dtype.bits == 64) && expands(p, 0, q);
}

/* Whether all positions are rows of the table, on a CPU; Python reports it where they are not. */
static int are_rows(const struct fn_rotation *r, int64_t length) {
    for (int64_t row = 0; row < r->rows; row++) {
        const int64_t at = row / r->inner * r->positions_outer_stride + row % r->inner * r->positions_stride;
        const int64_t position = r->position_size == 4 ? ((const int32_t *)r->positions)[at] : ((const int64_t *)r->positions)[at];
        if (position < 0 || position >= length) return 0;
    }
    return 1;
}

enum { LEVELS = 6 };

/* The memory of an operand: levels that lead from place to place, the smallest step first. */
struct memory {
    int levels;
    int64_t step[LEVELS], bytes[LEVELS + 1]; /* of all places below each level, and of the whole operand */
};

/* Returns 0 if the operand has more levels. */
static int find_memory(const tensor *t, struct memory *m) {
    const int64_t item = t->dtype.bits / 8;
    int64_t size[LEVELS];
    m->levels = 0, m->bytes[0] = item;
    for (int i = t->ndim - 1; i >= 0; i--) { /* whose steps mostly are in order already */
        if (t->shape[i] == 1) continue;
        if (m->levels == LEVELS) return 0;
        int at = m->levels++;
        for (; at > 0 && m->step[at - 1] > t->strides[i] * item; at--) m->step[at] = m->step[at - 1], size[at] = size[at - 1];
        m->step[at] = t->strides[i] * item, size[at] = t->shape[i];
    }
    for (int k = 0; k < m->levels; k++) m->bytes[k + 1] = (size[k] - 1) * m->step[k] + m->bytes[k];
    return 1;
}

/* Whether two elements share memory, as far as that is cheap to tell. */
static int overlaps_itself(const struct memory *m) {
    for (int k = 0; k < m->levels; k++)
        if (m->step[k] < m->bytes[k]) return 1;
    return 0;
}

/* Whether so many levels of two operands share no memory, as far as that is cheap to tell, where a begins so far before b. */
static int are_apart(const struct memory *a, int of_a, const struct memory *b, int of_b, int64_t distance) {
    if (distance >= a->bytes[of_a] || -distance >= b->bytes[of_b]) return 1;
    if (!of_a-- || !of_b-- || a->step[of_a] != b->step[of_b]) return 0;
    const int64_t step = a->step[of_a];
    if (a->bytes[of_a] > step || b->bytes[of_b] > step) return 0;
    distance = (distance % step + step) % step; /* as columns of one matrix, which repeat after a step */
    return are_apart(a, of_a, b, of_b, distance) && are_apart(a, of_a, b, of_b, distance - step);
}

static int same_elements(const struct given *g, int x, int out) {
    const tensor *a = &g->t[x], *b = &g->t[out];
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != 1 && a->strides[i] != b->strides[i]) return 0;
    return g->o[x].address == g->o[out].address;
}

/* The bytes from an operand's first element to behind its last one. */
static int64_t bytes_of(const tensor *t) {
    int64_t elements = 1;
    for (int i = 0; i < t->ndim; i++) elements += (t->shape[i] - 1) * t->strides[i];
    return elements * (t->dtype.bits / 8);
}

/* Whether what the caller wants written shares memory with another operand, other than exactly what it takes the place of. */
static int outputs_overlap(const struct given *g) {
    struct memory a, b;
    for (int out = Q_OUT; out <= K_OUT; out++) {
        if (!has(g, out)) continue;
        if (!find_memory(&g->t[out], &a) || overlaps_itself(&a)) return 1;
        for (int i = Q; i < out; i++) {
            if (!has(g, i) || (i == out - Q_OUT && same_elements(g, i, out))) continue;
            const int64_t distance = (int64_t)(g->o[i].address - g->o[out].address);
            if (distance >= a.bytes[a.levels] || -distance >= bytes_of(&g->t[i])) continue; /* the usual case */
            if (!find_memory(&g->t[i], &b) || !are_apart(&a, a.levels, &b, b.levels, distance)) return 1;
        }
    }
    return 0;
}

/* Reads where the rstd of each head goes, if it is wanted; whether that fits the heads. */
static int read_rstd(PyObject *given, const tensor *x, struct fn_heads *heads) {
    if (given == Py_None) return 1;
    tensor t;
    struct fn_operand o;
    if (!fn_read_memory(given, &t, &o) || !fn_same_device(&t, x)) return 0;
    int64_t count = 1;
    for (int i = 0; i < x->ndim - 1; i++) count *= x->shape[i];
    heads->rstd = o.address;
    return o.kind == (x->dtype.bits == 64 ? FN_F64 : FN_F32) && fn_elements(&t) == count;
}

/* Reads Python's arguments. Returns 0 if the fast path does not take them, perhaps with a Python error. */
static int read_arguments(PyObject *const *arguments, struct given *g, struct fn_rotation *r) {
    double eps, weight_offset;
    const int between = fn_between(arguments[BETWEEN]);
    if (between < 0) return 0;
    for (int i = NORM; i <= ROUND_NORM; i++)
        if (i != BETWEEN && !PyBool_Check(arguments[i])) return 0;
    for (int i = Q; i < TENSORS; i++) {
        g->o[i] = (struct fn_operand){.kind = FN_NONE};
        if (arguments[i] == Py_None) continue;
        if (i >= Q_OUT && arguments[i] == arguments[i - Q_OUT]) g->t[i] = g->t[i - Q_OUT], g->o[i] = g->o[i - Q_OUT];
        else if (!fn_read_memory(arguments[i], &g->t[i], &g->o[i])) return 0;
    }
    if (!has(g, Q) || !g->o[Q].kind || !all_fit(g)) return 0;
    const int normalises = arguments[NORM] == Py_True, rotates = has(g, COS);
    const int64_t kind = g->o[Q].kind;
    if (!fn_read_float(arguments[EPS], kind == FN_F64, &eps) || !fn_read_float(arguments[WEIGHT_OFFSET], kind == FN_F64, &weight_offset))
        return 0;
    if (!(normalises || rotates) || (!normalises && (has(g, Q_WEIGHT) || has(g, K_WEIGHT)))) return 0;
    if (between && kind == FN_F64) return 0;
    memset(r, 0, sizeof *r);
    /* Without a norm its arguments say nothing. */
    r->flags = (normalises ? FN_NORMALISED : 0) | (arguments[INTERLEAVED] == Py_True ? FN_INTERLEAVED : 0) |
               (normalises && arguments[ROUND_NORM] == Py_True ? FN_ROUND_NORM : 0);
    r->x_kind = r->out_kind = kind;
    r->between = normalises && rotates && between ? FN_F32 : kind;
    r->products = arguments[ROUND_PRODUCTS] == Py_True ? r->between : FN_NONE;
    r->size = last_of(&g->t[Q], 1);
    r->pairs = rotates ? last_of(&g->t[COS], 1) : 0;
    r->sets = has(g, K) ? 2 : 1;
    r->eps = normalises ? eps : 0;
    r->weight_offset = normalises ? weight_offset : 0;
    for (int set = 0; set < r->sets; set++)
        if (!read_rstd(arguments[Q_RSTD + set], &g->t[Q + set], &r->heads[set])) return 0;
    return 1;
}

/* Allocates the outputs that are not given. Returns 0, or nonzero if one does not lie as Python allocates it, or -1. */
static int allocate(PyObject *const *arguments, output outputs[FN_SETS], struct given *g) {
    for (int set = 0; set < FN_SETS; set++) {
        const int x = Q + set, out = Q_OUT + set;
        outputs[set].given = has(g, out);
        if (has(g, out) || !has(g, x)) {
            outputs[set].object = Py_NewRef(arguments[out]);
            continue;
        }
        const int failed = fn_take_output(&outputs[set], Py_None, arguments[x], &g->t[x], 0, NULL);
        if (failed) return failed;
        if (fn_elements(&outputs[set].t) < 0) return 1;
        g->t[out] = outputs[set].t;
        g->o[out] = outputs[set].o;
        g->o[out].stride = 0; /* found for all operands together */
    }
    return 0;
}

static void fill_in(const struct given *g, struct fn_rotation *r) {
    const struct fn_operand *o = g->o;
    r->cos = o[COS], r->sin = o[SIN];
    if (has(g, POSITIONS)) {
        r->position_size = g->t[POSITIONS].dtype.bits / 8;
        r->positions = o[POSITIONS].address;
        r->positions_outer_stride = o[POSITIONS].outer_stride, r->positions_stride = o[POSITIONS].stride;
    }
    for (int set = 0; set < r->sets; set++) {
        const int x = Q + set, out = Q_OUT + set, weight = Q_WEIGHT + set;
        r->heads[set] = (struct fn_heads){
            .count = last_of(&g->t[x], 2),
            .x = o[x].address, .x_outer_stride = o[x].outer_stride, .x_stride = o[x].stride,
            .x_head_stride = g->t[x].strides[g->t[x].ndim - 2],
            .out = o[out].address, .out_outer_stride = o[out].outer_stride, .out_stride = o[out].stride,
            .out_head_stride = g->t[out].strides[g->t[out].ndim - 2],
            .weight_kind = o[weight].kind, .weight = o[weight].address,
            .weight_stride = has(g, weight) && g->t[weight].ndim == 2 && g->t[weight].shape[0] > 1 ? r->size : 0,
            .rstd = r->heads[set].rstd,
        };
    }
}

PyObject *fn_rotate(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record) {
    (void)kind;
    struct given g;
    struct {
        struct fn_call call;
        struct fn_rotation rotation; /* follows the call in memory, as kernels expect it */
    } rotated;
    struct fn_call *c = &rotated.call;
    struct fn_rotation *r = &rotated.rotation;
    if (!read_arguments(arguments, &g, r)) return fn_refuse();
    const int32_t device = g.t[Q].device.type;
    if ((device != DL_CPU && device != DL_CUDA) || !(devices >> device & 1)) return fn_refuse();
    if (fn_is_heard()) return fn_refuse();
    const int others = fn_records_gradient(arguments, TENSORS);
    if (others) { /* Python refuses gradients of tables, and looks at positions */
        if (others < 0 || !may_record || has(&g, POSITIONS) || fn_records_gradient(arguments + COS, 2)) return fn_refuse();
        return Py_NewRef(Py_NotImplemented);
    }
    output outputs[FN_SETS] = {{.object = NULL}, {.object = NULL}};
    int failed = allocate(arguments, outputs, &g);
    if (!failed) failed = fn_refuses_writes(outputs, FN_SETS);
    if (!failed) failed = !find_levels(&g, r) || ((outputs[0].given || outputs[1].given) && outputs_overlap(&g));
    if (!failed) {
        fill_in(&g, r);
        if (has(&g, POSITIONS) && device == DL_CPU) failed = !are_rows(r, g.t[COS].shape[0]);
    }
    /* A kernel for GPUs knows one dtype of weights. */
    if (!failed && device == DL_CUDA && r->sets == FN_SETS) failed = r->heads[0].weight_kind != r->heads[1].weight_kind;
    if (!failed) {
        memset(c, 0, sizeof *c);
        c->flags = FN_ROTATION_ONLY;
        c->device = g.t[Q].device.id;
        c->rows = r->rows;
        c->hidden = r->heads[0].count * r->size + r->heads[1].count * r->size;
        failed = fn_run_on_device(c, &g.t[Q], 0);
    }
    return fn_hand_out(outputs, FN_SETS, failed);
}
