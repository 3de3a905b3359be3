// What each instruction computes. Floating point: only what is rounded to nearest even by itself; what approximates,
// flushes, or leaves the compiler a choice has no entry, and a kernel with it is refused.
#include "machine.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

namespace machine {

namespace {

template <class T> T get(u64 bits) {
    if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>((u32)bits);
    else if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(bits);
    else return (T)bits;
}

template <class T> u64 put(T value) {
    if constexpr (std::is_same_v<T, float>) return std::bit_cast<u32>(value);
    else if constexpr (std::is_same_v<T, double>) return std::bit_cast<u64>(value);
    else return (u64)value;
}

template <class FROM, class TO, auto F> void one(Warp& w, const Instruction& i, u32 lanes) {
    u64 *d = w[i.operands[0]], *a = w[i.operands[1]];
    each(lanes, [=](int l) { d[l] = put<TO>(F(get<FROM>(a[l]))); });
}

template <class T, class SECOND, class TO, auto F> void two(Warp& w, const Instruction& i, u32 lanes) {
    u64 *d = w[i.operands[0]], *a = w[i.operands[1]], *b = w[i.operands[2]];
    each(lanes, [=](int l) { d[l] = put<TO>(F(get<T>(a[l]), get<SECOND>(b[l]))); });
}

template <class T, class THIRD, class TO, auto F> void three(Warp& w, const Instruction& i, u32 lanes) {
    u64 *d = w[i.operands[0]], *a = w[i.operands[1]], *b = w[i.operands[2]], *c = w[i.operands[3]];
    each(lanes, [=](int l) { d[l] = put<TO>(F(get<T>(a[l]), get<T>(b[l]), get<THIRD>(c[l]))); });
}

// A comparison, joined with another predicate: operands d, a, b, c.
template <class T, auto COMPARE, auto JOIN> void compared(Warp& w, const Instruction& i, u32 lanes) {
    u64 *d = w[i.operands[0]], *a = w[i.operands[1]], *b = w[i.operands[2]];
    if (i.count == 3) {
        each(lanes, [=](int l) { d[l] = COMPARE(get<T>(a[l]), get<T>(b[l])); });
    } else {
        u64* c = w[i.operands[3]];
        each(lanes, [=](int l) { d[l] = JOIN(COMPARE(get<T>(a[l]), get<T>(b[l])), c[l] & 1); });
    }
}

template <class T> struct doubled;
template <> struct doubled<short> { using type = int; };
template <> struct doubled<u16> { using type = u32; };
template <> struct doubled<i32> { using type = i64; };
template <> struct doubled<u32> { using type = u64; };
template <> struct doubled<i64> { using type = __int128; };
template <> struct doubled<u64> { using type = unsigned __int128; };

// Halves and bfloat16: their values are values of float.
float of_half(u16 bits) { return (float)std::bit_cast<_Float16>(bits); }
float of_bfloat16(u16 bits) { return std::bit_cast<float>((u32)bits << 16); }
u16 half_of(float value) { return value != value ? 0x7FFF : std::bit_cast<u16>((_Float16)value); }
u16 bfloat16_of(float value) {
    const u32 bits = std::bit_cast<u32>(value);
    return value != value ? 0x7FFF : (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// What is rounded to odd first, to more bits, may be rounded again. `too_large`: the nearest value is, in magnitude.
template <class T> T odd(T nearest, bool exact, bool too_large) {
    using Bits = std::conditional_t<sizeof nearest == 4, u32, u64>;
    if (exact || std::isinf(nearest) || nearest != nearest) return nearest;
    return std::bit_cast<T>((std::bit_cast<Bits>(nearest) - too_large) | 1);
}
template <auto NARROW> u16 narrow_double(double value) {
    const float nearest = (float)value;
    return NARROW(odd(nearest, nearest == value, std::abs((double)nearest) > std::abs(value)));
}

// a * b + c of 16-bit numbers, rounded once: the product is exact in double.
template <auto WIDE, auto NARROW> u16 fused(u16 a, u16 b, u16 c) {
    const double product = (double)WIDE(a) * (double)WIDE(b), other = WIDE(c), sum = product + other;
    const double back = sum - product, lost = (product - (sum - back)) + (other - back);
    return narrow_double<NARROW>(odd(sum, lost == 0, lost != 0 && (lost > 0) != (sum > 0)));
}
constexpr auto FUSED_HALF = fused<of_half, half_of>;
constexpr auto FUSED_BFLOAT16 = fused<of_bfloat16, bfloat16_of>;

template <auto F> u32 both(u32 a, u32 b, u32 c) {
    return F((u16)a, (u16)b, (u16)c) | (u32)F((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}

// Two floats in a register.
template <auto F> u64 floats(u64 a, u64 b) {
    return put<float>(F(get<float>(a), get<float>(b))) |
           put<float>(F(get<float>(a >> 32), get<float>(b >> 32))) << 32;
}

// A float as 8 bits, of which MANTISSA follow an exponent with this bias: the nearest of the numbers with the codes up to
// MOST; of two that are equally near, the one with the even code. Of a NaN the PTX ISA says only that it becomes one of
// the format: here it is one that nothing else gives.
template <int MANTISSA, int BIAS, int MOST> u16 byte_of(float value) {
    static const auto numbers = [] {
        std::array<double, MOST + 1> found;
        for (int code = 0; code <= MOST; code++) {
            const int exponent = code >> MANTISSA, fraction = code & ((1 << MANTISSA) - 1);
            const int digits = exponent ? fraction + (1 << MANTISSA) : fraction;
            found[code] = std::ldexp(digits, (exponent ? exponent : 1) - BIAS - MANTISSA);
        }
        return found;
    }();
    if (value != value) return MANTISSA == 3 ? 0xFF : 0xFD;
    const double magnitude = std::abs((double)value);
    int code = (int)(std::upper_bound(numbers.begin(), numbers.end(), magnitude) - numbers.begin()) - 1;
    if (code < MOST) {
        const double below = magnitude - numbers[code], above = numbers[code + 1] - magnitude;
        if (above < below || (above == below && code & 1)) code++;
    }
    return (u16)(code | (std::signbit(value) ? 0x80 : 0));
}
constexpr auto E4M3_OF = byte_of<3, 7, 0x7E>;
constexpr auto E5M2_OF = byte_of<2, 15, 0x7B>;

// A float without a fraction as an integer: 0 of a NaN, and the nearest of what an integer cannot hold.
i32 whole(float value) {
    if (value != value) return 0;
    using Limits = std::numeric_limits<i32>;
    return value >= 0x1p31f ? Limits::max() : value < -0x1p31f ? Limits::min() : (i32)value;
}

template <class T> T shifted_left(T a, u32 by) { return by < 8 * sizeof a ? (T)(a << by) : (T)0; }
template <class T> T shifted_right(T a, u32 by) {
    if (by < 8 * sizeof a) return (T)(a >> by);
    return a < 0 ? (T)-1 : (T)0;
}

template <class T> T field(T a, u32 position, u32 length) {
    constexpr int BITS = 8 * sizeof(T);
    const int begin = position & 255, count = length & 255;
    if (count == 0) return 0;
    const int top = begin + count - 1 < BITS - 1 ? begin + count - 1 : BITS - 1;
    const bool sign = std::is_signed_v<T> && (u64)a >> top & 1;
    u64 found = 0;
    for (int i = 0; i < BITS; i++)
        found |= (u64)(i < count && begin + i < BITS ? (u64)a >> (begin + i) & 1 : sign) << i;
    return (T)found;
}

u32 permuted(u32 a, u32 b, u32 selector) {
    const u64 bytes = a | (u64)b << 32;
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        const u32 nibble = selector >> 4 * i & 15;
        u32 byte = (u32)(bytes >> 8 * (nibble & 7)) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        found |= byte << 8 * i;
    }
    return found;
}

void insert_field(Warp& w, const Instruction& i, u32 lanes) {
    u64 *d = w[i.operands[0]], *a = w[i.operands[1]], *b = w[i.operands[2]], *at = w[i.operands[3]],
        *length = w[i.operands[4]];
    const int bits = i.name == "bfi.b64" ? 64 : 32;
    each(lanes, [=](int l) {
        const int begin = at[l] & 255, count = length[l] & 255;
        u64 found = b[l];
        for (int k = 0; k < count && begin + k < bits; k++)
            found = (found & ~((u64)1 << (begin + k))) | (a[l] >> k & 1) << (begin + k);
        d[l] = found;
    });
}

template <class T> void selected(Warp& w, const Instruction& i, u32 lanes) {
    u64 *d = w[i.operands[0]], *a = w[i.operands[1]], *b = w[i.operands[2]], *p = w[i.operands[3]];
    each(lanes, [=](int l) { d[l] = (T)(p[l] & 1 ? a[l] : b[l]); });
}

// Parts of a register, of `operands[0]` bits each.
void packed(Warp& w, const Instruction& i, u32 lanes) {
    const int bits = (int)i.operands[0];
    each(lanes, [&](int l) {
        u64 found = 0;
        for (int k = 2; k < i.count; k++) {
            const u64 part = w[i.operands[k]][l] & (((u64)1 << bits) - 1);
            found |= part << bits * (k - 2);
        }
        w[i.operands[1]][l] = found;
    });
}

void unpacked(Warp& w, const Instruction& i, u32 lanes) {
    const int bits = (int)i.operands[0];
    each(lanes, [&](int l) {
        const u64 from = w[i.operands[1]][l];
        for (int k = 2; k < i.count; k++)
            if (i.operands[k] >= 0) w[i.operands[k]][l] = from >> bits * (k - 2) & (((u64)1 << bits) - 1);
    });
}

enum Shuffle { UP, DOWN, XOR, INDEX };

// Operands: d, the predicate that says whether the source is in range, or -1; a, b, c, the mask of lanes.
template <Shuffle HOW> void shuffled(Warp& w, const Instruction& i, u32 lanes) {
    u64 given[LANES];
    for (int l = 0; l < LANES; l++) given[l] = w[i.operands[2]][l];
    u64 *d = w[i.operands[0]], *b = w[i.operands[3]], *c = w[i.operands[4]], *mask = w[i.operands[5]];
    each(lanes, [&](int l) {
        const u32 members = (u32)mask[l];
        if (!(members >> l & 1)) throw Fault(i.name + ": a lane is not in its own mask");
        if (members & ~lanes) throw Fault(i.name + ": lanes of the mask are missing");
        const int by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        const int most = (l & segment) | (clamp & ~segment), least = l & segment;
        int from = HOW == UP     ? l - by
                   : HOW == DOWN ? l + by
                   : HOW == XOR  ? l ^ by
                                 : (least | (by & ~segment));
        const bool inside = HOW == UP ? from >= most : from <= most;
        if (!inside) from = l;
        if (!(members >> from & 1)) throw Fault(i.name + ": the value of a lane that is not in the mask");
        d[l] = (u32)given[from];
        if (i.operands[1] >= 0) w[i.operands[1]][l] = inside;
    });
}

// What joins the values of the lanes of a mask: operands d, a, the mask.
template <auto JOIN> void joined_lanes(Warp& w, const Instruction& i, u32 lanes) {
    i32 given[LANES];
    for (int l = 0; l < LANES; l++) given[l] = get<i32>(w[i.operands[1]][l]);
    u64 *d = w[i.operands[0]], *mask = w[i.operands[2]];
    each(lanes, [&](int l) {
        const u32 members = (u32)mask[l];
        if (!(members >> l & 1)) throw Fault(i.name + ": a lane is not in its own mask");
        if (members & ~lanes) throw Fault(i.name + ": lanes of the mask are missing");
        i32 found = given[l];
        for (int from = 0; from < LANES; from++)
            if (members >> from & 1 && from != l) found = JOIN(found, given[from]);
        d[l] = (u32)found;
    });
}

// A tile of 16 x 8 sums of 32 products of int8, which are added to others and limited to what int32 holds: operands d (4
// registers), a (4), b (2), c (4). Lane l has rows l / 4 and 8 more, and of those two sums, beginning at column 2 (l % 4);
// of a and b it has four numbers of a row or a column, beginning at 4 (l % 4), and those 16 further on.
void matrix_product(Warp& w, const Instruction& i, u32 lanes) {
    if (lanes != ~0u) throw Fault(i.name + ": a part of a warp");
    signed char a[16][32], b[8][32];
    i64 sums[16][8];
    for (int l = 0; l < LANES; l++) {
        const int group = l / 4, within = l % 4;
        for (int r = 0; r < 4; r++)
            for (int n = 0; n < 4; n++)
                a[group + r % 2 * 8][within * 4 + r / 2 * 16 + n] = (signed char)(w[i.operands[4 + r]][l] >> 8 * n);
        for (int r = 0; r < 2; r++)
            for (int n = 0; n < 4; n++) b[group][within * 4 + r * 16 + n] = (signed char)(w[i.operands[8 + r]][l] >> 8 * n);
        for (int r = 0; r < 4; r++) sums[group + r / 2 * 8][within * 2 + r % 2] = get<i32>(w[i.operands[10 + r]][l]);
    }
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++)
            for (int k = 0; k < 32; k++) sums[row][column] += a[row][k] * b[column][k];
    for (int l = 0; l < LANES; l++)
        for (int r = 0; r < 4; r++) {
            const i64 sum = sums[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2];
            w[i.operands[r]][l] = (u32)(i32)std::clamp<i64>(sum, INT32_MIN, INT32_MAX);
        }
}

void nothing(Warp&, const Instruction&, u32) {}

using Table = std::map<std::string, std::pair<Handler, Kind>>;

template <class T> void add_integers(Table& to, const std::string& type) {
    using Wide = typename doubled<T>::type;
    using Unsigned = std::make_unsigned_t<T>;
    auto set = [&](const std::string& name, Handler handler) { to[name + "." + type] = {handler, PLAIN}; };
    set("add", two<T, T, T, [](T a, T b) { return (T)((Unsigned)a + (Unsigned)b); }>);
    set("sub", two<T, T, T, [](T a, T b) { return (T)((Unsigned)a - (Unsigned)b); }>);
    set("mul.lo", two<T, T, T, [](T a, T b) { return (T)((Wide)a * b); }>);
    set("mul.hi", two<T, T, T, [](T a, T b) { return (T)(((Wide)a * b) >> 8 * sizeof a); }>);
    set("mad.lo", three<T, T, T, [](T a, T b, T c) { return (T)((Unsigned)(T)((Wide)a * b) + (Unsigned)c); }>);
    if constexpr (sizeof(T) < 8) {
        set("mul.wide", two<T, T, Wide, [](T a, T b) { return (Wide)((Wide)a * b); }>);
        set("mad.wide", three<T, Wide, Wide, [](T a, T b, Wide c) {
                using Bits = std::make_unsigned_t<Wide>;
                return (Wide)((Bits)((Wide)a * b) + (Bits)c);
            }>);
    }
    set("div", two<T, T, T, [](T a, T b) { return b ? (T)((Wide)a / b) : (T)-1; }>);
    set("rem", two<T, T, T, [](T a, T b) { return b ? (T)((Wide)a % b) : a; }>);
    set("min", two<T, T, T, [](T a, T b) { return a < b ? a : b; }>);
    set("max", two<T, T, T, [](T a, T b) { return b < a ? a : b; }>);
    set("neg", one<T, T, [](T a) { return (T)(0 - (Unsigned)a); }>);
    set("abs", one<T, T, [](T a) { return a < 0 ? (T)(0 - (Unsigned)a) : a; }>);
    set("shr", two<T, u32, T, [](T a, u32 by) { return shifted_right(a, by); }>);
    set("bfe", three<T, u32, T, [](T a, T at, u32 length) { return field(a, (u32)at, length); }>);
}

template <class T> void add_bits(Table& to, const std::string& type) {
    auto set = [&](const std::string& name, Handler handler) { to[name + "." + type] = {handler, PLAIN}; };
    set("and", two<T, T, T, [](T a, T b) { return (T)(a & b); }>);
    set("or", two<T, T, T, [](T a, T b) { return (T)(a | b); }>);
    set("xor", two<T, T, T, [](T a, T b) { return (T)(a ^ b); }>);
    set("not", one<T, T, [](T a) { return (T)~a; }>);
    set("shl", two<T, u32, T, [](T a, u32 by) { return shifted_left(a, by); }>);
    set("shr", two<T, u32, T, [](T a, u32 by) { return shifted_right(a, by); }>);
}

template <class T, auto COMPARE> void add_comparison(Table& to, const std::string& name, const std::string& type) {
    const Handler plain = compared<T, COMPARE, [](bool a, bool b) { return a && b; }>;
    to["setp." + name + "." + type] = to["setp." + name + ".and." + type] = {plain, PLAIN};
    to["setp." + name + ".or." + type] = {compared<T, COMPARE, [](bool a, bool b) { return a || b; }>, PLAIN};
}

template <class T> void add_comparisons(Table& to, const std::string& type) {
    add_comparison<T, [](T a, T b) { return a == b; }>(to, "eq", type);
    add_comparison<T, [](T a, T b) { return a < b || b < a; }>(to, "ne", type);
    add_comparison<T, [](T a, T b) { return a < b; }>(to, "lt", type);
    add_comparison<T, [](T a, T b) { return a <= b; }>(to, "le", type);
    add_comparison<T, [](T a, T b) { return b < a; }>(to, "gt", type);
    add_comparison<T, [](T a, T b) { return b <= a; }>(to, "ge", type);
    if constexpr (std::is_floating_point_v<T>) {  // true where an operand is a NaN
        add_comparison<T, [](T a, T b) { return !(a < b || b < a); }>(to, "equ", type);
        add_comparison<T, [](T a, T b) { return !(a == b); }>(to, "neu", type);
        add_comparison<T, [](T a, T b) { return !(b <= a); }>(to, "ltu", type);
        add_comparison<T, [](T a, T b) { return !(b < a); }>(to, "leu", type);
        add_comparison<T, [](T a, T b) { return !(a <= b); }>(to, "gtu", type);
        add_comparison<T, [](T a, T b) { return !(a < b); }>(to, "geu", type);
        add_comparison<T, [](T a, T b) { return a == a && b == b; }>(to, "num", type);
        add_comparison<T, [](T a, T b) { return a != a || b != b; }>(to, "nan", type);
    }
}

// The same of halves and bfloat16, alone and in pairs: operands p, q, a, b.
template <auto COMPARE> void compared_pairs(Warp& w, const Instruction& i, u32 lanes) {
    u64 *p = w[i.operands[0]], *q = w[i.operands[1]], *a = w[i.operands[2]], *b = w[i.operands[3]];
    each(lanes, [=](int l) {
        const bool low = COMPARE((u16)a[l], (u16)b[l]), high = COMPARE((u16)(a[l] >> 16), (u16)(b[l] >> 16));
        p[l] = low;
        q[l] = high;
    });
}
template <auto COMPARE> void add_narrow_comparison(Table& to, const std::string& name, const std::string& type) {
    add_comparison<u16, COMPARE>(to, name, type);
    to["setp." + name + "." + type + "x2"] = {compared_pairs<COMPARE>, PLAIN};
}
template <auto WIDE> void add_narrow_comparisons(Table& to, const std::string& type) {
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(a) == WIDE(b); }>(to, "eq", type);
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(a) < WIDE(b); }>(to, "lt", type);
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(a) <= WIDE(b); }>(to, "le", type);
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(b) < WIDE(a); }>(to, "gt", type);
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(b) <= WIDE(a); }>(to, "ge", type);
    add_narrow_comparison<[](u16 a, u16 b) { return !(WIDE(b) <= WIDE(a)); }>(to, "ltu", type);
    add_narrow_comparison<[](u16 a, u16 b) { return !(WIDE(b) < WIDE(a)); }>(to, "leu", type);
    add_narrow_comparison<[](u16 a, u16 b) { return !(WIDE(a) <= WIDE(b)); }>(to, "gtu", type);
    add_narrow_comparison<[](u16 a, u16 b) { return !(WIDE(a) < WIDE(b)); }>(to, "geu", type);
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(a) == WIDE(a) && WIDE(b) == WIDE(b); }>(to, "num", type);
    add_narrow_comparison<[](u16 a, u16 b) { return WIDE(a) != WIDE(a) || WIDE(b) != WIDE(b); }>(to, "nan", type);
}

