// The functions of gates as docs/spec.md, section 10, defines them, and their derivatives, in A. ACTIVATION, which the
// compilation defines, is one of them. tests/gaussian.py computes the constants.
#pragma once
#include "exponential.cuh"

// SWISH is z * sigmoid(alpha * z); ALPHA, which the compilation defines for it, has the bits of that number.
constexpr int SILU = 0, SIGMOID = 1, GELU_TANH = 2, GELU = 3, RELU2 = 4, SWISH = 5;
#ifndef ALPHA
#define ALPHA 0
#endif

constexpr A LOWEST = IN_F64 ? -680 : -80;

// Phi(-a) * exp(a^2 / 2) is the quotient of these two.
__device__ inline A numerator(A a, A square) {
    A c;
    if constexpr (IN_F64) {
        c = 0x1.ce4cd6f3470cdp-23;
        c = c * square + pair(a, 0x1.b2bdfec1cf8f9p-14, 0x1.c4bf808326fd9p-18);
        c = c * square + pair(a, 0x1.ca0c9f44be687p-8, 0x1.0a57ff14494c5p-10);
        c = c * square + pair(a, 0x1.0b370da0cdae9p-3, 0x1.1fc2ca64de9cp-5);
        c = c * square + pair(a, 0x1.59e28fbe180a6p-1, 0x1.6aae56a1f9583p-2);
        c = c * square + pair(a, 0x1p-1, 0x1.a695cc614ce9fp-1);
    } else {
        c = 0x1.040fb6p-8f;
        c = c * square + pair(a, 0x1.71644cp-3f, 0x1.44dc48p-5f);
        c = c * square + pair(a, 0x1p-1f, 0x1.bce64cp-2f);
    }
    return c;
}
__device__ inline A denominator(A a, A square) {
    A c;
    if constexpr (IN_F64) {
        c = pair(a, 0x1.1bb7bfb21aaa4p-16, 0x1.21b4230e18e46p-21);
        c = c * square + pair(a, 0x1.500766f505f7fp-9, 0x1.1100054519b63p-12);
        c = c * square + pair(a, 0x1.72f2aa28f8122p-4, 0x1.23476878a0fbep-6);
        c = c * square + pair(a, 0x1.f11d249f89feep-1, 0x1.60515c10d6bap-2);
        c = c * square + pair(a, 0x1.670454ae3ce44p+1, 0x1.fce9b81e3d8b3p+0);
        c = c * square + pair(a, 0x1p+0, 0x1.396bfafff74e4p+1);
    } else {
        c = pair(a, 0x1.972ef6p-4f, 0x1.45ef08p-7f);
        c = c * square + pair(a, 0x1.30cfa4p+0f, 0x1.d8f9bp-2f);
        c = c * square + pair(a, 0x1p+0f, 0x1.aab554p+0f);
    }
    return c;
}

// z * Phi(z), and in `slope` the derivative.
__device__ inline A gelu(A z, A& slope) {
    constexpr A REACH = IN_F64 ? 37.625 : 13.1875, DENSITY = IN_F64 ? 0x1.9884533d43651p-2 : 0x1.988454p-2;
    const A a = z < 0 ? -z : z + 0, square = a * a;  // of both zeros the positive one
    // exp is a normal number there. Beyond, nothing of it is used.
    const A e = exponential(no_less(square * (A)-0.5, LEAST_NORMAL)).normal(), q = numerator(a, square) / denominator(a, square);
    const bool outside = a > REACH, below = z < 0;
    const A tail = outside ? 0 : (q - a * DENSITY) * e;
    slope = below ? tail : 1 - tail;
    return (below ? z - z : z) - (outside ? 0 : a * q * e);
}

// The square of z, or 0 for a negative z; and in `slope` the derivative.
__device__ inline A relu2(A z, A& slope) {
    const A r = no_less(z, 0);
    slope = z > 0 ? z + z : 0;
    return r * r;
}

// What a function multiplies with sigmoid(v), and v.
__device__ inline A factor(A z) { return ACTIVATION == SIGMOID ? (A)1 : z; }
__device__ inline A argument(A z) {
    if (ACTIVATION == SWISH) return z * number_of_bits((Whole)ALPHA);
    return ACTIVATION == GELU_TANH ? (z + z * z * z * (A)0.044715) * (A)1.5957691216057308 : z;
}

// z * sigmoid(v) where v is low: 1 + exp(v) is 1. z - z is 0, or NaN for an infinity.
__device__ inline A low_product(A z, const Exponential& of_v) { return of_v.times(no_less(z, LEAST)) + (z - z); }

// The function of gates.
template <class T> __device__ void activate(A (&f)[VECTOR], const T (&gates)[VECTOR]) {
    A z[VECTOR];
    widen(z, gates);
    if constexpr (ACTIVATION == GELU || ACTIVATION == RELU2) {
        A unused;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) f[i] = ACTIVATION == GELU ? gelu(z[i], unused) : relu2(z[i], unused);
        return;
    }
    bool any_low = false;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const A v = argument(z[i]);
        any_low |= v < LOWEST;
        // Below LEAST_NORMAL its sum with 1 is 1.
        f[i] = factor(z[i]) / (1 + exponential(-no_more(v, -LEAST_NORMAL)).normal());
    }
    if (!any_low) return;  // nearly always
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const A v = argument(z[i]);
        if (v < LOWEST) f[i] = low_product(factor(z[i]), exponential(no_less(v, LEAST)));
    }
}

// The function of a gate, and in `slope` its derivative.
__device__ inline A activated(A z, A& slope) {
    if (ACTIVATION == GELU) return gelu(z, slope);
    if (ACTIVATION == RELU2) return relu2(z, slope);
    const A v = argument(z);
    const bool low = v < LOWEST;
    const Exponential x = exponential(no_less(low ? v : -v, LEAST));
    const A e = x.times(1), f = low ? low_product(factor(z), x) : factor(z) / (1 + e);
    const A s = low ? e : 1 / (1 + e);
    slope = f * (low ? 1 : e * s);
    if (ACTIVATION == GELU_TANH) {
        // Beyond these numbers the function is z or 0, and the square of the argument would be infinite.
        const A m = no_more(no_less(z, -64), 64);
        slope *= (m * m * (A)0.134145 + 1) * (A)1.5957691216057308;
    }
    if (ACTIVATION == SWISH) slope *= number_of_bits((Whole)ALPHA);
    if (ACTIVATION != SIGMOID) slope += s;
    return f;
}

// The same of a vector.
template <class T> __device__ void activate(A (&f)[VECTOR], A (&slope)[VECTOR], const T (&gates)[VECTOR]) {
    A z[VECTOR];
    widen(z, gates);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) f[i] = activated(z[i], slope[i]);
}

// Multiplies values by the function of gates.
template <class T> __device__ void multiply_by_gates(A (&values)[VECTOR], const T (&gates)[VECTOR]) {
    A f[VECTOR];
    activate(f, gates);
    multiply(values, f);
}
