/* What processors were measured to want: a row for each family, a column for each number. None of them changes a bit. */
#ifndef FUSEDNORM_TUNING_H
#define FUSEDNORM_TUNING_H

#include "run/run.h"

#define FN_ALWAYS INT64_MAX /* as a longest row */
enum { FN_NEVER = 0 };

struct fn_tuning {
    const char *name;
    int (*is_this)(void); /* whether the processor is of this family */
    const char *with; /* the instruction set in use that the row is for; NULL: any */
    const char *f16; /* that of kernels for rows of float16, but for gates; NULL: the one in use */

    /*
     * Inputs of so many bytes are taken to come from memory: they are fetched ahead. Outputs of so many bypass the caches,
     * which would no longer hold them when they are read; but not rows of 16-bit elements that are shorter than
     * `past_caches`: they are bound by arithmetic, and the detour by scratch would cost more than it saves.
     */
    int64_t from_memory;
    int64_t past_caches;
    /*
     * Rows that are normalised as they are, and less their means: AVX-512's kernels fetch what they read so many bytes ahead; and
     * whether the last pass over rows from memory fetches the next ones.
     */
    int64_t ahead[2], fetches_next[2];

    /*
     * The longest rows whose passes are made together with those of other rows. In bytes of x and its residual: of rows of
     * float16, whose conversions take longer, and of others. Of inputs that have `last_cache` bytes, all of these limits are
     * kept: in bytes, in place and where outputs bypass the caches; and in elements where there is a residual, in both cases.
     */
    int64_t overlap_f16, overlap;
    int64_t last_cache, overlap_beyond[2], overlap_sum_beyond[2];

    /* The same of two norms with an addition between them, in elements: of inputs in the caches and from memory. */
    int64_t two_norms[2], two_norms_f32[2];

    /* The longest rows of bfloat16, in elements, whose weight and bias are widened in advance where passes overlap. */
    int64_t widened;

    /* The bytes that pass between two calls, and between a norm and a rotation: a block of rows, which stays in the caches. */
    int64_t block, block_of_heads;

    /*
     * Gradients of a gate and a norm: the elements in a chunk of rows, which stays in the caches; one thread takes so many in
     * one chunk. The next block or chunk is fetched while a gate is computed, if x has so many bytes, or for gradients the gate;
     * and the next row while log-probabilities of one are, if all logits have so many.
     */
    int64_t chunk, only_chunk;
    int64_t fetched, fetched_gradients;
};

struct fn_tuning *fn_tuning(void); /* the row in use */
void fn_choose_tuning(const char *isa); /* as is fit for the processor, and for the instruction set in use */

/* Whether what gradients of so many bytes are computed from comes from memory: two operands, or three, for each gradient. */
int fn_gradients_come_from_memory(int64_t bytes);

/* Whether the output of a gate bypasses the caches. */
int fn_gate_bypasses_cache(const struct fn_gate *gate);

/* Whether the last call's outputs bypass the cache; and the fields of a job that change no bit. */
int fn_bypasses_cache(const struct fn_call *calls, int count);
void fn_tune(struct fn_forward_job *job, int64_t rows);

#endif
