// The types of operands, and conversions to and from A, the type of all arithmetic. Conversion from A rounds once.
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
struct none {};  // the type of an operand that is absent

using A = ACCUMULATOR;

template <class T> constexpr bool PRESENT = true;
template <> inline constexpr bool PRESENT<none> = false;

template <class T> __device__ A wide(T value) { return (A)value; }
template <> __device__ inline A wide(f16 value) { return (A)float_of_half(value.bits); }
template <> __device__ inline A wide(bf16 value) { return (A)number_of_bits((unsigned)value.bits << 16); }

// Sets the last bit of the float where the conversion is inexact ("rounding to odd"). Then rounding the float to 16
// bits gives what rounding the double at once would have given.
__device__ inline float rounded_to_odd(float value) { return value; }
__device__ inline float rounded_to_odd(double value) {
    float nearest = (float)value;
    double back = nearest;
    if (back == value || value != value) return nearest;
    unsigned bits = bits_of(nearest);
    if ((back < 0 ? -back : back) > (value < 0 ? -value : value)) bits -= 1;
    return number_of_bits(bits | 1);
}

// Converts COUNT values to A. The 16-bit types go in pairs, straight from the words that were loaded: splitting a word
// first would cost one or two instructions more per word.
template <class T, int COUNT> __device__ void widen(A (&to)[COUNT], const T (&from)[COUNT]) {
    if constexpr (sizeof(T) > 2 || COUNT == 1) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) to[i] = wide(from[i]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            unsigned word;
            memcpy(&word, from + i, sizeof word);
            if constexpr (T::HALF) {
                to[i] = (A)float_of_half((unsigned short)word);
                to[i + 1] = (A)float_of_half((unsigned short)(word >> 16));
            } else {
                to[i] = (A)number_of_bits(word << 16);
                to[i + 1] = (A)number_of_bits(word & 0xFFFF0000);
            }
        }
    }
}

// Rounds COUNT values to nearest even. The 16-bit types are rounded in pairs.
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
            memcpy(to + i, &word, COUNT > 1 ? sizeof word : sizeof *to);
        }
    }
}

// Rounds values to T and widens them again; none: leaves them as they are.
template <class T, int COUNT> __device__ void round_to(A (&values)[COUNT]) {
    if constexpr (PRESENT<T>) {
        T rounded[COUNT];
        narrow(rounded, values);
        widen(values, rounded);
    }
}

// Adds values, if the operand is present.
template <class T, int COUNT> __device__ void add(A (&to)[COUNT], const T (&from)[COUNT]) {
    if constexpr (PRESENT<T>) {
        A more[COUNT];
        widen(more, from);
#pragma unroll
        for (int i = 0; i < COUNT; i++) to[i] += more[i];
    }
}

template <int COUNT> __device__ void multiply(A (&values)[COUNT], const A (&factors)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] *= factors[i];
}

template <class T, int COUNT> __device__ void square(A (&to)[COUNT], const T (&from)[COUNT]) {
    widen(to, from);
    multiply(to, to);
}
