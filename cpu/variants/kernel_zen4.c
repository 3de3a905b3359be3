/*
 * Rows of bfloat16 for AVX-512 on AMD's processors, where a permutation of two registers is one operation. Zen 4 takes float16
 * by AVX2's kernels (tuning.c).
 */
#include "machine/target.h"

#if defined(FN_X86_64)
#include <immintrin.h>

FN_TARGET("avx512f,avx512bw,avx512dq,avx512vl")

#define PERMUTES_WORDS 1
#include "machine/x86/avx512.h"

#define ISA zen4
#define REST avx512

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

FN_TARGET_END
#endif
