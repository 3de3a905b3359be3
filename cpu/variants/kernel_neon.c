/* The kernels for NEON of Armv8.0, without arithmetic in fp16 or bf16: every AArch64 processor runs them. */
#include "machine/target.h"

#if defined(FN_AARCH64)
#include "machine/arm/neon.h"

#define ISA neon

FN_INLINE V bf16_lo(H2 h) { return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)); }
FN_INLINE V bf16_hi(H2 h) { return vreinterpretq_f32_u32(vshll_high_n_u16(h, 16)); }

/*
 * Rounds to nearest even in integer arithmetic: adds just under half a unit, and one more (tst is -1)
 * where the unit is odd. The low 16 bits of a NaN are zero (see DEFAULT_NAN in ieee.h).
 */
FN_INLINE uint32x4_t half_unit(V x) {
    uint32x4_t odd = vtstq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x10000));
    return vsubq_u32(vdupq_n_u32(0x7fff), odd);
}
FN_INLINE H2 h2_bf16(V a, V b) {
    uint16x4_t lo = vaddhn_u32(vreinterpretq_u32_f32(a), half_unit(a));
    return vaddhn_high_u32(lo, vreinterpretq_u32_f32(b), half_unit(b));
}

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

#endif
