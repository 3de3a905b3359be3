/* The instruction sets, and the one in use. */
#include <string.h>

#include "run/run.h"
#include "machine/target.h"
#include "run/tuning.h"

/*
 * The variants, which CMake may have named. A later one that is usable is the better one. On AArch64 llvm-mca says so, in
 * cycles per bfloat16 element on Neoverse V1 (256 bits): sve 1.22, neon_bf16 0.77, sve_bf16 0.73. SVE of 128 bits is not
 * usable (cpu_features.c). A64FX has sve, but no bfloat16.
 */
#if !defined(FN_VARIANTS)
#if defined(FN_AVX512_FP16)
#define FN_VARIANTS FN_VARIANT(scalar) FN_VARIANT(avx2) FN_VARIANT(avx512) FN_VARIANT(avx512_fp16) FN_VARIANT(zen4)
#elif defined(FN_X86_64)
#define FN_VARIANTS FN_VARIANT(scalar) FN_VARIANT(avx2) FN_VARIANT(avx512) FN_VARIANT(zen4)
#elif defined(FN_SVE)
#define FN_VARIANTS FN_VARIANT(neon) FN_VARIANT(sve) FN_VARIANT(neon_bf16) FN_VARIANT(sve_bf16)
#elif defined(FN_NEON_BF16)
#define FN_VARIANTS FN_VARIANT(neon) FN_VARIANT(neon_bf16)
#elif defined(FN_AARCH64)
#define FN_VARIANTS FN_VARIANT(neon)
#else
#define FN_VARIANTS FN_VARIANT(scalar)
#endif
#endif

#if defined(FN_AARCH64)
static int fn_has_neon(void) { return 1; }
#else
static int fn_has_scalar(void) { return 1; }
#endif

static const struct {
    const char *name;
    int (*usable)(void);
    const struct fn_kernels *kernels;
} isas[] = {
#define FN_VARIANT(name) {#name, fn_has_##name, &fn_kernels_##name},
    FN_VARIANTS
#undef FN_VARIANT
};

int fn_isa_count(void) { return (int)(sizeof isas / sizeof *isas); }
const char *fn_isa_name(int isa) { return isas[isa].name; }
int fn_isa_usable(int isa) { return isas[isa].usable(); }

static int isa_in_use, f16_isa; /* the second: for rows of float16 */
static const struct fn_int8_dots *int8_dots;

int fn_isa(void) { return isa_in_use; }
void fn_use_isa(int isa) {
    fn_choose_tuning(isas[isa].name);
    const char *const f16 = fn_tuning()->f16;
    isa_in_use = f16_isa = isa;
    int8_dots = fn_int8_dots_of(isas[isa].name);
    for (int k = 0; f16 && k < fn_isa_count(); k++)
        if (!strcmp(isas[k].name, f16)) f16_isa = k;
}
const struct fn_kernels *fn_kernels_for(int kind) { return isas[kind == FN_F16 ? f16_isa : isa_in_use].kernels; }
const struct fn_int8_dots *fn_int8_dots(void) { return int8_dots; }
