/*
 * Zen 4: the kernels for AVX-512, but those for AVX2 where x is float16. Zen 4 executes 512-bit instructions
 * in two halves, and conversions of float16 lose by it: measured, rows of 4096 take a quarter longer.
 */
#include "fusednorm_cpu.h"
#include "target.h"

#if defined(FN_X86_64)

static const struct fn_kernels *kernels(int kind) { return kind == FN_F16 ? &fn_kernels_avx2 : &fn_kernels_avx512; }

static void forward_rows(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    kernels(job->x_kind)->forward_rows(job, begin, end, scratch);
}

static void backward_begin(const struct fn_backward_job *job, void *scratch) {
    kernels(job->dy_kind)->backward_begin(job, scratch);
}

static void backward_rows(const struct fn_backward_job *job, int64_t begin, int64_t end, void *partial, void *scratch) {
    kernels(job->dy_kind)->backward_rows(job, begin, end, partial, scratch);
}

static void backward_end(const struct fn_backward_job *job, const void *sum) {
    kernels(job->dy_kind)->backward_end(job, sum);
}

const struct fn_kernels fn_kernels_zen4 = {forward_rows, backward_begin, backward_rows, backward_end};

#endif
