/* Triton's compiled kernels for CPUs, which backends/triton_cpu.py loads: a kernel is one program of a grid. */
#ifndef FUSEDNORM_PROGRAMS_H
#define FUSEDNORM_PROGRAMS_H

#include <stdint.h>

/*
 * What backends/triton_cpu_kernels.py takes, in its order. After a kernel's own arguments Triton's compiler adds six:
 * which program of the grid this is, in three dimensions, and how many there are.
 */
enum { FN_FORWARD_OPERANDS = 6, FN_FORWARD_NUMBERS = 6, FN_BACKWARD_OPERANDS = 9, FN_BACKWARD_NUMBERS = 7 };

/*
 * Runs the programs of a grid on torch's threads, with the arithmetic that the spec asks for; nonzero if there are
 * more of them than Triton counts. `wide`: eps and weight_offset are doubles to the kernel.
 */
typedef int fn_run_forward_fn(uintptr_t kernel, int wide, const uintptr_t *operands, const int64_t *numbers, double eps,
                              double weight_offset, int64_t programs, int threads);
fn_run_forward_fn fn_run_forward;
int fn_run_backward(uintptr_t kernel, int wide, const uintptr_t *operands, const int64_t *numbers, double weight_offset,
                    int64_t programs, int threads);

#endif
