/*
 * The functions of gates as docs/spec.md, section 10, defines them, and their slopes. gate_body.h includes this file once for
 * each type, with the constants of function_constants.h: REAL is the type, WHOLE an unsigned
 * integer of its size, and OF gives a name its suffix; these three end with the file. All of it is plain C on one element,
 * which compilers turn into vectors.
 */

/* One of two numbers by masks: a choice by "?" between floats keeps GCC from making vectors. */
FN_INLINE REAL OF(chosen)(int condition, REAL yes, REAL no) {
    const WHOLE mask = (WHOLE)0 - (WHOLE)condition;
    return OF(number_of)((OF(bits_of)(yes) & mask) | (OF(bits_of)(no) & ~mask));
}

/* A polynomial of x, which has so many coefficients. */
FN_INLINE REAL OF(polynomial)(const REAL *c, int count, REAL x, REAL square) {
    int i = count % 2 ? count - 1 : count - 2;
    REAL p = count % 2 ? c[i] : c[i + 1] * x + c[i];
    FN_UNROLLED
    while ((i -= 2) >= 0) p = p * square + (c[i + 1] * x + c[i]);
    return p;
}
#define POLYNOMIAL(c, x, square) OF(polynomial)(OF(c), sizeof OF(c) / sizeof(REAL), x, square)

/* exp(t) = p * 2^k, for t up to 700 (float: 88); `exponent` is k plus twice the bias. */
FN_INLINE REAL OF(reduced)(REAL t, WHOLE *exponent) {
    const REAL shifted = t * OF(log2_e) + OF(rounder), k = shifted - OF(rounder);
    const REAL r = (t - k * OF(ln2_high)) - k * OF(ln2_low), square = r * r;
    *exponent = OF(bits_of)(shifted) - OF(bits_of)(OF(rounder)) + 2 * OF(bias);
    return POLYNOMIAL(coefficients, r, square) * square + r + 1;
}

/* exp(t) = p * first * second; `second` is 0 where exp(t) is below every number. */
struct OF(exponential) {
    REAL p, first, second;
};

FN_INLINE struct OF(exponential) OF(exponential)(REAL t) {
    WHOLE whole;
    const REAL p = OF(reduced)(OF(chosen)(t < OF(least), OF(least), t), &whole);
    const WHOLE half = whole >> 1;
    const REAL second = OF(number_of)((whole - half) << OF(mantissa));
    return (struct OF(exponential)){p, OF(number_of)(half << OF(mantissa)), OF(chosen)(t < OF(least), 0, second)};
}

/* z * sigmoid(v); in `e`, exp(-v), or exp(v) where v is low. */
FN_INLINE REAL OF(product)(REAL z, REAL v, REAL *e) {
    const int low = v < OF(low);
    /* low ? v : -v, by the sign's bit: GCC 12 fails to make vectors of SVE of a choice between the two. */
    const WHOLE other_sign = (WHOLE)!low << (8 * sizeof(WHOLE) - 1);
    const struct OF(exponential) x = OF(exponential)(OF(number_of)(OF(bits_of)(v) ^ other_sign));
    const REAL within = OF(chosen)(z < OF(least), OF(least), z) + (z - z); /* NaN for an infinity */
    /* Beside 1 a low e is nothing; and processors take many times as long where a number is subnormal. */
    const REAL beside_one = x.p * OF(chosen)(low, 0, x.first) * x.second;
    *e = x.p * x.first * x.second;
    /* Not z * e: where e is subnormal, it has lost bits. */
    const WHOLE bits = OF(bits_of)(within * x.p * x.first * x.second);
    return OF(chosen)(low, OF(number_of)(bits << 1 ? bits : 0), z / (1 + beside_one)); /* never -0: z - z is added to it */
}

/* What gelu_tanh passes to the sigmoid. */
FN_INLINE REAL OF(argument)(REAL z) { return (z + z * z * z * (REAL)0.044715) * (REAL)1.5957691216057308; }

/* What it passes on changes so much with z. */
FN_INLINE REAL OF(slope_of_argument)(REAL z) { return (z * z * (REAL)0.134145 + 1) * (REAL)1.5957691216057308; }

