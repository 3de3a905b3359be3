/* The sizes of the buffers that kernels need beside the operands. */
#include "run/run.h"

/* float64: two rows. Else: kept rows, the sums of two rows' segments, and two rows if outputs bypass the cache. */
size_t fn_scratch_bytes(const struct fn_forward_job *job) {
    int64_t kept = fn_kept(job->hidden);
    if (job->x_kind == FN_F64) return (size_t)(2 * 8 * fn_round_up(job->hidden, FN_SEGMENT));
    int64_t bytes = fn_round_up(4 * (kept + 2 * fn_padded_sums(job->hidden)), FN_ALIGNMENT);
    return (size_t)(job->bypass_cache ? bytes + 8 * kept : bytes);
}

/* The weight and the bias as float, of all heads; or a weight of float, for rows of bfloat16 that are read in another order. */
size_t fn_make_room_for_affine(struct fn_forward_job *job, int64_t rows, size_t bytes) {
    const int ordered = rows >= FN_ONE_KIND_ROWS && job->x_kind == FN_BF16 && job->weight_kind == FN_F32;
    if (job->x_kind == FN_F64 || !(fn_has_affine_rows(job) || ordered)) return bytes;
    job->affine = bytes;
    return bytes + (size_t)((fn_has_affine_rows(job) ? 2 : 1) * 4 * job->heads * fn_float_row(job->hidden));
}

/* One row of each operand, padded to whole segments, the sums of segments, the gains of all heads, and wdy (pass_over). */
size_t fn_backward_scratch_bytes(const struct fn_backward_job *job) {
    int64_t padded = fn_round_up(job->hidden, FN_SEGMENT);
    int64_t others = job->heads * job->gain_stride + fn_room_for_sums(job->hidden);
    if (job->center && !job->wide) others += FN_SEGMENT + fn_room_for_sums(job->hidden);
    return (size_t)(fn_round_up(4 * padded + others, FN_SEGMENT) * (job->wide ? 8 : 4));
}
