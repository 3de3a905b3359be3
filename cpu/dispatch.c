/* Chooses the instruction set, divides the rows among threads, and finds room for their buffers. */
#include "fusednorm_cpu.h"

#include <stdlib.h>

#include "ieee.h"
#include "target.h"

static int always(void) { return 1; }

/*
 * A later entry that is usable is the better one. On AArch64 llvm-mca says so, in cycles per bfloat16
 * element on Neoverse V1 (256 bits), V2 and N2 (128): sve 1.33, 1.38, 2.84; neon_bf16 0.79, 0.91, 1.61;
 * sve_bf16 0.75, 0.83, 1.69. For float, SVE at 128 bits equals NEON. A64FX has sve, but no bfloat16.
 */
static const struct {
    const char *name;
    int (*usable)(void);
    const struct fn_kernels *kernels;
} isas[] = {
    {"scalar", always, &fn_kernels_scalar},
#if defined(FN_X86_64)
    {"avx2", fn_has_avx2, &fn_kernels_avx2},
    {"avx512", fn_has_avx512, &fn_kernels_avx512},
#if defined(FN_AVX512_FP16)
    {"avx512_fp16", fn_has_avx512_fp16, &fn_kernels_avx512_fp16},
#endif
    {"zen4", fn_is_zen4, &fn_kernels_zen4},
#elif defined(FN_AARCH64)
    {"neon", always, &fn_kernels_neon},
#if defined(FN_SVE)
    {"sve", fn_has_sve, &fn_kernels_sve},
#endif
#if defined(FN_NEON_BF16)
    {"neon_bf16", fn_has_neon_bf16, &fn_kernels_neon_bf16},
#endif
#if defined(FN_SVE)
    {"sve_bf16", fn_has_sve_bf16, &fn_kernels_sve_bf16},
#endif
#endif
};

int fn_isa_count(void) { return (int)(sizeof isas / sizeof *isas); }
const char *fn_isa_name(int isa) { return isas[isa].name; }
int fn_isa_usable(int isa) { return isas[isa].usable(); }

static int isa_in_use;

int fn_isa(void) { return isa_in_use; }
void fn_use_isa(int isa) { isa_in_use = isa; }
const struct fn_kernels *fn_kernels(void) { return isas[isa_in_use].kernels; }

/* Buffers up to this size lie on the stack of the thread that uses them. */
enum { STACK_SCRATCH = 48 * 1024 };

static int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/* Two rows of float64; or rows that are kept, one row's segments' sums padded to a power of two, and two rows as long for streaming. */
size_t fn_scratch_bytes(const struct fn_forward_job *job) {
    int64_t padded = round_up(job->hidden, FN_SEGMENT), kept = fn_kept(job->hidden), sums = 1;
    if (job->x_kind == FN_F64) return (size_t)(2 * 8 * padded);
    while (sums * FN_SEGMENT < padded) sums *= 2;
    int64_t bytes = round_up(4 * (kept + sums), FN_ALIGNMENT);
    return (size_t)(job->stream ? bytes + 8 * kept : bytes);
}

/* The weight, one row of each operand, the sums of segments; each padded to whole segments. */
size_t fn_backward_scratch_bytes(const struct fn_backward_job *job) {
    int64_t padded = round_up(job->hidden, FN_SEGMENT), sums = 1;
    while (sums * FN_SEGMENT < padded) sums *= 2;
    return (size_t)(round_up(5 * padded + sums, FN_SEGMENT) * (job->wide ? 8 : 4));
}

static int on_border(const char *row, int64_t stride, int64_t bytes) {
    return !(((uintptr_t)row | (uintptr_t)stride | (uintptr_t)bytes) % FN_ALIGNMENT);
}

