/*
 * Normalises and rotates heads, a block of rows at a time: what the norm writes is still in the caches when it is rotated.
 * q and k of a row are rotated with one row of the tables, which is widened once.
 */
#include "run/run.h"
#include "machine/ieee.h"
#include "run/tuning.h"

struct run {
    const struct fn_rotation *r;
    const struct fn_kernels *kernels;
    struct fn_forward_job norm[FN_SETS]; /* of the first row's heads */
    int64_t block; /* rows */
    int passes; /* whether normalised rows are passed on in the thread's buffer: they are of another kind than out */
    size_t passed_bytes[FN_SETS], table_bytes; /* a thread's buffer: a row of the tables, the passed rows, the kernels' scratch */
};

/* A row in two levels. A division takes as long as rotating half a head. */
struct place {
    int64_t outer, inner;
};
static struct place place_of(const struct fn_rotation *r, int64_t row) {
    const int64_t outer = r->inner == r->rows ? 0 : row / r->inner;
    return (struct place){outer, row - outer * r->inner};
}
static int64_t offset(struct place at, int64_t outer_stride, int64_t stride) { return at.outer * outer_stride + at.inner * stride; }
static char *x_of(const struct fn_rotation *r, const struct fn_heads *h, struct place at) {
    return (char *)h->x + offset(at, h->x_outer_stride, h->x_stride) * fn_element_size(r->x_kind);
}
static char *out_of(const struct fn_rotation *r, const struct fn_heads *h, struct place at) {
    return (char *)h->out + offset(at, h->out_outer_stride, h->out_stride) * fn_element_size(r->out_kind);
}

/* Whether all heads of all rows are one stride apart. */
static int in_one_level(const struct fn_rotation *r, const struct fn_heads *h) {
    return r->inner == r->rows && h->x_stride == h->count * h->x_head_stride && h->out_stride == h->count * h->out_head_stride;
}

/* Normalises the heads of rows [begin, end), into `passed` unless that is NULL. */
static void normalise(const struct run *run, int set, int64_t begin, int64_t end, char *passed, void *scratch) {
    const struct fn_rotation *r = run->r;
    const struct fn_heads *h = &r->heads[set];
    const int64_t together = in_one_level(r, h) ? end - begin : 1;
    struct fn_forward_job job = run->norm[set];
    for (int64_t row = begin; row < end; row += together) {
        const struct place at = place_of(r, row);
        job.x = x_of(r, h, at);
        job.out = passed ? passed + (row - begin) * h->count * job.out_stride : out_of(r, h, at);
        if (h->rstd) job.rstd = (char *)h->rstd + row * h->count * (r->x_kind == FN_F64 ? 8 : 4);
        run->kernels->forward_rows(&job, 0, together * h->count, scratch);
    }
}

static int64_t position(const struct fn_rotation *r, struct place at) {
    const int64_t i = offset(at, r->positions_outer_stride, r->positions_stride);
    return r->position_size == 4 ? ((const int32_t *)r->positions)[i] : ((const int64_t *)r->positions)[i];
}

/* The row of a table for a row of heads. */
static const void *row_of(const struct fn_rotation *r, const struct fn_operand *table, struct place at) {
    const int64_t i = r->position_size ? position(r, at) * table->stride : offset(at, table->outer_stride, table->stride);
    return (const char *)table->address + i * fn_element_size(table->kind);
}

