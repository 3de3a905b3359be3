/* Forward passes: one call, or a chain of calls, a block of rows after the other, divided among threads. */
#include "run/run.h"
#include "machine/ieee.h"
#include "run/tuning.h"

/* One call of a chain. */
struct part {
    const struct fn_call *given;
    struct fn_forward_job job; /* of the first rows, and of all where they lie in one level */
    const struct fn_kernels *kernels;
};

/*
 * Calls that each take the rows which the one before wrote. They run one after the other on a block of rows, and then on
 * the next block, so that what passes between them stays in the caches.
 */
struct chain {
    struct part part[FN_CHAIN];
    int count;
    int64_t block; /* rows */
    size_t passed_bytes; /* of a block's rows between two parts; a thread's buffer has them, then the kernels' scratch */
    const struct fn_kernels *kernels; /* the quantizer's */
    const struct fn_quantizer *quantizer; /* takes the rows of the last part, or those of x if there is no part; or NULL */
    const struct fn_gate *gate; /* takes the rows of the last part, or passes its rows to the first part; or NULL */
    fn_gate_run *gate_run;
    int gate_first;
    int fetches; /* whether the next block's x is fetched while a block is gated */
};

static int64_t outer_bytes(const struct fn_operand *o, int64_t outer) { return outer * o->outer_stride * fn_element_size(o->kind); }

/* Rows [begin, end), which may lie in several steps of the outer level. */
static void run_rows(const struct part *part, const struct fn_forward_job *given, int64_t begin, int64_t end, void *scratch) {
    const struct fn_call *c = part->given;
    if (c->inner == c->rows) {
        part->kernels->forward_rows(given, begin, end, scratch);
        return;
    }
    for (int64_t row = begin; row < end;) {
        const int64_t outer = row / c->inner, first = outer * c->inner;
        const int64_t next = first + c->inner < end ? first + c->inner : end;
        struct fn_forward_job job = *given;
        job.x += outer_bytes(&c->operand[FN_X], outer);
        job.out += outer_bytes(&c->operand[FN_OUT], outer);
        if (job.residual) job.residual += outer_bytes(&c->operand[FN_RESIDUAL], outer);
        if (job.residual_out) job.residual_out += outer_bytes(&c->operand[FN_RESIDUAL_OUT], outer);
        if (job.rstd) job.rstd = (char *)job.rstd + first * fn_element_size(c->operand[FN_RSTD].kind);
        job.first_row = first;
        part->kernels->forward_rows(&job, row - first, next - first, scratch);
        row = next;
    }
}

/* Quantizes rows [begin, end) of an operand, of which row `begin` lies at `first` unless that is NULL. */
static void quantize_rows(const struct chain *chain, const struct fn_call *c, int operand, int64_t begin, int64_t end,
                          const char *first, void *scratch) {
    const struct fn_operand *o = &c->operand[operand];
    const int64_t step = fn_step(o), jump = fn_jump_of(c, o) * fn_element_size(o->kind);
    for (int64_t m = begin; m < end; m++) {
        const char *row = first ? first + (m - begin) * step : fn_row((const char *)o->address, m, step, jump, c->inner);
        chain->kernels->quantize_row(chain->quantizer, (int)o->kind, row, c->hidden, m, scratch);
    }
}

/* Rows [begin, end) through all parts, a block at a time. What passes between two parts lies where `passed` points. */
static void run_blocks(const struct chain *chain, int64_t begin, int64_t end, char *passed, void *scratch) {
    const int taken = chain->quantizer || (chain->gate && !chain->gate_first); /* the last part's rows, too */
    for (int64_t row = begin; row < end; row += chain->block) {
        const int64_t next = end - row < chain->block ? end : row + chain->block;
        char *of_gate[FN_GATE_OPERANDS] = {[FN_GATED] = passed};
        if (chain->gate_first) {
            of_gate[FN_GATED] = NULL, of_gate[FN_GATE_OUT] = passed;
            fn_gate_rows(chain->gate_run, chain->gate, row, next, of_gate, NULL, &fn_nothing_ahead);
        }
        for (int k = 0; k < chain->count; k++) {
            const struct part *part = &chain->part[k];
            struct fn_forward_job job = part->job;
            /* Row number `row` is the first one there. */
            if (k > 0 || chain->gate_first) job.x = passed - row * job.x_stride;
            if (k < chain->count - 1 || (taken && !job.out)) job.out = passed - row * job.out_stride;
            run_rows(part, &job, row, next, scratch);
        }
        if (chain->quantizer) {
            const struct fn_call *last = chain->part[chain->count - 1].given;
            quantize_rows(chain, last, FN_OUT, row, next, last->operand[FN_OUT].address ? NULL : passed, scratch);
        } else if (chain->gate && !chain->gate_first) {
            const struct fn_forward_job *job = &chain->part[0].job;
            const struct fn_ahead ahead = {chain->fetches && next < end,
                                           {{job->x + next * job->x_stride, fn_element_size(job->x_kind)}}};
            fn_gate_rows(chain->gate_run, chain->gate, row, next, of_gate, NULL, &ahead);
        }
    }
}

