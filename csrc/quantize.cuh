// The quantizer (docs/spec.md, section 9): rows in registers become numbers of a byte, and scales. Constants that the
// compilation defines beside those of row.cuh:
//
//   NUMBER              what is stored: WHOLE (int8, uint8), E4M3 or E5M2
//   PER                 the adjacent elements that share a scale, a power of two up to 1024; 0: all elements of a row
//   GIVEN               whether there is one scale for all rows, which is read
//   SCALE_BY            how a scale is found: DIVIDE or RECIPROCAL
//   POWER_OF_TWO        whether it is rounded up to a power of two
//   APPLY               how it is applied: DIVIDE, RECIPROCAL or RATIO
//   MULTIPLIER          whether the multiplier is stored in place of the scale
//   ZERO_POINT          NONE, PLUS_128, or computed (given with a scale): AFTER or BEFORE rounding
//   KEEPS               whether the rows are stored too
//
// A group is what shares a scale. Of the index of an element in its row (row.cuh), the last bits say which element of its
// group it is. So a group lies within a vector, in some adjacent lanes, or in all of a row's lanes and some of their
// vectors; and where a row has several warps, in all of these if it is a row.
#pragma once
#include "forward.cuh"

constexpr int WHOLE = 0, E4M3 = 1, E5M2 = 2;
constexpr int DIVIDE = 0, RECIPROCAL = 1, RATIO = 2;
constexpr int NONE = 0, PLUS_128 = 1, AFTER = 2, BEFORE = 3;

constexpr bool ASYMMETRIC = ZERO_POINT == AFTER || ZERO_POINT == BEFORE;  // each scale has a zero point
constexpr bool OF_WARPS = !GIVEN && PER == 0 && BLOCKS_ROW;  // several warps have a group
constexpr bool ONE_GROUP = GIVEN || OF_WARPS;  // all elements of a warp have the same scale

constexpr int OF_WARP = PER > 0 ? PER : ROW;  // elements of a group that one warp has
constexpr int ADJACENT = smaller(OF_WARP, VECTOR);  // of a vector
constexpr int LANES_OF_GROUP = smaller(OF_WARP / ADJACENT, LANES_PER_ROW);
constexpr int VECTORS_OF_GROUP = OF_WARP / ADJACENT / LANES_OF_GROUP;  // that a lane has
constexpr int GROUPS = VECTORS * VECTOR / (VECTORS_OF_GROUP * ADJACENT);  // of which a lane has elements

// What a scale is computed from: the greatest magnitude of a group, as bits, so that a NaN is the greatest. With computed
// zero points, the greatest element and the least one; the latter with all bits inverted, so that both are maxima.
constexpr int EXTREMES = ASYMMETRIC ? 2 : 1;
struct Extremes {
    int value[EXTREMES];
};

// Whole numbers in the order of floats, and back. A NaN is before or behind all numbers.
__device__ inline int in_order(int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }

__device__ inline Extremes no_extremes() {
    Extremes found;
#pragma unroll
    for (int e = 0; e < EXTREMES; e++) found.value[e] = ASYMMETRIC ? (int)0x80000000 : 0;
    return found;
}

__device__ inline void note(Extremes& found, Extremes more) {
#pragma unroll
    for (int e = 0; e < EXTREMES; e++) found.value[e] = larger(found.value[e], more.value[e]);
}

__device__ inline void note(Extremes& found, float y) {
    const int bits = (int)bits_of(y);
    Extremes one;
    one.value[0] = ASYMMETRIC ? in_order(bits) : bits & 0x7FFFFFFF;
    one.value[EXTREMES - 1] = ASYMMETRIC ? ~one.value[0] : one.value[0];
    note(found, one);
}

// Over lanes that are up to COUNT / 2 apart.
template <int COUNT> __device__ Extremes over_lanes(Extremes found) {
#pragma unroll
    for (int distance = COUNT / 2; distance > 0; distance /= 2) {
        Extremes others;
#pragma unroll
        for (int e = 0; e < EXTREMES; e++) others.value[e] = exchanged(found.value[e], distance);
        note(found, others);
    }
    return found;
}

