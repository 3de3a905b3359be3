/*
 * The quantizer (docs/spec.md, section 9), included by kernel_body.h. Its loops are plain C, which compilers turn into
 * vectors of each instruction set: every operation is one of float or of 32-bit integers on one element.
 */

enum { FLOAT8 = 1, AFTER = 2 }; /* beside 0: ways to make a byte */

/* A row as float. Operands may be unaligned, and float64 is rounded. */
static void widen_row(int kind, const char *row, int64_t hidden, float *y) {
    if (kind == FN_F32) {
        memcpy(y, row, (size_t)hidden * sizeof *y);
    } else if (kind == FN_F64) {
        for (int64_t i = 0; i < hidden; i++) {
            double value;
            memcpy(&value, row + i * (int64_t)sizeof value, sizeof value);
            y[i] = (float)value;
        }
    } else if (kind == FN_BF16) {
        for (int64_t i = 0; i < hidden; i++) {
            uint16_t half;
            memcpy(&half, row + i * (int64_t)sizeof half, sizeof half);
            y[i] = f32_from_bf16(half);
        }
    } else {
        int64_t i = 0;
        for (; i + UNIT <= hidden; i += UNIT) u_store(F32, y, i, UNIT, u_load(F16, row, u_index(i), UNIT));
        if (i < hidden) u_store(F32, y, i, UNIT, u_load(F16, row, i, (int)(hidden - i)));
    }
}

/* The greatest magnitude, by its bits: a NaN is the greatest. */
static float greatest_magnitude(const float *y, int64_t n) {
    int32_t greatest = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(bits_of_f32(y[i]) & 0x7fffffff);
        greatest = bits > greatest ? bits : greatest;
    }
    return f32_of_bits((uint32_t)greatest);
}

/* Whole numbers in the order of floats; -0 is below +0, and NaN is apart from them. */
FN_INLINE int32_t in_order_of_floats(float value) {
    int32_t bits = (int32_t)bits_of_f32(value);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

/* The least and the greatest element; both are NaN if one of them is. */
static void least_and_greatest(const float *y, int64_t n, float *least, float *greatest) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        int32_t place = in_order_of_floats(y[i]);
        low = place < low ? place : low;
        high = place > high ? place : high;
    }
    *least = f32_of_bits((uint32_t)(low ^ (low >> 31 & 0x7fffffff)));
    *greatest = f32_of_bits((uint32_t)(high ^ (high >> 31 & 0x7fffffff)));
    /* A NaN of either sign is at one end. */
    if (*least != *least || *greatest != *greatest) *least = *greatest = *least + *greatest;
}

/* One of two numbers by masks: a choice by "?" between floats keeps GCC from making vectors. */
FN_INLINE uint32_t bits_if(int condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}
FN_INLINE float at_least(float value, float floor) {
    return f32_of_bits(bits_if(value < floor, bits_of_f32(floor), bits_of_f32(value)));
}
FN_INLINE float at_most(float value, float limit) {
    return f32_of_bits(bits_if(value > limit, bits_of_f32(limit), bits_of_f32(value)));
}

/* The byte of a number within the range, rounded to nearest even in integers. */
FN_INLINE uint8_t float8_of(float v, int mantissa, int least_exponent) {
    const int dropped = 23 - mantissa;
    const uint32_t bits = bits_of_f32(v), magnitude = bits & 0x7fffffff;
    const uint32_t least_normal = (uint32_t)(127 + least_exponent) << 23;
    /* A number with the step of subnormals: adding it rounds to that step. */
    const uint32_t step = (uint32_t)(127 + least_exponent - mantissa + 23) << 23;
    uint32_t normal = (magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1)) >> dropped;
    normal -= (uint32_t)(127 + least_exponent - 1) << mantissa;
    uint32_t subnormal = bits_of_f32(f32_of_bits(magnitude) + f32_of_bits(step)) - step;
    uint32_t code = bits_if(magnitude < least_normal, subnormal, normal) | (bits >> 24 & 0x80);
    return (uint8_t)bits_if(magnitude > 0x7f800000, 0x7f, code);
}

/* A group of a row, whose quotients are y / by or y * by. */
struct group {
    const float *y;
    uint8_t *out;
    int64_t n;
    float by, qmin, qmax, shift;
    int32_t added; /* to the whole number */
};

/* `mode`: FLOAT8 with these numbers of the format; AFTER: a zero point is added to a whole number; or 0. */
FN_INLINE void store_group(int mode, int mantissa, int least_exponent, int divides, int shifts, const struct group *g) {
    const float *restrict y = g->y;
    uint8_t *restrict out = g->out; /* which could be the memory of anything else */
    const int64_t n = g->n;
    const float by = g->by, qmin = g->qmin, qmax = g->qmax, shift = g->shift;
    const int32_t added = g->added, low = (int32_t)qmin, high = (int32_t)qmax;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    for (int64_t i = 0; i < n; i++) {
        float v = divides ? y[i] / by : y[i] * by;
        if (shifts) v += shift;
        if (mode == AFTER) {
            v = f32_of_bits(bits_if(v == v, bits_of_f32(v), 0));
            int32_t whole = (int32_t)rintf(at_most(at_least(v, -0x1p30f), 0x1p30f)) + added;
            whole = whole < low ? low : whole;
            out[i] = (uint8_t)(whole > high ? high : whole);
            continue;
        }
        v = at_most(at_least(v, qmin), qmax);
        if (mode == FLOAT8) {
            out[i] = float8_of(v, mantissa, least_exponent);
        } else {
            int32_t whole = (int32_t)(bits_of_f32(v + magic) - bits_of_f32(magic));
            out[i] = (uint8_t)((int32_t)bits_if(v == v, (uint32_t)whole, 0) + added);
        }
    }
}

