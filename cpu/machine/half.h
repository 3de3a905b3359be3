/* Conversions of one float16 or bfloat16 value, in integer arithmetic that every processor has. */
#ifndef FUSEDNORM_HALF_H
#define FUSEDNORM_HALF_H

#include <stdint.h>
#include <string.h>

#include "machine/target.h"

FN_INLINE uint32_t bits_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FN_INLINE float f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Elements of a row, which may be unaligned. */
FN_INLINE float f32_at(const char *row, int64_t i) {
    float value;
    memcpy(&value, row + i * (int64_t)sizeof value, sizeof value);
    return value;
}
FN_INLINE double f64_at(const char *row, int64_t i) {
    double value;
    memcpy(&value, row + i * (int64_t)sizeof value, sizeof value);
    return value;
}
FN_INLINE uint16_t half_at(const char *row, int64_t i) {
    uint16_t half;
    memcpy(&half, row + i * (int64_t)sizeof half, sizeof half);
    return half;
}

FN_INLINE float f32_from_bf16(uint16_t half) { return f32_of_bits((uint32_t)half << 16); }

/* Adding just under half a unit, and one more where the unit is odd, rounds to nearest even. */
FN_INLINE uint16_t bf16_from_f32(float value) {
    uint32_t bits = bits_of_f32(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

FN_INLINE float f32_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return f32_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return f32_of_bits(sign | ((magnitude << 13) + ((127 - 15) << 23)));
    return f32_of_bits(sign | bits_of_f32((float)magnitude * 0x1p-24f)); /* subnormal: exact */
}

FN_INLINE uint16_t f16_from_f32(float value) {
    uint32_t bits = bits_of_f32(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and up round to infinity */
    if (magnitude < 0x38800000) { /* below 2^-14: units of 2^-24, which are the units of 0.5f too */
        float shifted = f32_of_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of_f32(shifted) - bits_of_f32(0.5f)));
    }
    magnitude -= (127 - 15) << 23;
    return (uint16_t)(sign | (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

/*
 * Rounds to float, and sets the last bit if that was inexact ("round to odd"). Rounding the result
 * to a shorter type then gives the same value as rounding the double at once (Boldo and Melquiond,
 * Emulation of FMA and correctly rounded sums, IEEE TC 2008, theorem on double rounding).
 */
FN_INLINE float f32_odd_from_f64(double value) {
    float rounded = (float)value;
    double back = rounded;
    uint32_t bits = bits_of_f32(rounded);
    if (back == value || value != value) return rounded;
    if ((back < 0 ? -back : back) > (value < 0 ? -value : value)) bits -= 1; /* towards zero */
    return f32_of_bits(bits | 1);
}

#endif
