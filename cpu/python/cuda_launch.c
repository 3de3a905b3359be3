/*
 * Launches CUDA kernels that backends/cuda.py has compiled and loaded, for the fast path and for Python alike. The one seam
 * to the driver is the address of its cuLaunchKernelEx. Nothing of CUDA's is needed to build this.
 */
#include "python/fast_path.h"

#include <stdlib.h>
#include <string.h>

/* CUDA's driver API, as far as it is used here (docs.nvidia.com/cuda/cuda-driver-api). */
typedef struct {
    int id;
    char pad[4];
    union {
        char pad[64];
        unsigned cluster[3];
        int early;
    } value;
} attribute;

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    attribute *attributes;
    unsigned attribute_count;
} config;

enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6, TOO_LARGE = 9 /* CUDA_ERROR_INVALID_CONFIGURATION */ };

/* The driver's cuLaunchKernelEx, cuCtxGetDevice, cuCtxPushCurrent and cuCtxPopCurrent; NULL until they are given. */
static struct {
    int (*launch)(const config *, void *function, void **arguments, void **extra);
    int (*current_device)(int *device);
    int (*push)(void *context);
    int (*pop)(void **context);
} driver;

/*
 * What decides which kernels a call takes: the same as `ForwardKind`, `BackwardKind` and `GateKind` in
 * backends/kernel_keys.py. The kinds of the operands follow each other in `kinds`, four bits each. Of a quantizer there
 * are the length of its groups, and a bit for its being there, one for whether rows are stored too, its kind and its flags.
 * Of a gate there are its function, and the kind that this is rounded to. Without gaps, to be compared.
 */
typedef struct {
    int64_t hidden, kinds, group;
    int32_t device, options, alignment, quantizer, gate, unused;
} key;

/*
 * Options, above the flags of call.h: there is a weight offset; rstd is wanted; rows lie in two levels; a backward pass; a
 * weight or a bias has rows of heads; x is scaled; nothing but a gate; the rows of all its operands lie side by side.
 */
enum {
    OFFSET = 4, RSTD = 8, TWO_LEVELS = 16, BACKWARD = 32, OF_HEADS = 64, SCALED = 128, GATE_ONLY = 256, SIDE_BY_SIDE = 512,
    ROTATION = 1024
};

/* How a kernel shares out its work among programs: `Share` in backends/kernel_keys.py says what each takes. */
enum share { ROWS, COLUMNS_OF_SUMS, COLUMNS_OF_BLOCKS, BLOCKS, COLUMNS, ELEMENTS };

/* A kernel, of which a program takes `per_program` rows, columns or elements. */
typedef struct {
    void *function;
    unsigned threads, per_program, shared, cluster, early;
    int share;
} kernel;

/* The longest arguments, of a quantized float64 norm with a bias, have 300 bytes; a call with more would be refused. */
enum { ARGUMENT_BYTES = 48 * 8 };

enum { KERNELS = 3, FEWEST = 1024, BLOCKS_IN_LANE = 8, MOST_ALIGNED = 32 };

typedef struct {
    key key;
    int count; /* 0: free */
    void *context;
    kernel kernels[KERNELS];
} held;

/* A hash table: a power of two of places, of which at most half are taken. */
static held *places;
static size_t size, taken;

/* What is launched for a call: its key, its extent, and the arguments of its kernels. */
typedef struct {
    key key;
    int64_t rows, hidden, block; /* the rows of a block, where there are blocks */
    _Alignas(8) char arguments[ARGUMENT_BYTES];
} launch;

