/* The instruction sets that this processor and its operating system can run. AArch64 always has NEON. */
#include "machine/cpu_features.h"
#include "machine/target.h"

#if defined(FN_X86_64)

#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif

enum { EAX, EBX, ECX, EDX };

/* A part of a leaf of CPUID; zeros where the processor has no such leaf. */
static void cpuid_part(unsigned leaf, unsigned part, unsigned registers[4]) {
#if defined(_MSC_VER)
    int limit[4], values[4] = {0};
    __cpuid(limit, 0);
    if (leaf <= (unsigned)limit[0]) __cpuidex(values, (int)leaf, (int)part);
    for (int i = 0; i < 4; i++) registers[i] = (unsigned)values[i];
#else
    registers[EAX] = registers[EBX] = registers[ECX] = registers[EDX] = 0;
    __get_cpuid_count(leaf, part, &registers[EAX], &registers[EBX], &registers[ECX], &registers[EDX]);
#endif
}
static void cpuid(unsigned leaf, unsigned registers[4]) { cpuid_part(leaf, 0, registers); }

/* XCR0: the register files that the operating system saves. */
static unsigned saved_registers(void) {
    unsigned leaf1[4];
    cpuid(1, leaf1);
    if (!(leaf1[ECX] & 1u << 27)) return 0; /* without OSXSAVE there is no XGETBV */
#if defined(_MSC_VER)
    return (unsigned)_xgetbv(0);
#else
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
#endif
}

int fn_has_avx2(void) {
    const unsigned avx_f16c_fma = 1u << 28 | 1u << 29 | 1u << 12, avx2 = 1u << 5, ymm_state = 0x6;
    unsigned leaf1[4], leaf7[4];
    cpuid(1, leaf1);
    cpuid(7, leaf7);
    return (leaf1[ECX] & avx_f16c_fma) == avx_f16c_fma && (leaf7[EBX] & avx2) && (saved_registers() & ymm_state) == ymm_state;
}

int fn_has_avx512(void) {
    const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, zmm_state = 0xe6;
    unsigned leaf7[4];
    cpuid(7, leaf7);
    return fn_has_avx2() && (leaf7[EBX] & f_dq_bw_vl) == f_dq_bw_vl && (saved_registers() & zmm_state) == zmm_state;
}

int fn_has_avx512_vnni(void) {
    unsigned leaf7[4];
    cpuid(7, leaf7);
    return fn_has_avx512() && (leaf7[ECX] & 1u << 11);
}

int fn_has_avx_vnni(void) {
    unsigned leaf7[4], more[4];
    cpuid(7, leaf7);
    if (!fn_has_avx2() || leaf7[EAX] == 0) return 0; /* the leaf has no other part */
    cpuid_part(7, 1, more);
    return more[EAX] >> 4 & 1;
}

int fn_has_avx512_fp16(void) {
    unsigned leaf7[4];
    cpuid(7, leaf7);
    return fn_has_avx512() && (leaf7[ECX] & 1u << 6) && (leaf7[EDX] & 1u << 23); /* VBMI2, FP16 */
}

/* The family of an AMD processor; 0 of another one. */
static unsigned amd_family(void) {
    unsigned leaf0[4], leaf1[4];
    cpuid(0, leaf0);
    cpuid(1, leaf1);
    int amd = leaf0[EBX] == 0x68747541 && leaf0[EDX] == 0x69746e65 && leaf0[ECX] == 0x444d4163; /* "AuthenticAMD" */
    return amd ? (leaf1[EAX] >> 8 & 0xf) + (leaf1[EAX] >> 20 & 0xff) : 0;
}

int fn_is_zen5(void) { return amd_family() == 0x1a; }
int fn_has_zen4(void) { return (amd_family() == 0x19 || fn_is_zen5()) && fn_has_avx512(); } /* 0x19 is Zen 3's family too */

#elif defined(FN_AARCH64) && defined(__linux__)

#include <sys/auxv.h>
#include <sys/prctl.h>

/* Linux defines these numbers; older C libraries have no names for them. */
int fn_has_neon_bf16(void) { return (getauxval(AT_HWCAP2) & 1ul << 14) != 0; } /* HWCAP2_BF16 */

int fn_has_neon_dot(void) { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; } /* HWCAP_ASIMDDP */

int fn_has_sve(void) {
    const int get_vector_length = 51, length_mask = 0xffff; /* PR_SVE_GET_VL; in bytes */
    if (!(getauxval(AT_HWCAP) & 1ul << 22)) return 0; /* HWCAP_SVE */
    int length = prctl(get_vector_length) & length_mask;
    /* With 128 bits NEON takes fewer cycles (docs/performance.md). Other multiples of 16 bytes were allowed once. */
    return length > 16 && (length & (length - 1)) == 0;
}

int fn_has_sve_bf16(void) { return fn_has_sve() && (getauxval(AT_HWCAP2) & 1ul << 12); } /* HWCAP2_SVEBF16 */

#elif defined(FN_AARCH64) && defined(__APPLE__)

#include <sys/sysctl.h>

static int has(const char *name) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, NULL, 0) == 0 && found;
}
int fn_has_neon_bf16(void) { return has("hw.optional.arm.FEAT_BF16"); }
int fn_has_neon_dot(void) { return has("hw.optional.arm.FEAT_DotProd"); }

#endif
