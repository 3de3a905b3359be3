/* Launches CUDA kernels that backends/cuda.py has compiled and loaded. Nothing of CUDA's is needed to build this. */
#include "quick.h"

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

enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

/* The driver's cuLaunchKernelEx, cuCtxGetDevice, cuCtxPushCurrent and cuCtxPopCurrent; NULL until they are given. */
static struct {
    int (*launch)(const config *, void *function, void **arguments, void **extra);
    int (*current_device)(int *device);
    int (*push)(void *context);
    int (*pop)(void **context);
} driver;

/*
 * What decides which kernels a call takes: the same as the keys in backends/gpu_host.py. The kinds of the operands
 * of which it depends follow each other in `kinds`, four bits each: x, residual, weight, out; of a backward pass dy,
 * d_total, h, weight, dx, dresidual, dweight. Without gaps, to be compared.
 */
typedef struct {
    int64_t hidden;
    int32_t device, kinds, options, alignment;
} key;

/* Options, above the flags of fusednorm_cpu.h: the weight's offset, sums in double, rstd is wanted. */
enum { OFFSET = 4, WIDE = 8, ROOTS = 16, BACKWARD = 32 };

/* A kernel, and what a program of it takes: `per_program` rows, or columns, as backends/gpu_host.py says. */
typedef struct {
    void *function;
    unsigned threads, per_program, shared, cluster, early;
    enum { OF_ROWS, OF_SUMS, OF_COLUMNS_OF_BLOCKS, OF_BLOCKS } share;
} kernel;

enum { KERNELS = 3, FEWEST = 1024, IN_LANE = 8 };

typedef struct {
    key key;
    int count; /* 0: free */
    void *context;
    kernel kernels[KERNELS];
} held;

/* A hash table: a power of two of places, of which at most half are taken. */
static held *places;
static size_t size, taken;

/* Around the table and `driver`, where the interpreter has no lock of its own. */
#ifdef Py_GIL_DISABLED
static PyMutex mutex;
static void lock(void) { PyMutex_Lock(&mutex); }
static void unlock(void) { PyMutex_Unlock(&mutex); }
#else
static void lock(void) {}
static void unlock(void) {}
#endif

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
    lock();
    driver.launch = (int (*)(const config *, void *, void **, void **))(uintptr_t)launch;
    driver.current_device = (int (*)(int *))(uintptr_t)current_device;
    driver.push = (int (*)(void *))(uintptr_t)push;
    driver.pop = (int (*)(void **))(uintptr_t)pop;
    free(places);
    places = NULL;
    size = taken = 0;
    unlock();
    Py_RETURN_NONE;
}