// The lesser number, and the number where one operand is a NaN. -0 is less than +0.
template <class T> T least(T a, T b) {
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}

template <class T> void add_floats(Table& to, const std::string& type) {
    auto set = [&](const std::string& name, Handler handler) { to[name + "." + type] = {handler, PLAIN}; };
    set("add.rn", two<T, T, T, [](T a, T b) { return a + b; }>);
    set("sub.rn", two<T, T, T, [](T a, T b) { return a - b; }>);
    set("mul.rn", two<T, T, T, [](T a, T b) { return a * b; }>);
    set("div.rn", two<T, T, T, [](T a, T b) { return a / b; }>);
    set("rcp.rn", one<T, T, [](T a) { return 1 / a; }>);
    set("sqrt.rn", one<T, T, [](T a) { return std::sqrt(a); }>);
    set("min", two<T, T, T, least<T>>);
    set("max", two<T, T, T, [](T a, T b) { return -least<T>(-a, -b); }>);
    set("neg", one<T, T, [](T a) { return -a; }>);
    set("abs", one<T, T, [](T a) { return std::fabs(a); }>);
}

// The canonical NaN if one of two floats is a NaN, else what there is.
float or_nan(float a, float b, float found) { return a != a || b != b ? std::bit_cast<float>(0x7FFFFFFF) : found; }