/* Where the kernels of a call are, or may be put: there is a free place. */
static held *place_of(const key *wanted) {
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    const unsigned char *bytes = (const unsigned char *)wanted;
    for (size_t i = 0; i < sizeof *wanted; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    for (;; hash++) {
        held *place = &places[hash & (size - 1)];
        if (!place->count || memcmp(&place->key, wanted, sizeof *wanted) == 0) return place;
    }
}

/* Makes room for one more; nonzero if there is no memory. */
static int grow(void) {
    if (2 * (taken + 1) <= size) return 0;
    held *const before = places;
    const size_t count = size;
    held *more = calloc(count ? 2 * count : FEWEST, sizeof *more);
    if (!more) return 1;
    places = more;
    size = count ? 2 * count : FEWEST;
    for (size_t i = 0; i < count; i++)
        if (before[i].count) *place_of(&before[i].key) = before[i];
    free(before);
    return 0;
}

PyObject *fn_open_cuda(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long launch, current_device, push, pop;
    if (!PyArg_ParseTuple(arguments, "KKKK", &launch, &current_device, &push, &pop)) return NULL;
    fn_lock();
    driver.launch = (int (*)(const config *, void *, void **, void **))(uintptr_t)launch;
    driver.current_device = (int (*)(int *))(uintptr_t)current_device;
    driver.push = (int (*)(void *))(uintptr_t)push;
    driver.pop = (int (*)(void **))(uintptr_t)pop;
    free(places);
    places = NULL;
    size = taken = 0;
    fn_unlock();
    Py_RETURN_NONE;
}

/*
 * The arguments of a kernel: the operands' addresses, then strides and numbers. As in csrc/forward.cuh and
 * csrc/backward.cuh; test_cuda.py holds the offsets of both against each other.
 */
typedef struct {
    int operands;
    unsigned of_rows; /* a bit for each operand that has a row for each row of the call */
    unsigned decide; /* a bit for each operand whose kind decides which kernels a call takes */
} form;

static const form forms[] = {
    [FN_FORWARD] = {FN_FORWARD_OPERANDS, 1 << FN_X | 1 << FN_RESIDUAL | 1 << FN_OUT | 1 << FN_RESIDUAL_OUT,
                    1 << FN_X | 1 << FN_RESIDUAL | 1 << FN_WEIGHT | 1 << FN_OUT | 1 << FN_RESIDUAL_OUT},
    [FN_BACKWARD] = {FN_BACKWARD_OPERANDS, 1 << FN_DY | 1 << FN_D_RESIDUAL_OUT | 1 << FN_H,
                     1 << FN_DY | 1 << FN_D_RESIDUAL_OUT | 1 << FN_H | 1 << FN_BACKWARD_RSTD | 1 << FN_BACKWARD_WEIGHT |
                         1 << FN_DX | 1 << FN_DRESIDUAL | 1 << FN_DWEIGHT},
};

/*
 * A call, and the norm of x before its addition, or the scaling of x, and the quantizer of its rows, or a gate after it or
 * before it, which are NULL where there is none. Of a chain, the call is the last one with the x of the first one, because
 * one kernel takes both; and with a gate, the call has the x and the out of both. `between`: the kind that the norm passes
 * to the gate.
 */
typedef struct {
    const struct fn_call *call, *first, *scaling;
    const struct fn_quantizer *quantizer;
    const struct fn_gate *gate;
    int64_t between;
    struct fn_call of_chain;
} work;

static void read_work(const struct fn_call *calls, work *w) {
    w->call = calls;
    w->first = w->scaling = NULL;
    w->quantizer = fn_quantizer_after(calls->following ? calls + 1 : calls);
    w->gate = fn_gate_after(calls);
    if (w->gate) {
        w->of_chain = *calls;
        w->call = &w->of_chain;
        w->between = calls->flags & FN_GATE_AFTER ? calls->operand[FN_OUT].kind : FN_NONE;
        if (calls->flags & FN_GATE_AFTER) w->of_chain.operand[FN_OUT] = w->gate->operand[FN_GATE_OUT];
        else w->of_chain.operand[FN_X] = w->gate->operand[FN_GATED];
    }
    if (!calls->following) return;
    w->of_chain = calls[1];
    w->of_chain.operand[FN_X] = calls->operand[FN_X];
    w->call = &w->of_chain;
    if (calls->flags & FN_SCALE_ONLY) w->scaling = calls;
    else w->first = calls;
}

/* The bias of a forward pass; of kind FN_NONE in other passes too. */
static struct fn_operand bias_of(const struct fn_call *c) {
    return c->pass == FN_FORWARD ? c->operand[FN_BIAS] : (struct fn_operand){.kind = FN_NONE};
}

static int has_heads(const struct fn_call *c) { return c->pass == FN_FORWARD && c->heads > 1; }

static int is_wide(const struct fn_call *c) {
    return c->operand[c->pass == FN_FORWARD ? FN_X : FN_BACKWARD_RSTD].kind == FN_F64;
}

/* The bytes of an element of the narrowest type, which a vector of numbers has as many of. */
static int64_t narrowest(const struct fn_call *c) {
    int64_t least = fn_element_size(c->operand[FN_X].kind);
    for (int i = FN_RESIDUAL; i < FN_FORWARD_OPERANDS_IN_C; i++) {
        const int64_t item = fn_element_size(c->operand[i].kind);
        if (item && item < least) least = item;
    }
    return least;
}

/*
 * The bytes of which every row of every operand begins at a multiple; 0 where one begins between two elements. An operand
 * without an address is in registers.
 */
static int32_t alignment_of(const work *w) {
    const struct fn_call *c = w->call;
    const form *f = &forms[c->pass];
    const struct fn_operand none = {.kind = FN_NONE}, more[] = {w->first ? w->first->operand[FN_WEIGHT] : none, bias_of(c)};
    uint64_t low = MOST_ALIGNED;
    for (int i = 0; i < 2; i++) {
        const int item = fn_element_size(more[i].kind);
        if (!item) continue;
        if (more[i].address % (uintptr_t)item != 0) return 0;
        low |= more[i].address | (uint64_t)(more[i].stride * item);
    }
    if (has_heads(c)) low |= (uint64_t)(c->operand[FN_WEIGHT].stride * fn_element_size(c->operand[FN_WEIGHT].kind));
    for (int i = 0; i < f->operands; i++) {
        const struct fn_operand *o = &c->operand[i];
        const int item = fn_element_size(o->kind);
        if (!item || !o->address) continue;
        if (o->address % (uintptr_t)item != 0) return 0;
        low |= o->address;
        if (f->of_rows >> i & 1) low |= (uint64_t)((o->stride | o->outer_stride) * item);
    }
    if (w->gate) {
        const struct fn_operand *z = &w->gate->operand[FN_GATE];
        const int item = fn_element_size(z->kind);
        if (z->address % (uintptr_t)item != 0) return 0;
        low |= z->address | (uint64_t)((z->stride | z->outer_stride) * item);
    }
    if (w->quantizer) {
        const struct fn_quantizer *q = w->quantizer;
        if ((q->scale | q->zero_point) % 4 != 0) return 0;
        low |= (q->out | (uint64_t)(q->out_stride | q->out_outer_stride)) * (uint64_t)narrowest(c);
    }
    return (int32_t)(low & -low);
}

static key key_of(const work *w, int32_t alignment) {
    const struct fn_call *c = w->call;
    const form *f = &forms[c->pass];
    int at = 0;
    key k;
    memset(&k, 0, sizeof k);
    k.hidden = c->hidden;
    for (int i = 0; i < f->operands; i++)
        if (f->decide >> i & 1) k.kinds |= c->operand[i].kind << 4 * at++;
    if (w->first) k.kinds |= (w->first->operand[FN_WEIGHT].kind | w->first->operand[FN_OUT].kind << 4) << 4 * at;
    k.kinds |= bias_of(c).kind << 4 * (at + 2);
    if (w->gate) {
        k.kinds |= (w->between | w->gate->operand[FN_GATE].kind << 12) << 4 * (at + 1);
        k.gate = 1 + (int32_t)w->gate->activation;
    }
    k.device = (int32_t)c->device;
    const int normalises = !(c->flags & FN_QUANTIZE_ONLY); /* without a norm its flags say nothing */
    k.options = normalises ? (int32_t)c->flags & (FN_ROUND_SUM | FN_ROUND_NORM) : 0;
    k.options |= (c->weight_offset != 0 ? OFFSET : 0) | (c->inner != c->rows ? TWO_LEVELS : 0);
    k.options |= (has_heads(c) ? OF_HEADS : 0) | (w->scaling ? SCALED : 0);
    if (c->pass == FN_BACKWARD) k.options |= BACKWARD;
    else if (c->operand[FN_RSTD].kind) k.options |= RSTD;
    k.alignment = alignment;
    if (w->quantizer) {
        k.group = w->quantizer->group;
        k.quantizer = 1 | (!normalises || c->operand[FN_OUT].address ? 2 : 0) | (int32_t)w->quantizer->kind << 2;
        k.quantizer |= (int32_t)w->quantizer->flags << 4 | normalises << 16;
    }
    return k;
}

/* The programs of a kernel for a call. */
static int64_t programs(const kernel *k, const launch *l) {
    int64_t per_program = k->per_program, count = l->hidden, times = 1;
    const int64_t blocks = l->block > 0 ? (l->rows + l->block - 1) / l->block : 0;
    switch ((enum share)k->share) {
    case COLUMNS: break;
    case ROWS: count = l->rows; break;
    case ELEMENTS: count = l->rows * l->hidden; break;
    case COLUMNS_OF_SUMS:
        for (int64_t more = BLOCKS_IN_LANE; more < blocks; more *= 2) per_program /= 2;
        break;
    case COLUMNS_OF_BLOCKS: times = blocks; break;
    case BLOCKS:
        count = blocks;
        per_program = per_program > l->block ? per_program / l->block : 1;
        break;
    }
    return (count + per_program - 1) / per_program * times;
}

/* Appends a value to a kernel's arguments, where a compiler would put it. */
static void append(char *to, size_t *at, const void *value, size_t size) {
    *at = (*at + size - 1) / size * size;
    if (*at + size <= ARGUMENT_BYTES) memcpy(to + *at, value, size);
    *at += size;
}

static void append_real(char *to, size_t *at, double value, int wide) {
    const float narrow = (float)value;
    if (wide) append(to, at, &value, sizeof value);
    else append(to, at, &narrow, sizeof narrow);
}

/* Appends the arguments of a quantizer. Strides are given in bytes, and scales and zero points have four. */
static void append_quantizer(char *to, size_t *at, const struct fn_quantizer *q, int two_levels) {
    const int64_t strides[3][2] = {{q->out_outer_stride, q->out_stride},
                                   {q->scale_outer_stride / 4, q->scale_stride / 4},
                                   {q->zero_point_outer_stride / 4, q->zero_point_stride / 4}};
    const int64_t of_groups[2] = {q->scale_group_stride / 4, q->zero_point_group_stride / 4};
    const double reals[] = {q->qmin, q->qmax, q->amax_floor, q->amax_limit, q->scale_floor};
    append(to, at, &q->out, sizeof(uintptr_t));
    append(to, at, &q->scale, sizeof(uintptr_t));
    append(to, at, &q->zero_point, sizeof(uintptr_t));
    for (int i = 0; i < 3; i++) {
        const int64_t jump = strides[i][0] - q->inner * strides[i][1];
        append(to, at, &strides[i][1], sizeof(int64_t));
        if (two_levels) append(to, at, &jump, sizeof(int64_t));
    }
    for (int i = 0; i < 2; i++) append(to, at, &of_groups[i], sizeof(int64_t));
    for (int i = 0; i < 5; i++) append_real(to, at, reals[i], 0);
}

/* Writes a kernel's arguments: the structures `Arguments` of csrc/forward.cuh and csrc/backward.cuh. Returns their length. */
static size_t pack(const work *w, char *to) {
    const struct fn_call *c = w->call;
    const form *f = &forms[c->pass];
    const int backward = c->pass == FN_BACKWARD;
    const int64_t numbers[] = {c->rows, c->block, fn_blocks(c)};
    const int32_t hidden = (int32_t)c->hidden;
    const double reals[] = {c->eps, c->weight_offset};
    const int two_levels = c->inner != c->rows;
    size_t at = 0;
    if (two_levels) append(to, &at, &c->inner, sizeof(int64_t));
    for (int i = 0; i < f->operands; i++) append(to, &at, &c->operand[i].address, sizeof(uintptr_t));
    for (int i = 0; i < f->operands; i++) {
        if (!(f->of_rows >> i & 1)) continue;
        const int64_t jump = fn_jump(c, i);
        append(to, &at, &c->operand[i].stride, sizeof(int64_t));
        if (two_levels) append(to, &at, &jump, sizeof(int64_t));
    }
    for (int i = 0; i < (backward ? 3 : 1); i++) append(to, &at, &numbers[i], sizeof(int64_t));
    append(to, &at, &hidden, sizeof hidden);
    for (int i = backward; i < 2; i++) append_real(to, &at, reals[i], is_wide(c));
    if (w->first) {
        append(to, &at, &w->first->operand[FN_WEIGHT].address, sizeof(uintptr_t));
        append_real(to, &at, w->first->eps, is_wide(c));
    } else if (!backward) { /* a kernel without anything around the norm reads none of it */
        append(to, &at, &c->operand[FN_BIAS].address, sizeof(uintptr_t));
        append(to, &at, &c->heads, sizeof(int64_t));
        append(to, &at, &c->operand[FN_WEIGHT].stride, sizeof(int64_t));
        append(to, &at, &c->operand[FN_BIAS].stride, sizeof(int64_t));
        append_real(to, &at, w->scaling ? w->scaling->eps : 1, is_wide(c));
    }
    if (w->gate) {
        const struct fn_operand *z = &w->gate->operand[FN_GATE];
        const int64_t jump = z->outer_stride - c->inner * z->stride;
        append(to, &at, &z->address, sizeof(uintptr_t));
        append(to, &at, &z->stride, sizeof(int64_t));
        if (two_levels) append(to, &at, &jump, sizeof(int64_t));
    }
    if (w->quantizer) append_quantizer(to, &at, w->quantizer, two_levels);
    return at;
}

/*
 * Reads a gate, whose arguments are those of csrc/gate.cuh. Returns 0 if an operand begins between two elements: no kernel
 * is held for such a call.
 */
static int read_gate(const struct fn_call *call, launch *l) {
    const struct fn_gate *const g = fn_gate_after(call);
    const int two_levels = g->inner != g->rows;
    const int32_t hidden = (int32_t)g->hidden;
    int packed = !two_levels;
    uint64_t low = MOST_ALIGNED;
    size_t at = 0;
    memset(&l->key, 0, sizeof l->key);
    if (two_levels) append(l->arguments, &at, &g->inner, sizeof(int64_t));
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int item = fn_element_size(o->kind);
        if (item && o->address % (uintptr_t)item != 0) return 0;
        low |= o->address | (uint64_t)((o->stride | o->outer_stride) * item);
        packed &= !item || o->stride == g->hidden;
        l->key.kinds |= o->kind << 4 * i;
        append(l->arguments, &at, &o->address, sizeof(uintptr_t));
    }
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int64_t jump = o->outer_stride - g->inner * o->stride;
        append(l->arguments, &at, &o->stride, sizeof(int64_t));
        if (two_levels) append(l->arguments, &at, &jump, sizeof(int64_t));
    }
    append(l->arguments, &at, &g->rows, sizeof(int64_t));
    append(l->arguments, &at, &hidden, sizeof hidden);
    l->key.hidden = l->hidden = g->hidden;
    l->rows = g->rows;
    l->block = 0;
    l->key.device = (int32_t)call->device;
    l->key.options = GATE_ONLY | (two_levels ? TWO_LEVELS : 0) | (g->pass == FN_BACKWARD ? BACKWARD : 0);
    l->key.options |= packed ? SIDE_BY_SIDE : 0;
    l->key.alignment = (int32_t)(low & -low);
    l->key.gate = (int32_t)(1 + g->activation + (g->between << 4));
    return at <= ARGUMENT_BYTES;
}

