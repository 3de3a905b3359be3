/* Divides the rows of a backward pass among threads, and adds up the weight's gradient in the spec's order. */
#include <stdlib.h>

#include "run/run.h"
#include "machine/ieee.h"
#include "run/tuning.h"

enum { ROW_BLOCKS = 1 << FN_LEVELS };

/*
 * A gate after the norm, or before it. A chunk of rows goes through the gate's gradients and the norm's, in their order, and
 * then the next chunk, so that what passes between them stays in the caches.
 */
struct gating {
    fn_gate_run *run;
    const struct fn_gate *gate; /* NULL: there is none */
    int first; /* whether it comes before the norm */
    int64_t chunk; /* rows of heads; all of them where a thread has room for all */
    size_t passed_bytes; /* of each of two operands that pass between; `kept` of fn_gate_rows follows */
    /*
     * Operands and gradients of which the next chunk is fetched during the gate's part before the norm's, and after it. The
     * tree takes blocks of rows far from each other, so that the hardware would fetch the beginning of each row late.
     */
    struct fn_ahead before, after;
};

struct call {
    struct fn_backward_job job;
    struct gating gating;
    const struct fn_kernels *kernels;
    int64_t rows, block, blocks, width; /* rows of heads; of a block; blocks, and the next power of two */
    /*
     * Halving adds value k + P/2 to value k, if there are P values and P is a power of two. So the sum of all is the
     * sum of the even ones plus the sum of the odd ones, each halved by itself, and so on. Let S be a smaller power of
     * two: the sums of blocks s, s + S, s + 2S, ... for each s < S are independent, so threads share them. S changes
     * no bit.
     */
    int64_t subtrees; /* S */
    int levels; /* of one such sum's tree */
    size_t row_bytes, thread_bytes; /* sizes: a row of sums; a thread's scratch with its rows of sums */
    size_t gating_bytes; /* where in a thread's memory that of the gate begins */
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

/* A thread, and where the rows [begin, end) of heads are that pass between a gate and a norm: y or h, and their gradients. */
struct thread {
    struct fn_backward_part part;
    char *rows, *gradients;
    void *kept;
    int64_t next; /* where the chunk after these rows begins; or as many as there are rows */
    struct fn_backward_job job; /* of these rows */
};

static int64_t bytes_of(const struct fn_backward_job *job, int kind, int64_t rows) {
    return rows * job->heads * job->hidden * fn_element_size(kind);
}

/* What is fetched, from row `next` on. */
static struct fn_ahead ahead_from(const struct call *call, struct fn_ahead ahead, int64_t next) {
    if (next == call->rows) ahead.count = 0;
    for (int k = 0; k < ahead.count; k++)
        ahead.place[k].at += next * call->job.heads * call->job.hidden * ahead.place[k].item;
    return ahead;
}

/* The gate's part of rows [begin, end) that comes before the norm's gradients: dn; or h, with the gate's values. */
static void begin_rows(const struct call *call, struct thread *thread, int64_t begin, int64_t end) {
    const struct gating *gating = &call->gating;
    struct fn_backward_job *job = &thread->job;
    struct fn_gate gate = *gating->gate;
    const int64_t heads = job->heads;
    const struct fn_ahead ahead = ahead_from(call, gating->before, thread->next);
    char *passed[FN_GATE_OPERANDS] = {NULL};
    *job = call->job;
    if (gating->first) {
        gate.pass = FN_FORWARD;
        gate.operand[FN_GATE_OUT] = (struct fn_operand){.kind = job->h_kind, .outer_stride = gate.inner * gate.hidden, .stride = gate.hidden};
        passed[FN_GATE_OUT] = thread->rows;
        job->h = thread->rows - bytes_of(job, job->h_kind, begin);
        job->dx = job->dx_kind ? thread->gradients - bytes_of(job, job->dx_kind, begin) : NULL;
        fn_gate_rows(gating->run, &gate, begin * heads, end * heads, passed, thread->kept, &ahead);
        return;
    }
    for (int64_t m = begin; m < end; m++)
        call->kernels->normalise_again(job, m, thread->part.scratch, thread->rows + bytes_of(job, job->dy_kind, m - begin));
    passed[FN_GATED] = thread->rows;
    passed[FN_GATED_D] = thread->gradients;
    job->dy = thread->gradients - bytes_of(job, job->dy_kind, begin);
    fn_gate_rows(gating->run, &gate, begin * heads, end * heads, passed, NULL, &ahead);
}

/* The rest, once the norm's gradients are there: those of x and of the gate, if the gate comes first. */
static void end_rows(const struct call *call, struct thread *thread, int64_t begin, int64_t end) {
    const struct fn_ahead ahead = ahead_from(call, call->gating.after, thread->next);
    char *passed[FN_GATE_OPERANDS] = {[FN_GATE_D] = thread->gradients};
    if (!call->gating.first || !thread->job.dx) return;
    fn_gate_rows(call->gating.run, call->gating.gate, begin * thread->job.heads, end * thread->job.heads, passed, thread->kept, &ahead);
}

/* Rows [begin, end), after which rows from `after` on are next; sums and merged as fn_backward_rows says. */
static void run_rows(const struct call *call, int64_t begin, int64_t end, int64_t after, struct fn_sum_stack *sums, int merged,
                     struct thread *thread) {
    const struct gating *gating = &call->gating;
    if (!gating->gate || gating->chunk == call->rows) { /* the rows of a gate are all there */
        thread->part.after = after < call->rows ? after : 0;
        call->kernels->backward_rows(&thread->job, begin, end, sums, merged, &thread->part);
        return;
    }
    for (int64_t row = begin, next; row < end; row = next) {
        next = end - row < gating->chunk ? end : row + gating->chunk;
        thread->next = next < end ? next : after;
        begin_rows(call, thread, row, next);
        thread->part.continues = row > begin;
        call->kernels->backward_rows(&thread->job, row, next, sums, next < end ? 0 : merged, &thread->part);
        call->kernels->backward_flush(&thread->job, &thread->part);
        end_rows(call, thread, row, next);
    }
}

/* The first row of the block that sum_blocks takes after this one; or as many as there are rows. */
static int64_t row_after(const struct call *call, int64_t block) {
    do {
        /* Adds 1 to the number whose bits are those of the block's, in the opposite order. */
        int64_t bit = call->width / 2;
        for (; bit >= call->subtrees && block & bit; bit /= 2) block -= bit;
        if (bit < call->subtrees) return call->rows;
        block += bit;
    } while (block >= call->blocks);
    return block * call->block;
}

/* `count` blocks `step` apart from block `first` on; sums and merged as fn_backward_rows says. */
static void sum_blocks(const struct call *call, int64_t first, int64_t step, int64_t count, struct fn_sum_stack *sums,
                       int merged, struct thread *thread) {
    if (count == 1) {
        int64_t begin = first * call->block, end = begin + call->block;
        run_rows(call, begin, end < call->rows ? end : call->rows, row_after(call, first), sums, merged, thread);
        return;
    }
    int both = first + step < call->blocks; /* else the second half is padding: +0 */
    sum_blocks(call, first, 2 * step, count / 2, sums, both ? 0 : merged, thread);
    if (both) sum_blocks(call, first + step, 2 * step, count / 2, sums, merged + 1, thread);
}

static void run_thread(void *argument, int number, int threads) {
    const struct call *call = argument;
    const int all = call->gating.gate && call->gating.chunk == call->rows;
    struct thread thread = {.part = {.scratch = call->scratch + (size_t)number * call->thread_bytes}, .next = call->rows, .job = call->job};
    char *free_row = (char *)thread.part.scratch + fn_backward_scratch_bytes(&call->job);
    struct fn_sum_stack sums;
    for (int k = 0; k < call->levels; k++) sums.row[1 + k] = free_row + (size_t)k * call->row_bytes;
    thread.rows = (char *)thread.part.scratch + call->gating_bytes;
    thread.gradients = thread.rows + call->gating.passed_bytes;
    thread.kept = thread.gradients + call->gating.passed_bytes;
    fn_fp_state state = fn_enter_ieee();
    call->kernels->backward_begin(&call->job, thread.part.scratch);
    if (all) begin_rows(call, &thread, 0, call->rows);
    if (call->job.dweight || call->job.dbias) {
        for (int64_t s = number; s < call->subtrees && s < call->blocks; s += threads) {
            sums.row[0] = call->sums + (size_t)s * call->row_bytes;
            sums.count = 0;
            sum_blocks(call, s, call->subtrees, call->width / call->subtrees, &sums, 0, &thread);
        }
    } else {
        int64_t begin = fn_first_row(call->rows, number, threads), end = fn_first_row(call->rows, number + 1, threads);
        run_rows(call, begin, end, call->rows, NULL, 0, &thread);
    }
    call->kernels->backward_flush(&thread.job, &thread.part);
    if (all) end_rows(call, &thread, 0, call->rows);
    fn_leave_ieee(state);
}

/* Adds an operand whose rows follow each other without a gap. */
static void add_ahead(struct fn_ahead *ahead, const struct fn_operand *o, int64_t hidden) {
    if (!o->address || o->stride != hidden) return;
    ahead->place[ahead->count].at = (const char *)o->address;
    ahead->place[ahead->count++].item = fn_element_size(o->kind);
}

/* Returns the bytes that each thread needs. */
static size_t prepare_gate(struct call *call, const struct fn_call *c, int threads) {
    struct gating *gating = &call->gating;
    const struct fn_tuning *tuning = fn_tuning();
    const int64_t row = call->job.heads * call->job.hidden, item = call->job.wide ? 8 : 4;
    if (!(c->flags & (FN_GATE_AFTER | FN_GATE_BEFORE))) return 0;
    gating->gate = fn_gate_after(c);
    gating->run = fn_gate_run_in_use();
    gating->first = (c->flags & FN_GATE_BEFORE) != 0;
    gating->chunk = tuning->chunk / row > 1 ? tuning->chunk / row : 1;
    if (gating->chunk > call->rows || (threads == 1 && call->rows * row <= tuning->only_chunk)) gating->chunk = call->rows;
    const struct fn_operand *o = c->operand, *of_gate = gating->gate->operand;
    if (c->inner == c->rows && call->rows * row * fn_element_size(of_gate[FN_GATE].kind) >= tuning->fetched_gradients) {
        struct fn_ahead *gradients = gating->first ? &gating->after : &gating->before;
        add_ahead(&gating->before, &of_gate[FN_GATE], c->hidden);
        add_ahead(&gating->before, gating->first ? &o[FN_DY] : &of_gate[FN_GATE_D], c->hidden);
        add_ahead(&gating->before, gating->first ? &of_gate[FN_GATED] : &o[FN_H], c->hidden);
        add_ahead(gradients, &of_gate[FN_GATE_DZ], c->hidden);
        add_ahead(gradients, gating->first ? &of_gate[FN_GATED_D] : &o[FN_DX], c->hidden);
    }
    gating->passed_bytes = (size_t)fn_round_up(gating->chunk * row * item, FN_ALIGNMENT);
    const int64_t kept = gating->first ? fn_gate_kept(gating->gate, gating->chunk * call->job.heads) * item : 0;
    return 2 * gating->passed_bytes + (size_t)kept;
}

static int64_t bytes_of_jump(const struct fn_call *c, int operand) {
    return fn_jump_of(c, &c->operand[operand]) * fn_element_size(c->operand[operand].kind);
}

int fn_backward(const struct fn_call *c) {
    const struct fn_operand *o = c->operand;
    const int wide = o[FN_BACKWARD_RSTD].kind == FN_F64;
    const int64_t heads = c->heads, rows = c->rows / heads, hidden = c->hidden;
    const int gated = (c->flags & (FN_GATE_AFTER | FN_GATE_BEFORE)) != 0;
    struct call call = {
        .job = {.wide = wide, .dy_kind = (int)o[FN_DY].kind, .d_total_kind = (int)o[FN_D_RESIDUAL_OUT].kind,
                .h_kind = (int)o[FN_H].kind, .weight_kind = (int)o[FN_BACKWARD_WEIGHT].kind, .dx_kind = (int)o[FN_DX].kind,
                .dresidual_kind = (int)o[FN_DRESIDUAL].kind, .dy = (const char *)o[FN_DY].address,
                .d_total = (const char *)o[FN_D_RESIDUAL_OUT].address, .h = (const char *)o[FN_H].address,
                .rstd = (const void *)o[FN_BACKWARD_RSTD].address, .weight = (const void *)o[FN_BACKWARD_WEIGHT].address,
                .dx = (char *)o[FN_DX].address, .dresidual = (char *)o[FN_DRESIDUAL].address,
                .dweight = (void *)o[FN_DWEIGHT].address, .dbias = (void *)o[FN_DBIAS].address,
                .bias_kind = (int)o[FN_DBIAS].kind,
                .center = (c->flags & FN_CENTER) != 0, .norm_kind = c->flags & FN_ROUND_NORM && !wide ? (int)o[FN_H].kind : FN_NONE, .hidden = hidden,
                .heads = heads, .gain_stride = fn_float_row(hidden),
                .dy_stride = fn_step(&o[FN_DY]), .d_total_stride = fn_step(&o[FN_D_RESIDUAL_OUT]),
                .h_stride = fn_step(&o[FN_H]), .dy_jump = bytes_of_jump(c, FN_DY),
                .d_total_jump = bytes_of_jump(c, FN_D_RESIDUAL_OUT), .h_jump = bytes_of_jump(c, FN_H), .inner = c->inner,
                .dx_stride = hidden * fn_element_size(o[FN_DX].kind),
                .dresidual_stride = hidden * fn_element_size(o[FN_DRESIDUAL].kind),
                .weight_offset = fn_without_payload(c->weight_offset), .ahead = fn_tuning()->ahead[(c->flags & FN_CENTER) != 0]},
        .rows = rows,
        .width = 1,
        .kernels = fn_kernels_for((int)o[FN_DY].kind),
    };
    const int parameters = call.job.dweight || call.job.dbias;
    call.job.sums = heads * call.job.gain_stride;
    if (call.job.dbias) {
        call.job.bias_sums = call.job.sums;
        call.job.sums *= 2;
    }
    /* A gate's part has brought its rows into the caches. */
    call.job.from_memory = !gated && fn_gradients_come_from_memory(c->rows * call.job.dx_stride);
    call.job.bypass_cache = call.job.from_memory && (o[FN_DX].address | (uintptr_t)call.job.dx_stride) % FN_ALIGNMENT == 0;
    call.block = (rows + ROW_BLOCKS - 1) / ROW_BLOCKS; /* ceil(M / min(M, 256)) */
    call.blocks = (rows + call.block - 1) / call.block;
    while (call.width < call.blocks) call.width *= 2;
    int threads = c->threads < call.blocks ? (int)c->threads : (int)call.blocks;
    if (c->rows * hidden < FN_PARALLEL_ELEMENTS || threads < 1) threads = 1;
    int64_t shares = threads > 1 ? 4 * (int64_t)threads : 1; /* several each: threads end at about the same time */
    for (call.subtrees = 1; call.subtrees < shares && call.subtrees < call.width;) call.subtrees *= 2;
    while (call.subtrees << call.levels < call.width) call.levels++;

    call.row_bytes = (size_t)call.job.sums * (wide ? sizeof(double) : sizeof(float));
    call.gating_bytes = fn_backward_scratch_bytes(&call.job) + (parameters ? (size_t)call.levels * call.row_bytes : 0);
    call.thread_bytes = call.gating_bytes + prepare_gate(&call, c, threads);
    size_t sums_bytes = parameters ? (size_t)call.subtrees * call.row_bytes : 0;
    char *allocated = malloc(sums_bytes + call.thread_bytes * (size_t)threads + FN_ALIGNMENT);
    if (!allocated) return 1;
    call.sums = (char *)fn_round_up((int64_t)(uintptr_t)allocated, FN_ALIGNMENT);
    call.scratch = call.sums + sums_bytes;
    fn_parallel(run_thread, &call, threads);
    if (parameters) {
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
