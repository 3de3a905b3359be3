/* Chooses the instruction set, divides the rows among threads, and finds room for their buffers. */
#include "abi/fusednorm_cpu.h"

#include <stdlib.h>

#include "machine/ieee.h"
#include "machine/target.h"

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

static int isa_in_use, on_zen5; /* kept, because a virtual machine takes microseconds to say what its processor is */

int fn_isa(void) { return isa_in_use; }
void fn_use_isa(int isa) {
    isa_in_use = isa;
#if defined(FN_X86_64)
    on_zen5 = fn_is_zen5();
#endif
}
const struct fn_kernels *fn_kernels(int kind) {
    const struct fn_kernels *kernels = isas[isa_in_use].kernels;
#if defined(FN_X86_64)
    /* Zen 4 executes 512-bit instructions in two halves: with them, rows of 4096 float16 took a quarter longer. */
    if (kernels == &fn_kernels_zen4 && kind == FN_F16) return &fn_kernels_avx2;
#endif
    return (void)kind, kernels;
}

/* Buffers up to this size lie on the stack of the thread that uses them. */
enum { STACK_SCRATCH = 48 * 1024 };

static int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/* float64: two rows. Else: kept rows, the sums of two rows' segments, and two rows if outputs bypass the cache. */
size_t fn_scratch_bytes(const struct fn_forward_job *job) {
    int64_t kept = fn_kept(job->hidden);
    if (job->x_kind == FN_F64) return (size_t)(2 * 8 * round_up(job->hidden, FN_SEGMENT));
    int64_t bytes = round_up(4 * (kept + 2 * fn_padded_sums(job->hidden)), FN_ALIGNMENT);
    return (size_t)(job->bypass_cache ? bytes + 8 * kept : bytes);
}

/* The weight and the bias as float, of all heads. */
size_t fn_affine_bytes(const struct fn_forward_job *job) {
    return job->x_kind == FN_F64 ? 0 : (size_t)(2 * 4 * job->heads * fn_float_row(job->hidden));
}

/* One row of each operand, padded to whole segments, the sums of segments, and the gains of all heads. */
size_t fn_backward_scratch_bytes(const struct fn_backward_job *job) {
    int64_t padded = round_up(job->hidden, FN_SEGMENT);
    const int64_t others = job->heads * job->gain_stride + fn_room_for_sums(job->hidden);
    return (size_t)(round_up(4 * padded + others, FN_SEGMENT) * (job->wide ? 8 : 4));
}

/* Whether all rows of an operand begin and end with a cache line. */
static int on_border(const struct fn_operand *o, int64_t hidden) {
    const uintptr_t item = (uintptr_t)fn_element_size(o->kind);
    return !((o->address | (uintptr_t)(o->stride | o->outer_stride | hidden) * item) % FN_ALIGNMENT);
}

/* Whether an input of these calls lies at this address. */
static int is_input(const struct fn_call *calls, int count, uintptr_t address) {
    for (int k = 0; k < count; k++)
        if (calls[k].operand[FN_X].address == address || calls[k].operand[FN_RESIDUAL].address == address) return 1;
    return 0;
}

/* Whether the outputs of the last call are large, made of whole cache lines, and not in the caches already as inputs. */
static int bypasses_cache(const struct fn_call *calls, int count) {
    const struct fn_call *c = &calls[count - 1];
    const struct fn_operand *o = c->operand;
    const int64_t out_item = fn_element_size(o[FN_OUT].kind), residual_item = fn_element_size(o[FN_RESIDUAL_OUT].kind);
    if (o[FN_X].kind == FN_F64 || c->rows * c->hidden * (out_item + residual_item) < FN_FROM_MEMORY_BYTES) return 0;
    /* Short rows of 16-bit values are bound by arithmetic: the detour by scratch would cost more than it saves. */
    if (c->hidden < 256 && out_item == 2) return 0;
    for (int i = FN_OUT; i <= FN_RESIDUAL_OUT; i++) {
        if (!o[i].kind) continue;
        if (is_input(calls, count, o[i].address) || !on_border(&o[i], c->hidden)) return 0;
    }
    return 1;
}

enum { ZEN5_CACHES = 32 * 1024 * 1024 }; /* the last cache of its servers */

