/* The functions of the C library that Python calls. */
#ifndef FUSEDNORM_CPU_H
#define FUSEDNORM_CPU_H

#include "abi/call.h"
#include "abi/gate.h"
#include "abi/declared.h"
#include "abi/attention.h"
#include "abi/rotation.h"

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ == 1)
#error "fusednorm promises bits: build it without -ffast-math and the options that belong to it"
#endif
#include <float.h>
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16 /* 16: halves too are computed as what they are */
#error "fusednorm promises bits: build it for arithmetic in float itself, as with -msse2 -mfpmath=sse in place of the x87"
#endif

const char *fn_openmp_path(void); /* the file of the OpenMP runtime in use; empty if there is none */
void fn_after_fork(void); /* this process is a forked child: from now on everything runs on the calling thread */

/*
 * For what is computed around calls: gives the calling thread the spec's arithmetic, and the caller's back, which the first one
 * has returned.
 */
uint64_t fn_enter_arithmetic(void);
void fn_leave_arithmetic(uint64_t state);

/* isa.c: the instruction sets compiled in. The last usable one is the best. */
int fn_isa_count(void);
const char *fn_isa_name(int isa);
int fn_isa_usable(int isa);

/* The instruction set in use, in the whole process: the first one until it is set. */
int fn_isa(void);
void fn_use_isa(int isa);

/*
 * Runs a call as docs/spec.md says. Operands may be unaligned. An output of a forward pass may be the very memory of an
 * input of the same element size and strides; every other overlap is undefined. A backward pass has one row at least.
 * Returns 0, or 1 if there was no memory for the rows' buffers: then nothing is written.
 */
typedef int fn_run_fn(const struct fn_call *call);
fn_run_fn fn_run;

/* checked.c: runs calls of kinds that were noted, as fn_run does; returns 1 for others, of which nothing is written. */
fn_run_fn fn_run_if_checked;
void fn_note_checked(const void *packed); /* a `struct fn_call` */

/* Normalises and rotates heads, as a `struct fn_rotation` says, under the same conditions; returns as fn_run does. */
int fn_run_rotation(const void *packed);

/*
 * Computes a declared operation, or its gradient, as a `struct fn_declared` says, or a `struct fn_attention` whose output shares no
 * memory with operands, under the same conditions; returns as fn_run does.
 */
int fn_run_declared(const void *packed);

/* Runs a gate, a `struct fn_gate`, under the same conditions. Outputs of a backward pass share no memory with inputs. */
void fn_run_gate(const void *packed);

#endif
