/*
 * The operations of kernel_body.h on pairs of vectors, because a register of 16-bit values widens to
 * two registers of float. A file kernel_<isa>.c defines for its instruction set:
 *
 *   LANES                      floats in a vector
 *   V, H2                      a vector of LANES floats; one of 2 * LANES 16-bit values
 *   v_set1 v_add v_mul         each one correctly rounded IEEE operation
 *   v_fma                      x * y + z, rounded once, where LANES is not 1
 *   v_no_more v_no_less        the second one, within a limit that is no NaN; a NaN stays
 *   v_where_within             the last one where x is not below the first one, nor above the second; else +0
 *   v_load v_store             unaligned
 *   v_load_n v_store_n         the first n of LANES only; a load fills the rest with +0
 *   v_halve                    v[:n/2] + v[n/2:] until one value is left
 *   v_swap                     exchanges neighbours, where LANES is not 1
 *   h2_load h2_store h2_load_n h2_store_n      the same for 2 * LANES 16-bit values
 *   f16_lo f16_hi h2_f16       widen each half; narrow two vectors to nearest even
 *   bf16_lo bf16_hi h2_bf16    the same for bfloat16
 *   f16_load bf16_load         widen LANES 16-bit values in memory, where LANES is not 1
 *
 * A file may also define:
 *
 *   HALVES_FROM_MEMORY         where loading LANES 16-bit values is cheaper than taking half a register:
 *   f16_store bf16_store         round, store, and return the stored values
 *   READS_AHEAD                where memory is read faster if it is fetched ahead
 *   ADDS_F16                   where float16 can be added without widening, with the same bits:
 *   h2_add_f16                   rounds to nearest even
 *   STREAMS, u_stream_end      where an ordinary store first reads the line that it overwrites:
 *   v_stream h2_stream           aligned stores that bypass the caches
 *   MANY_REGISTERS             where there are 32 vectors
 *   BF16_BY_PARITY             where widening by parity is cheaper than widening by halves:
 *   bf16_even bf16_odd           widen the even and the odd elements
 *   h2_bf16_parity               narrows them back; a NaN must have zero low bits (see kind BF16P)
 */
#include <stdint.h>

#include "machine/kinds.h"
#include "machine/target.h"

enum { UNIT = 2 * LANES };

typedef struct {
    V a, b;
} U;

FN_INLINE U u_add(U x, U y) { return (U){v_add(x.a, y.a), v_add(x.b, y.b)}; }
FN_INLINE U u_mul(U x, U y) { return (U){v_mul(x.a, y.a), v_mul(x.b, y.b)}; }
FN_INLINE U u_no_more(float most, U x) { return (U){v_no_more(v_set1(most), x.a), v_no_more(v_set1(most), x.b)}; }
FN_INLINE U u_where_within(float least, float most, U x, U value) {
    const V from = v_set1(least), to = v_set1(most);
    return (U){v_where_within(from, to, x.a, value.a), v_where_within(from, to, x.b, value.b)};
}
FN_INLINE U u_no_less(float least, U x) { return (U){v_no_less(v_set1(least), x.a), v_no_less(v_set1(least), x.b)}; }
FN_INLINE U u_set1(float value) { return (U){v_set1(value), v_set1(value)}; }

FN_INLINE U widen(int kind, H2 h) {
    if (kind == F16) return (U){f16_lo(h), f16_hi(h)};
#if defined(BF16_BY_PARITY)
    if (kind == BF16P) return (U){bf16_even(h), bf16_odd(h)};
#endif
    return (U){bf16_lo(h), bf16_hi(h)};
}

FN_INLINE H2 narrow(int kind, U u) {
    if (kind == F16) return h2_f16(u.a, u.b);
#if defined(BF16_BY_PARITY)
    if (kind == BF16P) return h2_bf16_parity(u.a, u.b);
#endif
    return h2_bf16(u.a, u.b);
}

FN_INLINE U u_round(int kind, U u) { return widen(kind, narrow(kind, u)); }

