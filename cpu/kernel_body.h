/*
 * The kernels, written once. A file kernel_<isa>.c defines ISA and the operations below for its
 * instruction set (most by way of pairs.h) and then includes this file. Work is done in units, as
 * many floats as the instruction set likes to hold at once.
 *
 *   UNIT                       floats in a unit: a power of two that divides 128, known when the
 *                              program runs
 *   U                          a unit; never in an array or a struct, since SVE's types have no size
 *   u_set1 u_add u_mul         each one correctly rounded IEEE operation
 *   u_round                    to a 16-bit kind, to nearest even, and back
 *   u_load                     widens n <= UNIT elements of a row, and fills up with +0
 *   u_store                    rounds, stores n <= UNIT elements, and returns what was stored; only
 *                              results of u_add and u_mul are ever rounded (here and by u_round)
 *   u_halve                    v[:n/2] + v[n/2:] until one value is left
 *
 * and, where memory wants to be read otherwise than the caches, READS or READS_AHEAD and
 *
 *   u_read                     u_load, for what no cache holds yet
 *
 * and, where the second pass of a row is better not made together with the first of the next, ROW_BY_ROW;
 *
 * and, where float16 can be added without widening, with the same bits, ADDS_F16 and
 *
 *   u_add_f16                  rounds x + y to float16, stores it, and returns what was stored
 *
 * and, where u_load and u_store know the kind BF16P, BF16_BY_PARITY; and, where an ordinary store would
 * first read the line that it overwrites, STREAMS and
 *
 *   u_stream                   like u_store, but past the caches where n is UNIT; on a border of 64 bytes
 *   u_stream_end               makes other threads see what u_stream has stored
 *
 * and, where it is cheaper to halve a whole batch of units at once, HALVES_ROWS and
 *
 *   halve_rows                 u_halve of each of BATCH units, which are stored as floats one after the other
 *
 * and, where UNIT is not known to the compiler, OPAQUE_INDEX and
 *
 *   u_index                    the same index, but what it was computed from is hidden from the compiler
 *
 * Sums of a segment follow the spec's tree: v = v[:n/2] + v[n/2:]. Elements that are 128 or more apart
 * are added as whole units, down to UNIT apart in `sum_units`, and the rest in `u_halve`.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "kinds.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

#if !defined(READS) && !defined(READS_AHEAD)
#define u_read u_load
#endif

#if !defined(READS_AHEAD)
#define READS_AHEAD 0
#endif

#if !defined(ROW_BY_ROW)
#define ROW_BY_ROW 0
#endif

#if !defined(ADDS_F16)
#define ADDS_F16 0
#define u_add_f16(x, y, sum, i, n) u_set1(0)
#endif

#if !defined(STREAMS)
#define STREAMS 0
#define u_stream u_store
#define u_stream_end() ((void)0)
#endif

#if !defined(OPAQUE_INDEX)
#define u_index(i) (i)
#endif

enum { BATCH = 8 }; /* rows that go through the passes together, at most */

/* Keeps GCC from unrolling a loop so far that vectors no longer fit the registers. */
#if defined(__GNUC__) && !defined(__clang__)
#define FN_ROLLED _Pragma("GCC unroll 1")
#else
#define FN_ROLLED
#endif

#define FN_JOIN_(a, b) a##_##b
#define FN_JOIN(a, b) FN_JOIN_(a, b)

/* The first three levels of a tree, over eight units that lie `apart` from each other. */
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

/* What few calls write besides. */
struct aside {
    float *h; /* where to keep h, or NULL if the second pass can read it from an operand */
    void *streamed; /* NULL, or where residual_out goes as well, past the caches */
};

/*
 * One row's operands. The row that is normalised, h, is residual_out as float; the sum before
 * rounding (without round_sum); or x where there is no residual.
 */
struct row {
    const void *x, *residual;
    void *residual_out;
    const struct aside *aside; /* NULL: nothing else is to be written */
    float *sums; /* one per segment */
};

/* `near`: whether caches hold the operands. */
FN_INLINE U add_residual(int x, int residual, int round_sum, int near, const struct row *row, int64_t i, int n) {
    U h;
    if (ADDS_F16 && x == F16 && residual == F16 && round_sum) {
        h = u_add_f16(row->x, row->residual, row->residual_out, i, n);
        if (STREAMS && row->aside && row->aside->streamed) u_stream(F16, row->aside->streamed, i, n, h);
    } else {
        h = near ? u_load(x, row->x, i, n) : u_read(x, row->x, i, n);
        if (residual != NONE) {
            h = u_add(h, near ? u_load(residual, row->residual, i, n) : u_read(residual, row->residual, i, n));
            U rounded = u_store(residual, row->residual_out, i, n, h);
            if (STREAMS && row->aside && row->aside->streamed) u_stream(residual, row->aside->streamed, i, n, h);
            if (round_sum) h = rounded;
        }
    }
    if ((residual == NONE ? x : residual) != F32 && row->aside && row->aside->h) u_store(F32, row->aside->h, i, UNIT, h);
    return h;
}

