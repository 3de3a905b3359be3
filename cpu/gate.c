/* Divides the elements of a gate among threads, in tiles. */
#include "fusednorm_cpu.h"
#include "ieee.h"

/* Tiles [begin, end) of all rows, each of which has `per_row`. */
static void run_tiles(const struct fn_gate *g, int64_t per_row, int64_t begin, int64_t end) {
    const struct fn_kernels *kernels = fn_kernels((int)g->operand[FN_GATED].kind);
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t row = tile / per_row, first = tile % per_row * FN_GATE_TILE;
        const int64_t outer = row / g->inner, inner = row % g->inner, rest = g->hidden - first;
        char *at[FN_GATE_OPERANDS];
        for (int i = 0; i < FN_GATE_OPERANDS; i++) {
            const struct fn_operand *o = &g->operand[i];
            const int64_t offset = outer * o->outer_stride + inner * o->stride + first;
            at[i] = o->kind ? (char *)o->address + offset * fn_element_size(o->kind) : NULL;
        }
        kernels->gate_tile(g, at, (int)(rest < FN_GATE_TILE ? rest : FN_GATE_TILE));
    }
}

static void run_thread(void *argument, int thread, int threads) {
    const struct fn_gate *g = argument;
    const int64_t per_row = (g->hidden + FN_GATE_TILE - 1) / FN_GATE_TILE, tiles = g->rows * per_row;
    fn_fp_state state = fn_enter_ieee();
    run_tiles(g, per_row, fn_first_row(tiles, thread, threads), fn_first_row(tiles, thread + 1, threads));
    fn_leave_ieee(state);
}

void fn_run_gate(const void *packed) {
    struct fn_gate g = *(const struct fn_gate *)packed;
    int one_row = g.inner == g.rows;
    for (int i = 0; i < FN_GATE_OPERANDS; i++) one_row &= !g.operand[i].kind || g.operand[i].stride == g.hidden;
    if (one_row) { /* short rows would be short tiles */
        g.hidden *= g.rows;
        g.rows = g.inner = 1;
    }
    fn_parallel(run_thread, &g, g.rows * g.hidden < FN_PARALLEL_ELEMENTS ? 1 : (int)g.threads);
}
