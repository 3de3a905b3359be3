/*
 * Prints how cpu/run would have calls computed on each kind of processor: this file has kernels that only say what they are
 * given, and answers for cpu_features.c. No operand has memory. See test_choices.py.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT finds the functions below */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run/run.h"
#include "machine/target.h"

/* The processors, and what their instruction sets are. */
static const char *processor;
int fn_has_avx2(void) { return 1; }
int fn_has_avx512(void) { return 1; }
int fn_has_avx512_fp16(void) { return !strcmp(processor, "intel"); }
const struct fn_int8_dots *fn_int8_dots_of(const char *isa) { return (void)isa, NULL; } /* no choice of the calls here */
int fn_has_zen4(void) { return strcmp(processor, "intel") != 0; }
int fn_is_zen5(void) { return !strcmp(processor, "zen5"); }

/* What the first call of each kernel was given. */
static char said[2000];
static int threads_used;

static void say(const char *isa, const char *what, const char *rest) {
    char begin[64];
    snprintf(begin, sizeof begin, " %s(%s", what, isa);
    if (strstr(said, begin)) return;
    strcat(strcat(strcat(said, begin), rest), ")");
}

static void say_forward(const char *isa, const char *what, const struct fn_forward_job *job, int64_t rows) {
    char rest[200];
    snprintf(rest, sizeof rest, "%s%s%s%s%s%s%s, %d rows", job->ahead ? ", ahead" : "",
             job->fetches_next ? ", fetches next" : "", job->from_memory ? ", from memory" : "", job->overlaps ? ", overlaps" : "",
             job->two_norms_overlap ? ", two overlap" : "", job->affine_as_is ? ", affine as is" : "",
             job->bypass_cache ? ", past caches" : "", (int)rows);
    say(isa, what, rest);
}

static void say_rows(const char *isa, const char *what, int64_t n, int fetched) {
    char rest[200];
    snprintf(rest, sizeof rest, ", %d, %d fetched", (int)n, fetched);
    say(isa, what, rest);
}

static void say_backward(const char *isa, const struct fn_backward_job *job, int64_t rows) {
    char rest[200];
    snprintf(rest, sizeof rest, "%s%s, %d rows", job->from_memory ? ", from memory" : "", job->bypass_cache ? ", past caches" : "",
             (int)rows);
    say(isa, "backward", rest);
}

static void begin(const struct fn_backward_job *job, void *scratch) { (void)job, (void)scratch; }
static void flush(const struct fn_backward_job *job, struct fn_backward_part *part) { (void)job, (void)part; }
static void end(const struct fn_backward_job *job, const void *sum) { (void)job, (void)sum; }
static void again(const struct fn_backward_job *job, int64_t m, void *scratch, char *rows) {
    (void)job, (void)m, (void)scratch, (void)rows;
}

#define VARIANT(isa)                                                                                                         \
    static void forward_##isa(const struct fn_forward_job *job, int64_t b, int64_t e, void *scratch) {                      \
        (void)scratch, say_forward(#isa, "forward", job, e - b);                                                            \
    }                                                                                                                       \
    static int two_##isa(const struct fn_forward_job *first, const struct fn_forward_job *next, int64_t b, int64_t e,      \
                         void *scratch, float *gain) {                                                                      \
        (void)first, (void)scratch, (void)gain, say_forward(#isa, "two", next, e - b);                                      \
        return next->hidden % 1024 == 0;                                                                                    \
    }                                                                                                                       \
    static void backward_##isa(const struct fn_backward_job *job, int64_t b, int64_t e, struct fn_sum_stack *sums,          \
                               int merged, struct fn_backward_part *part) {                                                 \
        (void)sums, (void)merged, (void)part, say_backward(#isa, job, e - b);                                               \
    }                                                                                                                       \
    static void quantize_##isa(const struct fn_quantizer *q, int kind, const char *row, int64_t n, int64_t m, float *s) {   \
        (void)q, (void)kind, (void)row, (void)n, (void)m, (void)s, say(#isa, "quantize", "");                               \
    }                                                                                                                       \
    static void gate_##isa(const struct fn_gate *g, char *const *at, int64_t n, void *kept, const struct fn_ahead *ahead) { \
        (void)g, (void)at, (void)kept, say_rows(#isa, "gate", n, ahead->count);                                             \
    }                                                                                                                       \
    static void rotate_##isa(const struct fn_rotation *r, const void *c, const void *s, const struct fn_row_of_heads *sets, \
                             void *scratch) {                                                                               \
        (void)r, (void)c, (void)s, (void)sets, (void)scratch, say(#isa, "rotate", "");                                      \
    }                                                                                                                       \
    const struct fn_kernels fn_kernels_##isa = {                                                                             \
        .forward_rows = forward_##isa, .two_norms_rows = two_##isa, .backward_begin = begin, .backward_rows = backward_##isa,\
        .backward_flush = flush, .backward_end = end, .normalise_again = again, .quantize_row = quantize_##isa,              \
        .gate_run = gate_##isa, .rotate_row = rotate_##isa};
VARIANT(scalar) VARIANT(avx2) VARIANT(avx512) VARIANT(avx512_fp16) VARIANT(zen4)

/* An OpenMP runtime. */
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return threads_used; }
void GOMP_parallel(void (*task)(void *), void *argument, unsigned threads, unsigned flags) {
    (void)flags;
    threads_used = (int)threads;
    task(argument);
}

