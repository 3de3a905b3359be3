/* The kernels for NEON as every Armv8.0 processor has it: no arithmetic in fp16 or bf16 is needed. */
#include "target.h"

#if defined(FN_AARCH64)
#include "neon.h"

#define ISA neon

/* Rounds to nearest even in integer arithmetic; the result is the upper half of each 32-bit lane. */
FN_INLINE uint16x8_t rounded_bf16(V x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)));
}
FN_INLINE H2 h2_bf16(V a, V b) { return vuzp2q_u16(rounded_bf16(a), rounded_bf16(b)); }

#include "pairs.h"
#include "kernel_body.h"

#endif
