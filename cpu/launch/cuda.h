/*
 * Launches CUDA kernels that backends/cuda/ has compiled and loaded, for the fast path and for Python alike; knows nothing
 * of Python's. cuda_norm.c, cuda_gate.c and cuda_rotation.c read calls, cuda.c holds kernels and launches them.
 */
#ifndef FUSEDNORM_CUDA_H
#define FUSEDNORM_CUDA_H

#include <string.h>

#include "abi/call.h"

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

/* Appends a value to a kernel's arguments, where a compiler would put it. */
static inline void append(char *to, size_t *at, const void *value, size_t size) {
    *at = (*at + size - 1) / size * size;
    if (*at + size <= ARGUMENT_BYTES) memcpy(to + *at, value, size);
    *at += size;
}

static inline void append_real(char *to, size_t *at, double value, int wide) {
    const float narrow = (float)value;
    if (wide) append(to, at, &value, sizeof value);
    else append(to, at, &narrow, sizeof narrow);
}

/*
 * Each reads a call of its own, fn_cuda_read any call. Returns 0 if an operand begins between two elements: no kernel is held
 * for such a call.
 */
int fn_cuda_norm(const struct fn_call *calls, launch *l);
int fn_cuda_gate(const struct fn_call *call, launch *l);
int fn_cuda_rotation(const struct fn_call *call, launch *l);
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
