/* Rows of declared operations, included by kernel_body.h behind gates: each operation has its kernel. */
#include "kernels/log_prob_body.h"

void FN_OF(declared_row)(const struct fn_declared *job, int64_t m, void *sums, const char *next) {
    log_prob_row(job, m, sums, next);
}
