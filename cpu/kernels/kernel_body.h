/*
 * The kernels, written once. A file kernel_<isa>.c defines ISA and the operations below for its
 * instruction set (most of them through pairs.h) and then includes this file. A unit is the number of
 * floats that the instruction set works on best.
 *
 *   UNIT                       floats in a unit: a power of two that divides 128, known when the
 *                              program runs
 *   U                          a unit; never in an array or a struct, because SVE's types have no size
 *   u_set1 u_add u_mul         each one correctly rounded IEEE operation
 *   u_no_more u_no_less        a unit within a limit; a NaN stays
 *   u_where_within             values where another unit lies within limits, else +0, as where that is NaN
 *   u_round                    rounds to a 16-bit kind, to nearest even, and widens again
 *   u_load                     widens n <= UNIT elements of a row, and fills the rest with +0
 *   u_store                    rounds, stores n <= UNIT elements, and returns the stored values; it and
 *                              u_round round results of u_add and u_mul only
 *   u_halve                    v[:n/2] + v[n/2:] until one value is left
 *   u_swap                     exchanges neighbours
 *
 * A file may also define:
 *
 *   READS_AHEAD                where memory is read faster if it is fetched first:
 *   u_read                       u_load, which fetches the unit that is so many bytes ahead
 *   ROW_BY_ROW                 where it is slower to make a row's second pass together with the next row's first
 *   FEW_KINDS                  where kernels are not worth their code for each mix of kinds: those of the most mixes serve all
 *   ADDS_F16                   where float16 can be added without widening, with the same bits:
 *   u_add_f16                    rounds x + y to float16, stores the sum, and returns it
 *   BF16_BY_PARITY             where u_load and u_store know the kind BF16P
 *   STREAMS                    where an ordinary store first reads the line that it overwrites:
 *   u_stream                     u_store, but it bypasses the caches if n is UNIT; aligned to 64 bytes
 *   u_stream_end                 makes the stores of u_stream visible to other threads
 *   HALVES_ROWS                where it is cheaper to halve a whole batch of units at once:
 *   halve_rows                   u_halve of each of BATCH units, stored as consecutive floats
 *   REST                       an instruction set whose kernels this one takes, but for rows of bfloat16 alone, which it reads
 *                              by parity, and with ADDS_F16 for those whose float16 it adds; rows with a bias, with a weight for
 *                              each head and less their means gain nothing
 *   OVERLAPS_AS_IS             where overlapping rows of bfloat16 may take a weight and a bias as they are (tuning.c)
 *   OPAQUE_INDEX               where the compiler does not know UNIT:
 *   u_index                      returns its argument, but hides from the compiler how it was computed
 *
 * Sums of a segment follow the spec's tree: v = v[:n/2] + v[n/2:]. Elements that are 128 or more apart
 * are added as whole units, down to UNIT apart in `sum_units`, and the rest in `u_halve`.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "machine/half.h"
#include "kernels/jobs.h"
#include "machine/kinds.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

#if !defined(READS_AHEAD)
#define READS_AHEAD 0
#define u_read(kind, ahead, row, i, n) ((void)(ahead), u_load(kind, row, i, n))
#endif

#if !defined(ROW_BY_ROW)
#define ROW_BY_ROW 0
#endif

#if !defined(FEW_KINDS)
#define FEW_KINDS 0
#endif

#if !defined(ADDS_F16)
#define ADDS_F16 0
#define u_add_f16(ahead, x, y, sum, i, n) u_set1(0)
#endif

#if !defined(STREAMS)
#define STREAMS 0
#define u_stream u_store
#define u_stream_end() ((void)0)
#endif

#if !defined(OVERLAPS_AS_IS)
#define OVERLAPS_AS_IS 0
#endif

#if defined(REST)
#define AFFINE 0 /* whether there are kernels of affine rows and of centered ones */
#else
#define AFFINE 1
#endif

#if !defined(OPAQUE_INDEX)
#define u_index(i) (i)
#endif

/* bfloat16 where all operands are of it: their elements may then lie by parity, as they are in one order (see kinds.h). */
#if defined(BF16_BY_PARITY)
#define ALL_BF16 BF16P
#else
#define ALL_BF16 BF16
#endif

enum { BATCH = 8 }; /* the most rows that go through the passes together */

/* Otherwise GCC unrolls a loop so far that its vectors no longer fit the registers. */
#if defined(__GNUC__) && !defined(__clang__)
#define FN_ROLLED _Pragma("GCC unroll 1")
#else
#define FN_ROLLED
#endif

