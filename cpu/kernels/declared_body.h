/* Rows of declared operations, included by kernel_body.h behind gates: each operation has its kernel. */
#include "kernels/log_prob_body.h"
#include "kernels/modulate_body.h"

void FN_OF(declared_row)(const struct fn_declared *job, int64_t m, const struct fn_row_work *work) {
    if (job->operation >= FN_MODULATE) modulate_row(job, m, 0, job->hidden);
    else log_prob_row(job, m, work);
}
