/* What kernels are given, and their functions. */
#ifndef FUSEDNORM_JOBS_H
#define FUSEDNORM_JOBS_H

#include "abi/fusednorm_cpu.h"
#include "machine/numbers.h"

/* Rows of a forward pass in one level, as the kernels see them. Strides are in bytes, from one row to the next. */
struct fn_forward_job {
    int x_kind, residual_kind, weight_kind, out_kind, flags;
    const char *x, *residual;
    const void *weight;
    char *out, *residual_out;
    void *rstd; /* NULL, or one value per row: float, double where x is */
    int64_t hidden;
    int64_t x_stride, residual_stride, out_stride, residual_out_stride;
    double eps, weight_offset;
    /*
     * A bias, or rows of the weight and of the bias for each of `heads` heads: row i takes row (first_row + i) % heads of
     * an operand whose stride is not 0. `affine` is where in scratch the kernels keep such rows, or a weight, as float; 0: neither.
     */
    int bias_kind;
    const void *bias;
    int64_t heads, weight_stride, bias_stride, first_row;
    size_t affine;
    int from_memory; /* whether x and residual come from memory */
    int64_t ahead; /* they are fetched so many bytes ahead */
    int fetches_next; /* whether the last pass over a row fetches the next one */
    int overlaps; /* whether passes over different rows may be made together */
    int two_norms_overlap; /* the same, of two norms with an addition between them */
    int affine_as_is; /* whether long rows take a weight and a bias as they are, if these are of out's kind */
    size_t bypass_cache; /* 0, or where in scratch rows of residual_out lie while the outputs bypass the caches */
};

/*
 * Normalises rows [begin, end). `scratch` holds fn_scratch_bytes(job) bytes on a 64-byte border and, from job->affine on,
 * two rows of float for each head.
 */
typedef void fn_forward_rows(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch);

/*
 * Normalises rows [begin, end) as `first` says, and passes them to `next`, which adds the residual and normalises again.
 * Returns 0, having done nothing, where another way is needed. `gain` has room for fn_float_row(hidden) floats.
 */
typedef int fn_two_norms_rows(const struct fn_forward_job *first, const struct fn_forward_job *next, int64_t begin,
                              int64_t end, void *scratch, float *gain);

size_t fn_scratch_bytes(const struct fn_forward_job *job);
/* Whether each row takes a row of a weight and of a bias as float; and the room for them, job->affine, behind so many bytes. */
static inline int fn_has_affine_rows(const struct fn_forward_job *job) {
    return job->bias_kind || job->heads > 1 || job->flags & FN_CENTER;
}
size_t fn_make_room_for_affine(struct fn_forward_job *job, int64_t rows, size_t bytes); /* returns the bytes of both */

static inline int64_t fn_round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/* The bytes that a thread takes for a row of a declared operation, by itself. */
static inline int64_t fn_room_of_row(const struct fn_declared *job) {
    return fn_round_up((FN_DECLARED_ROOM + fn_declared_shared(job->hidden)) * (job->wide ? 8 : 4), FN_ALIGNMENT);
}

/* The elements that scratch holds as float between the passes: several short rows, or one row in whole segments. */
enum { FN_KEPT = 4 * FN_SEGMENT };
/* The room for a row as float in scratch, in elements. */
static inline int64_t fn_float_row(int64_t hidden) { return (hidden + 127) / 128 * 128; }