/*
 * Makes the same call whether `test` holds or not: with a copy of the call for each case, GCC takes the test out of the
 * call's loops. GCC 12 does not do so by itself where the loops are large.
 */
#define FN_UNSWITCH(test, call) \
    do {                        \
        if (test) call;         \
        else call;              \
    } while (0)

#define FN_JOIN_(a, b) a##_##b
#define FN_JOIN(a, b) FN_JOIN_(a, b)
#define FN_OF(name) FN_JOIN(fn_##name, ISA)
#define FN_DECLARED(name) fn_##name FN_OF(name);
FN_KERNELS(FN_DECLARED)
#if defined(REST)
#define FN_DECLARED_IN_REST(name) fn_##name FN_JOIN(fn_##name, REST);
FN_KERNELS(FN_DECLARED_IN_REST)
#define FN_TAKEN(name) FN_JOIN(fn_##name, REST) /* this instruction set's function, or REST's */
#else
#define FN_TAKEN(name) FN_OF(name)
#endif
fn_forward_rows FN_TAKEN(forward_rows_f64); /* in the unit of gradients, whose loops GCC makes vectors of */

/*
 * Families of functions, of which CMake has each compiled by itself: a compiler's memory is a matter of one file. Without
 * FN_FAMILY a file has all of them.
 */
#define FN_NORMS 1
#define FN_ROWS_OF_ONE_KIND 2
#define FN_GRADIENTS_AND_STEPS 4
#define FN_CENTERED 8
#if !defined(FN_FAMILY)
#define FN_FAMILY (FN_NORMS | FN_ROWS_OF_ONE_KIND | FN_GRADIENTS_AND_STEPS | FN_CENTERED)
#endif

/* The first three levels of a tree, over eight units that are `apart` from each other. */
#define SUM_OF_EIGHT(unit, apart)                                                                      \
    u_add(u_add(u_add(unit(0 * (apart)), unit(4 * (apart))), u_add(unit(2 * (apart)), unit(6 * (apart)))), \
          u_add(u_add(unit(1 * (apart)), unit(5 * (apart))), u_add(unit(3 * (apart)), unit(7 * (apart)))))

/* Halves `width` floats, whole units, until one unit is left. Overwrites them. */
FN_INLINE U sum_units(float *v, int64_t width) {
    for (; width >= 8 * UNIT; width /= 8) {
        FN_ROLLED
        for (int64_t i = 0; i < width / 8; i += UNIT) {
#define AT(k) u_load(F32, v, i + (k), UNIT)
            u_store(F32, v, i, UNIT, SUM_OF_EIGHT(AT, width / 8));
#undef AT
        }
    }
    for (; width > UNIT; width /= 2)
        for (int64_t i = 0; i < width / 2; i += UNIT)
            u_store(F32, v, i, UNIT, u_add(u_load(F32, v, i, UNIT), u_load(F32, v, i + width / 2, UNIT)));
    return u_load(F32, v, 0, UNIT);
}

#if !defined(HALVES_ROWS)
FN_INLINE void halve_rows(int by_parity, const float *units, float *sums) {
    for (int k = 0; k < BATCH; k++) sums[k] = u_halve(by_parity, u_load(F32, units, k * UNIT, UNIT));
}
#endif

/* Makes all but the first n elements of a unit +0, where terms of a sum that are not there would not be. */
FN_INLINE void clear_rest(int by_parity, float *unit, int64_t n) {
    for (int64_t k = n; k < UNIT; k++) unit[by_parity ? k % 2 * (UNIT / 2) + k / 2 : k] = 0;
}

/* Halves `count` values, padded with +0 to a power of two, until one is left. */
static float halve_sums(float *sums, int64_t count) {
    int64_t width = 1;
    while (width < count) width *= 2;
    for (int64_t i = count; i < width; i++) sums[i] = 0;
    while (width > 1) {
        width /= 2;
        for (int64_t i = 0; i < width; i++) sums[i] += sums[i + width];
    }
    return sums[0];
}

