// The gradients of a block of rows, and what the block adds to the weight's gradient: its rows' products, in row order.
#include "backward.cuh"

// Rows that a block of threads works on at a time.
constexpr int TOGETHER = BLOCKS_ROW ? 1 : WARPS * ROWS_PER_WARP;

struct Loaded {
    Dy dy[VECTORS][VECTOR];
    H h[VECTORS][VECTOR];
    DTotal d_total[VECTORS][VECTOR];
    A rstd[ROWS_IN_LANE];
};

// What this thread needs of the rows from `first` to `end`.
__device__ inline void load_rows(Loaded& to, const Arguments& a, long long first, long long end) {
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long row = first + row_of(k);
        const int column = (BLOCKS_ROW ? warp() * SEGMENT : 0) + column_of(k);
        const bool inside = (FULL || column < a.hidden_size) && row < end;
        load_if(inside, to.dy[k], a.dy + row * a.dy_stride + column);
        load_if(inside, to.h[k], a.h + row * a.h_stride + column);
        load_if(inside, to.d_total[k], a.d_total + row * a.d_total_stride + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS_IN_LANE; r++) {
        const long long row = first + row_of(r * VECTORS_IN_ROW);
        to.rstd[r] = row < end ? a.rstd[row] : (A)0;
    }
}

extern "C" __global__ void BOUNDS backward_blocks(const Arguments a) {
    const int segment = BLOCKS_ROW ? warp() : 0;
    const long long begin = blockIdx.x * a.block, end = begin + a.block < a.rows ? begin + a.block : a.rows;
    const int mine = BLOCKS_ROW ? 0 : warp() * ROWS_PER_WARP;  // the first of this warp's among the rows together
    wait_for_kernels_before();

    Weight weight[VECTORS_IN_ROW][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS_IN_ROW; k++) {
        const int column = segment * SEGMENT + column_of(k);
        load_if(FULL || column < a.hidden_size, weight[k], a.weight + column);
    }
    // The sums of columns: of its own elements' where a row is in a thread's registers, else of every THREADS-th.
    constexpr int COLUMNS = BLOCKS_ROW ? VECTORS * VECTOR : (ROW + THREADS - 1) / THREADS;
    A totals[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) totals[i] = 0;

    Loaded now, next;
    load_rows(next, a, begin + mine, end);
    int turn = 0;
    for (long long first = begin; first < end; first += TOGETHER, turn++) {
        now = next;
        if (AHEAD) load_rows(next, a, first + TOGETHER + mine, end);  // on their way while these are worked on
        A wdy[VECTORS][VECTOR], xhat[VECTORS][VECTOR], products[VECTORS][VECTOR];
        SHARED(A, shares, BLOCKS_ROW ? 1 : WARPS * SEGMENT);
        bool inside[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            inside[k] = (FULL || column < a.hidden_size) && (BLOCKS_ROW || first + mine + row_of(k) < end);
            weighted(wdy[k], xhat[k], products[k], now.dy[k], now.h[k], now.rstd[k / VECTORS_IN_ROW],
                     weight[k % VECTORS_IN_ROW], a.weight_offset, inside[k]);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const A share = wide(now.dy[k][v]) * xhat[k][v];
                if constexpr (BLOCKS_ROW) totals[k * VECTOR + v] += share;
                else shares[(mine + row_of(k)) * ROW + column + v] = share;
            }
        }
        A sum = sums_of_rows(products);
        if constexpr (BLOCKS_ROW) {
            SHARED(A, sums, 2 * WARPS);
            auto half = &sums[turn % 2 * WARPS];
            sum = sum_of_segments(sum, half);
        }
        const A c = sum / (A)a.hidden_size;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const long long at = (first + mine + row_of(k)) * a.hidden_size + segment * SEGMENT + column_of(k);
            store_gradients(wdy[k], xhat[k], of_row(c, k / VECTORS_IN_ROW), now.rstd[k / VECTORS_IN_ROW], now.d_total[k],
                            inside[k], a.dx + at, a.dresidual + at);
        }
        if constexpr (!BLOCKS_ROW) {
            block_barrier();
            const int together = end - first < TOGETHER ? (int)(end - first) : TOGETHER;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                const int column = threadIdx.x + i * THREADS;
                if (column < ROW) {
                    for (int r = 0; r < together; r++) totals[i] += (A)shares[r * ROW + column];
                }
            }
            block_barrier();
        }
        if (!AHEAD) load_rows(next, a, first + TOGETHER + mine, end);
    }
    let_next_kernel_begin();
    A* const partial = a.partial + (long long)blockIdx.x * a.hidden_size;
    if constexpr (BLOCKS_ROW) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            A total[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) total[v] = totals[k * VECTOR + v];
            store_if(FULL || column < a.hidden_size, partial + column, total);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int column = threadIdx.x + i * THREADS;
            if (column < a.hidden_size) partial[column] = totals[i];
        }
    }
}