// Over all warps of a row, of which each has found its own.
__device__ inline Extremes over_warps(Extremes found) {
    constexpr int IN_ROW = CLUSTER * WARPS;
    SHARED(float, shared, EXTREMES * IN_ROW);
    float given[EXTREMES];
#pragma unroll
    for (int e = 0; e < EXTREMES; e++) given[e] = number_of_bits((unsigned)found.value[e]);
    share(given, shared);
    found = no_extremes();
    for (int i = lane(); i < IN_ROW; i += LANES) {
#pragma unroll
        for (int e = 0; e < EXTREMES; e++) {
            found.value[e] = larger(found.value[e], (int)bits_of(shared[e * IN_ROW + i]));
        }
    }
    return over_lanes<LANES>(found);
}

// They keep a NaN.
__device__ inline float at_least(float value, float floor) { return value < floor ? floor : value; }
__device__ inline float at_most(float value, float limit) { return value > limit ? limit : value; }

// The nearest whole number, within 2^30; 0 of a NaN.
__device__ inline int whole_of(float value) {
    return value != value ? 0 : int_of_float(at_most(at_least(value, -0x1p30f), 0x1p30f));
}

// A scale rounded up to 2^-127, 2^-126, ... 2^127, of which the first is subnormal; a NaN stays.
__device__ inline float up_to_power_of_two(float scale) {
    const int up = (int)(bits_of(scale) + 0x7FFFFF & 0x7F800000), power = up == 0 ? 0x400000 : smaller(up, 0x7F000000);
    return scale != scale ? scale : number_of_bits((unsigned)power);
}

// What quantizes a group. `by`: what its elements are divided by or multiplied with. `stored`: the scale or the multiplier.
struct Group {
    float scale, by, stored;
    int zero_point;
};

__device__ inline Group group_of(Extremes found, const Arguments& a) {
    Group g;
    float span = 0;
    g.zero_point = 0;
    if (GIVEN) {
        g.scale = *a.scale;
        if (ASYMMETRIC) g.zero_point = *a.zero_point;
    } else {
        float low = 0;
        if (ASYMMETRIC) {
            float high = number_of_bits((unsigned)in_order(found.value[0]));
            low = number_of_bits((unsigned)in_order(~found.value[EXTREMES - 1]));
            if (low != low || high != high) low = high = low + high;  // a NaN of either sign is at one end
            span = high - low;
        } else {
            span = at_most(at_least(number_of_bits((unsigned)found.value[0]), a.amax_floor), a.amax_limit);
        }
        const float steps = ASYMMETRIC ? a.qmax - a.qmin : a.qmax;
        g.scale = at_least(SCALE_BY == RECIPROCAL ? span * (1.0f / steps) : span / steps, a.scale_floor);
        if (POWER_OF_TWO) g.scale = up_to_power_of_two(g.scale);
        if (ASYMMETRIC) g.zero_point = g.scale == 0 ? 0 : whole_of(a.qmin - low / g.scale);
    }
    g.by = APPLY == DIVIDE ? g.scale : APPLY == RATIO ? a.qmax / span : 1.0f / g.scale;
    g.stored = MULTIPLIER ? g.by : g.scale;
    return g;
}

// The code of a number, cut to the range and rounded to nearest even. Adding 2^20 steps of the format (of e4m3: its 3 bits
// and those 20 fill a float) rounds a magnitude to whole steps, which then stand in the last bits. The step is that of the
// magnitude's exponent, and from the least exponent on that of subnormals.
template <int MANTISSA, int LEAST_EXPONENT> __device__ int float8_of(float v, const Arguments& a) {
    constexpr int DROPPED = 23 - MANTISSA, LOWEST = (127 + LEAST_EXPONENT) << 23;
    const int bits = (int)bits_of(v), magnitude = bits & 0x7FFFFFFF;
    const int limit = (int)bits_of(bits < 0 ? -a.qmin : a.qmax), within = smaller(magnitude, limit);
    const int exponent = larger(within & 0x7F800000, LOWEST), shifted = exponent + (DROPPED << 23);
    const int steps = (int)bits_of(number_of_bits((unsigned)within) + number_of_bits((unsigned)shifted)) - shifted;
    const int code = steps + ((exponent - LOWEST) >> DROPPED);
    return magnitude > 0x7F800000 ? 0x7F : code | (bits >> 24 & 0x80);
}

