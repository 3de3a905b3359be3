/*
 * The operations of pairs.h for AVX-512 (F, BW, DQ, VL). Tails are masked. Included by the files
 * kernel_<isa>.c, which may define PERMUTES_WORDS, where a permutation of two registers is one operation, or HAS_VBMI2.
 */
#include <immintrin.h>
#include <stdint.h>

#include "machine/target.h"

#define LANES 16

typedef __m512 V;
typedef __m512i H2;

FN_INLINE V v_set1(float value) { return _mm512_set1_ps(value); }
FN_INLINE V v_add(V x, V y) { return _mm512_add_ps(x, y); }
FN_INLINE V v_mul(V x, V y) { return _mm512_mul_ps(x, y); }
FN_INLINE V v_fma(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
#define MANY_REGISTERS 1
FN_INLINE V v_no_more(V most, V x) { return _mm512_min_ps(most, x); }
FN_INLINE V v_no_less(V least, V x) { return _mm512_max_ps(least, x); }
FN_INLINE V v_where_within(V least, V most, V x, V value) {
    const __mmask16 not_below = _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
    return _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(not_below, x, most, _CMP_LE_OQ), value);
}
FN_INLINE V v_swap(V x) { return _mm512_permute_ps(x, 0xb1); }

FN_INLINE float v_halve(V x) {
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}

/*
 * Halves eight rows at once: each step puts the halves of two vectors into one, so that half as many vectors are left.
 * Returns two floats of each row: 128-bit lane L has those of rows L and L + 4.
 */
FN_INLINE V halve_eight(V r0, V r1, V r2, V r3, V r4, V r5, V r6, V r7) {
#define BY_8(p, q) v_add(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee))
#define BY_4(p, q) v_add(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd))
    V p = BY_8(r0, r1), q = BY_8(r2, r3), r = BY_8(r4, r5), s = BY_8(r6, r7);
    __m512d u = _mm512_castps_pd(BY_4(p, q)), w = _mm512_castps_pd(BY_4(r, s));
#undef BY_8
#undef BY_4
    return v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(u, w)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, w)));
}

#define HALVES_ROWS 1
FN_INLINE void halve_rows(int by_parity, const float *units, float *sums) {
#define A(k) _mm512_load_ps(units + 2 * LANES * (k))
#define B(k) _mm512_load_ps(units + 2 * LANES * (k) + LANES)
#define EIGHT(of) halve_eight(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7))
#define A_AND_B(k) v_add(A(k), B(k))
    V a = by_parity ? EIGHT(A) : EIGHT(A_AND_B), b = by_parity ? EIGHT(B) : a;
    V sum = v_add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    if (by_parity) sum = v_add(sum, _mm512_permute_ps(sum, 0x4e));
    const __m256i rows = _mm256_set_epi32(13, 9, 5, 1, 12, 8, 4, 0); /* their places */
    _mm256_store_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(_mm512_castsi256_si512(rows), sum)));
#undef A
#undef B
#undef EIGHT
#undef A_AND_B
}

FN_INLINE __mmask16 first16(int n) { return (__mmask16)((1u << n) - 1); }
FN_INLINE __mmask32 first32(int n) { return (__mmask32)((1ull << n) - 1); }

FN_INLINE V v_load(const void *p) { return _mm512_loadu_ps(p); }
FN_INLINE V v_load_n(const void *p, int n) { return _mm512_maskz_loadu_ps(first16(n), p); }
FN_INLINE void v_store(void *p, V x) { _mm512_storeu_ps(p, x); }
FN_INLINE void v_store_n(void *p, int n, V x) { _mm512_mask_storeu_ps(p, first16(n), x); }

FN_INLINE H2 h2_load(const void *p) { return _mm512_loadu_si512(p); }
FN_INLINE H2 h2_load_n(const void *p, int n) { return _mm512_maskz_loadu_epi16(first32(n), p); }
FN_INLINE void h2_store(void *p, H2 h) { _mm512_storeu_si512(p, h); }
FN_INLINE void h2_store_n(void *p, int n, H2 h) { _mm512_mask_storeu_epi16(p, first32(n), h); }

FN_INLINE __m256i lo256(H2 h) { return _mm512_castsi512_si256(h); }
FN_INLINE __m256i hi256(H2 h) { return _mm512_extracti64x4_epi64(h, 1); }
FN_INLINE H2 join256(__m256i lo, __m256i hi) { return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1); }

enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };

FN_INLINE V f16_lo(H2 h) { return _mm512_cvtph_ps(lo256(h)); }
FN_INLINE V f16_hi(H2 h) { return _mm512_cvtph_ps(hi256(h)); }
FN_INLINE H2 h2_f16(V a, V b) { return join256(_mm512_cvtps_ph(a, NEAREST), _mm512_cvtps_ph(b, NEAREST)); }