enum { X = 1, RESIDUAL, OUT, RESIDUAL_OUT, RSTD, OTHER, MORE };
static struct fn_operand operand(int64_t kind, int64_t hidden, int place) {
    return (struct fn_operand){kind, (uintptr_t)place << 36, 0, hidden};
}

static int64_t rows, hidden;
static int x, residual; /* kinds */

/* A norm, after an addition if there is a residual. */
static struct fn_call norm(int in_place) {
    struct fn_call c = {.flags = FN_ROUND_SUM, .threads = 2, .rows = rows, .inner = rows, .hidden = hidden, .heads = 1};
    c.operand[FN_X] = operand(x, hidden, X);
    c.operand[FN_WEIGHT] = operand(x, 0, OTHER);
    c.operand[FN_OUT] = operand(x, hidden, in_place ? X : OUT);
    if (!residual) return c;
    c.operand[FN_RESIDUAL] = operand(residual, hidden, RESIDUAL);
    c.operand[FN_RESIDUAL_OUT] = operand(residual, hidden, in_place ? RESIDUAL : RESIDUAL_OUT);
    return c;
}

static struct fn_call gradients(void) {
    struct fn_call c = {.pass = FN_BACKWARD, .threads = 1, .rows = rows, .inner = rows, .hidden = hidden, .heads = 1};
    c.operand[FN_DY] = operand(x, hidden, X);
    c.operand[FN_H] = operand(x, hidden, RESIDUAL);
    c.operand[FN_BACKWARD_RSTD] = operand(x == FN_F64 ? FN_F64 : FN_F32, 1, RSTD);
    c.operand[FN_BACKWARD_WEIGHT] = operand(x, 0, OTHER);
    c.operand[FN_DX] = operand(x, hidden, OUT);
    return c;
}

static void add_gate(struct fn_call *packed, int64_t flag, int backward) {
    struct fn_gate *g = (struct fn_gate *)(packed + 1);
    packed->flags |= flag;
    *g = (struct fn_gate){.pass = packed->pass, .wide = x == FN_F64, .threads = 2, .rows = rows, .inner = rows, .hidden = hidden};
    for (int i = backward ? FN_GATE_D : FN_GATED; i < (backward ? FN_GATE_OPERANDS : FN_GATE_DZ); i++)
        g->operand[i] = operand(x, hidden, MORE + i);
    if (flag == FN_GATE_ONLY) return;
    if (backward) g->operand[flag == FN_GATE_AFTER ? FN_GATED : FN_GATE_D].address = 0;
    else g->operand[flag == FN_GATE_AFTER ? FN_GATED : FN_GATE_OUT].address = 0;
    if (backward && flag == FN_GATE_AFTER) g->operand[FN_GATED_D].address = packed->operand[FN_DY].address = 0;
    if (!backward) packed->operand[flag == FN_GATE_AFTER ? FN_OUT : FN_X].address = 0;
}

