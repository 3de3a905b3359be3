/*
 * The quantizer (docs/spec.md, section 9), included by kernel_body.h. Its loops are plain C, which compilers turn into
 * vectors of each instruction set: every operation is one of float or of 32-bit integers on one element.
 */

enum { INTEGER, FLOAT8, AFTER }; /* ways to make a byte; AFTER: a whole number, to which a zero point is added */
enum { NO_SHIFT, SHIFTS }; /* whether a zero point is added before rounding */
enum { MULTIPLIES, DIVIDES }; /* whether elements are divided by a group's number */

/* How the numbers of a group are made. ZERO: the scale is 0, and so is every number. TAME: see find_scales. */
enum { CUT, TAME, ZERO };

/*
 * An element of a row of float or bfloat16, which may be unaligned. Of the other kinds there are no vectors in plain C:
 * `widen_row` makes rows of float of them.
 */
FN_INLINE float element(int kind, const char *row, int64_t i) {
    return kind == BF16 ? f32_from_bf16(half_at(row, i)) : f32_at(row, i);
}

/* n elements as float; float64 is rounded. */
static void widen_row(int kind, const char *y, int64_t n, float *wide) {
    int64_t i = 0;
    if (kind == FN_F64) {
        round_to_f32(y, n, wide);
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
        FN_VECTORS(reduction(max : greatest))
        for (int64_t i = 0; i < n; i++) {
            int32_t bits = (int32_t)(bits_of_f32(element(F32, y, i)) & 0x7fffffff);
            greatest = bits > greatest ? bits : greatest;
        }
        return f32_of_bits((uint32_t)greatest);
    }
    uint16_t greatest = 0;
    FN_VECTORS(reduction(max : greatest))
    for (int64_t i = 0; i < n; i++) {
        const uint16_t bits = half_at(y, i) & 0x7fff;
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
    FN_VECTORS(reduction(min : low) reduction(max : high))
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
 * magnitude's exponent, and from the least exponent on that of subnormals. What is added holds the byte's other bits too,
 * the exponent's and the sign's: they are a multiple of 8 or 4 steps, so the sum rounds as without them, and ends with the
 * byte. `tame`: see find_scales.
 */
FN_INLINE uint32_t float8_of(float v, int mantissa, int least_exponent, int tame, uint32_t least, uint32_t greatest) {
    const int dropped = 23 - mantissa;
    const uint32_t bits = bits_of_f32(v), negative = bits >> 24 & 0x80;
    const int32_t magnitude = (int32_t)(bits & 0x7fffffff), lowest = (127 + least_exponent) << 23;
    int32_t within = magnitude;
    if (!tame) {
        const int32_t limit = (int32_t)(negative ? least : greatest);
        within = magnitude > limit ? limit : magnitude;
    }
    int32_t exponent = within & 0x7f800000;
    exponent = exponent > lowest ? exponent : lowest;
    const int32_t others = exponent + (exponent >> dropped) + ((dropped << 23) - (lowest >> dropped)) + (int32_t)negative;
    const uint32_t code = bits_of_f32(f32_of_bits((uint32_t)within) + f32_of_bits((uint32_t)others));
    return tame ? code : bits_if(magnitude > 0x7f800000, 0x7f, code);
}

/* 1.5 * 2^23: adding it rounds to a whole number, whose last byte is the sum's. */
static const float magic = 12582912.0f;

/* Groups of a row, one after the other, whose numbers are all made by the same loop. */
struct groups {
    const char *y;
    int kind;
    uint8_t *out;
    int64_t length, count;
    const float *by; /* a group's numbers are made of y / by or y * by */
    const int32_t *zero_point; /* of each group, if there are any */
    float qmin, qmax;
    int32_t added; /* to the whole number */
};

FN_INLINE float quotient(int divides, float y, float by) { return divides ? y / by : y * by; }

/* A number of a tame group (see find_scales), in the last byte. `mode`: FLOAT8 with these numbers of the format, or INTEGER. */
FN_INLINE uint32_t tame_number(int mode, int mantissa, int least_exponent, int32_t added, float v) {
    if (mode == FLOAT8) return float8_of(v, mantissa, least_exponent, TAME, 0, 0);
    return bits_of_f32(v + magic) + (uint32_t)added;
}

FN_INLINE void store_tame_f32(int divides, int mode, int mantissa, int least_exponent, const struct groups *g) {
    uint8_t *restrict out = g->out; /* which could be the memory of anything else */
    const int64_t n = g->length;
    const int32_t added = g->added;
    for (int64_t k = 0; k < g->count; k++, out += n) {
        const char *restrict y = g->y + 4 * k * n;
        const float by = g->by[k];
        FN_VECTORS()
        for (int64_t i = 0; i < n; i++)
            out[i] = (uint8_t)tame_number(mode, mantissa, least_exponent, added, quotient(divides, element(F32, y, i), by));
    }
}

/* Two elements at a time: it costs less to take two apart than to widen each. */
FN_INLINE void store_tame_bf16(int divides, int mode, int mantissa, int least_exponent, const struct groups *g) {
    uint8_t *restrict out = g->out;
    const int64_t n = g->length;
    const int32_t added = g->added;
#define NUMBER(y) tame_number(mode, mantissa, least_exponent, added, quotient(divides, y, by))
    for (int64_t k = 0; k < g->count; k++, out += n) {
        const char *restrict y = g->y + 2 * k * n;
        const float by = g->by[k];
        FN_VECTORS()
        for (int64_t i = 0; i < n / 2; i++) {
            uint32_t two;
            memcpy(&two, y + 4 * i, sizeof two);
            const uint32_t low = NUMBER(f32_of_bits(two << 16)), high = NUMBER(f32_of_bits(two & 0xffff0000));
            const uint16_t numbers = (uint16_t)((low & 0xff) | high << 8);
            memcpy(out + 2 * i, &numbers, sizeof numbers);
        }
        if (n % 2) out[n - 1] = (uint8_t)NUMBER(element(BF16, y, n - 1));
    }
#undef NUMBER
}

/* Of any elements, cut to the range. */
FN_INLINE void store_cut(int divides, int mode, int mantissa, int least_exponent, int shifts, const struct groups *g) {
    uint8_t *restrict out = g->out;
    const int64_t n = g->length;
    const int32_t added = g->added, qmin = (int32_t)g->qmin, qmax = (int32_t)g->qmax;
    const uint32_t least = bits_of_f32(g->qmin) & 0x7fffffff, greatest = bits_of_f32(g->qmax);
    const int32_t lowest = (int32_t)bits_of_f32(magic) + qmin, highest = (int32_t)bits_of_f32(magic) + qmax;
    for (int64_t k = 0; k < g->count; k++, out += n) {
        const char *restrict y = g->y + 4 * k * n;
        const float by = g->by[k];
        const int32_t zero_point = mode == AFTER || shifts ? g->zero_point[k] : 0;
        const int32_t before_least = qmin - zero_point, before_most = qmax - zero_point; /* a sum could overflow: 2^30 + 2^30 */
        FN_VECTORS()
        for (int64_t i = 0; i < n; i++) {
            float v = quotient(divides, element(F32, y, i), by);
            if (shifts) v += (float)zero_point;
            if (mode == FLOAT8) {
                out[i] = (uint8_t)float8_of(v, mantissa, least_exponent, CUT, least, greatest);
            } else if (mode == AFTER) {
                v = f32_of_bits(bits_if(v == v, bits_of_f32(v), 0));
                int32_t whole = (int32_t)rintf(at_most(at_least(v, -0x1p30f), 0x1p30f));
                whole = whole < before_least ? before_least : whole;
                out[i] = (uint8_t)((whole > before_most ? before_most : whole) + zero_point);
            } else { /* sums have the order of their bits, taken as a signed number */
                int32_t whole = (int32_t)bits_of_f32(v + magic);
                whole = whole < lowest ? lowest : whole;
                whole = whole > highest ? highest : whole;
                out[i] = (uint8_t)((int32_t)bits_if(v == v, (uint32_t)whole, 0) + added);
            }
        }
    }
}

/* The numbers of groups. Only a row of tame groups may be of bfloat16. */
static void store_numbers(const struct fn_quantizer *q, int divides, int tame, const struct groups *g) {
#define STORE(store, ...)                            \
    do {                                             \
        if (divides) store(DIVIDES, __VA_ARGS__, g); \
        else store(MULTIPLIES, __VA_ARGS__, g);      \
    } while (0)
#define STORE_ANY(...)                                               \
    do {                                                             \
        if (!tame) STORE(store_cut, __VA_ARGS__, NO_SHIFT);          \
        else if (g->kind == F32) STORE(store_tame_f32, __VA_ARGS__); \
        else STORE(store_tame_bf16, __VA_ARGS__);                    \
    } while (0)
    if (q->kind == FN_E4M3) STORE_ANY(FLOAT8, 3, -6);
    else if (q->kind == FN_E5M2) STORE_ANY(FLOAT8, 2, -14);
    else if (q->flags & FN_ZERO_POINT_AFTER) STORE(store_cut, AFTER, 0, 0, NO_SHIFT);
    else if (q->flags & FN_ZERO_POINT_BEFORE) STORE(store_cut, INTEGER, 0, 0, SHIFTS);
    else STORE_ANY(INTEGER, 0, 0);
#undef STORE_ANY
#undef STORE
}

enum { GROUPS = 64 }; /* the most of which scales are found before numbers are stored */

/* What is known of groups. */
struct scales {
    float low[GROUPS], high[GROUPS]; /* the least and the greatest element; without zero points only the greatest magnitude */
    float span[GROUPS], scale[GROUPS], by[GROUPS]; /* by: elements are divided by it or multiplied with it */
    int32_t zero_point[GROUPS], how[GROUPS];
};

FN_INLINE int divides_by_scale(const struct fn_quantizer *q) {
    return !(q->flags & (FN_APPLY_RECIPROCAL | FN_APPLY_RATIO));
}

/* A scale rounded up to 2^-127, 2^-126, ... 2^127, of which the first is subnormal; a NaN stays. */
FN_INLINE float up_to_power_of_two(float scale) {
    const uint32_t bits = bits_of_f32(scale), up = (bits + 0x7fffff) & 0x7f800000;
    const uint32_t power = up > 0x7f000000 ? 0x7f000000 : up ? up : 0x400000;
    return f32_of_bits(bits_if(scale == scale, power, bits));
}

/* The scales and the rest, of low and high, or of scales and zero points that are given. */
static void find_scales(const struct fn_quantizer *q, struct scales *s, int64_t count) {
    const float qmin = (float)q->qmin, qmax = (float)q->qmax, scale_floor = (float)q->scale_floor;
    const float amax_floor = (float)q->amax_floor, amax_limit = (float)q->amax_limit;
    const int given = (q->flags & FN_GIVEN_SCALE) != 0, by_reciprocal = (q->flags & FN_SCALE_BY_RECIPROCAL) != 0;
    const int asymmetric = (q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE)) != 0;
    const int divides = divides_by_scale(q), by_ratio = (q->flags & FN_APPLY_RATIO) != 0;
    const int may_be_tame = !given && !asymmetric && qmin <= -qmax;
    const float steps = asymmetric ? qmax - qmin : qmax, reciprocal = 1.0f / steps;
    if (!given) {
        for (int64_t k = 0; k < count; k++) {
            const float span = asymmetric ? s->high[k] - s->low[k] : at_most(at_least(s->high[k], amax_floor), amax_limit);
            s->span[k] = span;
            s->scale[k] = at_least(by_reciprocal ? span * reciprocal : span / steps, scale_floor);
        }
    }
    for (int64_t k = 0; k < count && q->flags & FN_SCALE_UP_TO_POWER_OF_TWO; k++) s->scale[k] = up_to_power_of_two(s->scale[k]);
    for (int64_t k = 0; k < count && !given && asymmetric; k++) {
        float point = rintf(qmin - s->low[k] / s->scale[k]);
        if (s->scale[k] == 0 || point != point) point = 0;
        s->zero_point[k] = (int32_t)at_most(at_least(point, -0x1p30f), 0x1p30f);
    }
    for (int64_t k = 0; k < count; k++) {
        const float scale = s->scale[k], span = s->span[k], by = divides ? scale : by_ratio ? qmax / span : 1.0f / scale;
        /*
         * Tame: all quotients are numbers that round to one within the range, so that nothing need be cut: they are at most
         * qmax * (1 + 5 * 2^-24), by four roundings, none of them to a subnormal number. A power of two is not below the scale
         * that it was rounded from, but for 2^127.
         */
        const int tame = (s->high[k] <= span) & (span < INFINITY) & (scale >= 0x1p-126f) & (scale < 0x1p127f) & (by < INFINITY);
        s->by[k] = by;
        s->how[k] = scale == 0 ? ZERO : may_be_tame & tame ? TAME : CUT;
    }
    for (int64_t k = 0; k < count && q->flags & FN_RETURNS_MULTIPLIER; k++) s->scale[k] = qmax / s->span[k];
}

static void store_run(const struct fn_quantizer *q, int how, struct groups g, float *wide) {
    const int64_t n = g.count * g.length;
    const float zero = 0, one = 1;
    if (how == ZERO) { /* one byte for all elements */
        struct groups byte = g;
        byte.y = (const char *)&zero;
        byte.by = &one;
        byte.length = byte.count = 1;
        byte.kind = F32;
        store_numbers(q, MULTIPLIES, CUT, &byte);
        memset(g.out + 1, g.out[0], (size_t)(n - 1));
        return;
    }
    if (how == CUT && g.kind == BF16) {
        widen_row(FN_BF16, g.y, n, wide);
        g.y = (const char *)wide;
        g.kind = F32;
    }
    store_numbers(q, divides_by_scale(q), how == TAME, &g);
}

void FN_OF(quantize_row)(const struct fn_quantizer *q, int kind, const char *row, int64_t hidden, int64_t m,
                         float *scratch) {
    const int asymmetric = (q->flags & (FN_ZERO_POINT_AFTER | FN_ZERO_POINT_BEFORE)) != 0;
    const int given_scale = (q->flags & FN_GIVEN_SCALE) != 0;
    const int is_read = kind == FN_F32 || (kind == FN_BF16 && !asymmetric), given_kind = kind == FN_F64 ? FN_F32 : kind;
    if (!is_read) widen_row(kind, row, hidden, scratch);
    const char *const y = is_read ? row : (const char *)scratch, *const given = kind == FN_F64 ? y : row;
    const int64_t item = is_read ? fn_element_size(kind) : 4, given_item = fn_element_size(given_kind);
    const int64_t length = q->group ? q->group : hidden, all = hidden / length;
    const int64_t outer = m / q->inner, inner = m % q->inner;
    uint8_t *const out = (uint8_t *)q->out + outer * q->out_outer_stride + inner * q->out_stride;
    char *scales = (char *)q->scale + outer * q->scale_outer_stride + inner * q->scale_stride;
    char *points = (char *)q->zero_point + outer * q->zero_point_outer_stride + inner * q->zero_point_stride;
    for (int64_t first = 0; first < all; first += GROUPS) {
        struct scales s;
        const int64_t count = all - first < GROUPS ? all - first : GROUPS;
        for (int64_t k = 0; k < count; k++) {
            const int64_t at = (first + k) * length;
            if (given_scale) {
                s.high[k] = s.span[k] = 0;
                memcpy(&s.scale[k], scales, sizeof *s.scale);
                if (q->zero_point) memcpy(&s.zero_point[k], points, sizeof *s.zero_point);
            } else if (asymmetric) {
                least_and_greatest(y + at * item, length, &s.low[k], &s.high[k]);
            } else {
                s.high[k] = greatest_magnitude(given_kind, given + at * given_item, length);
            }
        }
        find_scales(q, &s, count);
        for (int64_t k = 0; k < count && !given_scale; k++) {
            memcpy(scales + (first + k) * q->scale_group_stride, &s.scale[k], sizeof *s.scale);
            if (q->zero_point) memcpy(points + (first + k) * q->zero_point_group_stride, &s.zero_point[k], sizeof *s.zero_point);
        }
        for (int64_t k = 0, end; k < count; k = end) {
            const int64_t at = (first + k) * length;
            for (end = k + 1; end < count && s.how[end] == s.how[k];) end++;
            const struct groups g = {
                .y = y + at * item, .kind = is_read ? kind : F32, .out = out + at, .length = length, .count = end - k,
                .by = s.by + k, .zero_point = s.zero_point + k, .qmin = (float)q->qmin, .qmax = (float)q->qmax,
                .added = q->flags & FN_ZERO_POINT_128 ? 128 : 0,
            };
            store_run(q, s.how[k], g, scratch + at);
        }
    }
}
