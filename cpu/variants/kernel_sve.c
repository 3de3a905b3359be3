/* The kernels for SVE alone (A64FX). */
#include "machine/target.h"

#if defined(FN_SVE)
#include <arm_sve.h>

FN_TARGET("arch=armv8.2-a+sve")

#include "machine/arm/sve.h"

#define ISA sve

/* Rounds to nearest even in integer arithmetic; the low 16 bits of a NaN are zero (see DEFAULT_NAN in ieee.h). */
FN_INLINE svuint32_t narrow_bf16(U x) {
    svuint32_t bits = svreinterpret_u32_f32(x), odd = svand_n_u32_x(all(), svlsr_n_u32_x(all(), bits, 16), 1);
    return svlsr_n_u32_x(all(), svadd_u32_x(all(), svadd_n_u32_x(all(), odd, 0x7fff), bits), 16);
}

#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