static void rotation(struct fn_call *packed) {
    struct fn_rotation *r = (struct fn_rotation *)(packed + 1);
    packed->flags = FN_ROTATION_ONLY;
    *r = (struct fn_rotation){.flags = FN_NORMALISED, .x_kind = x, .out_kind = x, .between = x, .threads = 2, .rows = rows,
                              .inner = rows, .size = 128, .pairs = 64, .sets = 1};
    r->cos = r->sin = operand(x, 64, OTHER);
    r->heads[0] = (struct fn_heads){.count = hidden / 128, .x = (uintptr_t)X << 36, .x_stride = hidden, .x_head_stride = 128,
                                    .out = (uintptr_t)OUT << 36, .out_stride = hidden, .out_head_stride = 128};
}

enum { NORM, IN_PLACE, CENTERED, TWO_NORMS, QUANTIZED, GATE, GATE_AFTER, GATE_BEFORE, GRADIENTS, OF_GATE_AFTER, OF_GATE_BEFORE, ROTATION, OPERATIONS };
static const char *const operations[] = {"norm", "norm in place", "norm, centered", "two norms", "norm, quantized", "gate", "norm, gate", "gate, norm",
                                         "gradients", "gradients of norm, gate", "gradients of gate, norm", "norm, rotation"};

static void run(int operation) {
    struct fn_call packed[FN_PACKED + 1] = {norm(operation == IN_PLACE)};
    if (operation == CENTERED) packed[0].flags |= FN_CENTER;
    if (operation == TWO_NORMS) {
        packed[1] = packed[0];
        packed[0].operand[FN_RESIDUAL] = packed[0].operand[FN_RESIDUAL_OUT] = (struct fn_operand){0};
        packed[0].operand[FN_OUT].address = packed[1].operand[FN_X].address = 0;
        packed[0].following = 1;
    }
    if (operation == QUANTIZED) packed[0].flags |= FN_QUANTIZED;
    if (operation == GATE) add_gate(packed, FN_GATE_ONLY, 0);
    if (operation == GATE_AFTER) add_gate(packed, FN_GATE_AFTER, 0);
    if (operation == GATE_BEFORE) add_gate(packed, FN_GATE_BEFORE, 0);
    if (operation >= GRADIENTS) packed[0] = gradients();
    if (operation == OF_GATE_AFTER) add_gate(packed, FN_GATE_AFTER, 1);
    if (operation == OF_GATE_BEFORE) add_gate(packed, FN_GATE_BEFORE, 1);
    if (operation == ROTATION) rotation(packed);
    said[0] = 0, threads_used = 1;
    fn_run(packed);
}

int main(int argc, char **argv) {
    static const char *const processors[] = {"intel", "zen4", "zen5"}, *const kinds[] = {"-", "f32", "f16", "bf16", "f64"};
    static const int pairs[][2] = {{FN_F32, 0}, {FN_BF16, 0}, {FN_F16, 0}, {FN_F64, 0}, {FN_F32, FN_F32}, {FN_BF16, FN_BF16},
                                   {FN_F16, FN_F16}, {FN_BF16, FN_F32}, {FN_F32, FN_F16}};
    const int step = argc > 1 ? atoi(argv[1]) : 2; /* rows are powers of 2 to the step */
    for (int p = 0; p < 3; p++)
        for (int isa = 0; processor = processors[p], isa < fn_isa_count(); isa++)
            for (int k = 0; k < (int)(sizeof pairs / sizeof *pairs); k++)
                for (int operation = 0; operation < OPERATIONS; operation++) {
                    if (!fn_isa_usable(isa) || (operation == TWO_NORMS && !pairs[k][1])) continue;
                    if (operation > TWO_NORMS && pairs[k][1]) continue;
                    fn_use_isa(isa);
                    x = pairs[k][0], residual = pairs[k][1];
                    for (rows = 1; rows <= 1 << 16; rows <<= step) {
                        char before[2000] = "";
                        for (int size = 12; size <= 33; size++) { /* powers of 2, and half way between them */
                            hidden = (size % 2 ? 3 : 2) << (size / 2 - 1);
                            if (rows * hidden > 1 << 26 || (operation == ROTATION && hidden % 128)) continue;
                            run(operation);
                            if (!strcmp(before, said)) continue;
                            printf("%s %s %s+%s %s %dx%d:%s, %d threads\n", processor, fn_isa_name(isa), kinds[x], kinds[residual],
                                   operations[operation], (int)rows, (int)hidden, said, threads_used);
                            strcpy(before, said);
                        }
                    }
                }
    return 0;
}
