/*
 * Sums of products of int8 numbers on each instruction set. Integers have no order, so each takes the fastest one. VNNI multiplies
 * numbers without a sign by others with it, so 128 is added to the weight's; without VNNI pairs of products of int16 are added.
 */
#include "abi/int8_dots.h"

#include <string.h>

#include "machine/target.h"

static int64_t padded(int64_t n) { return (n + FN_INT8_VECTOR - 1) / FN_INT8_VECTOR * FN_INT8_VECTOR; }

static void take_bytes(const int8_t *row, int64_t n, void *to) {
    memcpy(to, row, (size_t)n);
    memset((int8_t *)to + n, 0, (size_t)(padded(n) - n));
}

#if !defined(FN_AARCH64)
static void dots_portable(int rows, const void *x, int64_t row_step, int columns, const int8_t *w, int64_t w_step, int64_t n, int32_t *sums,
                          int64_t step) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            const int8_t *const a = (const int8_t *)x + r * row_step, *const b = w + c * w_step;
            int32_t sum = 0;
            FN_VECTORS(reduction(+ : sum))
            for (int64_t k = 0; k < n; k++) sum += a[k] * b[k];
            sums[r * step + c] = sum;
        }
}
static const struct fn_int8_dots portable = {1, take_bytes, dots_portable, 0};
#endif

#if defined(FN_X86_64)
#include <immintrin.h>

static void take_words(const int8_t *row, int64_t n, void *to) {
    int16_t *const words = to;
    for (int64_t k = 0; k < n; k++) words[k] = row[k];
    memset(words + n, 0, (size_t)(padded(n) - n) * sizeof *words);
}

FN_TARGET("avx2")
FN_INLINE __m256i words_of_avx2(const char *row, int64_t k) { return _mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * k)); }
FN_INLINE __m256i column_of_avx2(const int8_t *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)w)); }
FN_INLINE __m256i end_of_avx2(const int8_t *w, int64_t left) {
    int8_t last[16] = {0};
    return column_of_avx2(memcpy(last, w, (size_t)left));
}
FN_INLINE __m256i pairs_of_avx2(__m256i a, __m256i b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }
FN_INLINE void store_sums_of_avx2(int32_t *to, __m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i ab = pairs_of_avx2(a, b), cd = pairs_of_avx2(c, d);
    const __m256i s = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(void *)to, _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
}
#define NAME avx2
#define STEP 16
#define ROWS 2
#define A __m256i
#define S __m256i
#define row_at words_of_avx2
#define column_at column_of_avx2
#define column_end end_of_avx2
#define add_products(s, a, b) _mm256_add_epi32(s, _mm256_madd_epi16(a, b))
#define store_sums store_sums_of_avx2
#define zero _mm256_setzero_si256
#include "kernels/int8_tile.h"
FN_TARGET_END
static const struct fn_int8_dots avx2 = {2, take_words, dots_avx2, 0};

#if __has_include(<avxvnniintrin.h>) /* of GCC 11 and Clang 12 */
FN_TARGET("avx2,avxvnni")
FN_INLINE __m256i bytes_of_avx_vnni(const char *row, int64_t k) { return _mm256_loadu_si256((const __m256i *)(const void *)(row + k)); }
FN_INLINE __m256i column_of_avx_vnni(const int8_t *w) { /* 128 more, without a sign */
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(const void *)w), _mm256_set1_epi8((char)0x80));
}
FN_INLINE __m256i end_of_avx_vnni(const int8_t *w, int64_t left) {
    int8_t last[32] = {0};
    return column_of_avx_vnni(memcpy(last, w, (size_t)left));
}
#define NAME avx_vnni
#define STEP 32
#define ROWS 2
#define A __m256i
#define S __m256i
#define row_at bytes_of_avx_vnni
#define column_at column_of_avx_vnni
#define column_end end_of_avx_vnni
#define add_products(s, a, b) _mm256_dpbusd_avx_epi32(s, b, a)
#define store_sums store_sums_of_avx2
#define zero _mm256_setzero_si256
#include "kernels/int8_tile.h"
FN_TARGET_END
static const struct fn_int8_dots avx_vnni = {1, take_bytes, dots_avx_vnni, 128};
static const struct fn_int8_dots *best_of_avx2(void) { return fn_has_avx_vnni() ? &avx_vnni : &avx2; }
#else
static const struct fn_int8_dots *best_of_avx2(void) { return &avx2; }
#endif

