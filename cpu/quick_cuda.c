/* Launches CUDA kernels that backends/cuda.py has compiled and loaded. Nothing of CUDA's is needed to build this. */
#include <string.h>

#include "fusednorm_cpu.h"
#include "quick.h"

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

typedef int launch_kernel_ex(const config *, void *function, void **arguments, void **extra);

static launch_kernel_ex *launch_kernel;

/* What decides which kernel a call takes: the same as the key in backends/gpu_host.py. Without gaps, to be compared. */
typedef struct {
    int64_t hidden;
    int32_t device, code, offset, alignment;
} kind;

typedef struct {
    kind kind;
    void *function; /* NULL: a free place */
    unsigned threads, rows, shared, cluster, early;
} kernel;

enum { PLACES = 1024, NEAR = 8 };

static kernel kernels[PLACES + NEAR];

/* Where the kernel is, or may be put; NULL if all places near its hash are taken. */
static kernel *place_of(const kind *wanted) {
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    const unsigned char *bytes = (const unsigned char *)wanted;
    for (size_t i = 0; i < sizeof *wanted; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    kernel *first = &kernels[hash % PLACES];
    for (kernel *place = first; place < first + NEAR; place++) {
        if (!place->function || memcmp(&place->kind, wanted, sizeof *wanted) == 0) return place;
    }
    return NULL;
}

PyObject *fn_open_cuda(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long function;
    if (!PyArg_ParseTuple(arguments, "K", &function)) return NULL;
    launch_kernel = (launch_kernel_ex *)(uintptr_t)function;
    memset(kernels, 0, sizeof kernels);
    Py_RETURN_NONE;
}

PyObject *fn_hold(PyObject *module, PyObject *arguments) {
    (void)module;
    kernel given;
    int kinds[4], flags;
    long long hidden;
    unsigned long long function;
    memset(&given, 0, sizeof given);
    if (!PyArg_ParseTuple(arguments, "i(iiii)iLiiKIIIII", &given.kind.device, &kinds[0], &kinds[1], &kinds[2], &kinds[3],
                          &flags, &hidden, &given.kind.offset, &given.kind.alignment, &function, &given.threads,
                          &given.rows, &given.shared, &given.cluster, &given.early))
        return NULL;
    given.kind.hidden = hidden;
    given.kind.code = FN_CODE(kinds[0], kinds[1], kinds[2], kinds[3], flags);
    given.function = (void *)(uintptr_t)function;
    kernel *place = place_of(&given.kind);
    if (place) *place = given;
    return PyBool_FromLong(place != NULL);
}

static uintptr_t item_bytes(const tensor *t) { return t->dtype.bits / 8; }

/* Whether an output shares memory with another operand, other than exactly x or exactly the residual. */
static int overlap(const call *c) {
    for (int out = OUT; out <= RESIDUAL_OUT; out++) {
        for (int i = X; i < out && c->kind[out]; i++) {
            if (!c->kind[i]) continue;
            uintptr_t a = address(&c->t[out]), b = address(&c->t[i]);
            uintptr_t b_bytes = (i == WEIGHT ? 1 : c->rows) * c->hidden * item_bytes(&c->t[i]);
            if (i < WEIGHT && a == b && c->kind[out] == c->kind[i]) continue;
            if (a < b + b_bytes && b < a + c->rows * c->hidden * item_bytes(&c->t[out])) return 1;
        }
    }
    return 0;
}

int fn_launch(const exchange_api *api, const call *c) {
    if (!launch_kernel || !api->current_stream) return 1;
    uintptr_t low = 32; /* all rows begin at multiples of its lowest bit */
    for (int i = 0; i < OPERANDS; i++) {
        if (!c->kind[i]) continue;
        if (address(&c->t[i]) % item_bytes(&c->t[i]) != 0) return 1;
        low |= address(&c->t[i]) | (i == WEIGHT ? 0 : c->hidden * item_bytes(&c->t[i]));
    }
    kind wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.hidden = c->hidden;
    wanted.device = c->t[X].device.id;
    wanted.code = FN_CODE(c->kind[X], c->kind[RESIDUAL], c->kind[WEIGHT], c->kind[OUT], c->flags);
    wanted.offset = c->weight_offset != 0;
    wanted.alignment = (int32_t)(low & -low);
    const kernel *found = place_of(&wanted);
    if (!found || !found->function || overlap(c)) return 1;

    /* csrc/forward.cuh has the same structure. */
    struct {
        uintptr_t operands[OPERANDS], rstd;
        int64_t strides[4], rows;
        union {
            struct {
                int32_t hidden;
                float eps, weight_offset;
            } in_f32;
            struct {
                int32_t hidden;
                double eps, weight_offset;
            } in_f64;
        };
    } given;
    memset(&given, 0, sizeof given);
    for (int i = 0; i < OPERANDS; i++) given.operands[i] = c->kind[i] ? address(&c->t[i]) : 0;
    for (int i = 0; i < 4; i++) given.strides[i] = c->hidden;
    given.rows = c->rows;
    given.in_f32.hidden = (int32_t)c->hidden;
    if (c->kind[X] == FN_F64) {
        given.in_f64.eps = c->eps;
        given.in_f64.weight_offset = c->weight_offset;
    } else {
        given.in_f32.eps = (float)c->eps;
        given.in_f32.weight_offset = (float)c->weight_offset;
    }

    attribute attributes[2];
    memset(attributes, 0, sizeof attributes);
    config how = {.grid = {0, 1, 1}, .block = {found->threads, 1, 1}, .attributes = attributes};
    how.shared_bytes = found->shared;
    int64_t blocks = (c->rows + found->rows - 1) / found->rows * found->cluster;
    if (blocks > INT32_MAX || api->current_stream(DL_CUDA, wanted.device, &how.stream)) return 1;
    how.grid[0] = (unsigned)blocks;
    if (found->cluster > 1) {
        attribute *cluster = &attributes[how.attribute_count++];
        cluster->id = CLUSTER_DIMENSION;
        cluster->value.cluster[0] = found->cluster;
        cluster->value.cluster[1] = cluster->value.cluster[2] = 1;
    }
    if (found->early) {
        attribute *early = &attributes[how.attribute_count++];
        early->id = PROGRAMMATIC_STREAM_SERIALIZATION;
        early->value.early = 1;
    }
    void *arguments[] = {&given};
    /* A full queue makes the driver wait, perhaps for something that waits for the interpreter. */
    PyThreadState *state = PyEval_SaveThread();
    int failed = launch_kernel(&how, found->function, arguments, NULL);
    PyEval_RestoreThread(state);
    return failed;
}