static void run_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct chain *chain = argument;
    const struct part *part = chain->part;
    void *scratch = buffer + chain->passed_bytes;
    const int one_level = part->given->inner == part->given->rows;
    if (!chain->count)
        quantize_rows(chain, part->given, FN_X, begin, end, NULL, scratch);
    else if (chain->count == 1 && !chain->quantizer && !chain->gate)
        run_rows(part, &part->job, begin, end, scratch);
    else if (chain->quantizer || chain->gate || !one_level ||
             !part->kernels->two_norms_rows(&part[0].job, &part[1].job, begin, end, scratch, (float *)buffer))
        run_blocks(chain, begin, end, buffer, scratch);
}

static void prepare(struct part *part, const struct fn_call *c) {
    const struct fn_operand *o = c->operand;
    *part = (struct part){
        .given = c,
        .job = {.x_kind = (int)o[FN_X].kind, .residual_kind = (int)o[FN_RESIDUAL].kind, .weight_kind = (int)o[FN_WEIGHT].kind,
                .out_kind = (int)o[FN_OUT].kind, .flags = (int)c->flags, .x = (const char *)o[FN_X].address,
                .residual = (const char *)o[FN_RESIDUAL].address, .weight = (const void *)o[FN_WEIGHT].address,
                .out = (char *)o[FN_OUT].address, .residual_out = (char *)o[FN_RESIDUAL_OUT].address,
                .rstd = (void *)o[FN_RSTD].address, .hidden = c->hidden,
                .x_stride = fn_step(&o[FN_X]), .residual_stride = fn_step(&o[FN_RESIDUAL]),
                .out_stride = fn_step(&o[FN_OUT]), .residual_out_stride = fn_step(&o[FN_RESIDUAL_OUT]),
                .eps = fn_without_payload(c->eps), .weight_offset = fn_without_payload(c->weight_offset),
                .bias_kind = (int)o[FN_BIAS].kind, .bias = (const void *)o[FN_BIAS].address, .heads = c->heads,
                .weight_stride = fn_step(&o[FN_WEIGHT]), .bias_stride = fn_step(&o[FN_BIAS])},
        .kernels = fn_kernels_for((int)o[FN_X].kind),
    };
    const int64_t read = fn_element_size(o[FN_X].kind) + fn_element_size(o[FN_RESIDUAL].kind);
    part->job.from_memory = c->rows * c->hidden * read >= fn_tuning()->from_memory;
}

int fn_forward(const struct fn_call *calls, int count) {
    const int64_t rows = calls->rows, elements = rows * calls->hidden;
    if (elements == 0) return 0;
    const struct fn_tuning *tuning = fn_tuning();
    struct chain chain; /* without an initializer: that would take as long as a short row */
    size_t scratch_bytes = 0;
    const int64_t flags = calls[count - 1].flags;
    chain.quantizer = fn_quantizer_after(calls + count - 1);
    chain.gate = fn_gate_after(calls + count - 1);
    if (chain.gate) chain.gate_run = fn_gate_run_in_use();
    chain.gate_first = (flags & FN_GATE_BEFORE) != 0;
    const int gate_last = chain.gate && !chain.gate_first;
    chain.count = flags & FN_QUANTIZE_ONLY ? 0 : count;
    chain.block = 0;
    chain.passed_bytes = 0;
    chain.part[0].given = calls;
    if (chain.quantizer) {
        scratch_bytes = (size_t)(4 * fn_float_row(calls->hidden));
        chain.kernels = fn_kernels_for((int)(chain.count ? calls[count - 1].operand[FN_OUT].kind : calls->operand[FN_X].kind));
    }
    for (int k = 0; k < chain.count; k++) {
        prepare(&chain.part[k], &calls[k]);
        struct fn_forward_job *job = &chain.part[k].job;
        size_t bytes = fn_scratch_bytes(job);
        if (k == count - 1 && !chain.quantizer && !gate_last && fn_bypasses_cache(calls, count)) {
            job->bypass_cache = bytes;
            bytes = fn_scratch_bytes(job);
        }
        fn_tune(job, rows);
        bytes = fn_make_room_for_affine(job, rows, bytes);
        if (bytes > scratch_bytes) scratch_bytes = bytes;
        if (k == count - 1 && !chain.quantizer && !chain.gate) continue;
        /*
         * A gate computes longer than it reads, and the norm of the next block reads longer than it computes. So the next
         * block is fetched while a block is gated, if the second cache does not hold x: from memory a call took half of the time.
         */
        chain.fetches = gate_last && calls->inner == rows && job->x_stride == calls->hidden * fn_element_size(job->x_kind) &&
                        rows * job->x_stride >= tuning->fetched;
        const int64_t row_bytes = chain.gate_first ? job->x_stride : job->out_stride;
        chain.block = tuning->block / row_bytes > FN_ONE_KIND_ROWS ? tuning->block / row_bytes : FN_ONE_KIND_ROWS;
        if (chain.block > rows) chain.block = rows;
        const int64_t passed = chain.block * row_bytes, gain = 4 * fn_float_row(calls->hidden);
        chain.passed_bytes = (size_t)fn_round_up(passed > gain ? passed : gain, FN_ALIGNMENT);
    }
    return fn_divide(run_share, &chain, rows, elements, calls->threads, chain.passed_bytes + scratch_bytes);
}
