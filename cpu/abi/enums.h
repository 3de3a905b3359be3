/* Printed by fusednorm/calls/c_enums.py, which has the same numbers for Python. */
#ifndef FUSEDNORM_ENUMS_H
#define FUSEDNORM_ENUMS_H

/* How the elements of an operand are stored. NONE: the operand is absent. I32, I64: places of elements, as ids. BYTE:
 * int8. */
enum fn_kind {
    FN_NONE = 0, FN_F32 = 1, FN_F16 = 2, FN_BF16 = 3, FN_F64 = 4, FN_I32 = 5, FN_I64 = 6, FN_BYTE = 7
};

/* The direction of a call. */
enum fn_pass {
    FN_FORWARD = 0, FN_BACKWARD = 1
};

/* SCALE_ONLY: x times `eps`, rounded to out's kind, and nothing else. QUANTIZED: a `struct fn_quantizer` follows in
 * memory, which takes the rows of out; QUANTIZE_ONLY: it takes the rows of x, and there is nothing else. GATE_AFTER,
 * GATE_BEFORE: a `struct fn_gate` follows, which takes the rows of out, or whose rows are taken as x, and rounded, with
 * ROUND_NORM, to out's kind; GATE_ONLY: there is nothing else. ROTATION_ONLY, DECLARED_ONLY: a `struct fn_rotation` or
 * `fn_declared` follows, and there is nothing else; for GPUs, and declared operations for Triton on CPUs too. CENTER:
 * rows are normalised less their means. */
enum fn_flag {
    FN_ROUND_SUM = 1, FN_ROUND_NORM = 2, FN_SCALE_ONLY = 4, FN_QUANTIZED = 8, FN_QUANTIZE_ONLY = 16,
    FN_GATE_AFTER = 32, FN_GATE_BEFORE = 64, FN_GATE_ONLY = 128, FN_ROTATION_ONLY = 256, FN_CENTER = 512,
    FN_DECLARED_ONLY = 1024
};

/* The kinds of numbers that a quantizer writes, one byte each. */
enum fn_byte_kind {
    FN_I8 = 0, FN_U8 = 1, FN_E4M3 = 2, FN_E5M2 = 3
};

/* The rest of a `Quantization`; without a flag, the field's default. GIVEN_SCALE: one for all rows. */
enum fn_quantizer_flag {
    FN_GIVEN_SCALE = 1, FN_SCALE_BY_RECIPROCAL = 2, FN_APPLY_RECIPROCAL = 4, FN_APPLY_RATIO = 8,
    FN_RETURNS_MULTIPLIER = 16, FN_ZERO_POINT_128 = 32, FN_ZERO_POINT_AFTER = 64, FN_ZERO_POINT_BEFORE = 128,
    FN_SCALE_UP_TO_POWER_OF_TWO = 256
};

/* The function of a gate; those up to GELU_TANH take a sigmoid. SOFTCAP: of z alone; the limit is its cap. */
enum fn_activation {
    FN_SILU = 0, FN_SIGMOID = 1, FN_GELU_TANH = 2, FN_GELU = 3, FN_RELU2 = 4, FN_SOFTCAP = 5
};

/* Flags of a gate. IN_TURNS: elements of z and y take turns in memory, and so do their gradients. */
enum fn_gate_flag {
    FN_CLAMP_AFTER = 1, FN_ROUND_STEPS = 2, FN_IN_TURNS = 4
};

/* The fast path's calls with a gate. ALONE: x times the gate. AND_MUL: x is the gate, or both. FUNCTION: of x. */
enum fn_gate_order {
    FN_ALONE = 0, FN_AND_MUL = 1, FN_NORM_FIRST = 2, FN_GATE_FIRST = 3, FN_FUNCTION = 4
};

/* Declared operations with kernels of C, and gradients with kernels of their own. LOGARITHM: of each number, for tests.
 * SUMS: of a row's segments. */
enum fn_declared_of {
    FN_LOG_SOFTMAX = 0, FN_LOGSUMEXP = 1, FN_SELECTED = 2, FN_SELECTED_AND_ENTROPY = 3, FN_LOGARITHM = 4,
    FN_SUMS = 5, FN_MODULATE = 6, FN_MODULATE_BACKWARD = 7, FN_LINEAR = 8, FN_ATTENTION = 9, FN_INT8_LINEAR = 10
};

/* Flags of a rotation, beside ROUND_NORM. */
enum fn_rotation_flag {
    FN_NORMALISED = 1, FN_INTERLEAVED = 4
};

/* A program of a kernel for GPUs takes this, `per_program` times. ROWS: so many rows. COLUMNS_OF_SUMS: so many columns
 * of up to BLOCKS_IN_LANE blocks' sums; half as many of up to twice as many blocks, and so on. COLUMNS_OF_BLOCKS: so
 * many columns of one block of rows. BLOCKS: the blocks that so many rows hold whole, and at least one. COLUMNS: so
 * many columns of all blocks; no kernel of CUDA's. ELEMENTS: so many elements of all rows. */
enum fn_share {
    FN_ROWS = 0, FN_COLUMNS_OF_SUMS = 1, FN_COLUMNS_OF_BLOCKS = 2, FN_BLOCKS = 3, FN_COLUMNS = 4, FN_ELEMENTS = 5
};

/* Limits of kernels, but for the last one for GPUs. BLOCKS_IN_LANE: blocks of rows that a thread adds up, of a kernel
 * that takes the more columns the fewer blocks there are. MOST_ALIGNED: the largest number of bytes that any kernel
 * wants addresses to be multiples of. INT8_LONGEST: the elements of the longest rows whose sums of products int32
 * holds; 2^14 times so many is below 2^31. */
enum fn_limit {
    FN_BLOCKS_IN_LANE = 8, FN_MOST_ALIGNED = 32, FN_INT8_LONGEST = 131071
};

/* The names of enum fn_activation, in its order. */
#define FN_ACTIVATION_NAMES "silu", "sigmoid", "gelu_tanh", "gelu", "relu2", "softcap"

#endif