/* To load, round and store a unit of a kind that is known when the program runs. */
FN_INLINE U load_any(int64_t kind, const void *row, int64_t i, int n) {
    if (kind == F32) return u_load(F32, row, i, n);
    if (kind == F16) return u_load(F16, row, i, n);
    if (kind == BF16) return u_load(BF16, row, i, n);
    return u_load(ALL_BF16, row, i, n);
}
FN_INLINE U round_any(int64_t kind, U value) {
    if (kind == F16) return u_round(F16, value);
    if (kind == BF16) return u_round(BF16, value);
    if (kind == ALL_BF16) return u_round(ALL_BF16, value);
    return value;
}
FN_INLINE U store_any(int64_t kind, void *row, int64_t i, int n, U value) {
    if (kind == F32) return u_store(F32, row, i, n, value);
    if (kind == F16) return u_store(F16, row, i, n, value);
    if (kind == BF16) return u_store(BF16, row, i, n, value);
    return u_store(ALL_BF16, row, i, n, value);
}

/* A row of float64, rounded. */
FN_INLINE void round_to_f32(const char *row, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = (float)f64_at(row, i);
}

/* Elements in the order of rows that are read by parity, and in their own order again; in whole units. */
FN_INLINE void order_by_parity(const float *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += UNIT) {
        FN_VECTORS()
        for (int k = 0; k < UNIT / 2; k++) {
            to[i + k] = from[i + 2 * k];
            to[i + UNIT / 2 + k] = from[i + 2 * k + 1];
        }
    }
}
FN_INLINE void order_again(const float *by_parity, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += UNIT) {
        FN_VECTORS()
        for (int k = 0; k < UNIT / 2; k++) {
            to[i + 2 * k] = by_parity[i + k];
            to[i + 2 * k + 1] = by_parity[i + UNIT / 2 + k];
        }
    }
}

/* Rows that are read by parity are rounded in integers, which carries a NaN with a long payload into -0. */
FN_INLINE void drop_payloads(float *row, int64_t n) {
    for (int64_t i = 0; i < n; i++) row[i] = row[i] == row[i] ? row[i] : NAN;
}

/* The gain (weight + offset), or a bias, as float, in whole units; filled if there is none. */
static void widen_weight(int kind, const void *weight, float offset, float fill, int64_t hidden, float *g) {
    for (int64_t i = 0; i < hidden; i += UNIT) {
        int n = hidden - i < UNIT ? (int)(hidden - i) : UNIT;
        U u = kind == NONE ? u_set1(fill) : load_any(kind, weight, i, n);
        if (offset != 0 && kind != NONE) u = u_add(u, u_set1(offset));
        u_store(F32, g, i, UNIT, u);
    }
}

/* The same for rows of bfloat16 that are read by parity; of a kind that is not, it is put into their order. */
static void widen_by_parity(int kind, const void *weight, float offset, float fill, int64_t hidden, float *g) {
    if (kind == BF16 || kind == BF16P || kind == NONE) {
        widen_weight(kind == NONE ? (int)NONE : (int)ALL_BF16, weight, offset, fill, hidden, g);
        return;
    }
    const U more = u_set1(offset != 0 ? offset : -0.0f);
    float unit[UNIT];
    for (int64_t i = 0; i < hidden; i += UNIT) {
        const int n = hidden - i < UNIT ? (int)(hidden - i) : UNIT;
        u_store(F32, unit, 0, UNIT, u_add(load_any(kind, weight, i, n), more));
        drop_payloads(unit, UNIT);
        order_by_parity(unit, UNIT, g + i);
    }
}

#include "kernels/center_tables.h"

#if FN_FAMILY & (FN_NORMS | FN_ROWS_OF_ONE_KIND | FN_CENTERED)
#include "kernels/forward_passes.h"

#include "kernels/forward_strategies.h"

#include "kernels/kernel_tables.h"
#endif

#if FN_FAMILY & FN_CENTERED && AFFINE
#include "kernels/center_body.h"
#endif

#if FN_FAMILY & FN_NORMS
#include "kernels/forward_body.h"

#if !defined(REST)
#include "kernels/two_norms_body.h"
#endif
#define FN_ENTRY(name) FN_TAKEN(name),
const struct fn_kernels FN_JOIN(fn_kernels, ISA) = {FN_OF(forward_rows), FN_KERNELS_BESIDE(FN_ENTRY)};
#endif

#if FN_FAMILY & FN_GRADIENTS_AND_STEPS && !defined(REST)
#include "kernels/kernel_f64.h"

#include "kernels/backward_body.h"

#include "kernels/quantize_body.h"

#include "kernels/gate_body.h"

#include "kernels/rotation_body.h"

#include "kernels/declared_body.h"

#include "kernels/attention_body.h"
#endif