// From every integer type to this one; and to floats, rounded to nearest.
template <class FROM> void add_conversions(Table& to, const std::string& from) {
    auto set = [&](const std::string& name, Handler handler) { to["cvt." + name + "." + from] = {handler, PLAIN}; };
    set("u16", one<FROM, u16, [](FROM a) { return (u16)a; }>);
    set("s16", one<FROM, short, [](FROM a) { return (short)a; }>);
    set("u32", one<FROM, u32, [](FROM a) { return (u32)a; }>);
    set("s32", one<FROM, i32, [](FROM a) { return (i32)a; }>);
    set("u64", one<FROM, u64, [](FROM a) { return (u64)a; }>);
    set("s64", one<FROM, i64, [](FROM a) { return (i64)a; }>);
    set("rn.f32", one<FROM, float, [](FROM a) { return (float)a; }>);
    set("rn.f64", one<FROM, double, [](FROM a) { return (double)a; }>);
}

// Sums, differences and products of 16-bit numbers, alone and in pairs: as multiplications by 1 or -1, or additions of -0.
template <auto FUSED, u32 ONE> void add_narrow(Table& to, const std::string& type) {
    auto set = [&](const std::string& name, Handler handler) { to[name + ".rn." + type] = {handler, PLAIN}; };
    constexpr u32 SIGN = 0x8000, TWICE = 0x10001;
    set("add", two<u16, u16, u16, [](u16 a, u16 b) { return FUSED(a, ONE, b); }>);
    set("sub", two<u16, u16, u16, [](u16 a, u16 b) { return FUSED(b, ONE | SIGN, a); }>);
    set("mul", two<u16, u16, u16, [](u16 a, u16 b) { return FUSED(a, b, SIGN); }>);
    auto set_pairs = [&](const std::string& name, Handler handler) { to[name + ".rn." + type + "x2"] = {handler, PLAIN}; };
    set_pairs("add", two<u32, u32, u32, [](u32 a, u32 b) { return both<FUSED>(a, ONE * TWICE, b); }>);
    set_pairs("sub", two<u32, u32, u32, [](u32 a, u32 b) { return both<FUSED>(b, (ONE | SIGN) * TWICE, a); }>);
    set_pairs("mul", two<u32, u32, u32, [](u32 a, u32 b) { return both<FUSED>(a, b, SIGN * TWICE); }>);
}

