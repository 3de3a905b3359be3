/* A call: its operands, and where their rows lie. The fast path and Python fill it in; kernels' launchers take it whole. */
#ifndef FUSEDNORM_CALL_H
#define FUSEDNORM_CALL_H

#include <stddef.h>
#include <stdint.h>

/* How the elements of an operand are stored. FN_NONE: the operand is absent. */
enum fn_kind { FN_NONE, FN_F32, FN_F16, FN_BF16, FN_F64 };

static inline int fn_element_size(int64_t kind) {
    return kind == FN_NONE ? 0 : kind == FN_F32 ? 4 : kind == FN_F64 ? 8 : 2;
}

/*
 * FN_SCALE_ONLY: x times `eps`, rounded to out's kind, and nothing else. FN_QUANTIZED: a `struct fn_quantizer` follows in
 * memory, which takes the rows of out; FN_QUANTIZE_ONLY: it takes the rows of x, and there is nothing else.
 * FN_GATE_AFTER, FN_GATE_BEFORE: a `struct fn_gate` follows, which takes the rows of out, or whose rows are taken as x, and
 * rounded, with FN_ROUND_NORM, to out's kind; FN_GATE_ONLY: there is nothing else. FN_ROTATION_ONLY: a `struct fn_rotation`
 * follows, and there is nothing else; for GPUs.
 */
enum fn_flag {
    FN_ROUND_SUM = 1, FN_ROUND_NORM = 2, FN_SCALE_ONLY = 4, FN_QUANTIZED = 8, FN_QUANTIZE_ONLY = 16, FN_GATE_AFTER = 32,
    FN_GATE_BEFORE = 64, FN_GATE_ONLY = 128, FN_ROTATION_ONLY = 256
};

enum fn_pass { FN_FORWARD, FN_BACKWARD };

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

/* The kinds of numbers that a quantizer writes, one byte each. */
enum fn_byte_kind { FN_I8, FN_U8, FN_E4M3, FN_E5M2 };

/* What is beside the numbers in `Quantization` of fusednorm/calls/quantizations.py; without a flag, the field's default. */
enum fn_quantizer_flag {
    FN_GIVEN_SCALE = 1, /* one for all rows */
    FN_SCALE_BY_RECIPROCAL = 2,
    FN_APPLY_RECIPROCAL = 4,
    FN_APPLY_RATIO = 8,
    FN_RETURNS_MULTIPLIER = 16,
    FN_ZERO_POINT_128 = 32,
    FN_ZERO_POINT_AFTER = 64,
    FN_ZERO_POINT_BEFORE = 128
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

/* Row i of an operand begins i * stride + i / inner * jump elements after its address. */
static inline int64_t fn_jump(const struct fn_call *c, int operand) {
    const struct fn_operand *o = &c->operand[operand];
    return c->inner == c->rows ? 0 : o->outer_stride - c->inner * o->stride;
}

/* Blocks of rows, each of which adds up its share of the weight's gradient; 0 where their length is not given. */
static inline int64_t fn_blocks(const struct fn_call *c) { return c->block > 0 ? (c->rows + c->block - 1) / c->block : 0; }

_Static_assert(sizeof(struct fn_operand) == 4 * 8 && sizeof(struct fn_call) == (12 + 4 * FN_OPERANDS) * 8,
               "fusednorm/calls/c_abi.py packs fields of 8 bytes without gaps");
_Static_assert(sizeof(struct fn_quantizer) == 20 * 8, "fusednorm/calls/c_abi.py packs fields of 8 bytes without gaps");
_Static_assert(sizeof(struct fn_quantizer) <= sizeof(struct fn_call), "FN_PACKED has room for both");

#endif