/* z * Phi(z); and, where `slope` is not NULL, the derivative. */
FN_INLINE REAL OF(gelu)(REAL z, REAL *slope) {
    const REAL a = OF(number_of)(OF(bits_of)(z) << 1 >> 1), square = a * a;
    WHOLE exponent;
    const REAL p = OF(reduced)(square * (REAL)-0.5, &exponent);
    const REAL e = p * OF(number_of)((exponent - OF(bias)) << OF(mantissa)); /* a normal number, unless z is outside */
    const REAL q = POLYNOMIAL(numerator, a, square) / POLYNOMIAL(denominator, a, square);
    const int outside = a > OF(reach), below = z < 0;
    if (slope) {
        const REAL tail = OF(chosen)(outside, 0, (q - a * OF(density)) * e);
        *slope = OF(chosen)(below, tail, 1 - tail);
    }
    return OF(chosen)(below, z - z, z) - OF(chosen)(outside, 0, a * q * e);
}

FN_INLINE REAL OF(activated)(int activation, REAL alpha, REAL z) {
    REAL e;
    if (activation == FN_GELU) return OF(gelu)(z, NULL);
    if (activation == FN_RELU2) {
        const REAL r = OF(chosen)(z < 0, 0, z);
        return r * r;
    }
    if (activation == FN_SIGMOID) return OF(product)(1, z, &e);
    return OF(product)(z, activation == SWISH ? alpha * z : activation == FN_SILU ? z : OF(argument)(z), &e);
}

/* The same, and in `slope` the derivative. */
FN_INLINE REAL OF(activated_and_slope)(int activation, REAL alpha, REAL z, REAL *slope) {
    if (activation == FN_GELU) return OF(gelu)(z, slope);
    if (activation == FN_RELU2) {
        *slope = OF(chosen)(z > 0, z + z, 0);
        return OF(activated)(activation, alpha, z);
    }
    const REAL v = activation == FN_GELU_TANH ? OF(argument)(z) : activation == SWISH ? alpha * z : z;
    const int low = v < OF(low);
    REAL e;
    const REAL f = OF(product)(activation == FN_SIGMOID ? 1 : z, v, &e);
    const REAL s = OF(chosen)(low, e, 1 / (1 + e)), rest = OF(chosen)(low, 1, e) * OF(chosen)(low, 1, s);
    *slope = f * rest;
    if (activation == FN_GELU_TANH) {
        /* Beyond these numbers the function is z or 0, and the square of the argument would be infinite. */
        const REAL raised = OF(chosen)(z < -64, -64, z), m = OF(chosen)(raised > 64, 64, raised);
        *slope *= OF(slope_of_argument)(m);
    }
    if (activation == SWISH) *slope *= alpha;
    if (activation != FN_SIGMOID) *slope += s;
    return f;
}

/* n, which callers make a multiple of `together`; GCC sees that no loop ends with single elements. */
FN_INLINE int OF(whole)(int n) { return n / (int)OF(together) * (int)OF(together); }

/* One function with its constants. */
FN_INLINE void OF(activate_with)(int activation, REAL alpha, const REAL *restrict z, int n, REAL *restrict f, REAL *restrict slope) {
    if (slope) {
        FN_VECTORS()
        for (int i = 0; i < n; i++) f[i] = OF(activated_and_slope)(activation, alpha, z[i], &slope[i]);
    } else {
        FN_VECTORS()
        for (int i = 0; i < n; i++) f[i] = OF(activated)(activation, alpha, z[i]);
    }
}

/* Elements of a gate through its function, and with `slope` unless that is NULL. */
static FN_NOINLINE void OF(activate)(int activation, REAL alpha, const REAL *restrict z, int n, REAL *restrict f,
                                     REAL *restrict slope) {
    n = OF(whole)(n);
    if (activation == FN_SILU) OF(activate_with)(FN_SILU, alpha, z, n, f, slope);
    else if (activation == FN_SIGMOID) OF(activate_with)(FN_SIGMOID, alpha, z, n, f, slope);
    else if (activation == FN_GELU_TANH) OF(activate_with)(FN_GELU_TANH, alpha, z, n, f, slope);
    else if (activation == FN_GELU) OF(activate_with)(FN_GELU, alpha, z, n, f, slope);
    else if (activation == FN_RELU2) OF(activate_with)(FN_RELU2, alpha, z, n, f, slope);
    else OF(activate_with)(SWISH, alpha, z, n, f, slope);
}

/*
 * A tile of a gate with optional steps: the products in `first`, or, where d is not NULL, the gradients of y and z in `first`
 * and `second`. n is at most OF(steps).
 */
