/* The launcher of Triton's kernels for CPUs, for the fast path; knows nothing of Python's. */
#ifndef FUSEDNORM_TRITON_H
#define FUSEDNORM_TRITON_H

#include "abi/triton_programs.h"

void fn_triton_open(uintptr_t run, int64_t most); /* the address of fn_run_triton, and the longest rows */
void fn_triton_hold(const struct fn_call *c, uintptr_t kernel); /* one thread at a time */
int fn_triton_has(const struct fn_call *c); /* whether a kernel is held; before there is an `out`, it is taken to be like x */
int fn_triton_run(const struct fn_call *c); /* runs the kernel that is held; returns as fn_run_triton does */

#endif
