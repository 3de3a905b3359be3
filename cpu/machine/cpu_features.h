/* What the processor has. */
#ifndef FUSEDNORM_CPU_FEATURES_H
#define FUSEDNORM_CPU_FEATURES_H

int fn_has_avx2(void); /* with F16C and FMA, and an operating system that saves the registers */
int fn_has_avx512(void); /* F, BW, DQ and VL, and an operating system that saves the registers */
int fn_has_avx512_fp16(void); /* AVX-512 with VBMI2 and FP16 */
int fn_has_zen4(void); /* or Zen 5: with AVX-512, and without FP16 */
int fn_is_zen5(void);
int fn_has_neon_bf16(void);
int fn_has_sve(void); /* with vectors whose length is a power of two */
int fn_has_sve_bf16(void);

#endif