PyObject *fn_hold(PyObject *module, PyObject *arguments) {
    (void)module;
    held given;
    PyObject *kinds, *kernels;
    long long hidden;
    unsigned long long context;
    memset(&given, 0, sizeof given);
    if (!PyArg_ParseTuple(arguments, "iKO!iLiO!", &given.key.device, &context, &PyTuple_Type, &kinds,
                          &given.key.options, &hidden, &given.key.alignment, &PyTuple_Type, &kernels))
        return NULL;
    given.key.hidden = hidden;
    given.context = (void *)(uintptr_t)context;
    for (Py_ssize_t i = 0; i < PyTuple_Size(kinds); i++)
        given.key.kinds |= (int32_t)PyLong_AsLong(PyTuple_GetItem(kinds, i)) << 4 * i;
    for (; given.count < PyTuple_Size(kernels) && given.count < KERNELS; given.count++) {
        kernel *k = &given.kernels[given.count];
        unsigned long long function;
        int share;
        if (!PyArg_ParseTuple(PyTuple_GetItem(kernels, given.count), "KIIIIIi", &function, &k->threads, &k->per_program,
                              &k->shared, &k->cluster, &k->early, &share))
            return NULL;
        k->function = (void *)(uintptr_t)function;
        k->share = share;
    }
    if (PyErr_Occurred()) return NULL;
    lock();
    const int full = grow();
    if (!full) {
        held *place = place_of(&given.key);
        taken += !place->count;
        *place = given;
    }
    unlock();
    if (full) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* The bits that are set in no operand's address, nor in the bytes from row to row of those that have `strides`. */
static int alignment_of(const operand *o, int count, unsigned strides, int32_t *alignment) {
    uintptr_t low = 32;
    for (int i = 0; i < count; i++) {
        if (!o[i].kind) continue;
        if (fn_address(&o[i]) % (uintptr_t)fn_item_bytes(&o[i]) != 0) return 0;
        low |= fn_address(&o[i]);
        if (strides >> i & 1) low |= (uintptr_t)(o[i].stride * fn_item_bytes(&o[i]));
    }
    *alignment = (int32_t)(low & -low);
    return 1;
}

/* The programs of a kernel for a call; the last two numbers are of a backward pass. */
static int64_t programs(const kernel *k, int64_t rows, int64_t hidden, int64_t block, int64_t blocks) {
    int64_t per_program = k->per_program, count = hidden, times = 1;
    switch (k->share) {
    case OF_ROWS: count = rows; break;
    case OF_SUMS:
        for (int64_t more = IN_LANE; more < blocks; more *= 2) per_program /= 2;
        break;
    case OF_COLUMNS_OF_BLOCKS: times = blocks; break;
    case OF_BLOCKS:
        count = blocks;
        per_program = per_program > block ? per_program / block : 1;
        break;
    }
    return (count + per_program - 1) / per_program * times;
}

/*
 * Launches the kernels that are held for a call, one after the other, with the same arguments: in the current context
 * if that is one of the tensors' GPU, to which torch's current stream then belongs, else in the GPU's primary context.
 */
static int launch(const key *wanted, int64_t rows, int64_t block, int64_t blocks, void *arguments) {
    config hows[KERNELS];
    attribute attributes[KERNELS][2];
    void *stream, *popped;
    lock();
    const held found = driver.launch && size ? *place_of(wanted) : (held){.count = 0};
    unlock();
    if (!found.count || !fn_exchange_api->current_stream ||
        fn_exchange_api->current_stream(DL_CUDA, wanted->device, &stream))
        return 1;
    memset(attributes, 0, sizeof attributes);
    for (int i = 0; i < found.count; i++) {
        const kernel *k = &found.kernels[i];
        const int64_t grid = k->cluster * programs(k, rows, wanted->hidden, block, blocks);
        if (grid > INT32_MAX) return 1;
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
    /* A full queue makes the driver wait, perhaps for something that waits for the interpreter. */
    PyThreadState *state = PyEval_SaveThread();
    if (driver.current_device(&device) || device != wanted->device) { /* or a thread that has used no GPU yet */
        failed = driver.push(found.context);
        pushed = !failed;
    }
    for (int i = 0; i < found.count && !failed; i++)
        failed = driver.launch(&hows[i], found.kernels[i].function, &arguments, NULL);
    if (pushed) driver.pop(&popped);
    PyEval_RestoreThread(state);
    return failed;
}

/* What both structures of arguments end with. */
typedef union {
    struct {
        int32_t hidden;
        float numbers[2];
    } narrow;
    struct {
        int32_t hidden;
        double numbers[2];
    } wide;
} last;

static last last_of(int wide, int64_t hidden, double first, double second) {
    last l;
    memset(&l, 0, sizeof l);
    if (wide) l.wide.numbers[0] = first, l.wide.numbers[1] = second;
    else l.narrow.numbers[0] = (float)first, l.narrow.numbers[1] = (float)second;
    l.narrow.hidden = (int32_t)hidden;
    return l;
}

int fn_launch(const call *c) {
    const operand *o = c->o;
    key wanted;
    memset(&wanted, 0, sizeof wanted);
    if (!alignment_of(o, OPERANDS, 1 << X | 1 << RESIDUAL | 1 << OUT | 1 << RESIDUAL_OUT, &wanted.alignment)) return 1;
    wanted.hidden = c->hidden;
    wanted.device = o[X].t.device.id;
    wanted.kinds = o[X].kind | o[RESIDUAL].kind << 4 | o[WEIGHT].kind << 8 | o[OUT].kind << 12;
    wanted.options = c->flags | (c->weight_offset != 0 ? OFFSET : 0) | (o[RSTD].kind ? ROOTS : 0);
    struct { /* as in csrc/forward.cuh */
        uintptr_t operands[OPERANDS];
        int64_t strides[4], rows;
        last last;
    } given;
    for (int i = 0; i < OPERANDS; i++) given.operands[i] = fn_address(&o[i]);
    given.strides[0] = o[X].stride, given.strides[1] = o[RESIDUAL].stride;
    given.strides[2] = o[OUT].stride, given.strides[3] = o[RESIDUAL_OUT].stride;
    given.rows = c->rows;
    given.last = last_of(o[X].kind == FN_F64, c->hidden, c->eps, c->weight_offset);
    return launch(&wanted, c->rows, 0, 0, &given);
}

int fn_launch_backward(const gradient_call *c) {
    const operand *o = c->o;
    key wanted;
    memset(&wanted, 0, sizeof wanted);
    if (!alignment_of(o, GRADIENT_OPERANDS, 1 << DY | 1 << D_TOTAL | 1 << H, &wanted.alignment)) return 1;
    const int decide[] = {DY, D_TOTAL, H, GAIN, DX, DRESIDUAL, DWEIGHT};
    for (int i = 0; i < 7; i++) wanted.kinds |= o[decide[i]].kind << 4 * i;
    wanted.hidden = c->hidden;
    wanted.device = o[H].t.device.id;
    wanted.options = BACKWARD | (c->weight_offset != 0 ? OFFSET : 0) | (o[ROOT].kind == FN_F64 ? WIDE : 0);
    struct { /* as in csrc/backward.cuh */
        uintptr_t operands[GRADIENT_OPERANDS];
        int64_t strides[3], rows, block, blocks;
        last last;
    } given;
    for (int i = 0; i < GRADIENT_OPERANDS; i++) given.operands[i] = fn_address(&o[i]);
    given.strides[0] = o[DY].stride, given.strides[1] = o[D_TOTAL].stride, given.strides[2] = o[H].stride;
    given.rows = c->rows, given.block = c->block, given.blocks = c->blocks;
    given.last = last_of(o[ROOT].kind == FN_F64, c->hidden, c->weight_offset, 0);
    return launch(&wanted, c->rows, c->block, c->blocks, &given);
}