/* Whether the outputs are large, made of whole cache lines, and not in them already as inputs. */
static int streams(const struct fn_forward_job *job, int64_t rows) {
    int64_t out_row = job->hidden * fn_element_size(job->out_kind);
    int64_t residual_row = job->hidden * fn_element_size(job->residual_kind);
    if (job->x_kind == FN_F64 || rows * (out_row + residual_row) < FN_FAR_BYTES) return 0;
    /* Short rows of 16-bit values are bound by arithmetic: the detour by scratch would cost more than it saves. */
    if (job->hidden < 256 && fn_element_size(job->out_kind) == 2) return 0;
    if (job->out == job->x || job->out == job->residual || !on_border(job->out, job->out_stride, out_row)) return 0;
    if (!job->residual_kind) return 1;
    return job->residual_out != job->x && job->residual_out != job->residual &&
           on_border(job->residual_out, job->residual_out_stride, residual_row);
}

struct call {
    struct fn_forward_job job;
    fn_forward_rows *forward_rows;
    int64_t rows;
    size_t scratch_bytes;
    char *scratch; /* one buffer per thread, or NULL: on the stack */
};

static void run_on_stack(const struct call *call, int64_t begin, int64_t end) {
    _Alignas(64) char scratch[STACK_SCRATCH];
    call->forward_rows(&call->job, begin, end, scratch);
}

static void run_thread(void *argument, int thread, int threads) {
    const struct call *call = argument;
    int64_t begin = fn_first_row(call->rows, thread, threads), end = fn_first_row(call->rows, thread + 1, threads);
    fn_fp_state state = fn_enter_ieee();
    if (call->scratch)
        call->forward_rows(&call->job, begin, end, call->scratch + (size_t)thread * call->scratch_bytes);
    else
        run_on_stack(call, begin, end);
    fn_leave_ieee(state);
}

int fn_forward(int x_kind, int residual_kind, int weight_kind, int out_kind, int flags,
               uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, uintptr_t residual_out,
               uintptr_t rstd, int64_t rows, int64_t hidden, int64_t x_stride, int64_t residual_stride,
               int64_t out_stride, int64_t residual_out_stride, double eps, double weight_offset,
               int threads) {
    struct call call = {
        .job = {.x_kind = x_kind, .residual_kind = residual_kind, .weight_kind = weight_kind,
                .out_kind = out_kind, .flags = flags, .x = (const char *)x,
                .residual = (const char *)residual, .weight = (const void *)weight, .out = (char *)out,
                .residual_out = (char *)residual_out, .rstd = (void *)rstd, .hidden = hidden,
                .x_stride = x_stride * fn_element_size(x_kind), .residual_stride = residual_stride * fn_element_size(residual_kind),
                .out_stride = out_stride * fn_element_size(out_kind),
                .residual_out_stride = residual_out_stride * fn_element_size(residual_kind),
                .eps = fn_without_payload(eps), .weight_offset = fn_without_payload(weight_offset)},
        .forward_rows = fn_kernels()->forward_rows,
        .rows = rows,
    };
    if (rows == 0) return 0;
    if (threads > rows) threads = (int)rows;
    if (threads < 1 || rows * hidden < FN_PARALLEL_ELEMENTS) threads = 1;
    call.job.far = rows * hidden * (fn_element_size(x_kind) + fn_element_size(residual_kind)) >= FN_FAR_BYTES;
    call.scratch_bytes = fn_scratch_bytes(&call.job);
    if (streams(&call.job, rows)) {
        call.job.stream = call.scratch_bytes;
        call.scratch_bytes = fn_scratch_bytes(&call.job);
    }
    void *allocated = NULL;
    if (call.scratch_bytes > STACK_SCRATCH) {
        allocated = malloc(call.scratch_bytes * (size_t)threads + FN_ALIGNMENT);
        if (!allocated) return 1;
        call.scratch = (char *)(((uintptr_t)allocated + FN_ALIGNMENT - 1) / FN_ALIGNMENT * FN_ALIGNMENT);
    }
    fn_parallel(run_thread, &call, threads);
    free(allocated);
    return 0;
}