// The codes of up to four numbers, a byte each, as the GPU rounds them. Of a byte's bits below the sign a NaN's are the
// greatest: with the number of NaNs of one sign added, they alone carry into the sign's place.
template <int COUNT> __device__ unsigned float8s_of(const float (&v)[COUNT], const Arguments& a) {
    constexpr unsigned BYTES = 0x01010101, NANS = NUMBER == E4M3 ? 1 : 3;
    float within[4] = {};
#pragma unroll
    for (int i = 0; i < COUNT; i++) within[i] = cut(v[i], a.qmin, a.qmax);
    const auto halves = NUMBER == E4M3 ? e4m3s_of_floats : e5m2s_of_floats;
    unsigned codes = halves(within[0], within[1]);
    if (COUNT > 2) codes |= halves(within[2], within[3]) << 16;
    const unsigned nans = ((codes & BYTES * 0x7F) + BYTES * NANS) & BYTES * 0x80;
    if (NANS > 1) codes |= nans - (nans >> 7);  // to 0x7F, the only one of e4m3
    return codes & ~nans;
}

// A whole number, cut to the range; a NaN is 0. Adding 1.5 * 2^23 rounds to a whole number. The bits of sums, taken as
// signed numbers, have the order of the sums, but among negative ones, which are all cut. They are cut before anything is
// subtracted, which could overflow.
__device__ inline int whole_within(float v, const Arguments& a) {
    const float shift = 12582912.0f;
    const int zero = (int)bits_of(shift), sum = (int)bits_of(v + shift);
    return v != v ? 0 : smaller(larger(sum, zero + (int)a.qmin), zero + (int)a.qmax) - zero;
}

__device__ inline float quotient_of(float y, const Group& g) {
    const float v = APPLY == DIVIDE ? y / g.by : y * g.by;
    return g.scale == 0 ? 0 : v;
}

__device__ inline unsigned char number_of(float v, const Group& g, const Arguments& a) {
    if (ZERO_POINT == BEFORE) v += (float)g.zero_point;
    if (NUMBER == E4M3) return (unsigned char)float8_of<3, -6>(v, a);
    if (NUMBER == E5M2) return (unsigned char)float8_of<2, -14>(v, a);
    if (ZERO_POINT == AFTER) {  // cut before anything is added, which could overflow: 2^30 + 2^30
        const int whole = larger(whole_of(v), (int)a.qmin - g.zero_point);
        return (unsigned char)(smaller(whole, (int)a.qmax - g.zero_point) + g.zero_point);
    }
    return (unsigned char)(whole_within(v, a) + (ZERO_POINT == PLUS_128 ? 128 : 0));
}

// The numbers of adjacent elements of a group.
__device__ inline void numbers_of(unsigned char* to, const float* y, const Group& g, const Arguments& a) {
    constexpr bool ROUNDED = NUMBER != WHOLE && ROUNDS_TO_8_BITS;
    constexpr int TOGETHER = ROUNDED ? smaller(ADJACENT, 4) : 1;
#pragma unroll
    for (int i = 0; i < ADJACENT; i += TOGETHER) {
        float v[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) v[j] = quotient_of(y[i + j], g);
        if constexpr (ROUNDED) {
            const unsigned codes = float8s_of(v, a);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) to[i + j] = (unsigned char)(codes >> 8 * j);
        } else {
            to[i] = number_of(v[0], g, a);
        }
    }
}

__device__ inline void store_scale(const Group& g, long long row, int number, const Arguments& a) {
    a.scale[a.begin_of(row, a.scale_strides) + number * a.scale_group_stride] = g.stored;
    if (ASYMMETRIC) a.zero_point[a.begin_of(row, a.zero_point_strides) + number * a.zero_point_group_stride] = g.zero_point;
}

// Notes the elements of the lane's group `i` that are in their row.
__device__ inline void note_group(Extremes& found, const float (&y)[VECTORS][VECTOR], int i, const Rows& rows) {
    constexpr int IN_VECTOR = VECTOR / ADJACENT;
#pragma unroll
    for (int k = i / IN_VECTOR * VECTORS_OF_GROUP; k < (i / IN_VECTOR + 1) * VECTORS_OF_GROUP; k++) {
        if (!rows.have_column(k)) continue;
#pragma unroll
        for (int v = 0; v < ADJACENT; v++) note(found, y[k][i % IN_VECTOR * ADJACENT + v]);
    }
}

