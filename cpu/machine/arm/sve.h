/*
 * The operations of kernel_body.h on SVE vectors of any length that is a power of two, except narrowing
 * to bfloat16, which the files that include this define. Tails are masked.
 */
#include <arm_sve.h>
#include <stdint.h>

#include "machine/kinds.h"
#include "machine/target.h"

#define UNIT ((int)svcntw())

typedef svfloat32_t U;

FN_INLINE svbool_t all(void) { return svptrue_b32(); }
FN_INLINE svbool_t first(int n) { return n == UNIT ? all() : svwhilelt_b32_s32(0, n); }

/* Otherwise GCC keeps a pointer for every access of a loop, more than there are registers, instead of one index. */
#define OPAQUE_INDEX
FN_INLINE int64_t u_index(int64_t i) {
    __asm__("" : "+r"(i));
    return i;
}

FN_INLINE U u_set1(float value) { return svdup_n_f32(value); }
FN_INLINE U u_add(U x, U y) { return svadd_f32_x(all(), x, y); }
FN_INLINE U u_mul(U x, U y) { return svmul_f32_x(all(), x, y); }

/* See product_body.h: at most 16 lanes. */
#define P_LANES (UNIT < 16 ? UNIT : 16)
#define P_VECTORS (UNIT < 16 ? 2 : 1) /* of 256 bits, or of more: those of 128 bits are not used (cpu_features.c) */
#define MANY_REGISTERS 1
typedef svfloat32_t P;
FN_INLINE P p_zero(void) { return u_set1(0); }
FN_INLINE P p_set1(float x) { return u_set1(x); }
FN_INLINE P p_add(P x, P y) { return u_add(x, y); }
FN_INLINE P p_mul(P x, P w) { return u_mul(x, w); }
FN_INLINE P p_fma(P x, P w, P s) { return svmla_f32_x(all(), s, x, w); }
FN_INLINE U u_no_more(float most, U x) { return svmin_n_f32_x(all(), x, most); }
FN_INLINE U u_no_less(float least, U x) { return svmax_n_f32_x(all(), x, least); }
FN_INLINE U u_where_within(float least, float most, U x, U value) {
    const svbool_t within = svcmple_n_f32(svcmpge_n_f32(all(), x, least), x, most);
    return svsel_f32(within, value, svdup_n_f32(0));
}
FN_INLINE U u_swap(int by_parity, U u) {
    return (void)by_parity, svreinterpret_f32_u64(svrevw_u64_x(svptrue_b64(), svreinterpret_u64_f32(u)));
}

/*
 * 16-bit values are in the lower halves of 32-bit lanes, where loads put them; the upper halves are 0. Those of bfloat16 are
 * exchanged, not shifted: half of the ports of a Neoverse core shift, and all of them exchange halves.
 */
FN_INLINE U widen(int kind, svuint32_t h) {
    if (kind == F16) return svcvt_f32_f16_x(all(), svreinterpret_f16_u32(h));
    return svreinterpret_f32_u32(svrevh_u32_x(all(), h));
}

FN_INLINE svuint32_t narrow_bf16(U x);

FN_INLINE svuint32_t narrow(int kind, U x) {
    if (kind == F16) return svreinterpret_u32_f16(svcvt_f16_f32_x(all(), x));
    return narrow_bf16(x);
}

FN_INLINE U u_round(int kind, U u) { return widen(kind, narrow(kind, u)); }

FN_INLINE U u_load(int kind, const void *row, int64_t i, int n) {
    if (kind == F32) return svld1_f32(first(n), (const float *)row + i);
    return widen(kind, svld1uh_u32(first(n), (const uint16_t *)row + i));
}

FN_INLINE U u_store(int kind, void *row, int64_t i, int n, U value) {
    if (kind == F32) {
        svst1_f32(first(n), (float *)row + i, value);
        return value;
    }
    svuint32_t h = narrow(kind, value);
    svst1h_u32(first(n), (uint16_t *)row + i, h);
    return widen(kind, h);
}

/* compact moves the upper half down. The instruction that adds all lanes (faddv) adds neighbours first. */
FN_INLINE float u_halve(int by_parity, U u) {
    (void)by_parity;
    for (int n = UNIT / 2; n > 0; n /= 2) u = u_add(u, svcompact_f32(svnot_b_z(all(), svwhilelt_b32_s32(0, n)), u));
    return svlasta_f32(svpfalse_b(), u);
}

FN_INLINE P p_load(int kind, const char *p) { return u_load(kind, p, 0, P_LANES); }
FN_INLINE void p_store(float *p, P x) { u_store(F32, p, 0, P_LANES, x); }