/*
 * Whether passes over different rows are made together. Zen 4 reads memory slower then, unless its first cache holds all
 * that is under way: in place, rows of 4096 took 1.2 to 1.5 times as long with it. Outputs that bypass the caches leave
 * room for longer rows. Zen 5 does so too where a residual comes from beyond its caches (in place rows of 4096 took 1.35
 * times as long), and its caches feed it slower where the first one does not hold two rows; of float16, whose conversions
 * take longer, it did not matter.
 */
static int overlaps(const struct fn_forward_job *job, int64_t rows) {
    const int64_t row_bytes = job->hidden * (fn_element_size(job->x_kind) + fn_element_size(job->residual_kind));
    if (on_zen5) {
        if (job->residual_kind && rows * row_bytes >= ZEN5_CACHES && !(job->bypass_cache && job->hidden <= 2048)) return 0;
        return row_bytes <= 16 * 1024 || job->x_kind == FN_F16;
    }
#if defined(FN_X86_64)
    if (isas[isa_in_use].kernels == &fn_kernels_zen4 && job->from_memory)
        return row_bytes <= (job->bypass_cache ? 8 * 1024 : 4 * 1024);
#endif
    return 1;
}

/*
 * The same, of two norms with an addition between them. From memory, so that it is read while there is arithmetic to do. Zen 5
 * keeps so much under way that it is faster in the caches too, by 3 to 12 %, and in float32 up to a quarter; but it reads
 * long rows of float32 slower then.
 */
static int two_norms_overlap(const struct fn_forward_job *job) {
    if (!on_zen5) return job->from_memory;
    return job->x_kind != FN_F32 || job->hidden <= (job->from_memory ? 1024 : 2048);
}

/*
 * Whether long rows take a weight and a bias as they are: the first cache would not hold both as float and the rows too. On
 * Zen 5 a call took up to a third less time so. Conversions of float16, and those of AVX2, take longer.
 */
static int affine_as_is(const struct fn_forward_job *job) {
    return !job->overlaps || (on_zen5 && job->x_kind == FN_BF16 && job->hidden > 2048);
}

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
    size_t passed_bytes; /* of a block's rows between two parts */
    size_t thread_bytes; /* a thread's buffer: the passed rows, then the kernels' scratch */
    char *buffers; /* one per thread, or NULL: on the stack */
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
    const int64_t item = fn_element_size(o->kind), jump = fn_jump(c, operand) * item;
    for (int64_t m = begin; m < end; m++) {
        const char *row = first ? first + (m - begin) * o->stride * item
                                : fn_row((const char *)o->address, m, o->stride * item, jump, c->inner);
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

static void run_part_of_rows(const struct chain *chain, int64_t begin, int64_t end, char *buffer) {
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

static void run_on_stack(const struct chain *chain, int64_t begin, int64_t end) {
    _Alignas(64) char buffer[STACK_SCRATCH];
    run_part_of_rows(chain, begin, end, buffer);
}

static void run_thread(void *argument, int thread, int threads) {
    const struct chain *chain = argument;
    const int64_t rows = chain->part[0].given->rows;
    int64_t begin = fn_first_row(rows, thread, threads), end = fn_first_row(rows, thread + 1, threads);
    fn_fp_state state = fn_enter_ieee();
    if (chain->buffers) run_part_of_rows(chain, begin, end, chain->buffers + (size_t)thread * chain->thread_bytes);
    else run_on_stack(chain, begin, end);
    fn_leave_ieee(state);
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
                .x_stride = o[FN_X].stride * fn_element_size(o[FN_X].kind),
                .residual_stride = o[FN_RESIDUAL].stride * fn_element_size(o[FN_RESIDUAL].kind),
                .out_stride = o[FN_OUT].stride * fn_element_size(o[FN_OUT].kind),
                .residual_out_stride = o[FN_RESIDUAL_OUT].stride * fn_element_size(o[FN_RESIDUAL_OUT].kind),
                .eps = fn_without_payload(c->eps), .weight_offset = fn_without_payload(c->weight_offset),
                .bias_kind = (int)o[FN_BIAS].kind, .bias = (const void *)o[FN_BIAS].address, .heads = c->heads,
                .weight_stride = o[FN_WEIGHT].stride * fn_element_size(o[FN_WEIGHT].kind),
                .bias_stride = o[FN_BIAS].stride * fn_element_size(o[FN_BIAS].kind)},
        .kernels = fn_kernels((int)o[FN_X].kind),
    };
    const int64_t read = fn_element_size(o[FN_X].kind) + fn_element_size(o[FN_RESIDUAL].kind);
    part->job.from_memory = c->rows * c->hidden * read >= FN_FROM_MEMORY_BYTES;
}