/* Notes what an address and strides are multiples of, and appends the address; returns 0 if it lies between two elements. */
static int append_address(launch *l, size_t *at, uint64_t *low, uintptr_t address, int64_t strides, int64_t kind) {
    const int item = fn_element_size(kind);
    append(l->arguments, at, &address, sizeof address);
    if (!item || !address) return 1;
    *low |= address | (uint64_t)(strides * item);
    return address % (uintptr_t)item == 0;
}

static void append_strides(launch *l, size_t *at, const struct fn_rotation *r, int64_t outer_stride, int64_t stride) {
    const int64_t jump = outer_stride - r->inner * stride;
    append(l->arguments, at, &stride, sizeof stride);
    if (r->inner != r->rows) append(l->arguments, at, &jump, sizeof jump);
}

/* The same for heads that are rotated, whose arguments are those of csrc/rotate.cu. */
static int read_rotation(const struct fn_call *call, launch *l) {
    const struct fn_rotation *const r = (const struct fn_rotation *)(call + 1);
    const struct fn_operand *const tables[] = {&r->cos, &r->sin};
    const int64_t kinds[] = {r->x_kind, r->out_kind, r->between, r->products, r->cos.kind, r->sin.kind, r->heads[0].weight_kind};
    const int two_levels = r->inner != r->rows;
    uint64_t low = MOST_ALIGNED;
    size_t at = 0;
    int fine = r->position_size == 0 || r->positions % (uintptr_t)r->position_size == 0;
    memset(&l->key, 0, sizeof l->key);
    l->rows = l->block = 0;
    if (two_levels) append(l->arguments, &at, &r->inner, sizeof(int64_t));
    for (int i = 0; i < FN_SETS; i++) {
        const struct fn_heads *h = &r->heads[i];
        fine &= append_address(l, &at, &low, h->x, h->x_outer_stride | h->x_stride | h->x_head_stride, r->x_kind);
        fine &= append_address(l, &at, &low, h->out, h->out_outer_stride | h->out_stride | h->out_head_stride, r->out_kind);
        fine &= append_address(l, &at, &low, h->weight, h->weight_stride, h->weight_kind);
        fine &= append_address(l, &at, &low, h->rstd, 0, FN_F32);
        append_strides(l, &at, r, h->x_outer_stride, h->x_stride);
        append(l->arguments, &at, &h->x_head_stride, sizeof(int64_t));
        append_strides(l, &at, r, h->out_outer_stride, h->out_stride);
        append(l->arguments, &at, &h->out_head_stride, sizeof(int64_t));
        append(l->arguments, &at, &h->weight_stride, sizeof(int64_t));
        append(l->arguments, &at, &h->count, sizeof(int64_t));
        l->rows += r->rows * h->count;
    }
    for (int i = 0; i < 2; i++)
        fine &= append_address(l, &at, &low, tables[i]->address, tables[i]->outer_stride | tables[i]->stride, tables[i]->kind);
    append(l->arguments, &at, &r->positions, sizeof(uintptr_t));
    for (int i = 0; i < 2; i++) append_strides(l, &at, r, tables[i]->outer_stride, tables[i]->stride);
    append_strides(l, &at, r, r->positions_outer_stride, r->positions_stride);
    append(l->arguments, &at, &r->rows, sizeof(int64_t));
    append_real(l->arguments, &at, r->eps, 0);
    append_real(l->arguments, &at, r->weight_offset, 0);
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++) l->key.kinds |= kinds[i] << 4 * i;
    l->hidden = l->key.hidden = r->size;
    l->key.group = r->pairs;
    l->key.device = (int32_t)call->device;
    l->key.options = ROTATION | (two_levels ? TWO_LEVELS : 0) | (r->weight_offset != 0 ? OFFSET : 0) | (r->heads[0].rstd ? RSTD : 0);
    l->key.quantizer = (int32_t)(r->flags | r->position_size << 8);
    l->key.alignment = (int32_t)(low & -low);
    return fine && at <= ARGUMENT_BYTES;
}

