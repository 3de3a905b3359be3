/* A declared operation of rows, or its gradient, as fusednorm/calls/c_abi.py packs it. All fields have 8 bytes. */
#ifndef FUSEDNORM_DECLARED_H
#define FUSEDNORM_DECLARED_H

#include <string.h>

#include "abi/call.h"
#include "abi/int8_dots.h"

/*
 * The operands: those of the declaration, the rows first, then its results. In a backward pass operands are followed by results
 * that are kept, by incoming gradients, and by gradients of operands, in their order. Absent ones keep their places.
 */
enum { FN_DECLARED_OPERANDS = 16, FN_DECLARED_FLAGS = 16 };

/*
 * Those of log-probabilities, docs/spec.md, section 11; each of these operations has places for all. The numbers of a row's ids
 * lie as the ids do. A stride of 0 of TEMPERATURE, D and D_ENTROPY says that all their numbers are one.
 */
enum {
    FN_LOGITS, FN_LOG_PROB_IDS, FN_LOG_PROB_TEMPERATURE, FN_LOG_PROB_OUT, FN_LOG_PROB_ENTROPY_OUT, FN_LOG_PROB_M, FN_LOG_PROB_S,
    FN_LOG_PROB_ENTROPY
};

/* D_ENTROPY of log_softmax: of parts of rows, the sums of whole rows of D. */
enum {
    FN_LOG_PROB_KEPT_M = FN_LOG_PROB_TEMPERATURE + 1, FN_LOG_PROB_KEPT_S, FN_LOG_PROB_KEPT_ENTROPY, FN_LOG_PROB_D,
    FN_LOG_PROB_D_ENTROPY, FN_DLOGITS
};

/* Of SUMS: m is given, and the others have a number for each segment. */
enum { FN_SUMS_M = FN_LOG_PROB_TEMPERATURE + 1, FN_SUMS_OUT, FN_SUMS_ENTROPY };

/* Of modulate. */
enum {
    FN_MODULATE_Y, FN_MODULATE_SCALE, FN_MODULATE_SHIFT, FN_MODULATE_OUT, FN_MODULATE_D = FN_MODULATE_OUT, FN_MODULATE_DY,
    FN_MODULATE_DSCALE, FN_MODULATE_DSHIFT, FN_MODULATE_OPERANDS
};

/* Of linear: the weight has `columns` rows. */
enum { FN_LINEAR_X, FN_LINEAR_WEIGHT, FN_LINEAR_BIAS, FN_LINEAR_OUT };

/* Of int8_linear, whose scales and zero points are one for each row. */
enum {
    FN_INT8_LINEAR_Q, FN_INT8_LINEAR_SCALE, FN_INT8_LINEAR_WEIGHT, FN_INT8_LINEAR_WEIGHT_SCALE, FN_INT8_LINEAR_BIAS,
    FN_INT8_LINEAR_ZERO_POINT, FN_INT8_LINEAR_OUT
};

/* The flags of each. */
enum { FN_LOG_PROB_SOFTCAP, FN_LOG_PROB_IGNORE_INDEX };
enum { FN_MODULATE_ROUND_STEPS };

/* Whole numbers and booleans are `whole`. */
union fn_value {
    double number;
    int64_t whole;
};

/*
 * Row m of an operand begins where fn_row_of says; one that has no rows of N has other rows, such as K ids, or one number, which
 * are as long as its stride. All rows, or those of a sample or of a head, may be one, and then share memory.
 */
struct fn_declared {
    int64_t pass, operation; /* enum fn_declared_of */
    int64_t wide; /* whether all is computed in float64 */
    int64_t threads, rows, inner, hidden; /* as in struct fn_call */
    int64_t first, size; /* of a part of a row: the place of its first element in the row, and the whole row's length; else 0 */
    /*
     * A bit for each operand: gradients that are sums over rows. Their rows follow each other, and each is the sum over
     * `outer_stride` rows that lie `stride` rows apart: 1, or as many as there are heads.
     */
    int64_t sums;
    int64_t given; /* a bit for each flag that is not None */
    int64_t columns; /* of products: the elements of a row of the result; else 0 */
    union fn_value flag[FN_DECLARED_FLAGS]; /* in their declared order; 0 for None */
    struct fn_operand operand[FN_DECLARED_OPERANDS];
};

