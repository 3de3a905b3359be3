/* Rows of declared operations, included by kernel_body.h behind gates: each operation has its kernel. */

/* Row m, whose terms are added to gradients that are sums over rows. */
struct row_terms {
    int64_t m;
    int first; /* whether the sums begin with them */
    int with_rows; /* whether the gradients that have rows are written too */
    const struct fn_row_work *work; /* the columns, and the room for a row */
    void *sum[FN_DECLARED_OPERANDS]; /* of each such gradient that is wanted, those columns, float or double; else NULL */
};
/* `kind`: that in whose order the sums lie; NONE: their own. */
typedef void add_terms_of_row(const struct fn_declared *job, int kind, const struct row_terms *terms);

#include "kernels/log_prob_body.h"
#include "kernels/modulate_body.h"
#include "kernels/product_body.h"
#include "kernels/int8_body.h"

void FN_OF(declared_row)(const struct fn_declared *job, int64_t m, const struct fn_row_work *work) {
    switch (job->operation) {
    case FN_MODULATE:
    case FN_MODULATE_BACKWARD: modulate_row(job, modulated_kind(job), m, 0, job->hidden); break;
    default: log_prob_row(job, m, work);
    }
}

void FN_OF(declared_products)(const struct fn_declared *job, const struct fn_int8_dots *dots, int64_t begin, int64_t end, char *room) {
    if (job->operation == FN_INT8_LINEAR) int8_products(job, dots, begin, end, room);
    else float_products(job, begin, end, room);
}

/* A sum: the rowsum of docs/spec.md, section 5, whose blocks are added in the order of cpu/run/backward.c. */
struct sum {
    const struct fn_declared *job;
    const struct fn_sums *of;
    add_terms_of_row *add;
    int kind;
    int64_t block, blocks; /* rows of a block, and blocks */
    struct fn_row_work work;
};

static void add_sums(const struct sum *s, char *restrict to, const char *restrict from) {
    const struct fn_sums *of = s->of;
    for (int64_t done = 0; done < of->bytes; done += of->size * (s->job->wide ? 8 : 4)) {
        if (s->job->wide) {
            double *const restrict a = (double *)(void *)(to + done);
            const double *const restrict b = (const double *)(const void *)(from + done);
            for (int64_t i = 0; i < of->n; i++) a[i] += b[i];
        } else {
            float *const restrict a = (float *)(void *)(to + done);
            const float *const restrict b = (const float *)(const void *)(from + done);
            const int64_t all = s->kind == NONE ? of->n : (of->n + UNIT - 1) / UNIT * UNIT;
            for (int64_t i = 0; i < all; i++) a[i] += b[i];
        }
    }
}

/* `count` blocks `step` apart from block `first` on. `room` has room for the sums of each level. */
static void sum_blocks(const struct sum *s, int64_t first, int64_t step, int64_t count, char *sums, char *room) {
    const struct fn_sums *of = s->of;
    if (count > 1) {
        sum_blocks(s, first, 2 * step, count / 2, sums, room);
        if (first + step >= s->blocks) return; /* the second half is padding: +0 */
        sum_blocks(s, first + step, 2 * step, count / 2, room, room + of->bytes);
        add_sums(s, sums, room);
        return;
    }
    struct row_terms terms = {.with_rows = of->with_rows, .work = &s->work};
    for (int i = 0; i < FN_DECLARED_OPERANDS; i++)
        if (of->wanted >> i & 1) {
            terms.sum[i] = sums;
            sums += of->size * (s->job->wide ? 8 : 4);
        }
    const int64_t begin = first * s->block, end = begin + s->block < of->rows ? begin + s->block : of->rows;
    for (int64_t i = begin; i < end; i++) {
        terms.m = of->first + i * of->step;
        terms.first = i == begin;
        s->add(s->job, s->kind, &terms);
    }
}

/* Rounds a sum, which may be a row as it was read: kernels for processors that round by whole numbers take results alone. */
static void round_sum_float(int kind, int64_t to, const float *sum, int64_t n, char *row, int64_t begin) {
    volatile const float nothing = -0.0f;
    const U zero = u_set1(nothing);
    for (int64_t i = 0; i < n; i += UNIT) {
        const int count = n - i < UNIT ? (int)(n - i) : UNIT;
        const U whole = u_load(F32, sum, i, kind == ALL_BF16 ? UNIT : count);
        store_any(kind == ALL_BF16 ? kind : to, row, begin + i, count, u_add(whole, zero));
    }
}

void FN_OF(declared_sums)(const struct fn_declared *job, const struct fn_sums *of, char *room) {
    struct sum s = {.job = job, .of = of, .kind = NONE};
    switch (job->operation) {
    case FN_MODULATE_BACKWARD: s.add = modulate_terms, s.kind = modulated_kind(job); break;
    default: return;
    }
    s.work = (struct fn_row_work){.begin = of->begin, .end = of->begin + of->n, .room = room};
    s.work.shared = room + FN_DECLARED_ROOM * (job->wide ? 8 : 4);
    room += fn_room_of_row(job);
    s.block = (of->rows + (1 << FN_LEVELS) - 1) >> FN_LEVELS;
    s.blocks = (of->rows + s.block - 1) / s.block;
    int64_t width = of->subtrees;
    while (width < s.blocks) width *= 2;
    const int ends = !of->shared || of->subtree == of->subtrees;
    char *sums = room;
    if (!of->shared) sum_blocks(&s, 0, 1, width, sums, room + of->bytes);
    else if (of->subtree < of->subtrees) {
        if (of->subtree < s.blocks) sum_blocks(&s, of->subtree, of->subtrees, width / of->subtrees, of->shared + of->subtree * of->bytes, room);
    } else {
        sums = of->shared;
        for (int64_t half = of->subtrees / 2; half; half /= 2)
            for (int64_t i = 0; i < half && i + half < s.blocks; i++) add_sums(&s, sums + i * of->bytes, sums + (i + half) * of->bytes);
    }
    for (int i = 0; ends && i < FN_DECLARED_OPERANDS; i++) {
        const struct fn_operand *o = &job->operand[i];
        if (!(of->wanted >> i & 1)) continue;
        char *const row = (char *)o->address + of->number * job->hidden * fn_element_size(o->kind);
        if (job->wide) narrow_double(o->kind, (const double *)(const void *)sums, (int)of->n, row, of->begin);
        else round_sum_float(s.kind, o->kind, (const float *)(const void *)sums, of->n, row, of->begin);
        sums += of->size * (job->wide ? 8 : 4);
    }
}
