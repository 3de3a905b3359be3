/* Switches a thread to the arithmetic of the spec, and back to the caller's. */
#ifndef FUSEDNORM_IEEE_H
#define FUSEDNORM_IEEE_H

#include <math.h>
#include <stdint.h>

#include "machine/target.h"

/*
 * The spec rounds every operation to nearest even and keeps subnormals. The calling thread may have
 * set another mode (torch.set_flush_denormal, a library built with -ffast-math).
 */
#if defined(FN_X86_64)
#include <xmmintrin.h>
typedef unsigned fn_fp_state;
#define NOT_IEEE 0xe040u /* flush to zero, rounding mode, denormals are zero */
static inline fn_fp_state fn_enter_ieee(void) {
    fn_fp_state state = _mm_getcsr();
    if (state & NOT_IEEE) _mm_setcsr(state & ~NOT_IEEE);
    return state;
}
static inline void fn_leave_ieee(fn_fp_state state) {
    if (state & NOT_IEEE) _mm_setcsr(state);
}
#elif defined(FN_AARCH64)
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
enum { FPCR = 0x5a20 }; /* ARM64_SYSREG(3, 3, 4, 4, 0) */
static inline uint64_t read_fpcr(void) { return (uint64_t)_ReadStatusReg(FPCR); }
static inline void write_fpcr(uint64_t value) { _WriteStatusReg(FPCR, (__int64)value); }
#else
static inline uint64_t read_fpcr(void) {
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
static inline void write_fpcr(uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#endif
typedef uint64_t fn_fp_state;
#define NOT_IEEE 0x5c00003ull /* AHP, FZ, rounding mode, AH, FIZ; FZ16 affects no operation used here */
#define DEFAULT_NAN 0x2000000ull /* DN: every operation's NaN is 0x7fc00000, which rounding in integers keeps */
static inline fn_fp_state fn_enter_ieee(void) {
    fn_fp_state state = read_fpcr(), wanted = (state & ~NOT_IEEE) | DEFAULT_NAN;
    if (state != wanted) write_fpcr(wanted);
    return state;
}
static inline void fn_leave_ieee(fn_fp_state state) {
    if (state != ((state & ~NOT_IEEE) | DEFAULT_NAN)) write_fpcr(state);
}
#else
typedef int fn_fp_state;
static inline fn_fp_state fn_enter_ieee(void) { return 0; }
static inline void fn_leave_ieee(fn_fp_state state) { (void)state; }
#endif

/* Replaces a NaN that the caller gives as eps or an offset: rounding in integers takes NaNs whose low bits are zero. */
static inline double fn_without_payload(double number) { return number == number ? number : (double)NAN; }

#endif
