// The exponential of docs/spec.md, section 10, in A. tests/exponential.py computes the constants.
#pragma once
#include "memory.cuh"

constexpr bool IN_F64 = sizeof(A) == 8;
using Whole = decltype(bits_of(A()));

constexpr int MANTISSA = IN_F64 ? 52 : 23;
constexpr Whole BIAS = IN_F64 ? 1023 : 127;
constexpr A LEAST = IN_F64 ? -760 : -110;
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
