/* A call: its operands, and where their rows lie. The fast path and Python fill it in; kernels' launchers take it whole. */
#ifndef FUSEDNORM_CALL_H
#define FUSEDNORM_CALL_H

#include <stddef.h>
#include <stdint.h>

#include "abi/enums.h"

/* Elements in one segment of the spec's summation tree. */
#define FN_SEGMENT 1024

static inline int fn_element_size(int64_t kind) {
    return 0x18482240 >> 4 * kind & 15; /* a digit for each kind, the first one last */
}

/* The operands of a forward pass, as in `Forward` of fusednorm/calls/call.py. */
enum { FN_X, FN_RESIDUAL, FN_WEIGHT, FN_OUT, FN_RESIDUAL_OUT, FN_RSTD, FN_FORWARD_OPERANDS };

/* A bias comes after them: kernels of CUDA's have its address behind all other arguments. */
enum { FN_BIAS = FN_FORWARD_OPERANDS, FN_FORWARD_OPERANDS_IN_C };

/*
 * The operands of a backward pass, as in `Backward` of fusednorm/calls/call.py. FN_PARTIAL, [blocks, hidden], is scratch of GPU
 * kernels: what each block of rows adds to the weight's gradient. A CPU needs none, and writes the gradient of a bias there.
 */
enum {
    FN_DY, FN_D_RESIDUAL_OUT, FN_H, FN_BACKWARD_RSTD, FN_BACKWARD_WEIGHT, FN_DX, FN_DRESIDUAL, FN_PARTIAL, FN_DWEIGHT,
    FN_BACKWARD_OPERANDS, FN_DBIAS = FN_PARTIAL
};

enum { FN_OPERANDS = FN_BACKWARD_OPERANDS };

/* A chain has at most so many calls. With a quantizer or a gate after them it takes no more memory than so many. */
enum { FN_CHAIN = 2, FN_PACKED = FN_CHAIN + 1 };

/* Row i begins i / inner * outer_stride + i % inner * stride elements after the address. */
struct fn_operand {
    int64_t kind;
    uintptr_t address;
    int64_t outer_stride, stride;
};

/* All fields have 8 bytes, so that Python packs a call without knowing a compiler: fusednorm/calls/c_abi.py. */
struct fn_call {
    int64_t pass, flags;
    int64_t device; /* the number of a GPU */
    int64_t threads; /* at most so many, on a CPU */
    int64_t rows, inner, hidden; /* where all rows are one stride apart, inner is rows */
    int64_t block; /* rows of a block, where there is FN_PARTIAL */
    /*
     * Calls of a chain that follow in memory: each takes as x the rows that the one before it wrote as out. Those rows have
     * a kind and strides, and no address: they are kept in a buffer on a CPU, and in registers on a GPU.
     */
    int64_t following;
    int64_t heads; /* row i takes row i % heads of a weight or a bias whose stride is not 0; 1 without such operands */
    double eps, weight_offset;
    struct fn_operand operand[FN_OPERANDS];
};

/*
 * How rows are quantized, and where to: fusednorm/calls/c_abi.py packs it. All fields have 8 bytes. Strides are in bytes, in
 * the two levels of the call's rows; a group stride leads from the scale of a group to that of the row's next group. The
 * fields before `inner` are the same for all calls with one `Quantization` and rows of one dtype.
 */
struct fn_quantizer {
    int64_t kind, flags, group; /* group: the elements that share a scale, or 0 for all of a row */
    double qmin, qmax, amax_floor, amax_limit, scale_floor;
    int64_t inner;
    uintptr_t out;
    int64_t out_outer_stride, out_stride;
    uintptr_t scale; /* float */
    int64_t scale_outer_stride, scale_stride, scale_group_stride;
    uintptr_t zero_point; /* int32, or 0 */
    int64_t zero_point_outer_stride, zero_point_stride, zero_point_group_stride;
};

/* The quantizer that follows the last call of a chain in memory; NULL if there is none. */
static inline const struct fn_quantizer *fn_quantizer_after(const struct fn_call *last) {
    return last->flags & (FN_QUANTIZED | FN_QUANTIZE_ONLY) ? (const struct fn_quantizer *)(last + 1) : NULL;
}

/* The bytes from a row of an operand to the next one. */
static inline int64_t fn_step(const struct fn_operand *o) { return o->stride * fn_element_size(o->kind); }

/* Row i begins i * stride + i / inner * jump elements after the address; of rows of the call's, and of one of its operands. */
static inline int64_t fn_jump(const struct fn_call *c, int64_t outer_stride, int64_t stride) {
    return c->inner == c->rows ? 0 : outer_stride - c->inner * stride;
}
static inline int64_t fn_jump_of(const struct fn_call *c, const struct fn_operand *o) {
    return fn_jump(c, o->outer_stride, o->stride);
}

/* Blocks of rows, each of which adds up its share of the weight's gradient; 0 where their length is not given. */
static inline int64_t fn_blocks(const struct fn_call *c) { return c->block > 0 ? (c->rows + c->block - 1) / c->block : 0; }

_Static_assert(sizeof(uintptr_t) == 8, "fusednorm/calls/c_abi.py packs fields of 8 bytes without gaps");
_Static_assert(sizeof(struct fn_quantizer) <= sizeof(struct fn_call), "FN_PACKED has room for both");

#endif
