// The optional steps of a gate (docs/spec.md, section 10), as the reference's `_factors` has them. Constants that the
// compilation defines where STEPS is 1; the numbers by their bits, as A has them:
//
//   CLAMP          NOTHING, or whether z is limited, or the function's value; either limits y too
//   Z_LIMIT, Y_LIMIT, VALUE_LIMIT
//   ALPHA          of the function SWISH. Where ACTIVATION is SIGMOID, that is rounded before z is multiplied
//   UP_OFFSET      is added to y, unless it is 0
//   ROUND_OFFSET   whether that sum is rounded
#pragma once
#include "gate.cuh"

#if STEPS
constexpr int NOTHING = 0, BEFORE = 1, AFTER = 2;

__device__ inline A number(Whole bits) { return number_of_bits(bits); }

// The function's values, rounded; and their derivatives, if they are asked for.
template <bool DERIVED> __device__ void activate_in_steps(A (&f)[VECTOR], A (&slope)[VECTOR], const Z (&gates)[VECTOR]) {
    A z[VECTOR];
    widen(z, gates);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        if (CLAMP == BEFORE) z[i] = no_more(z[i], number(Z_LIMIT));
    if constexpr (ACTIVATION == SIGMOID) {
        A s[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) f[i] = z[i] * number(ALPHA);
        round_to<BETWEEN_TYPE>(f);
        activate(s, f);
        round_to<BETWEEN_TYPE>(s);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) f[i] = z[i] * s[i];
        round_to<BETWEEN_TYPE>(f);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) slope[i] = s[i] + f[i] * (1 - s[i]) * number(ALPHA);
    } else {
        if constexpr (DERIVED) activate(f, slope, z);
        else activate(f, z);
        round_to<BETWEEN_TYPE>(f);
    }
}

// The function's values within their limit.
__device__ inline A within_limit(A f) { return CLAMP == AFTER ? no_more(f, number(VALUE_LIMIT)) : f; }

// The rows that are multiplied.
__device__ inline void limit_and_add(A (&u)[VECTOR], const Y (&y)[VECTOR]) {
    widen(u, y);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        if (CLAMP != NOTHING) u[i] = no_less(no_more(u[i], number(Y_LIMIT)), -number(Y_LIMIT));
        if (UP_OFFSET) u[i] += number(UP_OFFSET);
    }
    if constexpr (ROUND_OFFSET) round_to<BETWEEN_TYPE>(u);
}

// A gradient where values are within their limits, else 0; so for a NaN.
__device__ inline A where(bool inside, A gradient) { return inside ? gradient : 0; }

// From the gradients of the products in dy and dz to those of y and z.
__device__ inline void differentiate_in_steps(A (&dy)[VECTOR], A (&dz)[VECTOR], const Y (&y)[VECTOR], const Z (&z)[VECTOR]) {
    A f[VECTOR], slope[VECTOR], u[VECTOR], gates[VECTOR], rows[VECTOR];
    activate_in_steps<true>(f, slope, z);
    limit_and_add(u, y);
    multiply(dz, u);
    round_to<BETWEEN_TYPE>(dz);
    widen(gates, z);
    widen(rows, y);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const A most = number(Y_LIMIT);
        dy[i] = where(CLAMP == NOTHING || (rows[i] <= most && rows[i] >= -most), dy[i] * within_limit(f[i]));
        dz[i] = where(CLAMP != AFTER || f[i] <= number(VALUE_LIMIT), dz[i]) * slope[i];
        dz[i] = where(CLAMP != BEFORE || gates[i] <= number(Z_LIMIT), dz[i]);
    }
}
#endif
