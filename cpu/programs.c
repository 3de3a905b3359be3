/* Runs Triton's compiled kernels for CPUs; see programs.h. */
#include "programs.h"

#include "fusednorm_cpu.h"
#include "ieee.h"

#define FORWARD(REAL) \
    void (*)(void *, void *, void *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, REAL, \
             REAL, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t)
#define BACKWARD(REAL) \
    void (*)(void *, void *, void *, void *, void *, void *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, \
             int64_t, int64_t, int64_t, REAL, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t)

struct grid {
    uintptr_t kernel;
    int wide, backward;
    void *operands[FN_BACKWARD_OPERANDS];
    const int64_t *numbers;
    double eps, weight_offset;
    int64_t programs;
};

static void run_program(const struct grid *g, uint32_t program) {
    void *const *p = g->operands;
    const int64_t *n = g->numbers;
    const uint32_t programs = (uint32_t)g->programs;
#define CALL_FORWARD(REAL) \
    ((FORWARD(REAL))g->kernel)(p[0], p[1], p[2], p[3], p[4], p[5], n[0], n[1], n[2], n[3], n[4], n[5], (REAL)g->eps, \
                               (REAL)g->weight_offset, program, 0, 0, programs, 1, 1)
#define CALL_BACKWARD(REAL) \
    ((BACKWARD(REAL))g->kernel)(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], n[0], n[1], n[2], n[3], n[4], n[5], \
                                n[6], (REAL)g->weight_offset, program, 0, 0, programs, 1, 1)
    if (g->backward && g->wide) CALL_BACKWARD(double);
    else if (g->backward) CALL_BACKWARD(float);
    else if (g->wide) CALL_FORWARD(double);
    else CALL_FORWARD(float);
}

static void run_thread(void *argument, int thread, int threads) {
    const struct grid *g = argument;
    int64_t begin = fn_first_row(g->programs, thread, threads), end = fn_first_row(g->programs, thread + 1, threads);
    fn_fp_state state = fn_enter_ieee();
    for (int64_t program = begin; program < end; program++) run_program(g, (uint32_t)program);
    fn_leave_ieee(state);
}

static int run(struct grid *g, const uintptr_t *operands, int count, int threads) {
    if (g->programs > INT32_MAX) return 1;
    for (int i = 0; i < count; i++) g->operands[i] = (void *)operands[i];
    fn_parallel(run_thread, g, threads < g->programs ? threads : (int)g->programs);
    return 0;
}

int fn_run_forward(uintptr_t kernel, int wide, const uintptr_t *operands, const int64_t *numbers, double eps,
                   double weight_offset, int64_t programs, int threads) {
    struct grid g = {.kernel = kernel, .wide = wide, .numbers = numbers, .eps = eps, .weight_offset = weight_offset,
                     .programs = programs};
    return run(&g, operands, FN_FORWARD_OPERANDS, threads);
}

int fn_run_backward(uintptr_t kernel, int wide, const uintptr_t *operands, const int64_t *numbers, double weight_offset,
                    int64_t programs, int threads) {
    struct grid g = {.kernel = kernel, .wide = wide, .backward = 1, .numbers = numbers, .weight_offset = weight_offset,
                     .programs = programs};
    return run(&g, operands, FN_BACKWARD_OPERANDS, threads);
}