static void run_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct run *run = argument;
    const struct fn_rotation *r = run->r;
    const int64_t passed_row = r->size * fn_element_size(r->between);
    char *const passed[] = {buffer + run->table_bytes, buffer + run->table_bytes + run->passed_bytes[0]};
    void *const scratch = passed[1] + run->passed_bytes[1];
    for (int64_t first = begin; first < end; first += run->block) {
        const int64_t last = end - first < run->block ? end : first + run->block;
        for (int set = 0; set < r->sets && r->flags & FN_NORMALISED; set++)
            normalise(run, set, first, last, run->passes ? passed[set] : NULL, scratch);
        for (int64_t row = first; row < last && r->pairs; row++) {
            const struct place at = place_of(r, row);
            struct fn_row_of_heads sets[FN_SETS];
            for (int set = 0; set < r->sets; set++) {
                const struct fn_heads *h = &r->heads[set];
                struct fn_row_of_heads *to = &sets[set];
                to->count = h->count;
                to->out = out_of(r, h, at);
                to->out_stride = h->out_head_stride * fn_element_size(r->out_kind);
                if (run->passes) to->x = passed[set] + (row - first) * h->count * passed_row, to->x_stride = passed_row;
                else if (r->flags & FN_NORMALISED) to->x = to->out, to->x_stride = to->out_stride;
                else to->x = x_of(r, h, at), to->x_stride = h->x_head_stride * fn_element_size(r->x_kind);
            }
            run->kernels->rotate_row(r, row_of(r, &r->cos, at), row_of(r, &r->sin, at), sets, buffer);
        }
    }
}

static size_t aligned(size_t bytes) { return (size_t)fn_round_up((int64_t)bytes, FN_ALIGNMENT); }

/* The norm of a set's heads; returns the bytes of its scratch. */
static size_t prepare(struct run *run, int set, int from_memory) {
    const struct fn_rotation *r = run->r;
    const struct fn_heads *h = &r->heads[set];
    const int64_t item = fn_element_size(r->x_kind), out_item = fn_element_size(r->out_kind);
    struct fn_forward_job *job = &run->norm[set];
    *job = (struct fn_forward_job){
        .x_kind = (int)r->x_kind, .weight_kind = (int)h->weight_kind, .out_kind = (int)r->between,
        .flags = (int)r->flags & FN_ROUND_NORM, .weight = (const void *)h->weight, .hidden = r->size,
        .x_stride = h->x_head_stride * item,
        .out_stride = run->passes ? r->size * fn_element_size(r->between) : h->out_head_stride * out_item,
        .eps = fn_without_payload(r->eps), .weight_offset = fn_without_payload(r->weight_offset),
        .heads = h->weight_stride ? h->count : 1, .weight_stride = h->weight_stride * fn_element_size(h->weight_kind),
        .from_memory = from_memory, .ahead = fn_tuning()->ahead[0],
    };
    return fn_make_room_for_affine(job, r->rows * h->count, fn_scratch_bytes(job));
}

int fn_run_rotation(const void *packed) {
    const struct fn_rotation *r = packed;
    struct run run; /* without an initializer: that would take as long as a head */
    int64_t count = 0;
    size_t scratch = 0;
    for (int set = 0; set < r->sets; set++) count += r->heads[set].count;
    const int64_t elements = r->rows * count * r->size, between = fn_element_size(r->between);
    run.r = r;
    run.kernels = fn_kernels_for((int)r->x_kind);
    run.passes = r->flags & FN_NORMALISED && r->between != r->out_kind;
    run.block = r->rows;
    if (r->flags & FN_NORMALISED) {
        run.block = fn_tuning()->block_of_heads / (count * r->size * between);
        run.block = run.block < 1 ? 1 : run.block < r->rows ? run.block : r->rows;
    }
    run.table_bytes = aligned(fn_table_bytes(r->size));
    for (int set = 0; set < FN_SETS; set++) {
        const int there = set < r->sets && r->flags & FN_NORMALISED;
        run.passed_bytes[set] = there && run.passes ? aligned((size_t)(run.block * r->heads[set].count * r->size * between)) : 0;
        const size_t bytes = there ? prepare(&run, set, elements * fn_element_size(r->x_kind) >= fn_tuning()->from_memory) : 0;
        if (bytes > scratch) scratch = bytes;
    }
    const size_t bytes = run.table_bytes + run.passed_bytes[0] + run.passed_bytes[1] + aligned(scratch);
    return fn_divide(run_share, &run, r->rows, elements, r->threads, bytes);
}
