/* Log-probabilities, as fusednorm/calls/c_abi.py packs them: docs/spec.md, section 11. All fields have 8 bytes. */
#ifndef FUSEDNORM_LOG_PROB_H
#define FUSEDNORM_LOG_PROB_H

#include <string.h>

#include "abi/call.h"

/*
 * The operands. OUT: rows of log_softmax, or its input's gradient, or numbers. D is of rows or of numbers. Numbers of ids have
 * `count` for each row, the others one; they follow each other, but the stride of TEMPERATURE, D and DH may be 0, where all
 * numbers are one. M and S may be absent in a forward pass. For SUMS, m is given, and OUT and H have one for each segment.
 * DH of log_softmax: of parts of rows, the sums of whole rows of D.
 */
enum {
    FN_LOGITS, FN_LOG_PROB_OUT, FN_LOG_PROB_IDS, FN_LOG_PROB_TEMPERATURE, FN_LOG_PROB_M, FN_LOG_PROB_S, FN_LOG_PROB_H,
    FN_LOG_PROB_D, FN_LOG_PROB_DH, FN_LOG_PROB_OPERANDS
};

struct fn_log_prob {
    int64_t pass, operation; /* enum fn_log_prob_of */
    int64_t wide; /* whether all is computed in float64 */
    int64_t threads, rows, inner, hidden; /* as in struct fn_call */
    int64_t id_size, count; /* the bytes of an id, and how many there are of each row */
    int64_t first, size; /* of a part of a row: the place of its first logit in the row, and the whole row's length; else 0 */
    int64_t ignores, ignore_index; /* whether there is an id that is ignored, and that */
    double softcap; /* 0: there is none */
    struct fn_operand operand[FN_LOG_PROB_OPERANDS];
};

/* The room for the sums of a row's segments, and for those of the entropy, in numbers. */
static inline int64_t fn_log_prob_sums(int64_t hidden) {
    int64_t sums = 8;
    while (sums * 1024 < hidden) sums *= 2;
    return sums;
}

/* An id of all rows' ids, and whether it is ignored. */
static inline int64_t fn_id_at(const struct fn_log_prob *job, int64_t i) {
    const char *const at = (const char *)job->operand[FN_LOG_PROB_IDS].address + i * job->id_size;
    int32_t narrow;
    int64_t wide;
    if (job->id_size == sizeof wide) return memcpy(&wide, at, sizeof wide), wide;
    return memcpy(&narrow, at, sizeof narrow), narrow;
}
static inline int fn_is_ignored(const struct fn_log_prob *job, int64_t id) { return job->ignores && id == job->ignore_index; }

/*
 * Computes row m, whose logits lie at `x`; `out` and `d` are its rows, or the first numbers of all rows. `next`: the logits that
 * are read after it and fetched meanwhile, or NULL.
 */
typedef void fn_log_prob_row(const struct fn_log_prob *job, int64_t m, const char *x, char *out, const char *d, void *sums,
                             const char *next);

#endif
