// The types of operands, how their values are read as A (the type that is computed in), and rounded once from it.
#pragma once
#include "machine.cuh"

struct f16 {
    static constexpr bool HALF = true;
    unsigned short bits;
};
struct bf16 {
    static constexpr bool HALF = false;
    unsigned short bits;
};
using f32 = float;
using f64 = double;
struct none {};  // of an operand that is absent

using A = ACCUMULATOR;

template <class T> constexpr bool PRESENT = true;
template <> inline constexpr bool PRESENT<none> = false;

template <class T> __device__ A wide(T value) { return (A)value; }
template <> __device__ inline A wide(f16 value) { return (A)float_of_half(value.bits); }
template <> __device__ inline A wide(bf16 value) { return (A)float_of_bits((unsigned)value.bits << 16); }

// The last bit of the float is set where anything was lost: then rounding once more, to 16 bits, rounds once.
__device__ inline float rounded_to_odd(float value) { return value; }
__device__ inline float rounded_to_odd(double value) {
    float nearest = (float)value;
    double back = nearest;
    if (back == value || value != value) return nearest;
    unsigned bits = bits_of_float(nearest);
    if ((back < 0 ? -back : back) > (value < 0 ? -value : value)) bits -= 1;
    return float_of_bits(bits | 1);
}

// COUNT values, rounded to nearest even: the 16-bit types are rounded in pairs.
template <class T, int COUNT> __device__ void narrow(T (&to)[COUNT], const A (&from)[COUNT]) {
    if constexpr (sizeof(T) > 2) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) to[i] = (T)from[i];
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            float low = rounded_to_odd(from[i]), high = rounded_to_odd(from[COUNT > 1 ? i + 1 : i]);
            unsigned word;
            if constexpr (T::HALF) word = halves_of_floats(low, high);
            else word = bfloat16s_of_floats(low, high);
            to[i].bits = (unsigned short)word;
            if (COUNT > 1) to[COUNT > 1 ? i + 1 : i].bits = (unsigned short)(word >> 16);
        }
    }
}