/* A unit of h, after add_residual has been there. */
FN_INLINE U h_at(int x, int residual, int round_sum, const struct row *row, int64_t i) {
    if (residual == NONE) return u_load(x, row->x, i, UNIT);
    if (residual == F32 || round_sum) return u_load(residual, row->residual_out, i, UNIT);
    return u_load(F32, row->aside->h, i, UNIT);
}

/* From the sum of a row's squares. */
FN_INLINE float rstd_of(float sum, int64_t hidden, double eps) { return 1.0f / sqrtf(sum / (float)hidden + (float)eps); }

/* What the second pass of one row needs. */
struct scale {
    float rstd, offset;
    const void *h, *weight;
    void *out;
    int stream; /* whether it goes past the caches */
    const char *next_x, *next_residual; /* what to fetch meanwhile; h if nothing */
};

FN_INLINE void scale_unit(int h, int norm, int weight, int offset, int out, const struct scale *s, int64_t i, int n,
                          int stream) {
    /* Floats that were stored by parity have n elements in both halves of a unit, and room for all of it. */
    U y = u_mul(u_load(h, s->h, i, h == F32 && out == BF16P ? UNIT : n), u_set1(s->rstd));
    if (norm != NONE) y = u_round(norm, y);
    if (weight != NONE) {
        U g = u_load(weight, s->weight, i, weight == F32 && out == BF16P ? UNIT : n);
        if (offset) g = u_add(g, u_set1(s->offset));
        y = u_mul(y, g);
    }
    if (STREAMS && stream) u_stream(out, s->out, i, n, y);
    else u_store(out, s->out, i, n, y);
}

/* Part of the second pass of the row before, of the same kind; its weight is float. */
FN_INLINE void scale_eight(int kind, int norm, const struct scale *before, int64_t i) {
    for (int k = 0; k < 8; k++) scale_unit(kind, norm, F32, 0, kind, before, u_index(i + k * UNIT), UNIT, before->stream);
}

FN_INLINE U u_square(U u) { return u_mul(u, u); }

/* The sum of eight squares that are 128 elements apart: the first three levels of a segment's tree. */
FN_INLINE U column(int x, int residual, int round_sum, const struct row *row, int64_t i) {
#define SQUARE(k) u_square(h_at(x, residual, round_sum, row, u_index(i + (k))))
    return SUM_OF_EIGHT(SQUARE, 128);
#undef SQUARE
}

/*
 * Adds the segment at `i` and squares the one before it, by turns: memory is read in order, which is
 * what its prefetchers want, and waiting for it overlaps with work on what the cache holds already: with the second pass
 * of the row before, too, unless `before` is NULL.
 */
FN_INLINE void add_and_square(int x, int residual, int round_sum, const struct row *row, int64_t i, int add, int square,
                              float *columns, int norm, const struct scale *before) {
    FN_ROLLED
    for (int c = 0; c < 128; c += UNIT) {
        if (add)
            for (int k = 0; k < 8; k++) add_residual(x, residual, round_sum, 0, row, u_index(i + 8 * c + k * UNIT), UNIT);
        if (square) u_store(F32, columns, c, UNIT, column(x, residual, round_sum, row, i - FN_SEGMENT + c));
        if (add && before) scale_eight(x, norm, before, i + 8 * c);
    }
}

/*
 * The sums of the squares of `segments` whole segments of float that caches hold: each unit is squared when it is
 * added, in the order of the tree, which eight streams of reads follow. 16-bit values gain nothing: they are widened
 * once more either way.
 */
FN_INLINE void sum_near_segments(int x, int residual, int round_sum, const struct row *row, int64_t segments, int norm,
                                 const struct scale *before) {
    _Alignas(64) float columns[128];
    for (int64_t s = 0; s < segments; s++) {
        FN_ROLLED
        for (int c = 0; c < 128; c += UNIT) {
#define SQUARE(k) u_square(add_residual(x, residual, round_sum, 1, row, u_index(s * FN_SEGMENT + c + (k)), UNIT))
            u_store(F32, columns, c, UNIT, SUM_OF_EIGHT(SQUARE, 128));
#undef SQUARE
            if (before) scale_eight(x, norm, before, s * FN_SEGMENT + 8 * c);
        }
        row->sums[s] = u_halve(x == BF16P, sum_units(columns, 128));
    }
}

