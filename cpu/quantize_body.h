/*
 * The quantizer (docs/spec.md, section 9), included by kernel_body.h. Its loops are plain C, which compilers turn into
 * vectors of each instruction set: every operation is one of float or of 32-bit integers on one element.
 */

enum { FLOAT8 = 1, AFTER = 2 }; /* beside 0: ways to make a byte */

/*
 * An element of a row of float or bfloat16, which may be unaligned. Of the other kinds there are no vectors in plain C:
 * `widen_row` makes rows of float of them.
 */
FN_INLINE float element(int kind, const char *row, int64_t i) {
    uint16_t half;
    float value;
    if (kind == BF16) {
        memcpy(&half, row + i * (int64_t)sizeof half, sizeof half);
        return f32_from_bf16(half);
    }
    memcpy(&value, row + i * (int64_t)sizeof value, sizeof value);
    return value;
}

/* n elements as float; float64 is rounded. */
static void widen_row(int kind, const char *y, int64_t n, float *wide) {
    int64_t i = 0;
    if (kind == FN_F64) {
        for (; i < n; i++) {
            double value;
            memcpy(&value, y + i * (int64_t)sizeof value, sizeof value);
            wide[i] = (float)value;
        }
    } else if (kind == FN_BF16) {
        for (; i < n; i++) wide[i] = element(BF16, y, i);
    } else {
        for (; i + UNIT <= n; i += UNIT) u_store(F32, wide, i, UNIT, u_load(F16, y, u_index(i), UNIT));
        if (i < n) u_store(F32, wide, i, UNIT, u_load(F16, y, i, (int)(n - i)));
    }
}

/* The greatest magnitude, by its bits: a NaN is the greatest. */
static float greatest_magnitude(int kind, const char *y, int64_t n) {
    if (kind == F32) {
        int32_t greatest = 0;
        for (int64_t i = 0; i < n; i++) {
            int32_t bits = (int32_t)(bits_of_f32(element(F32, y, i)) & 0x7fffffff);
            greatest = bits > greatest ? bits : greatest;
        }
        return f32_of_bits((uint32_t)greatest);
    }
    uint16_t greatest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, y + i * (int64_t)sizeof bits, sizeof bits);
        bits &= 0x7fff;
        greatest = bits > greatest ? bits : greatest;
    }
    return kind == BF16 ? f32_from_bf16(greatest) : f32_from_f16(greatest);
}

