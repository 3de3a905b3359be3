/* The operations of pairs.h on NEON of Armv8.0, except those of bfloat16. */
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "machine/target.h"

#define LANES 4

typedef float32x4_t V;
typedef uint16x8_t H2;

FN_INLINE V v_set1(float value) { return vdupq_n_f32(value); }
FN_INLINE V v_add(V x, V y) { return vaddq_f32(x, y); }
FN_INLINE V v_mul(V x, V y) { return vmulq_f32(x, y); }
FN_INLINE V v_fma(V x, V y, V z) { return vfmaq_f32(z, x, y); }
#define MANY_REGISTERS 1
FN_INLINE V v_no_more(V most, V x) { return vminq_f32(most, x); }
FN_INLINE V v_no_less(V least, V x) { return vmaxq_f32(least, x); }
FN_INLINE V v_where_within(V least, V most, V x, V value) {
    const uint32x4_t within = vandq_u32(vcgeq_f32(x, least), vcleq_f32(x, most));
    return vreinterpretq_f32_u32(vandq_u32(within, vreinterpretq_u32_f32(value)));
}
FN_INLINE V v_swap(V x) { return vrev64q_f32(x); }

FN_INLINE float v_halve(V x) {
    float32x2_t z = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(z, 0) + vget_lane_f32(z, 1);
}

/* Copies n < 16 bytes in pieces of known size, so that no call is made. */
FN_INLINE void copy_bytes(void *to, const void *from, int n) {
    char *t = to;
    const char *f = from;
    int at = 0;
    if (n & 8) memcpy(t, f, 8), at = 8;
    if (n & 4) memcpy(t + at, f + at, 4), at += 4;
    if (n & 2) memcpy(t + at, f + at, 2);
}

FN_INLINE H2 h2_load(const void *p) { return vreinterpretq_u16_u8(vld1q_u8(p)); }
FN_INLINE void h2_store(void *p, H2 h) { vst1q_u8(p, vreinterpretq_u8_u16(h)); }
FN_INLINE H2 h2_load_n(const void *p, int n) {
    uint16_t lanes[8] = {0};
    copy_bytes(lanes, p, 2 * n);
    return vld1q_u16(lanes);
}
FN_INLINE void h2_store_n(void *p, int n, H2 h) {
    uint16_t lanes[8];
    vst1q_u16(lanes, h);
    copy_bytes(p, lanes, 2 * n);
}

FN_INLINE V v_load(const void *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
FN_INLINE void v_store(void *p, V x) { vst1q_u8(p, vreinterpretq_u8_f32(x)); }
FN_INLINE V v_load_n(const void *p, int n) {
    return n == LANES ? v_load(p) : vreinterpretq_f32_u16(h2_load_n(p, 2 * n));
}
FN_INLINE void v_store_n(void *p, int n, V x) {
    if (n == LANES) v_store(p, x);
    else h2_store_n(p, 2 * n, vreinterpretq_u16_f32(x));
}

FN_INLINE V f16_lo(H2 h) { return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h))); }
FN_INLINE V f16_hi(H2 h) { return vcvt_high_f32_f16(vreinterpretq_f16_u16(h)); }
FN_INLINE H2 h2_f16(V a, V b) { return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b)); }

/* Half a register of 16-bit values, widened as the file that includes this does it. */
FN_INLINE H2 h2_load_half(const void *p) { return vcombine_u16(vreinterpret_u16_u8(vld1_u8(p)), vdup_n_u16(0)); }
FN_INLINE V f16_load(const void *p) { return f16_lo(h2_load_half(p)); }
FN_INLINE V bf16_lo(H2 h);
FN_INLINE V bf16_load(const void *p) { return bf16_lo(h2_load_half(p)); }