static void store_numbers(const struct fn_quantizer *q, int divides, const struct group *g) {
#define STORE(mode, mantissa, least_exponent, shifts)                           \
    do {                                                                        \
        if (divides) store_group(mode, mantissa, least_exponent, 1, shifts, g); \
        else store_group(mode, mantissa, least_exponent, 0, shifts, g);         \
    } while (0)
    if (q->kind == FN_E4M3) STORE(FLOAT8, 3, -6, 0);
    else if (q->kind == FN_E5M2) STORE(FLOAT8, 2, -14, 0);
    else if (q->flags & FN_ZERO_POINT_AFTER) STORE(AFTER, 0, 0, 0);
    else if (q->flags & FN_ZERO_POINT_BEFORE) STORE(0, 0, 0, 1);
    else STORE(0, 0, 0, 0);
#undef STORE
}

/* The scale and the zero point of a group, stored where they belong, and its numbers. */
static void quantize_group(const struct fn_quantizer *q, struct group *g, float *scale_out, int32_t *zero_point_out) {
    const float qmin = (float)q->qmin, qmax = (float)q->qmax;
    const int asymmetric = (q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE)) != 0;
    float scale, span = 0, low = 0;
    int32_t zero_point = 0;
    g->qmin = qmin;
    g->qmax = qmax;
    if (q->flags & FN_GIVEN_SCALE) {
        scale = *scale_out;
        if (asymmetric) zero_point = *zero_point_out;
    } else {
        float steps = qmax, high;
        if (asymmetric) {
            least_and_greatest(g->y, g->n, &low, &high);
            span = high - low;
            steps = qmax - qmin;
        } else {
            span = at_most(at_least(greatest_magnitude(g->y, g->n), (float)q->amax_floor), (float)q->amax_limit);
        }
        scale = q->flags & FN_SCALE_BY_RECIPROCAL ? span * (1.0f / steps) : span / steps;
        scale = at_least(scale, (float)q->scale_floor);
        if (asymmetric) {
            float point = rintf(qmin - low / scale);
            if (scale == 0 || point != point) point = 0;
            zero_point = (int32_t)at_most(at_least(point, -0x1p30f), 0x1p30f);
            *zero_point_out = zero_point;
        }
        *scale_out = q->flags & FN_RETURNS_MULTIPLIER ? qmax / span : scale;
    }
    g->shift = (float)zero_point;
    g->added = q->flags & FN_ZERO_POINT_128 ? 128 : q->flags & FN_ZERO_POINT_AFTER ? zero_point : 0;
    if (scale == 0) { /* one byte for all elements */
        const float zero = 0;
        struct group one = *g;
        one.y = &zero;
        one.n = 1;
        one.by = 1;
        store_numbers(q, 0, &one);
        memset(g->out + 1, g->out[0], (size_t)(g->n - 1));
        return;
    }
    const int divides = !(q->flags & (FN_APPLY_RECIPROCAL | FN_APPLY_RATIO));
    g->by = divides ? scale : q->flags & FN_APPLY_RATIO ? qmax / span : 1.0f / scale;
    store_numbers(q, divides, g);
}

static void quantize_row(const struct fn_quantizer *q, int kind, const char *row, int64_t hidden, int64_t m,
                         float *scratch) {
    widen_row(kind, row, hidden, scratch);
    const int64_t outer = m / q->inner, inner = m % q->inner;
    char *const out = (char *)q->out + outer * q->out_outer_stride + inner * q->out_stride;
    char *scale = (char *)q->scale + outer * q->scale_outer_stride + inner * q->scale_stride;
    char *point = (char *)q->zero_point + outer * q->zero_point_outer_stride + inner * q->zero_point_stride;
    for (int64_t begin = 0; begin < hidden; begin += q->group) {
        struct group g = {.y = scratch + begin, .out = (uint8_t *)out + begin, .n = q->group};
        float found = 0;
        int32_t found_point = 0;
        if (q->flags & FN_GIVEN_SCALE) {
            memcpy(&found, scale, sizeof found);
            if (q->zero_point) memcpy(&found_point, point, sizeof found_point);
        }
        quantize_group(q, &g, &found, &found_point);
        if (q->flags & FN_GIVEN_SCALE) continue;
        memcpy(scale, &found, sizeof found);
        scale += q->scale_group_stride;
        if (!q->zero_point) continue;
        memcpy(point, &found_point, sizeof found_point);
        point += q->zero_point_group_stride;
    }
}
