// The exponential of docs/spec.md, section 10, in A.
#pragma once
#include "memory.cuh"

constexpr bool IN_F64 = sizeof(A) == 8;
using Whole = decltype(bits_of(A()));

#include "function_constants.cuh"

constexpr A LEAST_NORMAL = IN_F64 ? -708 : -87;  // from here on exp is a normal number, or its rounding error is lost anyway

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

// A polynomial of x, its coefficients from the constant on: Horner's rule for pairs of terms.
template <int COUNT> __device__ A polynomial(A x, A square, const A (&c)[COUNT]) {
    A p = COUNT % 2 ? c[COUNT - 1] : pair(x, c[COUNT - 2], c[COUNT - 1]);
#pragma unroll
    for (int i = COUNT - 4 + COUNT % 2; i >= 0; i -= 2) p = p * square + pair(x, c[i], c[i + 1]);
    return p;
}
#define POLYNOMIAL(NAME, x, square) (IN_F64 ? polynomial(x, square, {NAME##_F64}) : polynomial(x, square, {NAME##_F32}))

// For a t up to 700 (float: 88).
__device__ inline Exponential exponential(A t) {
    const A shifted = t * LOG2_E + ROUNDER, k = shifted - ROUNDER;
    const A r = (t - k * LN2_HIGH) - k * LN2_LOW, q = r * r;
    const A c = POLYNOMIAL(COEFFICIENTS, r, q);
    return {c * q + r + 1, bits_of(shifted) - bits_of(ROUNDER) + 2 * BIAS};
}