_Static_assert(sizeof(struct fn_call) + sizeof(struct fn_declared) <= FN_PACKED * sizeof(struct fn_call), "FN_PACKED has room for both");

/* The numbers of a row's segments, padded to a power of two. */
static inline int64_t fn_numbers_of_segments(int64_t hidden) {
    int64_t numbers = 8;
    while (numbers * FN_SEGMENT < hidden) numbers *= 2;
    return numbers;
}

/* Number i of the whole numbers at an address. */
static inline int64_t fn_whole_at(int64_t kind, int64_t address, int64_t i) {
    int32_t narrow;
    int64_t wide;
    if (kind == FN_I64) return memcpy(&wide, (const char *)address + 8 * i, sizeof wide), wide;
    return memcpy(&narrow, (const char *)address + 4 * i, sizeof narrow), narrow;
}

/* The ids of each row; one of all rows' ids, and whether it is ignored. */
static inline int64_t fn_ids_of_row(const struct fn_declared *job) { return job->operand[FN_LOG_PROB_IDS].stride; }
static inline int64_t fn_id_at(const struct fn_declared *job, int64_t i) {
    const struct fn_operand *const ids = &job->operand[FN_LOG_PROB_IDS];
    return fn_whole_at(ids->kind, (int64_t)ids->address, i);
}
static inline int fn_is_ignored(const struct fn_declared *job, int64_t id) {
    return job->given >> FN_LOG_PROB_IGNORE_INDEX & 1 && id == job->flag[FN_LOG_PROB_IGNORE_INDEX].whole;
}

/* The operands of log-probabilities of either pass: `out` receives the results, or the gradient of logits. */
struct fn_log_prob {
    const struct fn_operand *out, *m, *s, *entropy, *d, *d_entropy;
};
static inline struct fn_log_prob fn_log_prob_of(const struct fn_declared *job) {
    static const struct fn_operand none;
    const struct fn_operand *const o = job->operand;
    if (job->pass == FN_BACKWARD)
        return (struct fn_log_prob){o + FN_DLOGITS, o + FN_LOG_PROB_KEPT_M, o + FN_LOG_PROB_KEPT_S, o + FN_LOG_PROB_KEPT_ENTROPY,
                                    o + FN_LOG_PROB_D, o + FN_LOG_PROB_D_ENTROPY};
    return (struct fn_log_prob){o + FN_LOG_PROB_OUT, o + FN_LOG_PROB_M, o + FN_LOG_PROB_S, o + FN_LOG_PROB_ENTROPY, &none, &none};
}

/* Row m of an operand. */
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
    return (whole && !job->operand[FN_LOG_PROB_D_ENTROPY].kind ? FN_SUM_SEGMENTS : 0) | FN_FIND_NUMBERS | FN_WRITE_ROW;
}

/* What is done with elements [begin, end) of a row, which are whole segments but for the row's end. */
struct fn_row_work {
    int steps;
    int64_t begin, end;
    void *shared, *room; /* of all threads that take the row: fn_declared_shared(hidden) numbers; of one: FN_DECLARED_ROOM */
    const char *next; /* the row that is read after it and fetched meanwhile, or NULL */
};
#define FN_DECLARED_ROOM (4 * FN_SEGMENT)
static inline int64_t fn_declared_shared(int64_t hidden) { return 16 + 3 * fn_numbers_of_segments(hidden); }

typedef void fn_declared_row(const struct fn_declared *job, int64_t m, const struct fn_row_work *work);

/*
 * Columns of gradients' sums that are added up together: all of them where a row's terms take the whole row. Of modulate a tile
 * for each level of the sum stays in the first cache.
 */
enum { FN_MODULATE_TILE = 512 };
static inline int64_t fn_declared_tile(const struct fn_declared *job) {
    return job->operation == FN_MODULATE_BACKWARD && job->hidden > FN_MODULATE_TILE ? FN_MODULATE_TILE : job->hidden;
}

