/* Transposes four rows of four floats: of vectors of 128 bits, which all kernels of these architectures have. */
#ifndef FUSEDNORM_TRANSPOSE_H
#define FUSEDNORM_TRANSPOSE_H

#include <stdint.h>

#include "machine/target.h"

/* Rows lie `step` floats apart; column i is written to `to[i]`. */
#if defined(FN_X86_64)
#include <immintrin.h>
FN_INLINE void transpose_four(const float *from, int64_t step, float *const *to) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + step), c = _mm_loadu_ps(from + 2 * step), d = _mm_loadu_ps(from + 3 * step);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to[0], a);
    _mm_storeu_ps(to[1], b);
    _mm_storeu_ps(to[2], c);
    _mm_storeu_ps(to[3], d);
}
#elif defined(FN_AARCH64)
#include <arm_neon.h>
FN_INLINE void transpose_four(const float *from, int64_t step, float *const *to) {
    const float32x4x2_t p = vtrnq_f32(vld1q_f32(from), vld1q_f32(from + step));
    const float32x4x2_t q = vtrnq_f32(vld1q_f32(from + 2 * step), vld1q_f32(from + 3 * step));
    vst1q_f32(to[0], vcombine_f32(vget_low_f32(p.val[0]), vget_low_f32(q.val[0])));
    vst1q_f32(to[1], vcombine_f32(vget_low_f32(p.val[1]), vget_low_f32(q.val[1])));
    vst1q_f32(to[2], vcombine_f32(vget_high_f32(p.val[0]), vget_high_f32(q.val[0])));
    vst1q_f32(to[3], vcombine_f32(vget_high_f32(p.val[1]), vget_high_f32(q.val[1])));
}
#else
FN_INLINE void transpose_four(const float *from, int64_t step, float *const *to) {
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++) to[i][k] = from[k * step + i];
}
#endif

#endif