FN_TARGET("avx512f,avx512bw,avx512vl")
FN_INLINE __m512i words_of_avx512(const char *row, int64_t k) { return _mm512_loadu_si512(row + 2 * k); }
FN_INLINE __m512i column_of_avx512(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)w)); }
FN_INLINE __m512i end_of_avx512(const int8_t *w, int64_t left) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((__mmask32)((1u << left) - 1), w));
}
FN_INLINE __m512i pairs_of_avx512(__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); }
FN_INLINE void store_sums_of_avx512(int32_t *to, __m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = pairs_of_avx512(a, b), cd = pairs_of_avx512(c, d);
    const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
    _mm_storeu_si128((__m128i *)(void *)to, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
#define NAME avx512
#define STEP 32
#define ROWS 4
#define A __m512i
#define S __m512i
#define row_at words_of_avx512
#define column_at column_of_avx512
#define column_end end_of_avx512
#define add_products(s, a, b) _mm512_add_epi32(s, _mm512_madd_epi16(a, b))
#define store_sums store_sums_of_avx512
#define zero _mm512_setzero_si512
#include "kernels/int8_tile.h"
FN_TARGET_END
static const struct fn_int8_dots avx512 = {2, take_words, dots_avx512, 0};

FN_TARGET("avx512f,avx512bw,avx512vl,avx512vnni")
FN_INLINE __m512i bytes_of_vnni(const char *row, int64_t k) { return _mm512_loadu_si512(row + k); }
FN_INLINE __m512i without_sign(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80)); } /* 128 more */
FN_INLINE __m512i column_of_vnni(const int8_t *w) { return without_sign(_mm512_loadu_si512(w)); }
FN_INLINE __m512i end_of_vnni(const int8_t *w, int64_t left) { return without_sign(_mm512_maskz_loadu_epi8(((__mmask64)1 << left) - 1, w)); }
#define NAME vnni
#define STEP 64
#define ROWS 4
#define A __m512i
#define S __m512i
#define row_at bytes_of_vnni
#define column_at column_of_vnni
#define column_end end_of_vnni
#define add_products(s, a, b) _mm512_dpbusd_epi32(s, b, a)
#define store_sums store_sums_of_avx512
#define zero _mm512_setzero_si512
#include "kernels/int8_tile.h"
FN_TARGET_END
static const struct fn_int8_dots vnni = {1, take_bytes, dots_vnni, 128};

const struct fn_int8_dots *fn_int8_dots_of(const char *isa) {
    if (!strcmp(isa, "scalar")) return &portable;
    if (!strcmp(isa, "avx2")) return best_of_avx2();
    return fn_has_avx512_vnni() ? &vnni : &avx512;
}

#elif defined(FN_AARCH64)
#include <arm_neon.h>

FN_INLINE int8x16_t bytes_of_neon(const char *row, int64_t k) { return vld1q_s8((const int8_t *)row + k); }
FN_INLINE int8x16_t column_of_neon(const int8_t *w) { return vld1q_s8(w); }
FN_INLINE int8x16_t end_of_neon(const int8_t *w, int64_t left) {
    int8_t last[16] = {0};
    return vld1q_s8(memcpy(last, w, (size_t)left));
}
/* A product fits into int16, and a sum of two need not. */
FN_INLINE int32x4_t products_of_neon(int32x4_t s, int8x16_t a, int8x16_t b) {
    s = vpadalq_s16(s, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vpadalq_s16(s, vmull_high_s8(a, b));
}
FN_INLINE void store_sums_of_neon(int32_t *to, int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    vst1q_s32(to, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
}
FN_INLINE int32x4_t zero_of_neon(void) { return vdupq_n_s32(0); }
#define NAME neon
#define STEP 16
#define ROWS 4
#define A int8x16_t
#define S int32x4_t
#define row_at bytes_of_neon
#define column_at column_of_neon
#define column_end end_of_neon
#define add_products products_of_neon
#define store_sums store_sums_of_neon
#define zero zero_of_neon
#include "kernels/int8_tile.h"
static const struct fn_int8_dots neon = {1, take_bytes, dots_neon, 0};

#if defined(FN_NEON_BF16) /* compilers that know it know dot products */
FN_TARGET("arch=armv8.2-a+dotprod")
#define NAME neon_dot
#define STEP 16
#define ROWS 4
#define A int8x16_t
#define S int32x4_t
#define row_at bytes_of_neon
#define column_at column_of_neon
#define column_end end_of_neon
#define add_products vdotq_s32
#define store_sums store_sums_of_neon
#define zero zero_of_neon
#include "kernels/int8_tile.h"
FN_TARGET_END
static const struct fn_int8_dots neon_dot = {1, take_bytes, dots_neon_dot, 0};
#endif

const struct fn_int8_dots *fn_int8_dots_of(const char *isa) {
    (void)isa;
#if defined(FN_NEON_BF16)
    if (fn_has_neon_dot()) return &neon_dot;
#endif
    return &neon;
}

#else
const struct fn_int8_dots *fn_int8_dots_of(const char *isa) {
    (void)isa;
    return &portable;
}
#endif