/* Gradients, each of which has a row that is the sum over the same rows: columns of that row. */
struct fn_sums {
    int64_t wanted; /* a bit for each of these gradients */
    int with_rows; /* whether gradients that have rows are written too */
    int64_t number, first, step, rows; /* of the gradients' row; of the first row of the sum, and how many are how far apart */
    int64_t begin, n; /* columns */
    int64_t size, bytes; /* the room for a gradient's columns, in elements, and for those of all */
    /*
     * Threads may share a sum: the blocks of rows `subtree`, subtree + subtrees and so on are then added up at `shared`, where
     * there is room for all subtrees; and once all are there, subtree `subtrees` is their sum. Else `shared` is NULL.
     */
    int64_t subtree, subtrees;
    char *shared;
};

/* Adds them up in the order of docs/spec.md, section 5, and rounds them. `room`: that of a row, and then 1 + FN_LEVELS times their bytes. */
typedef void fn_declared_sums(const struct fn_declared *job, const struct fn_sums *sums, char *room);

/*
 * Products: a block has at most so many rows and columns, of which FN_PRODUCT_DEPTH elements at a time stay in the first cache. Of
 * one row, or of two that stay there together with a column, one column is taken after the other.
 */
enum { FN_PRODUCT_ROWS = 64, FN_PRODUCT_COLUMNS = 48, FN_PRODUCT_DEPTH = 640, FN_FEW_ROWS = 2, FN_SHORT_ROW = 2048 };
static inline int64_t fn_product_padded(const struct fn_declared *job) { return (job->hidden + 15) / 16 * 16; } /* to whole sums */
static inline int64_t fn_product_depth(const struct fn_declared *job) { /* in parts of equal length */
    const int64_t sums = fn_product_padded(job) / 16, parts = (16 * sums + FN_PRODUCT_DEPTH - 1) / FN_PRODUCT_DEPTH;
    return 16 * ((sums + parts - 1) / parts);
}
/* The columns of a block, which stay in the second cache: a multiple of each tile's. */
static inline int64_t fn_product_columns(const struct fn_declared *job) {
    const int64_t sixes = (job->operation == FN_INT8_LINEAR ? 32 : 8) * 1024 / fn_product_padded(job);
    return sixes >= FN_PRODUCT_COLUMNS / 6 ? FN_PRODUCT_COLUMNS : sixes > 0 ? 6 * sixes : 6;
}

/* The elements that products read, of which each is multiplied by up to four: what a call takes is near to that of so many of a norm. */
static inline int64_t fn_product_elements(const struct fn_declared *job) { return job->columns * job->hidden * ((job->rows + 3) / 4); }
/* The most multiplications of a call that Python does not divide: one thread takes about half a second for them. */
#define FN_PRODUCT_OF_A_CALL 8000000000

/* Blocks [begin, end): those of the same rows one after the other. `room` has fn_product_bytes; `dots` adds up products of int8. */
typedef void fn_declared_products(const struct fn_declared *job, const struct fn_int8_dots *dots, int64_t begin, int64_t end, char *room);
static inline int64_t fn_product_blocks(const struct fn_declared *job) {
    const int64_t columns = fn_product_columns(job);
    return (job->columns + columns - 1) / columns * ((job->rows + FN_PRODUCT_ROWS - 1) / FN_PRODUCT_ROWS);
}
/* Rows as float, as many columns as may have to be widened, and 16 sums of each product. */
static inline int64_t fn_product_bytes(const struct fn_declared *job) {
    const int64_t rows = job->rows < FN_PRODUCT_ROWS ? (job->rows + 3) / 4 * 4 : FN_PRODUCT_ROWS;
    if (job->operation == FN_INT8_LINEAR) /* rows and one of ones, and sums; those of columns have room for a row */
        return (rows + 1) * fn_int8_row(2, job->hidden) + 4 * (rows + 1) * FN_PRODUCT_COLUMNS + fn_int8_row(1, job->hidden);
    if (job->wide) return 2 * FN_PRODUCT_DEPTH * (int64_t)sizeof(double);
    return ((rows + fn_product_columns(job)) * fn_product_padded(job) + 16 * rows * FN_PRODUCT_COLUMNS) * (int64_t)sizeof(float);
}

#endif
