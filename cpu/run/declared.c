/* Divides rows of a declared operation among threads. */
#include "abi/fusednorm_cpu.h"
#include "run/tuning.h"

struct work {
    const struct fn_declared *job;
    fn_declared_row *row;
    int fetches; /* whether a row is fetched while that before it is computed */
};

static void run_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct work *work = argument;
    const struct fn_declared *job = work->job;
    for (int64_t m = begin; m < end; m++)
        work->row(job, m, buffer, work->fetches && m + 1 < end ? fn_row_of(job, 0, m + 1) : NULL);
}

int fn_run_declared(const void *packed) {
    const struct fn_declared *job = packed;
    const int64_t bytes = job->rows * job->hidden * fn_element_size(job->operand[0].kind);
    const struct work work = {job, fn_kernels_for(FN_F32)->declared_row, bytes >= fn_tuning()->fetched};
    const size_t sums = (size_t)(2 * fn_declared_sums(job->hidden)) * (job->wide ? sizeof(double) : sizeof(float));
    return fn_divide(run_share, &work, job->rows, job->rows * job->hidden, job->threads, sums);
}