// What all elements of a row that is shared by warps have in common, from the extremes of the lane's elements.
__device__ inline Group group_of_row(Extremes found, long long row, const Arguments& a) {
    const Group g = group_of(over_warps(over_lanes<LANES>(found)), a);
    if (threadIdx.x == 0 && blockIdx.x % CLUSTER == 0) store_scale(g, row, 0, a);
    return g;
}

// Stores the numbers of the warp's elements, and the scales but of `one`, where that is the group of all elements.
__device__ inline void store_numbers(const float (&y)[VECTORS][VECTOR], const Group& one, const Rows& rows,
                                     const Arguments& a) {
    constexpr int IN_VECTOR = VECTOR / ADJACENT;
    unsigned char numbers[VECTORS][VECTOR];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const int first = i / IN_VECTOR * VECTORS_OF_GROUP, position = i % IN_VECTOR * ADJACENT;
        Group g = one;
        if constexpr (!ONE_GROUP) {
            Extremes found = no_extremes();
            note_group(found, y, i, rows);
            g = group_of(over_lanes<LANES_OF_GROUP>(found), a);
            if (lane() % LANES_OF_GROUP == 0 && rows.have(first)) {
                const int column = rows.begin + column_of(first) + position;
                store_scale(g, rows.first + row_of(first), PER > 0 ? column / OF_WARP : 0, a);
            }
        }
#pragma unroll
        for (int k = first; k < first + VECTORS_OF_GROUP; k++) numbers_of(numbers[k] + position, y[k] + position, g, a);
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        if (rows.have(k)) store(a.numbers + rows.at(k, a.numbers_strides), numbers[k]);
    }
}

// Quantizes rows that the registers of all warps hold together.
__device__ inline void quantize_rows(const float (&y)[VECTORS][VECTOR], const Rows& rows, const Arguments& a) {
    Group one = {};
    if constexpr (GIVEN) one = group_of(no_extremes(), a);
    if constexpr (OF_WARPS) {
        Extremes found = no_extremes();
        note_group(found, y, 0, rows);
        one = group_of_row(found, rows.first, a);
    }
    store_numbers(y, one, rows, a);
}

// The passes of a block over a row that does not fit the registers: two where the row has one scale, which is computed. In
// each of them `take` gets the elements of all segments.
struct Passes {
    const Arguments& a;
    const long long row;
    int left;
    Extremes found;
    Group one;

    __device__ Passes(const Arguments& a, long long row)
        : a(a), row(row), left(OF_WARPS ? 2 : 1), found(no_extremes()), one{} {
        if constexpr (GIVEN) one = group_of(found, a);
    }
    __device__ void take(const float (&y)[VECTORS][VECTOR], int segment) {
        const Rows rows = rows_of_warp(a, row, a.rows, segment * SEGMENT, a.hidden_size);
        if (left > 1) note_group(found, y, 0, rows);
        else store_numbers(y, one, rows, a);
    }
    __device__ void end() {
        left--;
        if constexpr (OF_WARPS) {
            if (left == 1) one = group_of_row(found, row, a);
        }
    }
};

// Rounds elements to float, in which a quantizer computes.
template <class T> __device__ void as_floats(float (&to)[VECTOR], const T (&from)[VECTOR]) {
    A wide[VECTOR];
    widen(wide, from);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) to[v] = (float)wide[v];
}

// The same after rounding to T, the type in which rows pass to the quantizer.
template <class T> __device__ void passed(float (&to)[VECTOR], const A (&from)[VECTOR]) {
    T rounded[VECTOR];
    narrow(rounded, from);
    as_floats(to, rounded);
}

// Loads the warp's elements of x as float.
__device__ inline void load_floats(float (&to)[VECTORS][VECTOR], const Arguments& a, const Rows& rows) {
    X x[VECTORS][VECTOR];
    load_rows(x, a.x, a.x_strides, rows);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) as_floats(to[k], x[k]);
}
