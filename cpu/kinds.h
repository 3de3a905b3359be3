/* How the kernels call the types of their operands. */
#ifndef FUSEDNORM_KINDS_H
#define FUSEDNORM_KINDS_H

#include "fusednorm_cpu.h"

/*
 * BF16P: bfloat16 taken apart by parity, the first half of a unit holding the even and the second
 * the odd elements. Used only when every 16-bit operand of the call is bfloat16 and none is float:
 * then all operands agree on the order, and every NaN that is narrowed was widened from bfloat16 or
 * made by the processor, so that its low 16 bits are zero.
 */
enum { NONE = FN_NONE, F32 = FN_F32, F16 = FN_F16, BF16 = FN_BF16, BF16P, KINDS };

#endif