/* The sums of the squares of `segments` whole segments. */
FN_INLINE void sum_segments(int x, int residual, int round_sum, const struct row *row, int64_t segments, int norm,
                            const struct scale *before) {
    _Alignas(64) float columns[128];
    if (segments == 0) return;
    add_and_square(x, residual, round_sum, row, 0, 1, 0, columns, norm, before);
    for (int64_t s = 1; s < segments; s++) {
        add_and_square(x, residual, round_sum, row, s * FN_SEGMENT, 1, 1, columns, norm, before);
        row->sums[s - 1] = u_halve(x == BF16P, sum_units(columns, 128));
    }
    add_and_square(x, residual, round_sum, row, segments * FN_SEGMENT, 0, 1, columns, norm, NULL);
    row->sums[segments - 1] = u_halve(x == BF16P, sum_units(columns, 128));
}

FN_INLINE U add_and_square_unit(int x, int residual, int round_sum, const struct row *row, int64_t i, int n) {
    return u_square(add_residual(x, residual, round_sum, 0, row, u_index(i), n));
}

/* The squares of the last n < FN_SEGMENT elements, added up to a unit. */
FN_INLINE U sum_short_segment(int x, int residual, int round_sum, const struct row *row, int64_t begin, int64_t n) {
    _Alignas(64) float squares[FN_SEGMENT];
    int64_t i = 0, width = UNIT;
    while (width < n) width *= 2;
    for (; i + UNIT <= n; i += UNIT)
        u_store(F32, squares, i, UNIT, add_and_square_unit(x, residual, round_sum, row, begin + i, UNIT));
    if (i < n) {
        u_store(F32, squares, i, UNIT, add_and_square_unit(x, residual, round_sum, row, begin + i, (int)(n - i)));
        i += UNIT;
    }
    for (; i < width; i += UNIT) u_store(F32, squares, i, UNIT, u_set1(0));
    return sum_units(squares, width);
}

/*
 * First pass over a row: residual_out, h if it is kept, and the sum of the squares of h. With the second pass of the row
 * `before`, of the same kind, unless that is NULL.
 */
FN_INLINE float sum_row(int x, int residual, int round_sum, int far, const struct row *row, int64_t hidden, int norm,
                        const struct scale *before) {
    int64_t segments = hidden / FN_SEGMENT, sums = segments, i = segments * FN_SEGMENT;
    if (READS_AHEAD && x == F32 && residual != BF16 && residual != F16 && !far)
        sum_near_segments(x, residual, round_sum, row, segments, norm, before);
    /* GCC does not take the test of every unit out of the loops by itself, unless they are small. */
    else if (!STREAMS && (residual == NONE ? x : residual) != F32 && row->aside)
        sum_segments(x, residual, round_sum, row, segments, norm, before);
    else
        sum_segments(x, residual, round_sum, row, segments, norm, before);
    if (i < hidden) row->sums[sums++] = u_halve(x == BF16P, sum_short_segment(x, residual, round_sum, row, i, hidden - i));
    if (before) {
        for (; i + UNIT <= hidden; i += UNIT) scale_unit(x, norm, F32, 0, x, before, i, UNIT, before->stream);
        if (i < hidden) scale_unit(x, norm, F32, 0, x, before, i, (int)(hidden - i), 0);
    }
    return halve_sums(row->sums, sums);
}

/*
 * Some rows that follow each other, few enough for the nearest cache if they are short: what one row waits for between
 * the passes (the last levels of its sum, a root, a division) overlaps with work on the others. Twice as many bytes
 * were slower from memory.
 */
enum { BATCH_BYTES = 16 * 1024 };
struct batch {
    int64_t rows;
    float *kept, *sums; /* scratch: rows of h, or NULL if they are not kept; sums of segments */
    const char *h; /* the rows of h for the second pass */
    int64_t h_stride; /* in bytes */
    int stream; /* whether out goes past the caches */
    char *streamed; /* NULL, or where rows of residual_out go past them too, the job's own being scratch then */
    int64_t streamed_stride;
    float rstd[BATCH]; /* the sums of squares until the first pass is over */
};

static int64_t padded(int64_t hidden) { return (hidden + 127) / 128 * 128; }