Table table() {
    Table to;
    auto set = [&](const std::string& name, Handler handler) { to[name] = {handler, PLAIN}; };
    add_integers<short>(to, "s16");
    add_integers<u16>(to, "u16");
    add_integers<i32>(to, "s32");
    add_integers<u32>(to, "u32");
    add_integers<i64>(to, "s64");
    add_integers<u64>(to, "u64");
    add_bits<u16>(to, "b16");
    add_bits<u32>(to, "b32");
    add_bits<u64>(to, "b64");
    add_bits<u64>(to, "pred");
    for (const char* type : {"s16", "u16", "s32", "u32", "s64", "u64"})
        set(std::string("shl.") + type, to.at(std::string("shl.b") + (type + 1)).first);
    add_comparisons<short>(to, "s16");
    add_comparisons<u16>(to, "u16");
    add_comparisons<u16>(to, "b16");
    add_comparisons<i32>(to, "s32");
    add_comparisons<u32>(to, "u32");
    add_comparisons<u32>(to, "b32");
    add_comparisons<i64>(to, "s64");
    add_comparisons<u64>(to, "u64");
    add_comparisons<u64>(to, "b64");
    add_comparisons<float>(to, "f32");
    add_comparisons<double>(to, "f64");
    add_narrow_comparisons<of_half>(to, "f16");
    add_narrow_comparisons<of_bfloat16>(to, "bf16");
    add_floats<float>(to, "f32");
    add_floats<double>(to, "f64");
    add_conversions<signed char>(to, "s8");
    add_conversions<short>(to, "s16");
    add_conversions<u16>(to, "u16");
    add_conversions<i32>(to, "s32");
    add_conversions<u32>(to, "u32");
    add_conversions<i64>(to, "s64");
    add_conversions<u64>(to, "u64");

    set("cvt.f64.f32", one<float, double, [](float a) { return (double)a; }>);
    set("cvt.rn.f32.f64", one<double, float, [](double a) { return (float)a; }>);
    set("cvt.rni.s32.f32", one<float, i32, [](float a) { return whole(std::nearbyint(a)); }>);
    set("cvt.rzi.s32.f32", one<float, i32, [](float a) { return whole(std::trunc(a)); }>);
    set("cvt.f32.f16", one<u16, float, of_half>);
    set("cvt.f32.bf16", one<u16, float, of_bfloat16>);
    set("cvt.f64.f16", one<u16, double, [](u16 a) { return (double)of_half(a); }>);
    set("cvt.f64.bf16", one<u16, double, [](u16 a) { return (double)of_bfloat16(a); }>);
    set("cvt.rn.f16.f64", one<double, u16, narrow_double<half_of>>);
    set("cvt.rn.bf16.f64", one<double, u16, narrow_double<bfloat16_of>>);
    set("cvt.rn.f16.f32", one<float, u16, half_of>);
    set("cvt.rn.bf16.f32", one<float, u16, bfloat16_of>);
    // Of two floats the first goes to the upper half.
    set("cvt.rn.f16x2.f32",
        two<float, float, u32, [](float a, float b) { return (u32)half_of(a) << 16 | half_of(b); }>);
    set("cvt.rn.bf16x2.f32",
        two<float, float, u32, [](float a, float b) { return (u32)bfloat16_of(a) << 16 | bfloat16_of(b); }>);

    set("cvt.rn.satfinite.e4m3x2.f32",
        two<float, float, u16, [](float a, float b) { return (u16)(E4M3_OF(a) << 8 | E4M3_OF(b)); }>);
    set("cvt.rn.satfinite.e5m2x2.f32",
        two<float, float, u16, [](float a, float b) { return (u16)(E5M2_OF(a) << 8 | E5M2_OF(b)); }>);
    set("min.NaN.f32", two<float, float, float, [](float a, float b) { return or_nan(a, b, least(a, b)); }>);
    set("max.NaN.f32", two<float, float, float, [](float a, float b) { return or_nan(a, b, -least(-a, -b)); }>);

    add_narrow<FUSED_HALF, 0x3C00>(to, "f16");
    add_narrow<FUSED_BFLOAT16, 0x3F80>(to, "bf16");
    set("fma.rn.f16x2", three<u32, u32, u32, both<FUSED_HALF>>);
    set("fma.rn.bf16x2", three<u32, u32, u32, both<FUSED_BFLOAT16>>);
    set("fma.rn.f16", three<u16, u16, u16, FUSED_HALF>);
    set("fma.rn.bf16", three<u16, u16, u16, FUSED_BFLOAT16>);
    // A 16-bit number and a float: the first is widened.
    set("add.rn.f32.f16", two<u16, float, float, [](u16 a, float b) { return of_half(a) + b; }>);
    set("add.rn.f32.bf16", two<u16, float, float, [](u16 a, float b) { return of_bfloat16(a) + b; }>);
    set("sub.rn.f32.f16", two<u16, float, float, [](u16 a, float b) { return of_half(a) - b; }>);
    set("sub.rn.f32.bf16", two<u16, float, float, [](u16 a, float b) { return of_bfloat16(a) - b; }>);
    set("add.rn.f32x2", two<u64, u64, u64, floats<[](float a, float b) { return a + b; }>>);
    set("sub.rn.f32x2", two<u64, u64, u64, floats<[](float a, float b) { return a - b; }>>);
    set("mul.rn.f32x2", two<u64, u64, u64, floats<[](float a, float b) { return a * b; }>>);

    for (const char* type : {"b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "pred"}) {
        set(std::string("mov.") + type, one<u64, u64, [](u64 a) { return a; }>);
        set(std::string("selp.") + type, selected<u64>);
    }
    set("cvta.to.global.u64", one<u64, u64, [](u64 a) { return a; }>);
    set("pack", packed);
    set("unpack", unpacked);
    set("prmt.b32", three<u32, u32, u32, permuted>);
    set("bfi.b32", insert_field);
    set("bfi.b64", insert_field);
    to["shfl.sync.up.b32"] = {shuffled<UP>, TOGETHER};
    to["shfl.sync.down.b32"] = {shuffled<DOWN>, TOGETHER};
    to["shfl.sync.bfly.b32"] = {shuffled<XOR>, TOGETHER};
    to["shfl.sync.idx.b32"] = {shuffled<INDEX>, TOGETHER};
    to["redux.sync.max.s32"] = {joined_lanes<[](i32 a, i32 b) { return std::max(a, b); }>, TOGETHER};
    to["redux.sync.add.s32"] = {joined_lanes<[](i32 a, i32 b) { return (i32)((u32)a + (u32)b); }>, TOGETHER};
    to["mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"] = {matrix_product, TOGETHER};
    set("prefetch.global.L2", nothing);
    set("griddepcontrol.launch_dependents", nothing);
    set("griddepcontrol.wait", [](Warp& w, const Instruction&, u32) { w.waited_for_kernels_before = true; });
    to["bar.warp.sync"] = {[](Warp& w, const Instruction& i, u32 lanes) {
        each(lanes, [&](int l) {
            if ((u32)w[i.operands[0]][l] & ~lanes) throw Fault(i.name + ": lanes of the mask are missing");
        });
        w.barriers++;
    }, TOGETHER};

    to["bra"] = to["bra.uni"] = {nothing, BRANCH};
    to["ret"] = to["exit"] = {nothing, RETURN};
    to["bar.sync"] = {nothing, BLOCK_BARRIER};
    to["barrier.cluster.arrive.release.aligned"] = {nothing, CLUSTER_ARRIVE};
    to["barrier.cluster.wait.acquire.aligned"] = {nothing, CLUSTER_WAIT};
    add_memory(to);
    return to;
}

}  // namespace

const std::map<std::string, std::pair<Handler, Kind>>& handlers() {
    static const Table all = table();
    return all;
}

}  // namespace machine
