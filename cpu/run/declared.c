/* Divides rows of a declared operation among threads; or the segments of each row, where there are fewer rows than threads. */
#include <stdlib.h>

#include "run/run.h"
#include "run/tuning.h"

struct work {
    const struct fn_declared *job;
    fn_declared_row *row;
    int fetches; /* whether a row is fetched while that before it is computed */
    int steps;
    int64_t m; /* the row that is divided */
    void *shared;
    size_t room_bytes;
};

/* Rows [begin, end). */
static void run_rows(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct work *work = argument;
    const struct fn_declared *job = work->job;
    for (int64_t m = begin; m < end; m++) {
        const char *const next = work->fetches && m + 1 < end ? fn_row_of(job, 0, m + 1) : NULL;
        const struct fn_row_work row = {work->steps, 0, job->hidden, buffer + work->room_bytes, buffer, next};
        work->row(job, m, &row);
    }
}

/* Segments [begin, end) of a row. */
static void run_segments(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct work *work = argument;
    const int64_t hidden = work->job->hidden, last = end * FN_SEGMENT;
    const struct fn_row_work part = {work->steps, begin * FN_SEGMENT, last < hidden ? last : hidden, work->shared, buffer, NULL};
    work->row(work->job, work->m, &part);
}

/* The rows one after the other, each by all threads: a step after the other. Returns as fn_divide does. */
static int run_divided(struct work *work) {
    const struct fn_declared *job = work->job;
    const int64_t segments = (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT;
    const int steps = work->steps;
    int failed = 0;
    for (work->m = 0; work->m < job->rows && !failed; work->m++)
        for (int step = FN_FIND_GREATEST; step <= steps && !failed; step *= 2) {
            work->steps = steps & step;
            const int64_t threads = step == FN_FIND_NUMBERS ? 1 : job->threads;
            if (work->steps) failed = fn_divide(run_segments, work, segments, job->hidden, threads, work->room_bytes);
        }
    return failed;
}

/* Sums of gradients over the same number of rows, of which threads take tiles of columns, or subtrees of these. */
struct tiles {
    const struct fn_declared *job;
    fn_declared_sums *sum;
    struct fn_sums of; /* of all of them */
    int64_t tile, per_sum; /* columns of a tile, and tiles of a sum */
};

/* Takes a subtree of a tile. */
static void take_tile(const struct tiles *tiles, int64_t tile, int64_t subtree, char *buffer) {
    struct fn_sums of = tiles->of;
    of.number = tile / tiles->per_sum;
    of.first = of.number / of.step * of.step * of.rows + of.number % of.step;
    of.begin = (tile - of.number * tiles->per_sum) * tiles->tile;
    of.n = tiles->job->hidden - of.begin < tiles->tile ? tiles->job->hidden - of.begin : tiles->tile;
    of.subtree = subtree;
    if (of.shared) of.shared += tile * of.subtrees * of.bytes;
    tiles->sum(tiles->job, &of, buffer);
}

static void take_subtrees(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct tiles *tiles = argument;
    const int64_t subtrees = tiles->of.subtrees;
    for (int64_t i = begin; i < end; i++) take_tile(tiles, i / subtrees, i % subtrees, buffer);
}

static void end_tiles(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct tiles *tiles = argument;
    for (int64_t tile = begin; tile < end; tile++) take_tile(tiles, tile, tiles->of.subtrees, buffer);
}

static int run_sums_of(const struct fn_declared *job, int64_t wanted, int with_rows, const struct fn_operand *like) {
    const int64_t tile = fn_declared_tile(job), elements = job->rows * job->hidden, item = job->wide ? sizeof(double) : sizeof(float);
    struct tiles tiles = {.job = job, .sum = fn_kernels_for(FN_F32)->declared_sums, .tile = tile, .per_sum = (job->hidden + tile - 1) / tile,
                          .of = {.wanted = wanted, .with_rows = with_rows, .rows = like->outer_stride, .step = like->stride,
                                 .size = fn_float_row(tile), .subtrees = 1}};
    struct fn_sums *const of = &tiles.of;
    for (int i = 0; i < FN_DECLARED_OPERANDS; i++) of->bytes += (wanted >> i & 1) * of->size * item;
    const int64_t all = job->rows / of->rows * tiles.per_sum, room = fn_room_of_row(job) + (1 + FN_LEVELS) * of->bytes;
    while (elements >= FN_PARALLEL_ELEMENTS && all * of->subtrees < job->threads && of->subtrees < of->rows && of->subtrees < 1 << FN_LEVELS)
        of->subtrees *= 2;
    char *const memory = of->subtrees > 1 ? malloc((size_t)(all * of->subtrees * of->bytes + FN_ALIGNMENT)) : NULL;
    if (of->subtrees > 1 && !memory) return 1;
    if (memory) of->shared = (char *)fn_round_up((int64_t)(uintptr_t)memory, FN_ALIGNMENT);
    int failed = fn_divide(take_subtrees, &tiles, all * of->subtrees, elements, job->threads, (size_t)room);
    if (!failed && memory) failed = fn_divide(end_tiles, &tiles, all, elements, job->threads, (size_t)room);
    free(memory);
    return failed;
}

/* All gradients in one pass over the rows, or in one for each number of rows that sums have. */
static int run_sums(const struct fn_declared *job) {
    int failed = 0, with_rows = 1;
    for (int64_t left = job->sums, wanted; left && !failed; left -= wanted, with_rows = 0) {
        const struct fn_operand *first = NULL;
        wanted = 0;
        for (int i = 0; i < FN_DECLARED_OPERANDS; i++) {
            const struct fn_operand *o = &job->operand[i];
            if (!(left >> i & 1)) continue;
            if (!first) first = o;
            if (o->outer_stride == first->outer_stride && o->stride == first->stride) wanted |= (int64_t)1 << i;
        }
        failed = run_sums_of(job, wanted, with_rows, first);
    }
    return failed;
}

/* Blocks of products. */
struct blocks {
    const struct fn_declared *job;
    fn_declared_products *products;
    const struct fn_int8_dots *dots;
};
static void run_blocks(const void *argument, int64_t begin, int64_t end, char *room) {
    const struct blocks *blocks = argument;
    blocks->products(blocks->job, blocks->dots, begin, end, room);
}
static int run_products(const struct fn_declared *job) {
    const struct blocks blocks = {job, fn_kernels_for(FN_F32)->declared_products, fn_int8_dots()};
    return fn_divide(run_blocks, &blocks, fn_product_blocks(job), fn_product_elements(job), job->threads, (size_t)fn_product_bytes(job));
}

int fn_run_declared(const void *packed) {
    const struct fn_declared *job = packed;
    if (job->operation == FN_ATTENTION) return fn_run_attention(packed);
    if (job->sums) return run_sums(job);
    if (job->columns) return run_products(job);
    const int64_t bytes = job->rows * job->hidden * fn_element_size(job->operand[0].kind);
    const size_t room_bytes = FN_DECLARED_ROOM * (job->wide ? sizeof(double) : sizeof(float)), all = (size_t)fn_room_of_row(job);
    struct work work = {.job = job, .row = fn_kernels_for(FN_F32)->declared_row, .fetches = bytes >= fn_tuning()->fetched,
                        .steps = fn_declared_steps(job), .room_bytes = room_bytes};
    if (!work.steps || job->rows >= job->threads || job->hidden < FN_PARALLEL_ELEMENTS)
        return fn_divide(run_rows, &work, job->rows, job->rows * job->hidden, job->threads, all);
    work.shared = malloc(all - room_bytes);
    const int failed = !work.shared || run_divided(&work);
    free(work.shared);
    return failed;
}