/* So many bytes pass between two parts, unless ONE_KIND_ROWS of forward_body.h, from which on rows overlap, are more. */
enum { BLOCK_BYTES = 64 * 1024, BLOCK_ROWS = 4 };

/*
 * A gate computes longer than it reads, and the norm of the next block reads longer than it computes. So the next block is
 * fetched while a block is gated, if x is so large that the second cache does not hold it: from memory a call took half of
 * the time.
 */
enum { FETCHED_BYTES = 1024 * 1024 };

int fn_forward(const struct fn_call *calls, int count) {
    const int64_t rows = calls->rows, elements = rows * calls->hidden;
    if (elements == 0) return 0;
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
    chain.buffers = NULL;
    chain.part[0].given = calls;
    if (chain.quantizer) {
        scratch_bytes = (size_t)(4 * fn_float_row(calls->hidden));
        chain.kernels = fn_kernels((int)(chain.count ? calls[count - 1].operand[FN_OUT].kind : calls->operand[FN_X].kind));
    }
    for (int k = 0; k < chain.count; k++) {
        prepare(&chain.part[k], &calls[k]);
        struct fn_forward_job *job = &chain.part[k].job;
        size_t bytes = fn_scratch_bytes(job);
        if (k == count - 1 && !chain.quantizer && !gate_last && bypasses_cache(calls, count)) {
            job->bypass_cache = bytes;
            bytes = fn_scratch_bytes(job);
        }
        job->overlaps = overlaps(job, rows);
        job->two_norms_overlap = two_norms_overlap(job);
        job->affine_as_is = affine_as_is(job);
        if (job->bias || job->heads > 1) {
            job->affine = bytes;
            bytes += fn_affine_bytes(job);
        }
        if (bytes > scratch_bytes) scratch_bytes = bytes;
        if (k == count - 1 && !chain.quantizer && !chain.gate) continue;
        chain.fetches = gate_last && calls->inner == rows && job->x_stride == calls->hidden * fn_element_size(job->x_kind) &&
                        rows * job->x_stride >= FETCHED_BYTES;
        const int64_t row_bytes = chain.gate_first ? job->x_stride : job->out_stride;
        chain.block = BLOCK_BYTES / row_bytes > BLOCK_ROWS ? BLOCK_BYTES / row_bytes : BLOCK_ROWS;
        if (chain.block > rows) chain.block = rows;
        const int64_t passed = chain.block * row_bytes, gain = 4 * fn_float_row(calls->hidden);
        chain.passed_bytes = (size_t)round_up(passed > gain ? passed : gain, FN_ALIGNMENT);
    }
    int threads = calls->threads < rows ? (int)calls->threads : (int)rows;
    if (threads < 1 || elements < FN_PARALLEL_ELEMENTS) threads = 1;
    chain.thread_bytes = chain.passed_bytes + scratch_bytes;
    void *allocated = NULL;
    if (chain.thread_bytes > STACK_SCRATCH) {
        allocated = malloc(chain.thread_bytes * (size_t)threads + FN_ALIGNMENT);
        if (!allocated) return 1;
        chain.buffers = (char *)(((uintptr_t)allocated + FN_ALIGNMENT - 1) / FN_ALIGNMENT * FN_ALIGNMENT);
    }
    fn_parallel(run_thread, &chain, threads);
    free(allocated);
    return 0;
}

int fn_run(const struct fn_call *call) {
    if (call->flags & FN_GATE_ONLY) {
        struct fn_gate gate = *fn_gate_after(call);
        gate.threads = call->threads;
        fn_run_gate(&gate);
        return 0;
    }
    return call->pass == FN_BACKWARD ? fn_backward(call) : fn_forward(call, 1 + (int)call->following);
}
