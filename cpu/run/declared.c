/* Divides rows of a declared operation among threads; or the segments of each row, where there are fewer rows than threads. */
#include <stdlib.h>

#include "abi/fusednorm_cpu.h"
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

/* Tiles of modulate's gradients that are sums over the same number of rows. */
struct sums {
    const struct fn_declared *job;
    fn_modulate_sums *sum;
    int wanted;
    int64_t rows, per_sample; /* per_sample: tiles */
};

static void sum_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct sums *sums = argument;
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t sample = tile / sums->per_sample, first = (tile - sample * sums->per_sample) * FN_MODULATE_TILE;
        const int64_t left = sums->job->hidden - first, n = left < FN_MODULATE_TILE ? left : FN_MODULATE_TILE;
        sums->sum(sums->job, sums->wanted, sums->rows, sample, first, (int)n, buffer);
    }
}

static int run_sums(const struct fn_declared *job, int wanted, int64_t rows) {
    const int64_t per_sample = (job->hidden + FN_MODULATE_TILE - 1) / FN_MODULATE_TILE;
    const struct sums sums = {job, fn_kernels_for(FN_F32)->modulate_sums, wanted, rows, per_sample};
    const size_t bytes = 2 * (FN_LEVELS + 1) * FN_MODULATE_TILE * (job->wide ? sizeof(double) : sizeof(float));
    return fn_divide(sum_share, &sums, job->rows / rows * per_sample, job->rows * job->hidden, job->threads, bytes);
}

/* All gradients in one pass over the rows, unless scale and shift have samples of two lengths. Dy, alone, is computed by rows. */
static int run_modulate_backward(const struct fn_declared *job) {
    const struct fn_operand *scale = &job->operand[FN_MODULATE_DSCALE], *shift = &job->operand[FN_MODULATE_DSHIFT];
    const int together = scale->kind && shift->kind && scale->outer_stride == shift->outer_stride;
    int dy = job->operand[FN_MODULATE_DY].kind ? 1 << FN_MODULATE_DY : 0;
    if (scale->kind) {
        if (run_sums(job, dy | 1 << FN_MODULATE_DSCALE | together << FN_MODULATE_DSHIFT, scale->outer_stride)) return 1;
        dy = 0;
    }
    return shift->kind && !together ? run_sums(job, dy | 1 << FN_MODULATE_DSHIFT, shift->outer_stride) : 0;
}

int fn_run_declared(const void *packed) {
    const struct fn_declared *job = packed;
    if (job->operation == FN_MODULATE_BACKWARD && (job->operand[FN_MODULATE_DSCALE].kind || job->operand[FN_MODULATE_DSHIFT].kind))
        return run_modulate_backward(job);
    const int64_t bytes = job->rows * job->hidden * fn_element_size(job->operand[0].kind);
    const size_t item = job->wide ? sizeof(double) : sizeof(float), shared = item * (size_t)fn_declared_shared(job->hidden);
    struct work work = {.job = job, .row = fn_kernels_for(FN_F32)->declared_row, .fetches = bytes >= fn_tuning()->fetched,
                        .steps = fn_declared_steps(job), .room_bytes = item * FN_DECLARED_ROOM};
    if (!work.steps || job->rows >= job->threads || job->hidden < FN_PARALLEL_ELEMENTS)
        return fn_divide(run_rows, &work, job->rows, job->rows * job->hidden, job->threads, work.room_bytes + shared);
    work.shared = malloc(shared);
    const int failed = !work.shared || run_divided(&work);
    free(work.shared);
    return failed;
}
