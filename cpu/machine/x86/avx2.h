/* The operations of pairs.h for AVX2 with F16C. Included by kernel_avx2.c. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "machine/target.h"

#define LANES 8

typedef __m256 V;
typedef __m256i H2;

FN_INLINE V v_set1(float value) { return _mm256_set1_ps(value); }
FN_INLINE V v_add(V x, V y) { return _mm256_add_ps(x, y); }
FN_INLINE V v_mul(V x, V y) { return _mm256_mul_ps(x, y); }
FN_INLINE V v_fma(V x, V y, V z) { return _mm256_fmadd_ps(x, y, z); }
FN_INLINE V v_no_more(V most, V x) { return _mm256_min_ps(most, x); }
FN_INLINE V v_no_less(V least, V x) { return _mm256_max_ps(least, x); }
FN_INLINE V v_where_within(V least, V most, V x, V value) {
    return _mm256_and_ps(_mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ), _mm256_cmp_ps(x, most, _CMP_LE_OQ)), value);
}
FN_INLINE V v_swap(V x) { return _mm256_permute_ps(x, 0xb1); }

FN_INLINE float v_halve(V x) {
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}

/* A mask whose first n lanes are set: a part of eight set lanes and eight clear ones. */
FN_INLINE __m256i first8(int n) {
    static const int32_t lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(lanes + 8 - n));
}

FN_INLINE V v_load(const void *p) { return _mm256_loadu_ps(p); }
FN_INLINE V v_load_n(const void *p, int n) { return _mm256_maskload_ps(p, first8(n)); }
FN_INLINE void v_store(void *p, V x) { _mm256_storeu_ps(p, x); }
FN_INLINE void v_store_n(void *p, int n, V x) { _mm256_maskstore_ps(p, first8(n), x); }

/* AVX2 has no masked load of 16-bit lanes: pairs are loaded by mask, and a last odd element by itself. */
FN_INLINE H2 h2_load_n(const void *p, int n) {
    __m256i h = _mm256_maskload_epi32(p, first8(n / 2));
    uint16_t last = 0;
    if (n & 1) memcpy(&last, (const char *)p + 2 * (n - 1), sizeof last);
    __m256i at = _mm256_andnot_si256(first8(n / 2), first8(n / 2 + 1));
    return n & 1 ? _mm256_or_si256(h, _mm256_and_si256(at, _mm256_set1_epi32(last))) : h;
}
FN_INLINE void h2_store_n(void *p, int n, H2 h) {
    _mm256_maskstore_epi32(p, first8(n / 2), h);
    if (n & 1) {
        uint16_t lanes[16];
        _mm256_storeu_si256((__m256i *)lanes, h);
        memcpy((char *)p + 2 * (n - 1), &lanes[n - 1], sizeof *lanes);
    }
}
FN_INLINE H2 h2_load(const void *p) { return _mm256_loadu_si256(p); }
FN_INLINE void h2_store(void *p, H2 h) { _mm256_storeu_si256(p, h); }

FN_INLINE __m128i lo128(H2 h) { return _mm256_castsi256_si128(h); }
FN_INLINE __m128i hi128(H2 h) { return _mm256_extracti128_si256(h, 1); }

FN_INLINE V f16_lo(H2 h) { return _mm256_cvtph_ps(lo128(h)); }
FN_INLINE V f16_hi(H2 h) { return _mm256_cvtph_ps(hi128(h)); }
FN_INLINE H2 h2_f16(V a, V b) {
    __m128i lo = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), hi = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
    return _mm256_set_m128i(hi, lo);
}

FN_INLINE V bf16_lo(H2 h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo128(h)), 16)); }
FN_INLINE V bf16_hi(H2 h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi128(h)), 16)); }

/* Rounds to nearest even in integer arithmetic; the result is the upper half of each 32-bit lane. */
FN_INLINE __m256i rounded_bf16(V x) {
    __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
FN_INLINE __m256i rounded_bf16_or_nan(V x) {
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q), rounded = _mm256_castsi256_ps(rounded_bf16(x));
    return _mm256_castps_si256(_mm256_blendv_ps(rounded, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan));
}
FN_INLINE H2 h2_bf16(V a, V b) {
    __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded_bf16_or_nan(a), 16),
                                         _mm256_srli_epi32(rounded_bf16_or_nan(b), 16));
    return _mm256_permute4x64_epi64(packed, 0xd8); /* packus works within 128-bit halves */
}

/* Widening by parity takes a shift or a mask, where widening by halves moves data across lanes. */
#define BF16_BY_PARITY 1
FN_INLINE V bf16_even(H2 h) { return _mm256_castsi256_ps(_mm256_slli_epi32(h, 16)); }
FN_INLINE V bf16_odd(H2 h) { return _mm256_castsi256_ps(_mm256_and_si256(h, _mm256_set1_epi32((int)0xffff0000))); }
FN_INLINE H2 h2_bf16_parity(V even, V odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(rounded_bf16(even), 16), rounded_bf16(odd), 0xaa);
}

#define STREAMS 1
FN_INLINE void v_stream(void *p, V x) { _mm256_stream_ps(p, x); }
FN_INLINE void h2_stream(void *p, H2 h) { _mm256_stream_si256(p, h); }
FN_INLINE void u_stream_end(void) { _mm_sfence(); }

#define HALVES_FROM_MEMORY 1
FN_INLINE V f16_load(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
FN_INLINE V bf16_load(const void *p) { return bf16_lo(_mm256_castsi128_si256(_mm_loadu_si128(p))); }
FN_INLINE V f16_store(void *p, V x) {
    __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(p, h);
    return _mm256_cvtph_ps(h);
}
FN_INLINE V bf16_store(void *p, V x) {
    __m128i h = lo128(h2_bf16(x, x));
    _mm_storeu_si128(p, h);
    return bf16_lo(_mm256_castsi128_si256(h));
}
