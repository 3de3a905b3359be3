/* Triton's compiled kernels for CPUs, which backends/triton/cpu.py loads: a kernel is one program of a grid. */
#ifndef FUSEDNORM_TRITON_PROGRAMS_H
#define FUSEDNORM_TRITON_PROGRAMS_H

#include "abi/call.h"

/*
 * Runs `programs` programs of a kernel with a call's operands on torch's threads, with the arithmetic that the spec asks
 * for. Returns 0, or 1 if there are more programs than Triton counts. A kernel takes what backends/triton/kernels/cpu_norm.py
 * writes; Triton's compiler adds six arguments: which program of the grid this is, in three dimensions, and how many
 * there are.
 */
typedef int fn_run_triton_fn(uintptr_t kernel, const struct fn_call *call, int64_t programs);
fn_run_triton_fn fn_run_triton;

#endif
