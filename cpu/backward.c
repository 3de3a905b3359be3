/* Divides the rows of a backward pass among threads, and adds up the weight's gradient in the spec's order. */
#include <stdlib.h>

#include "fusednorm_cpu.h"
#include "ieee.h"
#include "pages.h"

enum { ROW_BLOCKS = 1 << FN_LEVELS };

struct call {
    struct fn_backward_job job;
    const struct fn_kernels *kernels;
    int64_t rows, block, blocks, width; /* rows per block; blocks, and the next power of two */
    /*
     * Halving adds value k + P/2 to value k, if there are P values and P is a power of two. So the sum of all is the
     * sum of the even ones plus the sum of the odd ones, each halved by itself, and so on. Let S be a smaller power of
     * two: the sums of blocks s, s + S, s + 2S, ... for each s < S are independent, so threads share them. S changes
     * no bit.
     */
    int64_t subtrees; /* S */
    int levels; /* of one such sum's tree */
    size_t row_bytes, thread_bytes; /* sizes: a row of sums; a thread's scratch with its rows of sums */
    char *sums; /* a row for each subtree */
    char *scratch;
};

static void add(const struct call *call, void *to, const void *from) {
    int64_t n = (int64_t)(call->row_bytes / (call->job.wide ? sizeof(double) : sizeof(float)));
    if (call->job.wide)
        for (int64_t i = 0; i < n; i++) ((double *)to)[i] += ((const double *)from)[i];
    else
        for (int64_t i = 0; i < n; i++) ((float *)to)[i] += ((const float *)from)[i];
}

/* `count` blocks `step` apart from block `first` on; sums and merged as fn_backward_rows says. */
static void sum_blocks(const struct call *call, int64_t first, int64_t step, int64_t count, struct fn_sum_stack *sums,
                       int merged, struct fn_backward_part *part) {
    if (count == 1) {
        int64_t begin = first * call->block, end = begin + call->block;
        call->kernels->backward_rows(&call->job, begin, end < call->rows ? end : call->rows, sums, merged, part);
        return;
    }
    int both = first + step < call->blocks; /* else the second half is padding: +0 */
    sum_blocks(call, first, 2 * step, count / 2, sums, both ? 0 : merged, part);
    if (both) sum_blocks(call, first + step, 2 * step, count / 2, sums, merged + 1, part);
}

static void run_thread(void *argument, int thread, int threads) {
    const struct call *call = argument;
    struct fn_backward_part part = {.scratch = call->scratch + (size_t)thread * call->thread_bytes};
    char *free_row = (char *)part.scratch + fn_backward_scratch_bytes(&call->job);
    struct fn_sum_stack sums;
    for (int k = 0; k < call->levels; k++) sums.row[1 + k] = free_row + (size_t)k * call->row_bytes;
    fn_fp_state state = fn_enter_ieee();
    call->kernels->backward_begin(&call->job, part.scratch);
    if (call->job.dweight) {
        for (int64_t s = thread; s < call->subtrees && s < call->blocks; s += threads) {
            sums.row[0] = call->sums + (size_t)s * call->row_bytes;
            sums.count = 0;
            sum_blocks(call, s, call->subtrees, call->width / call->subtrees, &sums, 0, &part);
        }
    } else {
        int64_t begin = fn_first_row(call->rows, thread, threads), end = fn_first_row(call->rows, thread + 1, threads);
        call->kernels->backward_rows(&call->job, begin, end, NULL, 0, &part);
    }
    call->kernels->backward_flush(&call->job, &part);
    fn_leave_ieee(state);
}

