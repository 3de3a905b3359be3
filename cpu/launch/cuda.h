/*
 * Launches CUDA kernels that backends/cuda/ has compiled and loaded, for the fast path and for Python alike; knows nothing
 * of Python's. cuda_norm.c, cuda_gate.c, cuda_rotation.c and cuda_log_prob.c read calls, cuda.c holds kernels and launches them.
 */
#ifndef FUSEDNORM_CUDA_H
#define FUSEDNORM_CUDA_H

#include <string.h>

#include "abi/call.h"

/*
 * What decides which kernels a call takes: the same as `Kind` in
 * backends/kernel_keys.py. The kinds of the operands follow each other in `kinds`, four bits each. Of a quantizer there
 * are the length of its groups, and a bit for its being there, one for whether rows are stored too, its kind and its flags.
 * Of a gate there are its function, the kind that this is rounded to, its flags (enum fn_gate_flag), and its numbers where it
 * has optional steps. Without gaps, to be compared.
 */
typedef struct {
    int64_t hidden, kinds, group;
    double limit, alpha, up_offset;
    int32_t device, options, alignment, quantizer, gate, gate_flags;
} key;

/*
 * Options, above the flags of call.h: there is a weight offset; rstd is wanted; rows lie in two levels; a backward pass; a
 * weight or a bias has rows of heads; x is scaled; nothing but a gate; the rows of all its operands lie side by side; a
 * rotation; rows are centered; log-probabilities.
 */
enum {
    OFFSET = 4, RSTD = 8, TWO_LEVELS = 16, BACKWARD = 32, OF_HEADS = 64, SCALED = 128, GATE_ONLY = 256, SIDE_BY_SIDE = 512,
    ROTATION = 1024, CENTER = 2048, LOG_PROB = 4096
};

/* A kernel, of which a program takes `per_program` rows, columns or elements. */
typedef struct {
    void *function;
    unsigned threads, per_program, shared, cluster, early;
    int share; /* enum fn_share */
} kernel;

/* The longest arguments, of a quantized float64 norm with a bias, have 300 bytes; a call with more would be refused. */
enum { ARGUMENT_BYTES = 48 * 8 };

enum { KERNELS = 3 };

typedef struct {
    key key;
    int count; /* 0: free */
    void *context;
    kernel kernels[KERNELS];
} held;

/* What is launched for a call: its key, its extent, and the arguments of its kernels. */
typedef struct {
    key key;
    int64_t rows, hidden, block; /* the rows of a block, where there are blocks */
    _Alignas(8) char arguments[ARGUMENT_BYTES];
} launch;

/* The arguments of a launch while they are written, and of how many bytes all that was written so far is a multiple. */
typedef struct {
    launch *of;
    size_t length;
    int64_t inner; /* the rows of the inner level, 0 where all rows lie in one */
    uint64_t alignment; /* its lowest bit */
    int between; /* whether an operand begins between two elements */
} arguments;

/* Appends a value, where a compiler would put it. */
static inline void append(arguments *to, const void *value, size_t size) {
    to->length = (to->length + size - 1) / size * size;
    if (to->length + size <= ARGUMENT_BYTES) memcpy(to->of->arguments + to->length, value, size);
    to->length += size;
}

static inline void append_integer(arguments *to, int64_t value) { append(to, &value, sizeof value); }

static inline void append_real(arguments *to, double value, int wide) {
    const float narrow = (float)value;
    if (wide) append(to, &value, sizeof value);
    else append(to, &narrow, sizeof narrow);
}

/* Appends an address. `steps` has the bits of all strides, in elements, that lead from it to other rows. */
static inline void append_address(arguments *to, uintptr_t address, int64_t steps, int64_t kind) {
    const int item = fn_element_size(kind);
    append(to, &address, sizeof address);
    if (!item || !address) return; /* there is no such operand, or it is in registers */
    to->alignment |= address | (uint64_t)(steps * item);
    to->between |= address % (uintptr_t)item != 0;
}

/* Appends the strides of rows, in the form that kernels take. */
static inline void append_strides(arguments *to, int64_t outer_stride, int64_t stride) {
    append_integer(to, stride);
    if (to->inner) append_integer(to, outer_stride - to->inner * stride);
}

static inline arguments begin_arguments(launch *l, int64_t rows, int64_t inner) {
    arguments to = {.of = l, .inner = inner == rows ? 0 : inner, .alignment = FN_MOST_ALIGNED};
    memset(&l->key, 0, sizeof l->key);
    if (to.inner) append_integer(&to, inner);
    return to;
}

/* Whether kernels may be held for a call with these arguments, and its alignment in the key. */
static inline int end_arguments(const arguments *to) {
    to->of->key.alignment = (int32_t)(to->alignment & -to->alignment);
    return !to->between && to->length <= ARGUMENT_BYTES;
}

/*
 * Each reads a call of its own, fn_cuda_read any call. Returns 0 if an operand begins between two elements: no kernel is held
 * for such a call.
 */
int fn_cuda_norm(const struct fn_call *calls, launch *l);
int fn_cuda_gate(const struct fn_call *call, launch *l);
int fn_cuda_rotation(const struct fn_call *call, launch *l);
int fn_cuda_log_prob(const struct fn_call *call, launch *l);
int fn_cuda_read(const struct fn_call *calls, launch *l);

/* The table of kernels that are held, one thread at a time. */
void fn_cuda_open(uintptr_t launch, uintptr_t current_device, uintptr_t push, uintptr_t pop); /* forgets all */
int fn_cuda_hold(const held *given); /* nonzero if there is no memory */
held fn_cuda_find(const key *wanted); /* with a count of 0 if there are none */

/*
 * Launches kernels one after the other, with the same arguments: in the current context if that is the one of the tensors'
 * GPU, to which torch's current stream then belongs, else in the GPU's primary context. Returns the driver's status.
 */
int fn_cuda_start(const held *found, launch *l, void *stream);

#endif
