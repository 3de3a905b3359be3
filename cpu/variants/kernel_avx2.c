/* The kernels for AVX2 with F16C and FMA (Haswell, Zen, and later). */
#include "machine/target.h"

#if defined(FN_X86_64)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

FN_TARGET("avx2,f16c,fma")

#define ISA avx2
#include "machine/x86/avx2.h"
#include "machine/pairs.h"
#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
