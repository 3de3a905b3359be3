/* The kernels for AVX-512 as Zen 4 runs them fastest; float16 goes to AVX2's there (isa.c). */
#include "machine/target.h"

#if defined(FN_X86_64)
#include <immintrin.h>

FN_TARGET("avx512f,avx512bw,avx512dq,avx512vl")

#define FOR_ZEN4 1
#include "machine/x86/avx512.h"

#define ISA zen4
#define LACKS_F16 1
#define QUANTIZER avx512

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
