/* The kernels that are held, and the driver. The one seam to it is the address of its cuLaunchKernelEx. */
#include "launch/cuda.h"

#include <stdlib.h>

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

enum { FEWEST = 1024 };

/* A hash table: a power of two of places, of which at most half are taken. */
static held *places;
static size_t size, taken;

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

void fn_cuda_open(uintptr_t launch, uintptr_t current_device, uintptr_t push, uintptr_t pop) {
    driver.launch = (int (*)(const config *, void *, void **, void **))launch;
    driver.current_device = (int (*)(int *))current_device;
    driver.push = (int (*)(void *))push;
    driver.pop = (int (*)(void **))pop;
    free(places);
    places = NULL;
    size = taken = 0;
}

int fn_cuda_hold(const held *given) {
    if (grow()) return 1;
    held *place = place_of(&given->key);
    taken += !place->count;
    *place = *given;
    return 0;
}

held fn_cuda_find(const key *wanted) { return driver.launch && size ? *place_of(wanted) : (held){.count = 0}; }

int fn_cuda_read(const struct fn_call *calls, launch *l) {
    if (calls->flags & FN_GATE_ONLY) return fn_cuda_gate(calls, l);
    if (calls->flags & FN_ROTATION_ONLY) return fn_cuda_rotation(calls, l);
    if (calls->flags & FN_DECLARED_ONLY) return fn_cuda_log_prob(calls, l);
    return fn_cuda_norm(calls, l);
}

/* The programs of a kernel for a call. */
static int64_t programs(const kernel *k, const launch *l) {
    int64_t per_program = k->per_program, count = l->hidden, times = 1;
    const int64_t blocks = l->block > 0 ? (l->rows + l->block - 1) / l->block : 0;
    switch ((enum fn_share)k->share) {
    case FN_COLUMNS: break;
    case FN_ROWS: count = l->rows; break;
    case FN_ELEMENTS: count = l->rows * l->hidden; break;
    case FN_COLUMNS_OF_SUMS:
        for (int64_t more = FN_BLOCKS_IN_LANE; more < blocks; more *= 2) per_program /= 2;
        break;
    case FN_COLUMNS_OF_BLOCKS: times = blocks; break;
    case FN_BLOCKS:
        count = blocks;
        per_program = per_program > l->block ? per_program / l->block : 1;
        break;
    }
    return (count + per_program - 1) / per_program * times;
}

int fn_cuda_start(const held *found, launch *l, void *stream) {
    config hows[KERNELS];
    attribute attributes[KERNELS][2];
    void *arguments = l->arguments;
    memset(attributes, 0, sizeof attributes);
    for (int i = 0; i < found->count; i++) {
        const kernel *k = &found->kernels[i];
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
    if (driver.current_device(&device) || device != l->key.device) { /* or a thread that has used no GPU yet */
        failed = driver.push(found->context);
        pushed = !failed;
    }
    for (int i = 0; i < found->count && !failed; i++)
        failed = driver.launch(&hows[i], found->kernels[i].function, &arguments, NULL);
    if (pushed) driver.pop(&popped);
    return failed;
}
