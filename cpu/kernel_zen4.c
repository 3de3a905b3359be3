/*
 * Zen 4: the kernels for AVX-512, as they are best there, but those for AVX2 where x is float16. Zen 4 executes 512-bit
 * instructions in two halves, and conversions of float16 lose by it: measured, rows of 4096 take a quarter longer.
 */
#include "fusednorm_cpu.h"
#include "target.h"

#if defined(FN_X86_64)
#include <immintrin.h>

FN_TARGET("avx512f,avx512bw,avx512dq,avx512vl")

#define FOR_ZEN4 1
#include "avx512.h"

#define ISA zen4_wide

#include "pairs.h"
#include "kernel_body.h"

FN_TARGET_END

static const struct fn_kernels *kernels(int kind) { return kind == FN_F16 ? &fn_kernels_avx2 : &fn_kernels_zen4_wide; }

static void forward_rows_zen4(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    kernels(job->x_kind)->forward_rows(job, begin, end, scratch);
}

static void backward_begin_zen4(const struct fn_backward_job *job, void *scratch) {
    kernels(job->dy_kind)->backward_begin(job, scratch);
}

static void backward_rows_zen4(const struct fn_backward_job *job, int64_t begin, int64_t end, struct fn_sum_stack *sums,
                               int merged, struct fn_backward_part *part) {
    kernels(job->dy_kind)->backward_rows(job, begin, end, sums, merged, part);
}

static void backward_flush_zen4(const struct fn_backward_job *job, struct fn_backward_part *part) {
    kernels(job->dy_kind)->backward_flush(job, part);
}

static void backward_end_zen4(const struct fn_backward_job *job, const void *sum) {
    kernels(job->dy_kind)->backward_end(job, sum);
}

const struct fn_kernels fn_kernels_zen4 = {forward_rows_zen4, backward_begin_zen4, backward_rows_zen4,
                                           backward_flush_zen4, backward_end_zen4};

#endif
