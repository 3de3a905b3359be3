/* Divides the elements of a gate among threads, and passes rows that follow each other to the kernels as one. */
#include "run/run.h"
#include "run/tuning.h"

const struct fn_ahead fn_nothing_ahead = {0};

/* Those for float, also on Zen 4, where a norm of float16 has others: a gate computes longer than it converts. */
fn_gate_run *fn_gate_run_in_use(void) { return fn_kernels_for(FN_F32)->gate_run; }

/* Elements [begin, end) of a row; of all rows, as if they were one, where no gap is between them. */
static void run_elements(fn_gate_run *run, const struct fn_gate *g, int64_t row, int64_t begin, int64_t end, void *kept,
                         const struct fn_ahead *ahead) {
    char *at[FN_GATE_OPERANDS];
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int64_t first = row / g->inner * o->outer_stride + row % g->inner * o->stride;
        const int64_t place = first + begin * fn_gate_step(g, i);
        at[i] = o->kind ? (char *)o->address + place * fn_element_size(o->kind) : NULL;
    }
    run(g, at, end - begin, kept, ahead);
}

/* Whether rows follow each other without a gap in every operand. */
static int is_one_row(const struct fn_gate *g) {
    if (g->inner != g->rows) return 0;
    for (int i = 0; i < FN_GATE_OPERANDS; i++)
        if (g->operand[i].kind && g->operand[i].stride != g->hidden * fn_gate_step(g, i)) return 0;
    return 1;
}

/* The numbers that are kept of so many elements that follow each other. */
static int64_t kept_of(int64_t elements) { return 2 * ((elements + FN_GATE_TILE - 1) / FN_GATE_TILE * FN_GATE_TILE); }

int64_t fn_gate_kept(const struct fn_gate *gate, int64_t rows) {
    return is_one_row(gate) ? kept_of(rows * gate->hidden) : rows * kept_of(gate->hidden);
}

void fn_gate_rows(fn_gate_run *run, const struct fn_gate *gate, int64_t begin, int64_t end, char *const *passed, void *kept,
                  const struct fn_ahead *fetched) {
    struct fn_gate g = *gate;
    struct fn_ahead ahead = *fetched;
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        struct fn_operand *o = &g.operand[i];
        /* Row `begin` is the first one there; row 0 would have this address. */
        if (passed[i]) o->address = (uintptr_t)passed[i] - (uintptr_t)(begin * g.hidden * fn_element_size(o->kind));
    }
    if (is_one_row(&g)) {
        run_elements(run, &g, 0, begin * g.hidden, end * g.hidden, kept, &ahead);
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        run_elements(run, &g, row, 0, g.hidden, kept, &ahead);
        for (int k = 0; k < ahead.count; k++) ahead.place[k].at += g.hidden * ahead.place[k].item;
        if (kept) kept = (char *)kept + kept_of(g.hidden) * (g.wide ? 8 : 4);
    }
}

/* A gate, and what its threads share. */
struct work {
    struct fn_gate gate;
    fn_gate_run *run;
    int64_t per_row; /* tiles */
};

/* Tiles [begin, end). */
static void run_share(const void *argument, int64_t begin, int64_t end, char *buffer) {
    const struct work *work = argument;
    const struct fn_gate *g = &work->gate;
    (void)buffer;
    for (int64_t tile = begin, next; tile < end; tile = next) {
        const int64_t row = tile / work->per_row, first = row * work->per_row;
        next = first + work->per_row < end ? first + work->per_row : end;
        const int64_t last = (next - first) * FN_GATE_TILE;
        run_elements(work->run, g, row, (tile - first) * FN_GATE_TILE, last < g->hidden ? last : g->hidden, NULL, &fn_nothing_ahead);
    }
}

void fn_run_gate(const void *packed) {
    struct work work = {.gate = *(const struct fn_gate *)packed, .run = fn_gate_run_in_use()};
    struct fn_gate *g = &work.gate;
    if (is_one_row(g)) { /* short rows would be short tiles */
        g->hidden *= g->rows;
        g->rows = g->inner = 1;
        if (fn_gate_bypasses_cache(g)) g->flags |= FN_PAST_CACHES;
    }
    work.per_row = (g->hidden + FN_GATE_TILE - 1) / FN_GATE_TILE;
    fn_divide(run_share, &work, g->rows * work.per_row, g->rows * g->hidden, g->threads, 0);
}
