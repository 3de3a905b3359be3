// The functions of gates as docs/spec.md, section 10, defines them, and their derivatives, in A. ACTIVATION, which the
// compilation defines, is one of them.
#pragma once
#include "exponential.cuh"

// SWISH is z * sigmoid(alpha * z); ALPHA, which the compilation defines for it, has the bits of that number.
constexpr int SILU = 0, SIGMOID = 1, GELU_TANH = 2, GELU = 3, RELU2 = 4, SWISH = 5;
#ifndef ALPHA
#define ALPHA 0
#endif

// z * Phi(z), and in `slope` the derivative.
__device__ inline A gelu(A z, A& slope) {
    const A a = z < 0 ? -z : z + 0, square = a * a;  // of both zeros the positive one
    // exp is a normal number there. Beyond, nothing of it is used.
    const A e = exponential(no_less(square * (A)-0.5, LEAST_NORMAL)).normal();
    // Phi(-a) * exp(a^2 / 2) is this quotient.
    const A q = POLYNOMIAL(NUMERATOR, a, square) / POLYNOMIAL(DENOMINATOR, a, square);
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
        any_low |= v < LOW;
        // Below LEAST_NORMAL its sum with 1 is 1.
        f[i] = factor(z[i]) / (1 + exponential(-no_more(v, -LEAST_NORMAL)).normal());
    }
    if (!any_low) return;  // nearly always
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const A v = argument(z[i]);
        if (v < LOW) f[i] = low_product(factor(z[i]), exponential(no_less(v, LEAST)));
    }
}

// The function of a gate, and in `slope` its derivative.
__device__ inline A activated(A z, A& slope) {
    if (ACTIVATION == GELU) return gelu(z, slope);
    if (ACTIVATION == RELU2) return relu2(z, slope);
    const A v = argument(z);
    const bool low = v < LOW;
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
