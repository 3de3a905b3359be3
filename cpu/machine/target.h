/* Compiles the rest of a file for one instruction set, without a compiler flag. */
#ifndef FUSEDNORM_TARGET_H
#define FUSEDNORM_TARGET_H

#define FN_PRAGMA(text) _Pragma(#text)

/* A fused multiply-add would change bits. CMakeLists.txt has the flag for GCC; clang-cl and MSVC do not take it. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

#if defined(__clang__)
#define FN_TARGET(isa) FN_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define FN_TARGET_END _Pragma("clang attribute pop")
#elif defined(__GNUC__)
#define FN_TARGET(isa) _Pragma("GCC push_options") FN_PRAGMA(GCC target(isa))
#define FN_TARGET_END _Pragma("GCC pop_options")
#else /* MSVC takes every intrinsic everywhere */
#define FN_TARGET(isa)
#define FN_TARGET_END
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define FN_INLINE static __forceinline
#define FN_NOINLINE __declspec(noinline)
#else
#define FN_INLINE static inline __attribute__((always_inline))
#define FN_NOINLINE __attribute__((noinline))
#endif

/* Before a function whose loops take up to 6 % more time where they begin elsewhere in a cache line. */
#if defined(__GNUC__)
#define FN_ON_A_LINE __attribute__((aligned(64)))
#else
#define FN_ON_A_LINE
#endif

/*
 * Before a loop that must be made of vectors, also where GCC optimises for size (with -fopenmp-simd, see CMakeLists.txt):
 * FN_VECTORS(), with OpenMP's clauses in the brackets.
 */
#if defined(__GNUC__) && !defined(__clang__)
#define FN_VECTORS(...) FN_PRAGMA(omp simd __VA_ARGS__)
#else
#define FN_VECTORS(...)
#endif

/* Before a short inner loop, without which GCC makes no vectors of the loop around it. */
#if defined(__GNUC__) && !defined(__clang__)
#define FN_UNROLLED _Pragma("GCC unroll 16")
#else
#define FN_UNROLLED
#endif

/* Fetch memory that is read soon into the first cache, or into the second. The address need not be valid. */
#if defined(_MSC_VER) && !defined(__clang__)
#define FN_PREFETCH(address) ((void)(address))
#define FN_PREFETCH_2(address) ((void)(address))
#else
#define FN_PREFETCH(address) __builtin_prefetch(address, 0, 3)
#define FN_PREFETCH_2(address) __builtin_prefetch(address, 0, 2)
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define FN_X86_64 1
#elif defined(__aarch64__) || defined(_M_ARM64)
#define FN_AARCH64 1
#endif

/* Extensions that only newer compilers know. */
#if defined(FN_X86_64) && ((defined(__clang__) && __clang_major__ >= 14 && !defined(_MSC_VER)) || \
                           (!defined(__clang__) && __GNUC__ >= 12))
#define FN_AVX512_FP16 1
#endif

/* AArch64's extensions that can be detected on this system, and that this compiler knows. */
#if defined(FN_AARCH64) && defined(__linux__) && (__GNUC__ >= 10 || (defined(__clang__) && __clang_major__ >= 17))
#define FN_NEON_BF16 1
#define FN_SVE 1
#elif defined(FN_AARCH64) && defined(__APPLE__) && defined(__clang__) && __clang_major__ >= 15
#define FN_NEON_BF16 1
#endif

#endif
