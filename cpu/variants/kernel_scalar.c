/* The kernels for any processor, one float at a time. AArch64 has none: each of its processors runs those for NEON. */
#include "machine/half.h"
#include "machine/target.h"

#if !defined(FN_AARCH64)
#define ISA scalar
#define LANES 1
#define FEW_KINDS 1 /* few processors run them */
#define ROW_BY_ROW 1 /* arithmetic is the limit: two passes together take a fifth longer, for want of registers */

typedef float V;
typedef struct {
    uint16_t lo, hi;
} H2;

FN_INLINE V v_set1(float value) { return value; }
FN_INLINE V v_add(V x, V y) { return x + y; }
FN_INLINE V v_mul(V x, V y) { return x * y; }
FN_INLINE V v_no_more(V most, V x) { return x > most ? most : x; }
FN_INLINE V v_no_less(V least, V x) { return x < least ? least : x; }
FN_INLINE V v_where_within(V least, V most, V x, V value) { return x >= least && x <= most ? value : 0; }
FN_INLINE float v_halve(V x) { return x; }

FN_INLINE V v_load(const void *p) {
    V value;
    memcpy(&value, p, sizeof value);
    return value;
}
FN_INLINE void v_store(void *p, V value) { memcpy(p, &value, sizeof value); }
FN_INLINE V v_load_n(const void *p, int n) { return n ? v_load(p) : 0; }
FN_INLINE void v_store_n(void *p, int n, V value) {
    if (n) v_store(p, value);
}

FN_INLINE H2 h2_load_n(const void *p, int n) {
    H2 h = {0, 0};
    memcpy(&h, p, (size_t)n * sizeof h.lo);
    return h;
}
FN_INLINE void h2_store_n(void *p, int n, H2 h) { memcpy(p, &h, (size_t)n * sizeof h.lo); }
FN_INLINE H2 h2_load(const void *p) { return h2_load_n(p, 2); }
FN_INLINE void h2_store(void *p, H2 h) { h2_store_n(p, 2, h); }

FN_INLINE V f16_lo(H2 h) { return f32_from_f16(h.lo); }
FN_INLINE V f16_hi(H2 h) { return f32_from_f16(h.hi); }
FN_INLINE H2 h2_f16(V a, V b) { return (H2){f16_from_f32(a), f16_from_f32(b)}; }
FN_INLINE V bf16_lo(H2 h) { return f32_from_bf16(h.lo); }
FN_INLINE V bf16_hi(H2 h) { return f32_from_bf16(h.hi); }
FN_INLINE H2 h2_bf16(V a, V b) { return (H2){bf16_from_f32(a), bf16_from_f32(b)}; }

#include "machine/pairs.h"
#include "kernels/kernel_body.h"

#endif
