/* The kernels' names for the types of their operands. */
#ifndef FUSEDNORM_KINDS_H
#define FUSEDNORM_KINDS_H

#include "abi/call.h"

/*
 * BF16P: bfloat16 by parity, where the first half of a unit holds the even elements and the second half
 * the odd ones. It is used only if every operand of the call is bfloat16, but for a weight or a bias of float, which are put
 * into this order and lose the payloads of NaN. Then all operands have the same order, and every NaN that is narrowed was
 * widened from bfloat16 or made by the processor, so that its low 16 bits are zero. Tables have KINDS entries; float64 is in none of them.
 *
 * ANY: known when the program runs. A branch for each unit costs little beside a loop for each pair of kinds. A weight may
 * also be one of out's kind WITH_OFFSET.
 */
enum { NONE = FN_NONE, F32 = FN_F32, F16 = FN_F16, BF16 = FN_BF16, BF16P, KINDS, ANY = KINDS, WITH_OFFSET, WEIGHTS };

#endif
