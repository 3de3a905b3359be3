/*
 * sigmoid, silu and gelu_tanh as docs/spec.md, section 10, defines them, and their slopes. gate_body.h includes this file
 * once for each type, with the constants of tests/exponential.py: REAL is the type, WHOLE an unsigned integer of its size,
 * and OF gives a name its suffix; these three end with the file. All of it is plain C on one element, which compilers turn
 * into vectors.
 */

/* One of two numbers by masks: a choice by "?" between floats keeps GCC from making vectors. */
FN_INLINE REAL OF(chosen)(int condition, REAL yes, REAL no) {
    const WHOLE mask = (WHOLE)0 - (WHOLE)condition;
    return OF(number_of)((OF(bits_of)(yes) & mask) | (OF(bits_of)(no) & ~mask));
}

/* exp(t) = p * first * second, for t up to 700 (float: 88). */
struct OF(exponential) {
    REAL p, first, second;
};

FN_INLINE struct OF(exponential) OF(exponential)(REAL t) {
    const REAL *const c = OF(coefficients);
    enum { PAIRS = sizeof OF(coefficients) / sizeof(REAL) / 2 };
    t = OF(chosen)(t < OF(least), OF(least), t);
    const REAL shifted = t * OF(log2_e) + OF(rounder), k = shifted - OF(rounder);
    const REAL r = (t - k * OF(ln2_high)) - k * OF(ln2_low), square = r * r;
    REAL p = c[2 * PAIRS - 1] * r + c[2 * PAIRS - 2];
    for (int i = PAIRS - 2; i >= 0; i--) p = p * square + (c[2 * i + 1] * r + c[2 * i]);
    const WHOLE whole = OF(bits_of)(shifted) - OF(bits_of)(OF(rounder)) + 2 * OF(bias), half = whole >> 1;
    return (struct OF(exponential)){p * square + r + 1, OF(number_of)(half << OF(mantissa)),
                                    OF(number_of)((whole - half) << OF(mantissa))};
}

/* z * sigmoid(v); in `e`, exp(-v), or exp(v) where v is low. */
FN_INLINE REAL OF(product)(REAL z, REAL v, REAL *e) {
    const int low = v < OF(low);
    /* low ? v : -v, by the sign's bit: GCC 12 fails to make vectors of SVE of a choice between the two. */
    const WHOLE other_sign = (WHOLE)!low << (8 * sizeof(WHOLE) - 1);
    const struct OF(exponential) x = OF(exponential)(OF(number_of)(OF(bits_of)(v) ^ other_sign));
    const REAL within = OF(chosen)(z < OF(least), OF(least), z);
    *e = x.p * x.first * x.second;
    /* Not z * e: where e is subnormal, it has lost bits. z - z is 0, or NaN for an infinity. */
    return OF(chosen)(low, within * x.p * x.first * x.second + (z - z), z) / (1 + *e);
}

/* What gelu_tanh passes to the sigmoid. */
FN_INLINE REAL OF(argument)(REAL z) { return (z + z * z * z * (REAL)0.044715) * (REAL)1.5957691216057308; }

/* What it passes on changes so much with z. */
FN_INLINE REAL OF(slope_of_argument)(REAL z) { return (z * z * (REAL)0.134145 + 1) * (REAL)1.5957691216057308; }

FN_INLINE REAL OF(activated)(int activation, REAL z) {
    REAL e;
    if (activation == FN_SIGMOID) return OF(product)(1, z, &e);
    return OF(product)(z, activation == FN_SILU ? z : OF(argument)(z), &e);
}

/* The same, and in `slope` the derivative. */
FN_INLINE REAL OF(activated_and_slope)(int activation, REAL z, REAL *slope) {
    const REAL v = activation == FN_GELU_TANH ? OF(argument)(z) : z;
    const int low = v < OF(low);
    REAL e;
    const REAL f = OF(product)(activation == FN_SIGMOID ? 1 : z, v, &e);
    const REAL s = OF(chosen)(low, e, 1) / (1 + e), rest = OF(chosen)(low, 1, e * s);
    *slope = f * rest;
    if (activation == FN_GELU_TANH) {
        /* Beyond these numbers the function is z or 0, and the square of the argument would be infinite. */
        const REAL raised = OF(chosen)(z < -64, -64, z), m = OF(chosen)(raised > 64, 64, raised);
        *slope *= OF(slope_of_argument)(m);
    }
    if (activation != FN_SIGMOID) *slope += s;
    return f;
}

/* Elements of a gate through its function, and with `slope` unless that is NULL. */
static FN_NOINLINE void OF(activate)(int activation, const REAL *restrict z, int n, REAL *restrict f,
                                     REAL *restrict slope) {
#define EACH(activation)                                                                             \
    do {                                                                                             \
        if (slope)                                                                                   \
            for (int i = 0; i < n; i++) f[i] = OF(activated_and_slope)(activation, z[i], &slope[i]); \
        else                                                                                         \
            for (int i = 0; i < n; i++) f[i] = OF(activated)(activation, z[i]);                      \
    } while (0)
    if (activation == FN_SILU) EACH(FN_SILU);
    else if (activation == FN_SIGMOID) EACH(FN_SIGMOID);
    else EACH(FN_GELU_TANH);
#undef EACH
}
#undef REAL
#undef WHOLE
#undef OF