/* The same for any call. */
static int read_call(const struct fn_call *calls, launch *l) {
    work w;
    if (calls->flags & FN_GATE_ONLY) return read_gate(calls, l);
    if (calls->flags & FN_ROTATION_ONLY) return read_rotation(calls, l);
    read_work(calls, &w);
    const int32_t alignment = alignment_of(&w);
    if (!alignment) return 0;
    l->key = key_of(&w, alignment);
    l->rows = w.call->rows;
    l->hidden = w.call->hidden;
    l->block = w.call->block;
    return pack(&w, l->arguments) <= ARGUMENT_BYTES;
}

PyObject *fn_hold_cuda(PyObject *module, PyObject *arguments) {
    (void)module;
    held given;
    launch wanted;
    struct fn_call calls[FN_PACKED];
    PyObject *packed, *kernels;
    unsigned long long context;
    memset(&given, 0, sizeof given);
    if (!PyArg_ParseTuple(arguments, "O!KO!", &PyBytes_Type, &packed, &context, &PyTuple_Type, &kernels) ||
        !fn_unpack(packed, calls))
        return NULL;
    if (!read_call(calls, &wanted)) {
        PyErr_SetString(PyExc_ValueError, "an operand begins between two elements");
        return NULL;
    }
    given.key = wanted.key;
    given.context = (void *)(uintptr_t)context;
    for (; given.count < PyTuple_Size(kernels) && given.count < KERNELS; given.count++) {
        kernel *k = &given.kernels[given.count];
        unsigned long long function;
        if (!PyArg_ParseTuple(PyTuple_GetItem(kernels, given.count), "KIIIIpi", &function, &k->threads, &k->per_program,
                              &k->shared, &k->cluster, &k->early, &k->share))
            return NULL;
        k->function = (void *)(uintptr_t)function;
    }
    fn_lock();
    const int full = grow();
    if (!full) {
        held *place = place_of(&given.key);
        taken += !place->count;
        *place = given;
    }
    fn_unlock();
    if (full) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/*
 * Launches the kernels that are held for a call, one after the other, with the same arguments: in the current context
 * if that is the one of the tensors' GPU, to which torch's current stream then belongs, else in the GPU's primary context.
 */
static int launch_kernels(launch *l, void *stream) {
    config hows[KERNELS];
    attribute attributes[KERNELS][2];
    void *arguments = l->arguments;
    fn_lock();
    const held found = driver.launch && size ? *place_of(&l->key) : (held){.count = 0};
    fn_unlock();
    if (!found.count) return FN_NOT_HELD;
    memset(attributes, 0, sizeof attributes);
    for (int i = 0; i < found.count; i++) {
        const kernel *k = &found.kernels[i];
        const int64_t grid = k->cluster * programs(k, l);
        if (grid > INT32_MAX) return TOO_LARGE;
        hows[i] = (config){.grid = {(unsigned)grid, 1, 1}, .block = {k->threads, 1, 1}, .attributes = attributes[i],
                           .shared_bytes = k->shared, .stream = stream};
        if (k->cluster > 1) {
            attribute *cluster = &attributes[i][hows[i].attribute_count++];
            cluster->id = CLUSTER_DIMENSION;
            cluster->value.cluster[0] = k->cluster;
            cluster->value.cluster[1] = cluster->value.cluster[2] = 1;
        }
        if (k->early) {
            attribute *early = &attributes[i][hows[i].attribute_count++];
            early->id = PROGRAMMATIC_STREAM_SERIALIZATION;
            early->value.early = 1;
        }
    }
    int failed = 0, device, pushed = 0;
    void *popped;
    /* A full queue makes the driver wait, perhaps for a callback that needs the interpreter. */
    PyThreadState *state = PyEval_SaveThread();
    if (driver.current_device(&device) || device != l->key.device) { /* or a thread that has used no GPU yet */
        failed = driver.push(found.context);
        pushed = !failed;
    }
    for (int i = 0; i < found.count && !failed; i++)
        failed = driver.launch(&hows[i], found.kernels[i].function, &arguments, NULL);
    if (pushed) driver.pop(&popped);
    PyEval_RestoreThread(state);
    return failed;
}

int fn_launch_cuda(const struct fn_call *calls, void *stream) {
    launch l;
    return read_call(calls, &l) ? launch_kernels(&l, stream) : FN_NOT_HELD;
}

PyObject *fn_launch_held(PyObject *module, PyObject *arguments) {
    (void)module;
    struct fn_call calls[FN_PACKED];
    PyObject *packed;
    unsigned long long stream;
    if (!PyArg_ParseTuple(arguments, "O!K", &PyBytes_Type, &packed, &stream) || !fn_unpack(packed, calls)) return NULL;
    return PyLong_FromLong(fn_launch_cuda(calls, (void *)(uintptr_t)stream));
}