static int64_t batch_rows(const struct fn_forward_job *job) {
    int64_t element = fn_element_size(job->x_kind) + fn_element_size(job->residual_kind), room = padded(job->hidden);
    int64_t rows = BATCH_BYTES / element < FN_KEPT ? BATCH_BYTES / element / room : FN_KEPT / room;
    return rows < 1 ? 1 : rows < BATCH ? rows : BATCH;
}

/* First pass over the rows. */
FN_INLINE void sum_rows(int x, int residual, int round_sum, const struct fn_forward_job *job, struct batch *batch) {
    int far = job->far;
    int64_t hidden = job->hidden;
    for (int64_t k = 0; k < batch->rows; k++) {
        const struct aside aside = {
            .h = batch->kept ? (float *)((char *)batch->kept + k * batch->h_stride) : NULL,
            .streamed = batch->streamed ? batch->streamed + k * batch->streamed_stride : NULL,
        };
        const struct row row = {
            .x = job->x + k * job->x_stride,
            .residual = residual == NONE ? NULL : job->residual + k * job->residual_stride,
            .residual_out = residual == NONE ? NULL : job->residual_out + k * job->residual_out_stride,
            .aside = aside.h || aside.streamed ? &aside : NULL,
            .sums = batch->sums,
        };
        batch->rstd[k] = sum_row(x, residual, round_sum, far, &row, hidden, NONE, NULL);
    }
}

/* A row from its end to its beginning, because the end is what the nearest cache still holds. */
FN_INLINE void scale_row(int h, int norm, int weight, int offset, int out, const struct scale *s, int64_t hidden,
                         int stream) {
    int64_t i = hidden / UNIT * UNIT;
    if (i < hidden) scale_unit(h, norm, weight, offset, out, s, i, (int)(hidden - i), 0);
    for (int64_t done = 0; (i = u_index(i - UNIT)) >= 0; done += 2 * UNIT) {
        if (READS_AHEAD && out != F32) {
            FN_PREFETCH_2(s->next_x + done);
            FN_PREFETCH_2(s->next_residual + done);
        }
        scale_unit(h, norm, weight, offset, out, s, i, UNIT, stream);
    }
}

/*
 * Second pass over the rows: out. `norm` is the type that h * rstd is rounded to, or NONE. Backwards is not where the
 * processor expects a row to go on: the next one is fetched meanwhile, if it comes from memory, is long enough for that
 * to matter, and short enough to stay in the second cache.
 */
FN_INLINE void scale_rows(int h, int norm, int weight, int offset, int out, const struct fn_forward_job *job,
                          const struct batch *batch) {
    int64_t hidden = job->hidden;
    int ahead = job->far && hidden >= FN_SEGMENT && hidden <= 8 * FN_SEGMENT;
    for (int64_t k = 0; k < batch->rows; k++) {
        const struct scale s = {
            .rstd = batch->rstd[k],
            .offset = (float)job->weight_offset,
            .h = batch->h + k * batch->h_stride,
            .weight = job->weight,
            .out = job->out + k * job->out_stride,
            .next_x = ahead ? job->x + (k + batch->rows) * job->x_stride : batch->h,
            .next_residual = ahead && job->residual ? job->residual + (k + batch->rows) * job->residual_stride : batch->h,
        };
        if (STREAMS && batch->stream) scale_row(h, norm, weight, offset, out, &s, hidden, 1);
        else scale_row(h, norm, weight, offset, out, &s, hidden, 0);
    }
}

/*
 * One function per combination of types, so that each is compiled with its types known. ROUND_SUM
 * has no effect on the bits when the residual is float or absent, hence the shorter list. The second
 * pass reads h as float, or straight from an operand of out's type, which is how most calls are.
 */
typedef void sum_fn(const struct fn_forward_job *, struct batch *);
typedef void scale_fn(const struct fn_forward_job *, const struct batch *);

#define SUM(x, residual, round_sum)                                                                    \
    static void sum_##x##_##residual##_##round_sum(const struct fn_forward_job *job, struct batch *batch) { \
        sum_rows(x, residual, round_sum, job, batch);                                                  \
    }
#define SUMS(x) SUM(x, NONE, 0) SUM(x, F32, 0) SUM(x, F16, 0) SUM(x, F16, 1) SUM(x, BF16, 0) SUM(x, BF16, 1)
SUMS(F32) SUMS(F16) SUMS(BF16)

