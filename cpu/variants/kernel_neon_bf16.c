/*
 * The kernels for NEON with FEAT_BF16 (Neoverse V1 and N2, Apple M2, and later). Its conversion rounds
 * to nearest even and keeps subnormals, as long as FPCR.AH is clear. Its bfloat16 products round
 * differently from the spec, and are not used.
 */
#include "machine/target.h"

#if defined(FN_NEON_BF16)
#include <arm_neon.h>

FN_TARGET("arch=armv8.2-a+bf16")

#include "machine/arm/neon.h"

#define ISA neon_bf16

/* Half of the ports of a Neoverse core shift, all of them interleave with zeros; Cortex-A72 takes three times as long. */
FN_INLINE V bf16_lo(H2 h) { return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), h)); }
FN_INLINE V bf16_hi(H2 h) { return vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), h)); }
FN_INLINE H2 h2_bf16(V a, V b) { return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b)); }

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