FN_INLINE U u_load(int kind, const void *row, int64_t i, int n) {
    if (kind == F32) {
        const float *p = (const float *)row + i;
        if (n == UNIT) return (U){v_load(p), v_load(p + LANES)};
        if (n <= LANES) return (U){v_load_n(p, n), v_set1(0)};
        return (U){v_load(p), v_load_n(p + LANES, n - LANES)};
    }
    const uint16_t *p = (const uint16_t *)row + i;
#if defined(HALVES_FROM_MEMORY)
    if (kind == F16 && n == UNIT) return (U){f16_load(p), f16_load(p + LANES)};
    if (kind == BF16 && n == UNIT) return (U){bf16_load(p), bf16_load(p + LANES)};
#endif
    return widen(kind, n == UNIT ? h2_load(p) : h2_load_n(p, n));
}

#if defined(READS_AHEAD)
FN_INLINE void fetch_ahead(int kind, int64_t ahead, const void *row, int64_t i) {
    const char *p = (const char *)row + i * (kind == F32 ? 4 : 2) + ahead;
    FN_PREFETCH(p);
    if (kind == F32) FN_PREFETCH(p + sizeof(V));
}
FN_INLINE U u_read(int kind, int64_t ahead, const void *row, int64_t i, int n) {
    fetch_ahead(kind, ahead, row, i);
    return u_load(kind, row, i, n);
}
#endif

FN_INLINE U u_store(int kind, void *row, int64_t i, int n, U value) {
    if (kind == F32) {
        float *p = (float *)row + i;
        if (n == UNIT) {
            v_store(p, value.a);
            v_store(p + LANES, value.b);
        } else if (n <= LANES) {
            v_store_n(p, n, value.a);
        } else {
            v_store(p, value.a);
            v_store_n(p + LANES, n - LANES, value.b);
        }
        return value;
    }
    uint16_t *p = (uint16_t *)row + i;
#if defined(HALVES_FROM_MEMORY)
    if (kind == F16 && n == UNIT) return (U){f16_store(p, value.a), f16_store(p + LANES, value.b)};
    if (kind == BF16 && n == UNIT) return (U){bf16_store(p, value.a), bf16_store(p + LANES, value.b)};
#endif
    H2 h = narrow(kind, value);
    if (n == UNIT) h2_store(p, h);
    else h2_store_n(p, n, h);
    return widen(kind, h);
}

#if defined(ADDS_F16)
FN_INLINE U u_add_f16(int64_t ahead, const void *x, const void *y, void *sum, int64_t i, int n) {
    fetch_ahead(F16, ahead, x, i);
    fetch_ahead(F16, ahead, y, i);
    const uint16_t *a = (const uint16_t *)x + i, *b = (const uint16_t *)y + i;
    H2 h = n == UNIT ? h2_add_f16(h2_load(a), h2_load(b)) : h2_add_f16(h2_load_n(a, n), h2_load_n(b, n));
    if (n == UNIT) h2_store((uint16_t *)sum + i, h);
    else h2_store_n((uint16_t *)sum + i, n, h);
    return widen(F16, h);
}
#endif

#if defined(STREAMS)
FN_INLINE U u_stream(int kind, void *row, int64_t i, int n, U value) {
    if (n != UNIT) return u_store(kind, row, i, n, value);
    if (kind == F32) {
        v_stream((float *)row + i, value.a);
        v_stream((float *)row + i + LANES, value.b);
    } else {
        h2_stream((uint16_t *)row + i, narrow(kind, value));
    }
    return value;
}
#endif

FN_INLINE U u_swap(int by_parity, U u) {
#if LANES == 1
    return (void)by_parity, (U){u.b, u.a};
#else
    return by_parity ? (U){u.b, u.a} : (U){v_swap(u.a), v_swap(u.b)};
#endif
}

/* By parity, neighbours are in different vectors, which are therefore added last. */
FN_INLINE float u_halve(int by_parity, U u) {
    if (by_parity) return v_halve(u.a) + v_halve(u.b);
    return v_halve(v_add(u.a, u.b));
}
