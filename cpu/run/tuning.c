/* Decisions that change no bit: the table, and how a call is decided by its numbers. */
#include "run/tuning.h"

#include <string.h>

#include "machine/target.h"

static int always(void) { return 1; }

#define KB *1024
#define MB *1024 * 1024
/* The columns that were not found to differ. */
#define SAME                                                                                                        \
    .from_memory = 8 MB, .past_caches = 256, .overlap_f16 = FN_ALWAYS, .block = 64 KB, .block_of_heads = 32 KB,      \
    .chunk = 16 * 1024, .only_chunk = 32 * 1024, .fetched = 1 MB, .fetched_gradients = 2 MB

/* The last row that fits is the processor's. */
static const struct fn_tuning rows_of_table[] = {
    /* Two norms overlap from memory, so that it is read while there is arithmetic to do. */
    {"any", always, SAME, .ahead = {1 KB, 1 KB}, .fetches_next = {1, 1}, .overlap = FN_ALWAYS, .last_cache = 8 MB, .overlap_beyond = {FN_ALWAYS, FN_ALWAYS},
     .overlap_sum_beyond = {FN_ALWAYS, FN_ALWAYS}, .two_norms = {FN_NEVER, FN_ALWAYS}, .two_norms_f32 = {FN_NEVER, FN_ALWAYS},
     .widened = FN_ALWAYS},
#if defined(FN_X86_64)
    /*
     * Zen 4 reads memory slower where rows overlap, unless its first cache holds all that is under way: in place, rows of
     * 4096 took 1.2 to 1.5 times as long. Outputs that bypass the caches leave room for longer rows. It executes 512-bit
     * conversions of float16 in two halves: with them, rows of 4096 took a quarter longer than by AVX2.
     */
    {"zen4", fn_has_zen4, SAME, .with = "zen4", .f16 = "avx2", .ahead = {0, 1 KB}, .fetches_next = {0, 1}, .overlap = FN_ALWAYS, .last_cache = 8 MB,
     .overlap_beyond = {4 KB, 8 KB}, .overlap_sum_beyond = {FN_ALWAYS, FN_ALWAYS}, .two_norms = {FN_NEVER, FN_ALWAYS},
     .two_norms_f32 = {FN_NEVER, FN_ALWAYS}, .widened = FN_ALWAYS},
    /*
     * Zen 5 does so too where a residual comes from beyond its caches (in place rows of 4096 took 1.35 times as long), and
     * its caches feed it slower where the first one does not hold two rows; of float16 it did not matter. Two norms overlap
     * in the caches too, by 3 to 12 %, and in float32 up to a quarter; but it reads long rows of float32 slower then. With
     * long rows of bfloat16 a weight and a bias as they are took up to a third less time.
     */
    {"zen5", fn_is_zen5, SAME, .ahead = {1 KB, 1 KB}, .fetches_next = {1, 1}, .overlap = 16 KB, .last_cache = 32 MB, .overlap_beyond = {FN_ALWAYS, FN_ALWAYS},
     .overlap_sum_beyond = {FN_NEVER, 2048}, .two_norms = {FN_ALWAYS, FN_ALWAYS}, .two_norms_f32 = {2048, 1024},
     .widened = 2048},
#endif
};

/* A copy, because a virtual machine takes microseconds to name its processor; and benchmarks/tune.py changes it. */
static struct fn_tuning in_use;

struct fn_tuning *fn_tuning(void) { return &in_use; }

void fn_choose_tuning(const char *isa) {
    for (size_t k = 0; k < sizeof rows_of_table / sizeof *rows_of_table; k++) {
        const struct fn_tuning *row = &rows_of_table[k];
        if (row->is_this() && (!row->with || !strcmp(row->with, isa))) in_use = *row;
    }
}

int fn_gradients_come_from_memory(int64_t bytes) { return bytes >= in_use.from_memory / 2; }

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

/* Other gates compute longer than memory takes, and from memory such stores took twice the time. */
int fn_gate_bypasses_cache(const struct fn_gate *g) {
    const struct fn_operand *out = &g->operand[FN_GATE_OUT];
    if (g->activation != FN_RELU2 || out->kind != FN_BF16 || g->operand[FN_GATED].kind || g->pass == FN_BACKWARD || out->address % FN_ALIGNMENT) return 0;
    return out->address != g->operand[FN_GATE].address && g->hidden * fn_element_size(out->kind) >= in_use.from_memory;
}

/* Whether the outputs of the last call are large, made of whole cache lines, and not in the caches already as inputs. */
int fn_bypasses_cache(const struct fn_call *calls, int count) {
    const struct fn_call *c = &calls[count - 1];
    const struct fn_operand *o = c->operand;
    const int64_t out_item = fn_element_size(o[FN_OUT].kind), residual_item = fn_element_size(o[FN_RESIDUAL_OUT].kind);
    if (o[FN_X].kind == FN_F64 || c->rows * c->hidden * (out_item + residual_item) < in_use.from_memory) return 0;
    if (c->hidden < in_use.past_caches && out_item == 2) return 0;
    for (int i = FN_OUT; i <= FN_RESIDUAL_OUT; i++) {
        if (!o[i].kind) continue;
        if (is_input(calls, count, o[i].address) || !on_border(&o[i], c->hidden)) return 0;
    }
    return 1;
}

/* Whether passes over different rows are made together. */
static int overlaps(const struct fn_forward_job *job, int64_t rows) {
    const int64_t row_bytes = job->hidden * (fn_element_size(job->x_kind) + fn_element_size(job->residual_kind));
    const int past_caches = job->bypass_cache != 0;
    if (row_bytes > (job->x_kind == FN_F16 ? in_use.overlap_f16 : in_use.overlap)) return 0;
    if (rows * row_bytes < in_use.last_cache) return 1;
    if (job->residual_kind && job->hidden > in_use.overlap_sum_beyond[past_caches]) return 0;
    return row_bytes <= in_use.overlap_beyond[past_caches];
}

void fn_tune(struct fn_forward_job *job, int64_t rows) {
    const int64_t *const two_norms = job->x_kind == FN_F32 ? in_use.two_norms_f32 : in_use.two_norms;
    const int centered = (job->flags & FN_CENTER) != 0;
    job->ahead = in_use.ahead[centered];
    /* Shorter rows are fetched by the processor in time. */
    const int fits = job->hidden >= FN_SEGMENT && job->hidden <= FN_FETCHED_ROW;
    job->fetches_next = in_use.fetches_next[centered] && job->from_memory && fits;
    job->overlaps = overlaps(job, rows);
    job->two_norms_overlap = job->hidden <= two_norms[job->from_memory];
    /* The first cache would not hold both as float and long rows too. Conversions of float16, and those of AVX2, take longer. */
    job->affine_as_is = !job->overlaps || (job->x_kind == FN_BF16 && job->hidden > in_use.widened);
}
