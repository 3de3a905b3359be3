/*
 * The kernels for AVX-512 with VBMI2 and FP16 (Sapphire Rapids and later). FP16 adds float16 without widening it. The
 * spec rounds the sum to float first, but the result is the same: rounding twice is harmless if the longer type has at
 * least 2 * 11 + 2 bits (Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 1995), and float has 24. All
 * 2^32 pairs were compared.
 */
#include "machine/target.h"

#if defined(FN_AVX512_FP16)
#include <immintrin.h>

FN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx512fp16")

#define HAS_VBMI2 1
#include "machine/x86/avx512.h"

#define ISA avx512_fp16
#define REST avx512

#define ADDS_F16 1
FN_INLINE H2 h2_add_f16(H2 x, H2 y) {
    return _mm512_castph_si512(_mm512_add_ph(_mm512_castsi512_ph(x), _mm512_castsi512_ph(y)));
}

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
