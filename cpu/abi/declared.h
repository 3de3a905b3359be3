/* A declared operation of rows, or its gradient, as fusednorm/calls/c_abi.py packs it. All fields have 8 bytes. */
#ifndef FUSEDNORM_DECLARED_H
#define FUSEDNORM_DECLARED_H

#include <string.h>

#include "abi/call.h"

/*
 * The operands: those of the declaration, the rows first, then its results. In a backward pass operands are followed by results
 * that are kept, by incoming gradients, and by the gradient of the rows.
 */
enum { FN_DECLARED_OPERANDS = 9 };

/*
 * Those of log-probabilities have places of their own: docs/spec.md, section 11. OUT: rows of log_softmax, or its input's
 * gradient, or numbers. D is of rows or of numbers. Numbers of ids have `count` for each row, the others one; they follow each
 * other, but the stride of TEMPERATURE, D and DH may be 0, where all numbers are one. M and S may be absent in a forward pass.
 * For SUMS, m is given, and OUT and H have one for each segment.
 * DH of log_softmax: of parts of rows, the sums of whole rows of D.
 */
enum {
    FN_LOGITS, FN_LOG_PROB_OUT, FN_LOG_PROB_IDS, FN_LOG_PROB_TEMPERATURE, FN_LOG_PROB_M, FN_LOG_PROB_S, FN_LOG_PROB_H,
    FN_LOG_PROB_D, FN_LOG_PROB_DH
};

/*
 * Those of modulate: scale and shift have the rows of y, which share memory where they are of samples. Backward OUT is D, and the
 * gradients follow, each of which may be absent. Those of scale and shift are contiguous, and each of their rows is the sum over
 * `outer_stride` rows of y.
 */
enum {
    FN_MODULATE_Y, FN_MODULATE_SCALE, FN_MODULATE_SHIFT, FN_MODULATE_OUT, FN_MODULATE_D = FN_MODULATE_OUT, FN_MODULATE_DY,
    FN_MODULATE_DSCALE, FN_MODULATE_DSHIFT, FN_MODULATE_OPERANDS
};

/* Flags that are numbers, in their order, 0 for None; of log-probabilities the softcap. */
enum { FN_LOG_PROB_SOFTCAP, FN_MODULATE_ROUND_STEPS = 0, FN_NUMBERS = 2 };

/* Columns that are added up together: a tile for each level of the sum stays in the first cache. */
enum { FN_MODULATE_TILE = 512 };

struct fn_declared {
    int64_t pass, operation; /* enum fn_declared_of */
    int64_t wide; /* whether all is computed in float64 */
    int64_t threads, rows, inner, hidden; /* as in struct fn_call */
    int64_t id_size, count; /* the bytes of an id, and how many there are of each row */
    int64_t first, size; /* of a part of a row: the place of its first logit in the row, and the whole row's length; else 0 */
    int64_t ignores, ignore_index; /* whether there is an id that is ignored, and that */
    double number[FN_NUMBERS];
    struct fn_operand operand[FN_DECLARED_OPERANDS];
};

/* The sums of a row's segments, padded to a power of two. */
static inline int64_t fn_declared_sums(int64_t hidden) {
    int64_t sums = 8;
    while (sums * FN_SEGMENT < hidden) sums *= 2;
    return sums;
}

/* An id of all rows' ids, and whether it is ignored. */
static inline int64_t fn_id_at(const struct fn_declared *job, int64_t i) {
    const char *const at = (const char *)job->operand[FN_LOG_PROB_IDS].address + i * job->id_size;
    int32_t narrow;
    int64_t wide;
    if (job->id_size == sizeof wide) return memcpy(&wide, at, sizeof wide), wide;
    return memcpy(&narrow, at, sizeof narrow), narrow;
}
static inline int fn_is_ignored(const struct fn_declared *job, int64_t id) { return job->ignores && id == job->ignore_index; }

/* Row m of an operand with rows. */
static inline char *fn_row_of(const struct fn_declared *job, int operand, int64_t m) {
    const struct fn_operand *o = &job->operand[operand];
    const int64_t place = m / job->inner * o->outer_stride + m % job->inner * o->stride;
    return (char *)o->address + place * fn_element_size(o->kind);
}

/*
 * The steps of a row, in their order. Threads may take segments of one row, each step once all have made the step before; one
 * thread alone finds the numbers.
 */
enum { FN_FIND_GREATEST = 1, FN_SUM_SEGMENTS = 2, FN_FIND_NUMBERS = 4, FN_WRITE_ROW = 8 };
static inline int fn_declared_steps(const struct fn_declared *job) {
    const int whole = job->operation == FN_LOG_SOFTMAX;
    if (job->operation > FN_SELECTED_AND_ENTROPY) return 0; /* what has no steps is not divided */
    if (job->pass == FN_FORWARD) return FN_FIND_GREATEST | FN_SUM_SEGMENTS | FN_FIND_NUMBERS | (whole ? FN_WRITE_ROW : 0);
    return (whole && !job->operand[FN_LOG_PROB_DH].kind ? FN_SUM_SEGMENTS : 0) | FN_FIND_NUMBERS | FN_WRITE_ROW;
}

/* What is done with elements [begin, end) of a row, which are whole segments but for the row's end. */
struct fn_row_work {
    int steps;
    int64_t begin, end;
    void *shared, *room; /* of all threads that take the row: fn_declared_shared(hidden) numbers; of one: FN_DECLARED_ROOM */
    const char *next; /* the row that is read after it and fetched meanwhile, or NULL */
};
#define FN_DECLARED_ROOM (4 * FN_SEGMENT)
static inline int64_t fn_declared_shared(int64_t hidden) { return 16 + 3 * fn_declared_sums(hidden); }

typedef void fn_declared_row(const struct fn_declared *job, int64_t m, const struct fn_row_work *work);

/*
 * Computes columns [begin, begin + n), a tile at most, of gradients of which each row is a sum over `rows` rows, for one sample, and of dy
 * for its rows: those that have a bit in `wanted`. `sums` has room for two tiles for each level of the sum, and for two more.
 */
typedef void fn_modulate_sums(const struct fn_declared *job, int wanted, int64_t rows, int64_t sample, int64_t begin, int n, void *sums);

#endif
