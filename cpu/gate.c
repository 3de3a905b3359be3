/* Divides the elements of a gate among threads, and passes rows that follow each other to the kernels as one. */
#include "fusednorm_cpu.h"
#include "ieee.h"
#include "target.h"

/* Elements [begin, end) of a row; of all rows, as if they were one, where no gap is between them. */
static void run_elements(const struct fn_gate *g, int64_t row, int64_t begin, int64_t end, void *kept) {
    char *at[FN_GATE_OPERANDS];
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        const struct fn_operand *o = &g->operand[i];
        const int64_t first = row / g->inner * o->outer_stride + row % g->inner * o->stride;
        at[i] = o->kind ? (char *)o->address + (first + begin) * fn_element_size(o->kind) : NULL;
    }
    fn_kernels((int)g->operand[FN_GATED].kind)->gate_run(g, at, end - begin, kept);
}

/* Whether rows follow each other without a gap in every operand. */
static int is_one_row(const struct fn_gate *g) {
    if (g->inner != g->rows) return 0;
    for (int i = 0; i < FN_GATE_OPERANDS; i++)
        if (g->operand[i].kind && g->operand[i].stride != g->hidden) return 0;
    return 1;
}

/* The same, and fetches other memory meanwhile: tile by tile, because a processor waits for a few lines at a time only. */
static void run_and_fetch(const struct fn_gate *g, int64_t row, int64_t begin, int64_t end, void *kept, const char *ahead,
                          int item) {
    for (int64_t tile = begin, next; ahead && tile < end; tile = next) {
        next = end - tile < FN_GATE_TILE ? end : tile + FN_GATE_TILE;
        for (int64_t k = (tile - begin) * item; k < (next - begin) * item; k += FN_ALIGNMENT) FN_PREFETCH_2(ahead + k);
        run_elements(g, row, tile, next, NULL);
    }
    if (!ahead) run_elements(g, row, begin, end, kept);
}

/* The numbers that are kept of so many elements that follow each other. */
static int64_t kept_of(int64_t elements) { return 2 * ((elements + FN_GATE_TILE - 1) / FN_GATE_TILE * FN_GATE_TILE); }

int64_t fn_gate_kept(const struct fn_gate *gate, int64_t rows) {
    return is_one_row(gate) ? kept_of(rows * gate->hidden) : rows * kept_of(gate->hidden);
}

void fn_gate_rows(const struct fn_gate *gate, int64_t begin, int64_t end, char *const *passed, void *kept,
                  const char *ahead, int item) {
    struct fn_gate g = *gate;
    for (int i = 0; i < FN_GATE_OPERANDS; i++) {
        struct fn_operand *o = &g.operand[i];
        /* Row `begin` is the first one there; row 0 would have this address. */
        if (passed[i]) o->address = (uintptr_t)passed[i] - (uintptr_t)(begin * g.hidden * fn_element_size(o->kind));
    }
    if (is_one_row(&g)) {
        run_and_fetch(&g, 0, begin * g.hidden, end * g.hidden, kept, ahead, item);
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        run_and_fetch(&g, row, 0, g.hidden, kept, ahead, item);
        if (ahead) ahead += g.hidden * item;
        if (kept) kept = (char *)kept + kept_of(g.hidden) * (g.wide ? 8 : 4);
    }
}

/* A gate, and what its threads share. */
struct work {
    struct fn_gate gate;
    int64_t per_row; /* tiles */
};

static void run_thread(void *argument, int thread, int threads) {
    const struct work *work = argument;
    const struct fn_gate *g = &work->gate;
    const int64_t tiles = g->rows * work->per_row, end = fn_first_row(tiles, thread + 1, threads);
    fn_fp_state state = fn_enter_ieee();
    for (int64_t tile = fn_first_row(tiles, thread, threads), next; tile < end; tile = next) {
        const int64_t row = tile / work->per_row, first = row * work->per_row;
        next = first + work->per_row < end ? first + work->per_row : end;
        const int64_t last = (next - first) * FN_GATE_TILE;
        run_elements(g, row, (tile - first) * FN_GATE_TILE, last < g->hidden ? last : g->hidden, NULL);
    }
    fn_leave_ieee(state);
}

void fn_run_gate(const void *packed) {
    struct work work = {.gate = *(const struct fn_gate *)packed};
    struct fn_gate *g = &work.gate;
    if (is_one_row(g)) { /* short rows would be short tiles */
        g->hidden *= g->rows;
        g->rows = g->inner = 1;
    }
    work.per_row = (g->hidden + FN_GATE_TILE - 1) / FN_GATE_TILE;
    fn_parallel(run_thread, &work, g->rows * g->hidden < FN_PARALLEL_ELEMENTS ? 1 : (int)g->threads);
}
