/* Decisions that change no bit, as they were measured on each processor. */
#include "abi/fusednorm_cpu.h"
#include "machine/target.h"

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
int fn_bypasses_cache(const struct fn_call *calls, int count) {
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
    if (fn_on_zen5()) {
        if (job->residual_kind && rows * row_bytes >= ZEN5_CACHES && !(job->bypass_cache && job->hidden <= 2048)) return 0;
        return row_bytes <= 16 * 1024 || job->x_kind == FN_F16;
    }
#if defined(FN_X86_64)
    if (fn_kernels_for(FN_F32) == &fn_kernels_zen4 && job->from_memory)
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
    if (!fn_on_zen5()) return job->from_memory;
    return job->x_kind != FN_F32 || job->hidden <= (job->from_memory ? 1024 : 2048);
}

/*
 * Whether long rows take a weight and a bias as they are: the first cache would not hold both as float and the rows too. On
 * Zen 5 a call took up to a third less time so. Conversions of float16, and those of AVX2, take longer.
 */
static int affine_as_is(const struct fn_forward_job *job) {
    return !job->overlaps || (fn_on_zen5() && job->x_kind == FN_BF16 && job->hidden > 2048);
}

void fn_tune(struct fn_forward_job *job, int64_t rows) {
    job->overlaps = overlaps(job, rows);
    job->two_norms_overlap = two_norms_overlap(job);
    job->affine_as_is = affine_as_is(job);
}