FN_INLINE V bf16_lo(H2 h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(lo256(h)), 16)); }
FN_INLINE V bf16_hi(H2 h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(hi256(h)), 16)); }

/* Rounds to nearest even in integer arithmetic; the result is the upper half of each 32-bit lane. */
FN_INLINE __m512i rounded_bf16(V x) {
    __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
FN_INLINE __m512i rounded_bf16_or_nan(V x) {
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_epi32(nan, rounded_bf16(x), _mm512_set1_epi32(0x7fc00000));
}
FN_INLINE H2 h2_bf16(V a, V b) {
    return join256(_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16_or_nan(a), 16)),
                   _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16_or_nan(b), 16)));
}

/* Widening by parity takes a shift or a mask, where widening by halves moves data across lanes. */
#define BF16_BY_PARITY 1
FN_INLINE V bf16_even(H2 h) { return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16)); }
FN_INLINE V bf16_odd(H2 h) { return _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000))); }
/* The upper words of the 32-bit lanes of e and o, in the order e0 o0 e1 o1 ...; and their lower words. */
#if defined(PERMUTES_WORDS)
#define UPPER_WORDS                                                                                    \
    _mm512_set_epi16(63, 31, 61, 29, 59, 27, 57, 25, 55, 23, 53, 21, 51, 19, 49, 17,                   \
                     47, 15, 45, 13, 43, 11, 41, 9, 39, 7, 37, 5, 35, 3, 33, 1)
FN_INLINE H2 upper_words(H2 e, H2 o) { return _mm512_permutex2var_epi16(e, UPPER_WORDS, o); }
FN_INLINE H2 lower_words(H2 e, H2 o) {
    return _mm512_permutex2var_epi16(e, _mm512_sub_epi16(UPPER_WORDS, _mm512_set1_epi16(1)), o);
}
#else /* Intel splits that permutation into three operations. The first operand is overwritten: it is not used again. */
FN_INLINE H2 from_upper(H2 upper, H2 lower) {
    return _mm512_ternarylogic_epi32(upper, _mm512_set1_epi32((int)0xffff0000), lower, 0xe2);
}
#if defined(HAS_VBMI2)
FN_INLINE H2 crossed(H2 e, H2 o) { return _mm512_shrdi_epi32(e, o, 16); } /* e's upper words below o's lower ones */
FN_INLINE H2 upper_words(H2 e, H2 o) { return from_upper(o, crossed(e, o)); }
FN_INLINE H2 lower_words(H2 e, H2 o) { return from_upper(crossed(e, o), e); }
#else
FN_INLINE H2 upper_words(H2 e, H2 o) { return from_upper(o, _mm512_srli_epi32(e, 16)); }
FN_INLINE H2 lower_words(H2 e, H2 o) { return from_upper(_mm512_slli_epi32(o, 16), e); }
#endif
#endif

/*
 * Narrows both vectors at once. A lower word's last bit is set where the upper word is odd: then one
 * comparison, "more than half a unit", rounds ties to even too. The conversion of AVX512_BF16 is no
 * faster: it flushes subnormals, so they would have to be treated separately.
 */
FN_INLINE H2 h2_bf16_parity(V even, V odd) {
    H2 e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
    H2 upper = upper_words(e, o), lower = lower_words(e, o);
    lower = _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(1), 0xf8); /* lower | (upper & 1) */
    __mmask32 up = _mm512_cmpgt_epu16_mask(lower, _mm512_set1_epi16(-0x8000));
    return _mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
}

#define READS_AHEAD 1

#define STREAMS 1
FN_INLINE void v_stream(void *p, V x) { _mm512_stream_ps(p, x); }
FN_INLINE void h2_stream(void *p, H2 h) { _mm512_stream_si512(p, h); }
FN_INLINE void u_stream_end(void) { _mm_sfence(); }

#define HALVES_FROM_MEMORY 1
FN_INLINE V f16_load(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
FN_INLINE V bf16_load(const void *p) { return bf16_lo(_mm512_castsi256_si512(_mm256_loadu_si256(p))); }
FN_INLINE V f16_store(void *p, V x) {
    __m256i h = _mm512_cvtps_ph(x, NEAREST);
    _mm256_storeu_si256(p, h);
    return _mm512_cvtph_ps(h);
}
FN_INLINE V bf16_store(void *p, V x) {
    __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16_or_nan(x), 16));
    _mm256_storeu_si256(p, h);
    return bf16_lo(_mm512_castsi256_si512(h));
}