#define SUM_ROW(x)                                                                                     \
    {                                                                                                  \
        [NONE] = {sum_##x##_NONE_0, sum_##x##_NONE_0}, [F32] = {sum_##x##_F32_0, sum_##x##_F32_0},      \
        [F16] = {sum_##x##_F16_0, sum_##x##_F16_1}, [BF16] = {sum_##x##_BF16_0, sum_##x##_BF16_1},     \
    }
static sum_fn *const sums[4][4][2] = {[F32] = SUM_ROW(F32), [F16] = SUM_ROW(F16), [BF16] = SUM_ROW(BF16)};

#define SCALE(h, norm, weight, offset, out)                                                            \
    static void scale_##h##_##norm##_##weight##_##offset##_##out(const struct fn_forward_job *job,      \
                                                                 const struct batch *batch) {          \
        scale_rows(h, norm, weight, offset, out, job, batch);                                          \
    }
#define SCALES_OUT(norm, weight, offset)                                                               \
    SCALE(F32, norm, weight, offset, F32)                                                              \
    SCALE(F32, norm, weight, offset, F16) SCALE(F32, norm, weight, offset, BF16)                       \
    SCALE(F16, norm, weight, offset, F16) SCALE(BF16, norm, weight, offset, BF16)
#define SCALES(norm)                                                                                   \
    SCALES_OUT(norm, NONE, 0)                                                                          \
    SCALES_OUT(norm, F32, 0) SCALES_OUT(norm, F16, 0) SCALES_OUT(norm, BF16, 0)                        \
    SCALES_OUT(norm, F32, 1) SCALES_OUT(norm, F16, 1) SCALES_OUT(norm, BF16, 1)
SCALES(NONE) SCALES(F16) SCALES(BF16)

#define SCALE_OUT(norm, weight, offset)                                                                \
    {                                                                                                  \
        [F32] = {scale_F32_##norm##_##weight##_##offset##_F32, scale_F32_##norm##_##weight##_##offset##_F32}, \
        [F16] = {scale_F32_##norm##_##weight##_##offset##_F16, scale_F16_##norm##_##weight##_##offset##_F16}, \
        [BF16] = {scale_F32_##norm##_##weight##_##offset##_BF16, scale_BF16_##norm##_##weight##_##offset##_BF16}, \
    }
#define SCALE_ROW(norm)                                                                                \
    {                                                                                                  \
        [NONE] = {SCALE_OUT(norm, NONE, 0), SCALE_OUT(norm, NONE, 0)},                                 \
        [F32] = {SCALE_OUT(norm, F32, 0), SCALE_OUT(norm, F32, 1)},                                    \
        [F16] = {SCALE_OUT(norm, F16, 0), SCALE_OUT(norm, F16, 1)},                                    \
        [BF16] = {SCALE_OUT(norm, BF16, 0), SCALE_OUT(norm, BF16, 1)},                                 \
    }
static scale_fn *const scales[4][4][2][4][2] = {
    [NONE] = SCALE_ROW(NONE), [F16] = SCALE_ROW(F16), [BF16] = SCALE_ROW(BF16)};

#if defined(BF16_BY_PARITY)
#define SCALES_PARITY(norm, weight, offset)                                                            \
    SCALE(F32, norm, weight, offset, BF16P) SCALE(BF16P, norm, weight, offset, BF16P)
SUM(BF16P, NONE, 0) SUM(BF16P, BF16P, 0) SUM(BF16P, BF16P, 1)
SCALES_PARITY(NONE, NONE, 0) SCALES_PARITY(NONE, BF16P, 0) SCALES_PARITY(NONE, BF16P, 1)
SCALES_PARITY(BF16P, NONE, 0) SCALES_PARITY(BF16P, BF16P, 0) SCALES_PARITY(BF16P, BF16P, 1)

static sum_fn *parity_sum(int residual, int round_sum) {
    if (!residual) return sum_BF16P_NONE_0;
    return round_sum ? sum_BF16P_BF16P_1 : sum_BF16P_BF16P_0;
}

#define SCALE_PARITY(norm, weight, offset) \
    {scale_F32_##norm##_##weight##_##offset##_BF16P, scale_BF16P_##norm##_##weight##_##offset##_BF16P}
static scale_fn *parity_scale(int norm, int weight, int offset, int direct) {
    static scale_fn *const found[2][3][2] = {
        {SCALE_PARITY(NONE, NONE, 0), SCALE_PARITY(NONE, BF16P, 0), SCALE_PARITY(NONE, BF16P, 1)},
        {SCALE_PARITY(BF16P, NONE, 0), SCALE_PARITY(BF16P, BF16P, 0), SCALE_PARITY(BF16P, BF16P, 1)},
    };
    return found[norm != NONE][weight == NONE ? 0 : 1 + offset][direct];
}
#endif


#include "kernel_f64.h"

/* weight + offset as float, in whole units; ones if there is no weight. */
static void widen_weight(int kind, const void *weight, float offset, int64_t hidden, float *g) {
    for (int64_t i = 0; i < hidden; i += UNIT) {
        int n = hidden - i < UNIT ? (int)(hidden - i) : UNIT;
        U u;
        if (kind == NONE) u = u_set1(1);
        else if (kind == F32) u = u_load(F32, weight, i, n);
        else if (kind == F16) u = u_load(F16, weight, i, n);
        else if (kind == BF16) u = u_load(BF16, weight, i, n);
        else u = u_load(BF16P, weight, i, n);
        if (offset != 0 && kind != NONE) u = u_add(u, u_set1(offset));
        u_store(F32, g, i, UNIT, u);
    }
}

/* Whether rows are taken by parity. */
static int by_parity(const struct fn_forward_job *job) {
#if defined(BF16_BY_PARITY)
    return job->x_kind == FN_BF16 && job->out_kind == FN_BF16 &&
           (job->residual_kind == FN_NONE || job->residual_kind == FN_BF16) &&
           (job->weight_kind == FN_NONE || job->weight_kind == FN_BF16);
#else
    return (void)job, 0;
#endif
}

/*
 * Where x, residual and out are of one kind, and the second pass reads h in one of them, the weight is widened once for
 * all rows, and there are functions for long rows and for short ones: per kind, with a residual and without, with h * rstd
 * rounded and not. Few rows are not worth it.
 */
enum { ALIKE_ROWS = 4 };
#if defined(BF16_BY_PARITY)
#define BF16_ALIKE BF16P
#else
#define BF16_ALIKE BF16
#endif
#define ALIKE_OF(fn, kind) fn(kind, NONE, NONE) fn(kind, NONE, kind) fn(kind, kind, NONE) fn(kind, kind, kind)
#define ALIKE(fn) fn(F32, NONE, NONE) fn(F32, F32, NONE) ALIKE_OF(fn, F16) ALIKE_OF(fn, BF16_ALIKE)
#define ALIKE_TABLE_OF(name, kind) ALIKE_TABLE_OF_(name, kind)
#define ALIKE_TABLE_OF_(name, kind)                            \
    {{name##_##kind##_NONE_NONE, name##_##kind##_NONE_##kind}, \
     {name##_##kind##_##kind##_NONE, name##_##kind##_##kind##_##kind}}
#define ALIKE_TABLE(name)                                                                                             \
    {[F32] = {{name##_F32_NONE_NONE}, {name##_F32_F32_NONE}}, [F16] = ALIKE_TABLE_OF(name, F16),                      \
     [BF16] = ALIKE_TABLE_OF(name, BF16_ALIKE)}

static int alike(const struct fn_forward_job *job, int64_t rows, int direct) {
#if defined(BF16_BY_PARITY)
    if (job->x_kind == FN_BF16 && !by_parity(job)) return 0;
#endif
    return !ROW_BY_ROW && rows >= ALIKE_ROWS && direct && job->x_kind == job->out_kind;
}

/*
 * Rows [begin, end) of one kind: the first pass of each together with the second of the row before it. Memory is read
 * while there is arithmetic to do, and what a row waits for between its passes overlaps with work on the other. `before`
 * is the first of them at first, and then the last, whose second pass is left.
 */
FN_INLINE void overlap_rows(int kind, int residual, int norm, const struct fn_forward_job *job, int64_t begin, int64_t end,
                            struct scale *before, char *scratch) {
    int far = job->far;
    int64_t hidden = job->hidden, kept = (int64_t)sizeof(float) * fn_kept(hidden);
    struct scale copy = *before; /* the caller's could change with every store, for all a compiler knows */
    for (int64_t m = begin; m < end; m++) {
        char *residual_out = residual == NONE ? NULL : job->residual_out + m * job->residual_out_stride;
        const struct aside aside = {.streamed = copy.stream ? residual_out : NULL};
        const struct row row = {
            .x = job->x + m * job->x_stride,
            .residual = residual == NONE ? NULL : job->residual + m * job->residual_stride,
            .residual_out = aside.streamed ? scratch + job->stream + (m - begin) % 2 * kept : residual_out,
            .aside = &aside,
            .sums = (float *)(scratch + kept),
        };
        float sum = sum_row(kind, residual, 1, far, &row, hidden, norm, &copy);
        copy.rstd = rstd_of(sum, hidden, job->eps);
        copy.h = residual == NONE ? row.x : row.residual_out;
        copy.out = job->out + m * job->out_stride;
        if (job->rstd) ((float *)job->rstd)[m] = copy.rstd;
    }
    *before = copy;
}

typedef void overlap_fn(const struct fn_forward_job *, int64_t, int64_t, struct scale *, char *);
#define OVERLAP(kind, residual, norm)                                                                              \
    static void overlap_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, int64_t end, \
                                                     struct scale *before, char *scratch) {                        \
        overlap_rows(kind, residual, norm, job, begin, end, before, scratch);                                      \
    }
ALIKE(OVERLAP)
static overlap_fn *const overlaps[4][2][2] = ALIKE_TABLE(overlap);

/* The squares of a row, added up to a unit; in registers, where it is as long as heads often are. */
FN_INLINE U sum_short_row(int kind, int residual, const struct row *row, int64_t hidden) {
#define SQUARE(k) add_and_square_unit(kind, residual, 1, row, UNIT * (k), UNIT)
    if (hidden == 2 * UNIT) return u_add(SQUARE(0), SQUARE(1));
    if (hidden == 4 * UNIT) return u_add(u_add(SQUARE(0), SQUARE(2)), u_add(SQUARE(1), SQUARE(3)));
    if (hidden == 8 * UNIT) return SUM_OF_EIGHT(SQUARE, 1);
#undef SQUARE
    return sum_short_segment(kind, residual, 1, row, 0, hidden);
}

/*
 * Rows [begin, end) of one kind, shorter than a segment. The last levels of some rows' trees are halved together, and
 * their roots are taken together.
 */
FN_INLINE void short_rows(int kind, int residual, int norm, int64_t hidden, const struct fn_forward_job *job, int64_t begin,
                          int64_t end, const void *weight) {
    _Alignas(64) float units[BATCH * 128], rstd[BATCH];
    int64_t batch = batch_rows(job);
    for (int64_t m = begin; m < end; m += batch) {
        int64_t rows = end - m < batch ? end - m : batch;
        for (int64_t k = 0; k < rows; k++) {
            const struct row row = {
                .x = job->x + (m + k) * job->x_stride,
                .residual = residual == NONE ? NULL : job->residual + (m + k) * job->residual_stride,
                .residual_out = residual == NONE ? NULL : job->residual_out + (m + k) * job->residual_out_stride,
            };
            u_store(F32, units, k * UNIT, UNIT, sum_short_row(kind, residual, &row, hidden));
        }
        for (int64_t k = rows; k < BATCH; k++) u_store(F32, units, k * UNIT, UNIT, u_set1(0)); /* no rows */
        halve_rows(kind == BF16P, units, rstd);
        for (int k = 0; k < BATCH; k++) rstd[k] = rstd_of(rstd[k], hidden, job->eps);
        if (job->rstd) memcpy((float *)job->rstd + m, rstd, (size_t)rows * sizeof(float));
        for (int64_t k = 0; k < rows; k++) {
            const struct scale s = {
                .rstd = rstd[k],
                .h = residual == NONE ? job->x + (m + k) * job->x_stride
                                      : job->residual_out + (m + k) * job->residual_out_stride,
                .weight = weight,
                .out = job->out + (m + k) * job->out_stride,
            };
            int64_t i = 0;
            for (; i + UNIT <= hidden; i += UNIT) scale_unit(kind, norm, F32, 0, kind, &s, u_index(i), UNIT, 0);
            if (i < hidden) scale_unit(kind, norm, F32, 0, kind, &s, i, (int)(hidden - i), 0);
        }
    }
}

/* The lengths that heads have most often are known to the compiler. */
typedef void short_fn(const struct fn_forward_job *, int64_t, int64_t, const void *);
#define SHORT(kind, residual, norm)                                                                              \
    static void short_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, int64_t end, \
                                                   const void *weight) {                                         \
        if (job->hidden == 64) short_rows(kind, residual, norm, 64, job, begin, end, weight);                    \
        else if (job->hidden == 128) short_rows(kind, residual, norm, 128, job, begin, end, weight);             \
        else if (job->hidden == 256) short_rows(kind, residual, norm, 256, job, begin, end, weight);             \
        else short_rows(kind, residual, norm, job->hidden, job, begin, end, weight);                             \
    }
ALIKE(SHORT)
static short_fn *const shorts[4][2][2] = ALIKE_TABLE(short);

static overlap_fn *overlap_for(const struct fn_forward_job *job, int64_t rows, int norm, int direct) {
    if (job->hidden < FN_SEGMENT || !alike(job, rows, direct)) return NULL;
    return overlaps[job->x_kind][job->residual_kind != FN_NONE][norm != FN_NONE];
}

/* For outputs that stay in the caches. */
static short_fn *short_for(const struct fn_forward_job *job, int64_t rows, int norm, int direct) {
    if (job->hidden >= FN_SEGMENT || job->stream || !alike(job, rows, direct)) return NULL;
    return shorts[job->x_kind][job->residual_kind != FN_NONE][norm != FN_NONE];
}

static void forward_rows(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    if (job->x_kind == FN_F64) {
        forward_rows_f64(job, begin, end, scratch);
        return;
    }
    int round_sum = job->flags & FN_ROUND_SUM ? 1 : 0, offset = (float)job->weight_offset != 0;
    int norm = job->flags & FN_ROUND_NORM && job->x_kind != FN_F32 ? job->x_kind : FN_NONE;
    /* Which operand h is, unless it is a sum before rounding, and whether the second pass can read it there. */
    int residual = job->residual_kind, h_kind = residual ? residual : job->x_kind;
    int operand = !residual || round_sum || residual == FN_F32;
    int direct = operand && h_kind == job->out_kind;
    int keep = !direct && !(operand && h_kind == FN_F32);
    sum_fn *sum = sums[job->x_kind][residual][round_sum];
    scale_fn *scale = scales[norm][job->weight_kind][offset][job->out_kind][direct];
#if defined(BF16_BY_PARITY)
    if (by_parity(job)) {
        sum = parity_sum(residual, round_sum);
        scale = parity_scale(norm, job->weight_kind, offset, direct);
    }
#endif
    overlap_fn *overlap = overlap_for(job, end - begin, norm, direct);
    short_fn *brief = short_for(job, end - begin, norm, direct);
    struct scale before = {.weight = job->weight, .stream = STREAMS && job->stream};
    if ((overlap || brief) && (job->weight_kind != FN_F32 || offset)) {
        int kind = job->weight && by_parity(job) ? (int)BF16P : job->weight_kind;
        /* where rows that are kept would be */
        widen_weight(kind, job->weight, (float)job->weight_offset, job->hidden, scratch);
        before.weight = scratch;
    }
    if (brief) {
        brief(job, begin, end, before.weight);
        return;
    }
    int64_t hidden = job->hidden, room = padded(hidden), rows = overlap ? 1 : batch_rows(job);
    struct batch batch = {
        .kept = keep ? scratch : NULL, .sums = (float *)scratch + fn_kept(hidden), .stream = STREAMS && job->stream,
    };
    for (int64_t m = begin; m < end; m += rows) {
        struct fn_forward_job part = *job;
        part.x += m * job->x_stride;
        part.out += m * job->out_stride;
        if (residual) {
            part.residual += m * job->residual_stride;
            part.residual_out += m * job->residual_out_stride;
        }
        if (batch.stream && residual) {
            batch.streamed = part.residual_out;
            batch.streamed_stride = job->residual_out_stride;
            part.residual_out = (char *)scratch + job->stream + (overlap ? 4 * room : 0); /* where the second pass finds h */
            part.residual_out_stride = 4 * room;
        }
        batch.rows = end - m < rows ? end - m : rows;
        batch.h_stride = keep ? 4 * room : residual ? part.residual_out_stride : job->x_stride;
        sum(&part, &batch);
        for (int64_t k = 0; k < batch.rows; k++)
            batch.rstd[k] = rstd_of(batch.rstd[k], hidden, job->eps);
        if (job->rstd) memcpy((float *)job->rstd + m, batch.rstd, (size_t)batch.rows * sizeof(float));
        batch.h = keep ? scratch : residual ? part.residual_out : part.x;
        if (overlap) {
            before.rstd = batch.rstd[0];
            before.h = batch.h;
            before.out = part.out;
            overlap(job, m + 1, end, &before, scratch);
            batch.rstd[0] = before.rstd;
            batch.h = before.h;
            part.out = before.out;
            m = end;
        }
        scale(&part, &batch);
    }
    if (batch.stream) u_stream_end();
}

#include "backward_body.h"

const struct fn_kernels FN_JOIN(fn_kernels, ISA) = {
    forward_rows, backward_begin, backward_rows, backward_flush, backward_end};