static FN_NOINLINE void OF(activate_in_steps)(const struct fn_gate *g, const REAL *restrict z, const REAL *restrict y,
                                              const REAL *restrict d, int n, REAL *restrict first, REAL *restrict second) {
    REAL limited[OF(steps)], factor[OF(steps)], slopes[OF(steps)], a[OF(steps)];
    const int limits = g->limit != 0, after = limits && g->flags & FN_CLAMP_AFTER, before = limits && !after;
    const REAL of_z = (REAL)limit_of(g, g->operand[FN_GATE].kind), of_y = (REAL)limit_of(g, g->operand[FN_GATED].kind);
    const REAL of_a = (REAL)limit_of(g, g->between), alpha = (REAL)g->alpha, offset = (REAL)g->up_offset;
    n = OF(whole)(n);
    if (n <= 0) return; /* never: GCC sees that the loops fill their arrays */
    for (int i = 0; i < n; i++) limited[i] = OF(chosen)(before & (z[i] > of_z), of_z, z[i]);
    if (alpha == 1) {
        OF(activate_any)(FN_SILU, alpha, limited, n, a, d ? slopes : NULL);
    } else if (!(g->flags & FN_ROUND_STEPS)) {
        OF(activate_any)(SWISH, alpha, limited, n, a, d ? slopes : NULL);
    } else {
        for (int i = 0; i < n; i++) factor[i] = alpha * limited[i];
        OF(round_tile)(g->between, factor, n);
        OF(activate_any)(FN_SIGMOID, alpha, factor, n, slopes, NULL);
        OF(round_tile)(g->between, slopes, n);
        for (int i = 0; i < n; i++) a[i] = limited[i] * slopes[i];
        OF(round_tile)(g->between, a, n);
        for (int i = 0; i < n; i++) slopes[i] += a[i] * (1 - slopes[i]) * alpha;
    }
    OF(round_tile)(g->between, a, n);
    for (int i = 0; i < n; i++) {
        const REAL most = OF(chosen)(limits & (y[i] > of_y), of_y, y[i]);
        factor[i] = OF(chosen)(limits & (most < -of_y), -of_y, most);
    }
    if (offset != 0)
        for (int i = 0; i < n; i++) factor[i] += offset;
    if (offset != 0 && g->flags & FN_ROUND_STEPS) OF(round_tile)(g->between, factor, n);
    if (!d) {
        for (int i = 0; i < n; i++) first[i] = factor[i] * OF(chosen)(after & (a[i] > of_a), of_a, a[i]);
        return;
    }
    for (int i = 0; i < n; i++) second[i] = d[i] * factor[i];
    OF(round_tile)(g->between, second, n);
    for (int i = 0; i < n; i++) {
        const REAL of_f = OF(chosen)(!after | (a[i] <= of_a), second[i], 0) * slopes[i];
        second[i] = OF(chosen)(!before | (z[i] <= of_z), of_f, 0);
        first[i] = OF(chosen)((!limits) | ((y[i] <= of_y) & (y[i] >= -of_y)),
                              d[i] * OF(chosen)(after & (a[i] > of_a), of_a, a[i]), 0);
    }
}

/* tanh(x). */
FN_INLINE REAL OF(tangent_of)(REAL x) {
    const WHOLE bits = OF(bits_of)(x), sign = bits >> (8 * sizeof(WHOLE) - 1) << (8 * sizeof(WHOLE) - 1);
    const REAL a = OF(number_of)(bits ^ sign), t = a * a, square = t * t;
    const REAL low = POLYNOMIAL(tangent, t, square) * t * a + a;
    const REAL within = OF(chosen)(a > OF(flat), OF(flat), a); /* a NaN stays */
    WHOLE exponent;
    const REAL p = OF(reduced)(within + within, &exponent);
    const REAL high = 1 - 2 / (p * OF(number_of)((exponent - OF(bias)) << OF(mantissa)) + 1);
    return OF(number_of)(OF(bits_of)(OF(chosen)(a < (REAL)0.75, low, high)) | sign);
}

/*
 * Elements through softcap, whose cap is the gate's limit, each step rounded to the kind between; and with the slope unless that
 * is NULL.
 */
static FN_NOINLINE void OF(softcap)(const struct fn_gate *g, const REAL *restrict z, int n, REAL *restrict f,
                                    REAL *restrict slope) {
    const REAL cap = (REAL)g->limit;
    FN_VECTORS()
    for (int i = 0; i < n; i++) f[i] = z[i] / cap;
    OF(round_tile)(g->between, f, n);
    FN_VECTORS()
    for (int i = 0; i < n; i++) f[i] = OF(tangent_of)(f[i]);
    OF(round_tile)(g->between, f, n);
    if (slope)
        for (int i = 0; i < n; i++) slope[i] = (1 - f[i]) * (1 + f[i]);
    for (int i = 0; i < n; i++) f[i] *= cap;
    OF(round_tile)(g->between, f, n);
}
#undef POLYNOMIAL
#undef REAL
#undef WHOLE
#undef OF