static inline int64_t fn_kept(int64_t hidden) {
    return hidden <= FN_KEPT ? FN_KEPT : (hidden + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT;
}

/* The room for a row of the tables that heads of so many elements are rotated by, and for one head. */
static inline size_t fn_table_bytes(int64_t size) { return (size_t)(16 * fn_float_row(size)); }

/* The sums of a row's segments, padded to a power of two. */
static inline int64_t fn_padded_sums(int64_t hidden) {
    int64_t sums = 1;
    while (sums * FN_SEGMENT < hidden) sums *= 2;
    return sums;
}

/* The room for them in a backward pass, in elements. */
static inline int64_t fn_room_for_sums(int64_t hidden) { return (fn_padded_sums(hidden) + 15) / 16 * 16; }

/*
 * One backward pass. dx, dresidual and dweight are NULL where they are not wanted, d_total where
 * residual_out had no gradient, weight where there was none. dweight has the weight's type.
 */
struct fn_backward_job {
    int wide; /* whether rstd is double and sums are computed in double */
    int from_memory; /* whether operands come from memory */
    int64_t ahead; /* they are fetched so many bytes ahead then */
    int bypass_cache; /* whether dx is large, and made of whole cache lines */
    int dy_kind, d_total_kind, h_kind, weight_kind, dx_kind, dresidual_kind;
    const char *dy, *d_total, *h;
    const void *rstd, *weight;
    char *dx, *dresidual;
    void *dweight, *dbias;
    int bias_kind; /* of dbias */
    int norm_kind; /* that h * rstd is rounded to where rows are normalised again, or FN_NONE */
    int64_t hidden;
    /*
     * Row i takes row i % heads of the weight, and adds to that row of dweight and dbias. The gains of all heads, as float or
     * double, lie gain_stride apart, and so do a row's sums of dweight; from bias_sums on follow those of dbias, unless that
     * is 0. There are `sums` elements in all. `head` is that of row 0.
     */
    int64_t heads, head, gain_stride, bias_sums, sums;
    int64_t dy_stride, d_total_stride, h_stride, dx_stride, dresidual_stride;
    /* Where rows lie in two levels, jumps that follow after every `inner` rows; else 0. */
    int64_t dy_jump, d_total_jump, h_jump, inner;
    double weight_offset;
    int center; /* whether rows were normalised less their means, which are found again */
};

/* Row m of an operand that is only read. */
static inline const char *fn_row(const char *operand, int64_t m, int64_t stride, int64_t jump, int64_t inner) {
    return operand + m * stride + (jump ? m / inner * jump : 0);
}
static inline const char *fn_row_of_dy(const struct fn_backward_job *job, int64_t m) {
    return fn_row(job->dy, m, job->dy_stride, job->dy_jump, job->inner);
}
static inline const char *fn_row_of_h(const struct fn_backward_job *job, int64_t m) {
    return fn_row(job->h, m, job->h_stride, job->h_jump, job->inner);
}
static inline const char *fn_row_of_d_total(const struct fn_backward_job *job, int64_t m) {
    return job->d_total ? fn_row(job->d_total, m, job->d_total_stride, job->d_total_jump, job->inner) : NULL;
}

/* The spec's rowsum has at most 2^FN_LEVELS blocks of rows, which are then halved. */
enum { FN_LEVELS = 8 };

/* Sums of the weight's gradient over blocks of rows, newest last, that are still to be added to each other. */
struct fn_sum_stack {
    int count;
    void *row[FN_LEVELS + 1];
};

/* The state of one thread in a backward pass. */
struct fn_backward_part {
    void *scratch; /* fn_backward_scratch_bytes(job) bytes on a 64-byte border, prepared by `begin` */
    int continues; /* whether the sum on top of the stack is that of the block's rows before the next ones */
    int64_t after; /* the row that comes after the next ones; 0: none */
    int pending; /* whether a second pass is still to be made, with the first pass of the next row or by `flush` */
    int64_t row; /* the number of that row */
    float c; /* mean(wdy * xhat) of that row */
    float mean, b; /* its mean, and that of wdy, where rows are centered */
};

typedef void fn_backward_begin(const struct fn_backward_job *job, void *scratch);
/*
 * Rows [begin, end) of heads, at least one: dx, dresidual, and, unless `sums` is NULL, the sum over these rows of the weight's
 * gradient. The newest `merged` sums of the stack are added to it, the newest first; the result takes their place.
 */
typedef void fn_backward_rows(const struct fn_backward_job *job, int64_t begin, int64_t end, struct fn_sum_stack *sums,
                              int merged, struct fn_backward_part *part);
/* Makes the pending second pass of the last row, and makes all that was written visible to other threads. */
typedef void fn_backward_flush(const struct fn_backward_job *job, struct fn_backward_part *part);
/* Rounds the sum over all rows into dweight and dbias. Only the kernels know the order of a sum's elements. */
typedef void fn_backward_end(const struct fn_backward_job *job, const void *sum);

size_t fn_backward_scratch_bytes(const struct fn_backward_job *job);

/*
 * Row m of heads, normalised again into consecutive rows of dy's kind at `rows`. `scratch` has been prepared by `begin`.
 */
typedef void fn_normalise_again(const struct fn_backward_job *job, int64_t m, void *scratch, char *rows);

/* Quantizes row m, which lies at `row`. `scratch` has room for fn_float_row(hidden) floats. */
typedef void fn_quantize_row(const struct fn_quantizer *q, int kind, const char *row, int64_t hidden, int64_t m,
                             float *scratch);

/* The functions of a file kernel_<isa>.c; `fn`, a macro, is applied to each. */
#define FN_KERNELS(fn) fn(forward_rows) FN_KERNELS_BESIDE(fn)
#define FN_KERNELS_BESIDE(fn)                                                                  \
    fn(two_norms_rows) fn(backward_begin) fn(backward_rows) fn(backward_flush) fn(backward_end) \
    fn(normalise_again) fn(quantize_row) fn(gate_run) fn(rotate_row) fn(declared_row) fn(declared_sums) \
    fn(declared_products) fn(attend)
#define FN_MEMBER(name) fn_##name *name;
struct fn_kernels {
    FN_KERNELS(FN_MEMBER)
};
extern const struct fn_kernels fn_kernels_scalar;
extern const struct fn_kernels fn_kernels_avx2, fn_kernels_avx512, fn_kernels_avx512_fp16, fn_kernels_zen4;
extern const struct fn_kernels fn_kernels_neon, fn_kernels_neon_bf16, fn_kernels_sve, fn_kernels_sve_bf16;

#endif