/* Whole numbers in the order of floats; -0 is below +0, and NaN is apart from them. */
FN_INLINE int32_t in_order_of_floats(float value) {
    int32_t bits = (int32_t)bits_of_f32(value);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

/* The least and the greatest element; both are NaN if one of them is. */
static void least_and_greatest(const char *y, int64_t n, float *least, float *greatest) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        int32_t place = in_order_of_floats(element(F32, y, i));
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

/*
 * The byte of a number, cut to the range and rounded to nearest even. Adding 2^20 steps of the format (of e4m3: its 3 bits
 * and those 20 fill a float) rounds a magnitude to whole steps, which then stand in the last bits. The step is that of the
 * magnitude's exponent, and from the least exponent on that of subnormals. `tame`: see struct group.
 */
FN_INLINE uint8_t float8_of(float v, int mantissa, int least_exponent, int tame, uint32_t least, uint32_t greatest) {
    const int dropped = 23 - mantissa;
    const int32_t bits = (int32_t)bits_of_f32(v), negative = bits >> 31, magnitude = bits & 0x7fffffff;
    const int32_t limit = (int32_t)(greatest + ((uint32_t)negative & (least - greatest)));
    const int32_t within = !tame && magnitude > limit ? limit : magnitude, lowest = (127 + least_exponent) << 23;
    int32_t exponent = within & 0x7f800000;
    exponent = exponent > lowest ? exponent : lowest;
    const uint32_t shifted = (uint32_t)exponent + ((uint32_t)dropped << 23);
    const uint32_t steps = bits_of_f32(f32_of_bits((uint32_t)within) + f32_of_bits(shifted)) - shifted;
    const uint32_t code = steps + ((uint32_t)(exponent - lowest) >> dropped);
    const uint32_t signed_code = code | (uint32_t)(negative & 0x80);
    return (uint8_t)(tame ? signed_code : bits_if(magnitude > 0x7f800000, 0x7f, signed_code));
}

/* A group of a row, whose quotients are y / by or y * by. */
struct group {
    const char *given, *y; /* the elements, and what `element` reads: the same where it can */
    int given_kind, kind;
    float *wide; /* room for the elements as float */
    uint8_t *out;
    int64_t n;
    float by, qmin, qmax, shift;
    int32_t added; /* to the whole number */
    int tame; /* whether all quotients are numbers that round to one within the range, so that nothing need be cut */
};

/* `mode`: FLOAT8 with these numbers of the format; AFTER: a zero point is added to a whole number; or 0. */
FN_INLINE void store_group(int kind, int divides, int tame, int mode, int mantissa, int least_exponent, int shifts,
                           const struct group *g) {
    const char *restrict y = g->y;
    uint8_t *restrict out = g->out; /* which could be the memory of anything else */
    const int64_t n = g->n;
    const float by = g->by, shift = g->shift;
    const int32_t added = g->added, qmin = (int32_t)g->qmin, qmax = (int32_t)g->qmax;
    const uint32_t least = bits_of_f32(g->qmin) & 0x7fffffff, greatest = bits_of_f32(g->qmax);
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, whose last byte is the sum's */
    const int32_t low = (int32_t)bits_of_f32(magic) + qmin, high = (int32_t)bits_of_f32(magic) + qmax;
    for (int64_t i = 0; i < n; i++) {
        float v = divides ? element(kind, y, i) / by : element(kind, y, i) * by;
        if (shifts) v += shift;
        if (mode == FLOAT8) {
            out[i] = float8_of(v, mantissa, least_exponent, tame, least, greatest);
        } else if (mode == AFTER) {
            v = f32_of_bits(bits_if(v == v, bits_of_f32(v), 0));
            int32_t whole = (int32_t)rintf(at_most(at_least(v, -0x1p30f), 0x1p30f)) + added;
            whole = whole < qmin ? qmin : whole;
            out[i] = (uint8_t)(whole > qmax ? qmax : whole);
        } else if (tame) {
            out[i] = (uint8_t)((int32_t)bits_of_f32(v + magic) + added);
        } else { /* sums have the order of their bits, taken as a signed number */
            int32_t whole = (int32_t)bits_of_f32(v + magic);
            whole = whole < low ? low : whole;
            whole = whole > high ? high : whole;
            out[i] = (uint8_t)((int32_t)bits_if(v == v, (uint32_t)whole, 0) + added);
        }
    }
}

/* The numbers of a group. Only a tame one may be of bfloat16. */
static void store_numbers(const struct fn_quantizer *q, int divides, const struct group *g) {
#define STORE(kind, tame, ...)                                       \
    do {                                                             \
        if (divides) store_group(kind, 1, tame, __VA_ARGS__, g);     \
        else store_group(kind, 0, tame, __VA_ARGS__, g);             \
    } while (0)
#define STORE_TAME(...)                                              \
    do {                                                             \
        if (!g->tame) STORE(F32, 0, __VA_ARGS__);                    \
        else if (g->kind == F32) STORE(F32, 1, __VA_ARGS__);         \
        else STORE(BF16, 1, __VA_ARGS__);                            \
    } while (0)
    if (q->kind == FN_E4M3) STORE_TAME(FLOAT8, 3, -6, 0);
    else if (q->kind == FN_E5M2) STORE_TAME(FLOAT8, 2, -14, 0);
    else if (q->flags & FN_ZERO_POINT_AFTER) STORE(F32, 0, AFTER, 0, 0, 0);
    else if (q->flags & FN_ZERO_POINT_BEFORE) STORE(F32, 0, 0, 0, 0, 1);
    else STORE_TAME(0, 0, 0, 0);
#undef STORE
#undef STORE_TAME
}

/* The scale and the zero point of a group, stored where they belong, and its numbers. */
static void quantize_group(const struct fn_quantizer *q, struct group *g, float *scale_out, int32_t *zero_point_out) {
    const float qmin = (float)q->qmin, qmax = (float)q->qmax;
    const int asymmetric = (q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE)) != 0;
    float scale, amax = INFINITY, span = 0, low = 0;
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
            amax = greatest_magnitude(g->given_kind, g->given, g->n);
            span = at_most(at_least(amax, (float)q->amax_floor), (float)q->amax_limit);
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
        one.y = (const char *)&zero;
        one.kind = F32;
        one.n = 1;
        one.by = 1;
        store_numbers(q, 0, &one);
        memset(g->out + 1, g->out[0], (size_t)(g->n - 1));
        return;
    }
    const int divides = !(q->flags & (FN_APPLY_RECIPROCAL | FN_APPLY_RATIO));
    g->by = divides ? scale : q->flags & FN_APPLY_RATIO ? qmax / span : 1.0f / scale;
    /* Then a quotient is at most qmax * (1 + 5 * 2^-24): four roundings, none of them to a subnormal number. */
    g->tame = amax <= span && span < INFINITY && scale >= 0x1p-126f && g->by < INFINITY && qmin <= -qmax;
    if (!g->tame && g->kind == BF16) {
        widen_row(FN_BF16, g->y, g->n, g->wide);
        g->y = (const char *)g->wide;
        g->kind = F32;
    }
    store_numbers(q, divides, g);
}

static void quantize_row(const struct fn_quantizer *q, int kind, const char *row, int64_t hidden, int64_t m,
                         float *scratch) {
    const int asymmetric = (q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE)) != 0;
    const int is_read = kind == FN_F32 || (kind == FN_BF16 && !asymmetric), given_kind = kind == FN_F64 ? FN_F32 : kind;
    if (!is_read) widen_row(kind, row, hidden, scratch);
    const char *const y = is_read ? row : (const char *)scratch, *const given = kind == FN_F64 ? y : row;
    const int64_t item = is_read ? fn_element_size(kind) : 4, given_item = fn_element_size(given_kind);
    const int64_t length = q->group ? q->group : hidden;
    const int64_t outer = m / q->inner, inner = m % q->inner;
    char *const out = (char *)q->out + outer * q->out_outer_stride + inner * q->out_stride;
    char *scale = (char *)q->scale + outer * q->scale_outer_stride + inner * q->scale_stride;
    char *point = (char *)q->zero_point + outer * q->zero_point_outer_stride + inner * q->zero_point_stride;
    for (int64_t begin = 0; begin < hidden; begin += length) {
        struct group g = {
            .given = given + begin * given_item, .y = y + begin * item, .given_kind = given_kind,
            .kind = is_read ? kind : F32, .wide = scratch + begin, .out = (uint8_t *)out + begin, .n = length,
        };
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
