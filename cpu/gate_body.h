/*
 * Gates (docs/spec.md, section 10), included by kernel_body.h: rows times a function of other rows, and the gradients. The
 * functions are plain C in activations.h; around them units are widened, multiplied and rounded.
 */

FN_INLINE uint64_t bits_of_f64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
FN_INLINE double f64_of_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define bits_of_float bits_of_f32
#define number_of_float f32_of_bits
#define REAL float
#define WHOLE uint32_t
#define OF(name) name##_float
#define MANTISSA 23
#define BIAS 127
#define LEAST -110.0f
#define LOW -80.0f
#define ROUNDER 12582912.0f /* 1.5 * 2^23 */
#define LOG2_E 0x1.715476p+0f
#define LN2_HIGH 0x1.62e4p-1f
#define LN2_LOW 0x1.7f7d1cp-20f
#define COEFFICIENTS \
    {0.5f, 0x1.55553cp-3f, 0x1.5554f2p-5f, 0x1.1136aep-7f, 0x1.6d40a6p-10f, 0x1.6c3104p-13f}
#include "activations.h"
#undef REAL
#undef WHOLE
#undef OF
#undef MANTISSA
#undef BIAS
#undef LEAST
#undef LOW
#undef ROUNDER
#undef LOG2_E
#undef LN2_HIGH
#undef LN2_LOW
#undef COEFFICIENTS

#define bits_of_double bits_of_f64
#define number_of_double f64_of_bits
#define REAL double
#define WHOLE uint64_t
#define OF(name) name##_double
#define MANTISSA 52
#define BIAS 1023
#define LEAST -760.0
#define LOW -680.0
#define ROUNDER 6755399441055744.0 /* 1.5 * 2^52 */
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42fefa38p-1
#define LN2_LOW 0x1.ef35793c7673p-45
#define COEFFICIENTS                                                                                              \
    {0.5, 0x1.5555555555556p-3, 0x1.5555555555557p-5, 0x1.1111111110e61p-7, 0x1.6c16c16c156cdp-10,                \
     0x1.a01a01a183f68p-13, 0x1.a01a01ab4b9c3p-16, 0x1.71de34f283766p-19, 0x1.27e4d0cd3dd2bp-22,                  \
     0x1.ae7757c5bb063p-26, 0x1.1f849744516fbp-29, 0x1.4816247897b6bp-33}
#include "activations.h"
#undef REAL
#undef WHOLE
#undef OF

/* Units of a kind that only the running program knows: a branch for each costs less than a loop for each pair of kinds. */
FN_INLINE U gate_load(int64_t kind, const void *row, int64_t i, int n) {
    if (kind == F32) return u_load(F32, row, i, n);
    if (kind == F16) return u_load(F16, row, i, n);
    return u_load(BF16, row, i, n);
}
FN_INLINE void gate_store(int64_t kind, void *row, int64_t i, int n, U value) {
    if (kind == F32) u_store(F32, row, i, n, value);
    else if (kind == F16) u_store(F16, row, i, n, value);
    else u_store(BF16, row, i, n, value);
}
FN_INLINE U gate_round(int64_t kind, U value) {
    if (kind == F16) return u_round(F16, value);
    if (kind == BF16) return u_round(BF16, value);
    return value;
}

FN_INLINE void gate_unit(const struct fn_gate *g, char *const *at, const float *a, int64_t i, int n) {
    const struct fn_operand *o = g->operand;
    const U y = gate_load(o[FN_GATED].kind, at[FN_GATED], i, n), f = gate_round(g->between, u_load(F32, a, i, UNIT));
    gate_store(o[FN_GATE_OUT].kind, at[FN_GATE_OUT], i, n, u_mul(y, f));
}

FN_INLINE void gate_backward_unit(const struct fn_gate *g, char *const *at, const float *a, const float *slope, int64_t i,
                                  int n) {
    const struct fn_operand *o = g->operand;
    const U d = gate_load(o[FN_GATE_D].kind, at[FN_GATE_D], i, n), y = gate_load(o[FN_GATED].kind, at[FN_GATED], i, n);
    const U f = gate_round(g->between, u_load(F32, a, i, UNIT)), da = gate_round(g->between, u_mul(d, y));
    if (at[FN_GATED_D]) gate_store(o[FN_GATED_D].kind, at[FN_GATED_D], i, n, u_mul(d, f));
    if (at[FN_GATE_DZ]) gate_store(o[FN_GATE_DZ].kind, at[FN_GATE_DZ], i, n, u_mul(da, u_load(F32, slope, i, UNIT)));
}

/* n <= FN_GATE_TILE elements, which begin at `at` of each operand. */
static void gate_float(const struct fn_gate *g, char *const *at, int n) {
    _Alignas(64) float z[FN_GATE_TILE], a[FN_GATE_TILE], slope[FN_GATE_TILE];
    const int whole = n / UNIT * UNIT, backward = g->pass == FN_BACKWARD, rest = n - whole;
    for (int i = 0; i < whole; i += UNIT)
        u_store(F32, z, i, UNIT, gate_load(g->operand[FN_GATE].kind, at[FN_GATE], u_index(i), UNIT));
    if (rest) u_store(F32, z, whole, UNIT, gate_load(g->operand[FN_GATE].kind, at[FN_GATE], whole, rest));
    activate_float((int)g->activation, z, rest ? whole + UNIT : whole, a, backward ? slope : NULL);
    if (backward) {
        for (int i = 0; i < whole; i += UNIT) gate_backward_unit(g, at, a, slope, u_index(i), UNIT);
        if (rest) gate_backward_unit(g, at, a, slope, whole, rest);
    } else {
        for (int i = 0; i < whole; i += UNIT) gate_unit(g, at, a, u_index(i), UNIT);
        if (rest) gate_unit(g, at, a, whole, rest);
    }
}

/* The same in float64; the function's value is never rounded there. */
static void gate_double(const struct fn_gate *g, char *const *at, int n) {
    double z[FN_GATE_TILE], a[FN_GATE_TILE], y[FN_GATE_TILE], slope[FN_GATE_TILE];
    const struct fn_operand *o = g->operand;
    const int backward = g->pass == FN_BACKWARD;
    widen_to_f64((int)o[FN_GATE].kind, at[FN_GATE], z, n);
    widen_to_f64((int)o[FN_GATED].kind, at[FN_GATED], y, n);
    activate_double((int)g->activation, z, n, a, backward ? slope : NULL);
    if (!backward) {
        for (int i = 0; i < n; i++) a[i] *= y[i];
        narrow_from_f64((int)o[FN_GATE_OUT].kind, a, at[FN_GATE_OUT], n);
        return;
    }
    double *const d = z;
    widen_to_f64((int)o[FN_GATE_D].kind, at[FN_GATE_D], d, n);
    for (int i = 0; i < n; i++) {
        a[i] *= d[i];
        slope[i] *= d[i] * y[i];
    }
    if (at[FN_GATED_D]) narrow_from_f64((int)o[FN_GATED_D].kind, a, at[FN_GATED_D], n);
    if (at[FN_GATE_DZ]) narrow_from_f64((int)o[FN_GATE_DZ].kind, slope, at[FN_GATE_DZ], n);
}

static void gate_tile(const struct fn_gate *g, char *const *at, int n) {
    if (g->wide) gate_double(g, at, n);
    else gate_float(g, at, n);
}
