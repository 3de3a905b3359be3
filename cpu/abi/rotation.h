/* Heads that are normalised and rotated, as fusednorm/calls/c_abi.py packs them. All fields have 8 bytes. */
#ifndef FUSEDNORM_ROTATION_H
#define FUSEDNORM_ROTATION_H

#include "abi/call.h"

/*
 * Heads of q or of k: of each row so many, which lie one stride apart. Strides are in elements; the first two lead from
 * row to row in two levels. The weight's stride leads from a head's weight to the next head's, 0 if all share one.
 */
struct fn_heads {
    int64_t count;
    uintptr_t x;
    int64_t x_outer_stride, x_stride, x_head_stride;
    uintptr_t out;
    int64_t out_outer_stride, out_stride, out_head_stride;
    int64_t weight_kind;
    uintptr_t weight;
    int64_t weight_stride;
    uintptr_t rstd; /* 0, or one number per head, without gaps: float, double where x is */
};

enum { FN_SETS = 2 };

struct fn_rotation {
    int64_t flags;
    int64_t x_kind, out_kind;
    int64_t between; /* the kind of the rows that are rotated: x's, or that to which normalised rows are rounded */
    int64_t products; /* the kind that products are rounded to, or FN_NONE */
    int64_t threads, rows, inner, size; /* rows of heads, in two levels; elements of a head */
    int64_t pairs; /* of a head that are rotated; 0: nothing is */
    int64_t sets; /* of heads: q alone, or q and k */
    double eps, weight_offset;
    /* Rows of the tables. Where there are positions, int32 or int64, row i takes row positions[i], and the table has one level. */
    struct fn_operand cos, sin;
    int64_t position_size; /* bytes, 0: there are none */
    uintptr_t positions;
    int64_t positions_outer_stride, positions_stride;
    struct fn_heads heads[FN_SETS];
};

/* Whether everything is computed in float64. */
static inline int fn_is_wide(const struct fn_rotation *r) {
    return r->x_kind == FN_F64 || r->between == FN_F64 || r->out_kind == FN_F64;
}

/* Heads of one row, so many bytes apart. */
struct fn_row_of_heads {
    const char *x; /* of r->between */
    char *out; /* may be x */
    int64_t x_stride, out_stride, count;
};

/* Rotates r->sets of heads with a row of the tables. `scratch` has room for fn_table_bytes(r->size). */
typedef void fn_rotate_row(const struct fn_rotation *r, const void *cos, const void *sin, const struct fn_row_of_heads *sets,
                           void *scratch);

#endif
