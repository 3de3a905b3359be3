/* The instruction sets, and the one in use. */
#include "abi/fusednorm_cpu.h"
#include "machine/target.h"
#include "run/tuning.h"

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

static int isa_in_use;

int fn_isa(void) { return isa_in_use; }
void fn_use_isa(int isa) {
    isa_in_use = isa;
    fn_choose_tuning(isas[isa].kernels);
}
const struct fn_kernels *fn_kernels_for(int kind) {
    const struct fn_kernels *f16 = fn_tuning()->f16;
    return kind == FN_F16 && f16 ? f16 : isas[isa_in_use].kernels;
}
