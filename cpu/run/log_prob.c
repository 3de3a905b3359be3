/* Divides rows of logits among threads. */
#include "abi/fusednorm_cpu.h"
#include "run/tuning.h"

struct work {
    const struct fn_log_prob *job;
    fn_log_prob_row *row;
    int fetches; /* whether a row is fetched while that before it is computed */
};

/* Row m of an operand with rows; of others the first number. */
static char *row_of(const struct fn_log_prob *job, int operand, int rows, int64_t m) {
    const struct fn_operand *o = &job->operand[operand];
    const int64_t place = m / job->inner * o->outer_stride + m % job->inner * o->stride;
    return (char *)o->address + (rows ? place * fn_element_size(o->kind) : 0);
}

static void run_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct work *work = argument;
    const struct fn_log_prob *job = work->job;
    const int whole = job->operation == FN_LOG_SOFTMAX;
    for (int64_t m = begin; m < end; m++)
        work->row(job, m, row_of(job, FN_LOGITS, 1, m), row_of(job, FN_LOG_PROB_OUT, whole || job->pass == FN_BACKWARD, m),
                  row_of(job, FN_LOG_PROB_D, whole, m), buffer,
                  work->fetches && m + 1 < end ? row_of(job, FN_LOGITS, 1, m + 1) : NULL);
}

int fn_run_log_prob(const void *packed) {
    const struct fn_log_prob *job = packed;
    const int64_t bytes = job->rows * job->hidden * fn_element_size(job->operand[FN_LOGITS].kind);
    const struct work work = {job, fn_kernels_for(FN_F32)->log_prob_row, bytes >= fn_tuning()->fetched};
    const size_t sums = (size_t)(2 * fn_log_prob_sums(job->hidden)) * (job->wide ? sizeof(double) : sizeof(float));
    return fn_divide(run_share, &work, job->rows, job->rows * job->hidden, job->threads, sums);
}