int fn_backward(const struct fn_call *c) {
    const struct fn_operand *o = c->operand;
    const int wide = o[FN_BACKWARD_RSTD].kind == FN_F64;
    const int64_t rows = c->rows, hidden = c->hidden;
    struct call call = {
        .job = {.wide = wide, .dy_kind = (int)o[FN_DY].kind, .d_total_kind = (int)o[FN_D_RESIDUAL_OUT].kind,
                .h_kind = (int)o[FN_H].kind, .weight_kind = (int)o[FN_BACKWARD_WEIGHT].kind, .dx_kind = (int)o[FN_DX].kind,
                .dresidual_kind = (int)o[FN_DRESIDUAL].kind, .dy = (const char *)o[FN_DY].address,
                .d_total = (const char *)o[FN_D_RESIDUAL_OUT].address, .h = (const char *)o[FN_H].address,
                .rstd = (const void *)o[FN_BACKWARD_RSTD].address, .weight = (const void *)o[FN_BACKWARD_WEIGHT].address,
                .dx = (char *)o[FN_DX].address, .dresidual = (char *)o[FN_DRESIDUAL].address,
                .dweight = (void *)o[FN_DWEIGHT].address, .hidden = hidden,
                .dy_stride = o[FN_DY].stride * fn_element_size(o[FN_DY].kind),
                .d_total_stride = o[FN_D_RESIDUAL_OUT].stride * fn_element_size(o[FN_D_RESIDUAL_OUT].kind),
                .h_stride = o[FN_H].stride * fn_element_size(o[FN_H].kind),
                .dy_jump = fn_jump(c, FN_DY) * fn_element_size(o[FN_DY].kind),
                .d_total_jump = fn_jump(c, FN_D_RESIDUAL_OUT) * fn_element_size(o[FN_D_RESIDUAL_OUT].kind),
                .h_jump = fn_jump(c, FN_H) * fn_element_size(o[FN_H].kind), .inner = c->inner,
                .dx_stride = hidden * fn_element_size(o[FN_DX].kind),
                .dresidual_stride = hidden * fn_element_size(o[FN_DRESIDUAL].kind),
                .weight_offset = fn_without_payload(c->weight_offset)},
        .rows = rows,
        .width = 1,
        .kernels = fn_kernels((int)o[FN_DY].kind),
    };
    call.job.from_memory = rows * call.job.dx_stride >= FN_FROM_MEMORY_BYTES;
    call.job.bypass_cache = call.job.from_memory && (o[FN_DX].address | (uintptr_t)call.job.dx_stride) % FN_ALIGNMENT == 0;
    call.block = (rows + ROW_BLOCKS - 1) / ROW_BLOCKS; /* ceil(M / min(M, 256)) */
    call.blocks = (rows + call.block - 1) / call.block;
    while (call.width < call.blocks) call.width *= 2;
    int threads = c->threads < call.blocks ? (int)c->threads : (int)call.blocks;
    if (rows * hidden < FN_PARALLEL_ELEMENTS || threads < 1) threads = 1;
    int64_t shares = threads > 1 ? 4 * (int64_t)threads : 1; /* several each: threads end at about the same time */
    for (call.subtrees = 1; call.subtrees < shares && call.subtrees < call.width;) call.subtrees *= 2;
    while (call.subtrees << call.levels < call.width) call.levels++;

    call.row_bytes = (size_t)((hidden + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT) * (wide ? sizeof(double) : sizeof(float));
    call.thread_bytes = fn_backward_scratch_bytes(&call.job) + (call.job.dweight ? (size_t)call.levels * call.row_bytes : 0);
    size_t sums_bytes = call.job.dweight ? (size_t)call.subtrees * call.row_bytes : 0;
    char *allocated = malloc(sums_bytes + call.thread_bytes * (size_t)threads + FN_ALIGNMENT);
    if (!allocated) return 1;
    call.sums = (char *)(((uintptr_t)allocated + FN_ALIGNMENT - 1) / FN_ALIGNMENT * FN_ALIGNMENT);
    call.scratch = call.sums + sums_bytes;
    fn_expect_writes(o[FN_DX].address, rows * call.job.dx_stride); /* gradients are always new */
    fn_expect_writes(o[FN_DRESIDUAL].address, rows * call.job.dresidual_stride);
    fn_parallel(run_thread, &call, threads);
    if (call.job.dweight) {
        fn_fp_state state = fn_enter_ieee();
        for (int64_t half = call.subtrees / 2; half > 0; half /= 2)
            for (int64_t s = 0; s < half && s + half < call.blocks; s++)
                add(&call, call.sums + (size_t)s * call.row_bytes, call.sums + (size_t)(s + half) * call.row_bytes);
        call.kernels->backward_end(&call.job, call.sums);
        fn_leave_ieee(state);
    }
    free(allocated);
    return 0;
}
