/* The kernels for SVE with FEAT_BF16 (Neoverse V1 and N2, and later); see kernel_neon_bf16.c. */
#include "machine/target.h"

#if defined(FN_SVE)
#include <arm_sve.h>

FN_TARGET("arch=armv8.2-a+sve+bf16")

#include "machine/arm/sve.h"

#define ISA sve_bf16

FN_INLINE svuint32_t narrow_bf16(U x) { return svreinterpret_u32_bf16(svcvt_bf16_f32_x(all(), x)); }

#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
