/* The kernels for AVX-512 (F, BW, DQ, VL: Skylake servers and later). */
#include "machine/target.h"

#if defined(FN_X86_64)
#include <immintrin.h>

FN_TARGET("avx512f,avx512bw,avx512dq,avx512vl")

#include "machine/x86/avx512.h"

#define ISA avx512
#define OVERLAPS_AS_IS 1

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
