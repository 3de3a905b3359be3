// sigmoid, silu and gelu_tanh as docs/spec.md, section 10, defines them, and their derivatives, in A. ACTIVATION, which the
// compilation defines, is one of them. tests/exponential.py computes the constants.
#pragma once
#include "memory.cuh"

constexpr int SILU = 0, SIGMOID = 1, GELU_TANH = 2;

constexpr bool IN_F64 = sizeof(A) == 8;
using Whole = decltype(bits_of(A()));

constexpr int MANTISSA = IN_F64 ? 52 : 23;
constexpr Whole BIAS = IN_F64 ? 1023 : 127;
constexpr A LEAST = IN_F64 ? -760 : -110, LOWEST = IN_F64 ? -680 : -80;
constexpr A LEAST_NORMAL = IN_F64 ? -708 : -87;  // from here on exp is a normal number, or its rounding error is lost anyway
constexpr A ROUNDER = IN_F64 ? 0x1.8p+52 : 0x1.8p+23;
constexpr A LOG2_E = IN_F64 ? 0x1.71547652b82fep+0 : 0x1.715476p+0;
constexpr A LN2_HIGH = IN_F64 ? 0x1.62e42fefa38p-1 : 0x1.62e4p-1, LN2_LOW = IN_F64 ? 0x1.ef35793c7673p-45 : 0x1.7f7d1cp-20;

// They keep a NaN.
__device__ inline A no_less(A value, A least) { return value < least ? least : value; }
__device__ inline A no_more(A value, A most) { return value > most ? most : value; }

// exp(t) is p times a power of two, whose exponent plus 2 * BIAS is `exponent`.
struct Exponential {
    A p;
    Whole exponent;

    // value * exp(t), where the last product alone may be subnormal.
    __device__ A times(A value) const {
        const Whole half = exponent >> 1;
        return value * p * number_of_bits(half << MANTISSA) * number_of_bits((exponent - half) << MANTISSA);
    }
    // exp(t), if it is a normal number.
    __device__ A normal() const { return p * number_of_bits((exponent - BIAS) << MANTISSA); }
};

__device__ inline A pair(A r, A even, A odd) { return odd * r + even; }

// For a t up to 700 (float: 88).
__device__ inline Exponential exponential(A t) {
    const A shifted = t * LOG2_E + ROUNDER, k = shifted - ROUNDER;
    const A r = (t - k * LN2_HIGH) - k * LN2_LOW, q = r * r;
    A c;
    if constexpr (IN_F64) {
        c = pair(r, 0x1.1f849744516fbp-29, 0x1.4816247897b6bp-33);
        c = c * q + pair(r, 0x1.27e4d0cd3dd2bp-22, 0x1.ae7757c5bb063p-26);
        c = c * q + pair(r, 0x1.a01a01ab4b9c3p-16, 0x1.71de34f283766p-19);
        c = c * q + pair(r, 0x1.6c16c16c156cdp-10, 0x1.a01a01a183f68p-13);
        c = c * q + pair(r, 0x1.5555555555557p-5, 0x1.1111111110e61p-7);
        c = c * q + pair(r, 0.5, 0x1.5555555555556p-3);
    } else {
        c = pair(r, 0x1.6d40a6p-10f, 0x1.6c3104p-13f);
        c = c * q + pair(r, 0x1.5554f2p-5f, 0x1.1136aep-7f);
        c = c * q + pair(r, 0.5f, 0x1.55553cp-3f);
    }
    return {c * q + r + 1, bits_of(shifted) - bits_of(ROUNDER) + 2 * BIAS};
}

// What a function multiplies with sigmoid(v), and v.
__device__ inline A factor(A z) { return ACTIVATION == SIGMOID ? (A)1 : z; }
__device__ inline A argument(A z) {
    return ACTIVATION == GELU_TANH ? (z + z * z * z * (A)0.044715) * (A)1.5957691216057308 : z;
}

// z * sigmoid(v) where v is low: 1 + exp(v) is 1. z - z is 0, or NaN for an infinity.
__device__ inline A low_product(A z, const Exponential& of_v) { return of_v.times(no_less(z, LEAST)) + (z - z); }

// The function of gates.
template <class T> __device__ void activate(A (&f)[VECTOR], const T (&gates)[VECTOR]) {
    A z[VECTOR];
    widen(z, gates);
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
