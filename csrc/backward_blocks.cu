// The gradients of blocks of rows, and the sum of each block's shares of the weight's gradient, added in row order.
//
// If a block of threads works on one row (BLOCKS_ROW), a thread adds the shares of its columns in registers. Else a
// block works on several rows, and writes their shares to shared memory, where a thread adds some adjacent columns.
#include "backward.cuh"

// Rows that a block of threads works on at a time. It takes as many whole blocks of rows as these hold, at least one.
constexpr int TOGETHER = BLOCKS_ROW ? 1 : WARPS * ROWS_PER_WARP;

// Adjacent columns that a thread adds in shared memory.
constexpr int SIDE_BY_SIDE = 4;

// Where the share of a column lies in shared memory. Groups of four are permuted, so that there are no bank conflicts,
// neither between lanes that write their vectors nor between lanes that read a row.
__device__ inline int place_of(int column) {
    const int four = column / SIDE_BY_SIDE;
    return (four ^ (four / 8 % larger(VECTOR / SIDE_BY_SIDE, 1))) * SIDE_BY_SIDE + column % SIDE_BY_SIDE;
}

template <class SHARES> __device__ void keep_shares(SHARES& shares, int row, int column, const A (&from)[VECTOR]) {
    constexpr int COUNT = smaller(VECTOR, SIDE_BY_SIDE);
#pragma unroll
    for (int v = 0; v < VECTOR; v += COUNT) {
        const int place = row * ROW + place_of(column + v);
#pragma unroll
        for (int c = 0; c < COUNT; c++) shares[place + c] = from[v + c];
    }
}

// Adds the shares of `rows` rows to the sums of columns, which begin at 0 with the `first` rows, and stores the sums
// after the `last` rows. If there are `several` blocks of rows, of `block` rows each, all of them begin and end here.
template <class SHARES>
__device__ void add_columns(A (&sums)[SIDE_BY_SIDE], SHARES& shares, int rows, int several, int block, bool first,
                            bool last, A* partial, int hidden_size) {
    constexpr int OF_ROW = ROW / SIDE_BY_SIDE;
    static_assert(BLOCKS_ROW || OF_ROW <= THREADS, "a thread has one sum of a block of rows");
    for (int i = threadIdx.x; i < several * OF_ROW; i += THREADS) {
        const int column = i % OF_ROW * SIDE_BY_SIDE, begin = i / OF_ROW * block, end = smaller(begin + block, rows);
        if (first) memset(sums, 0, sizeof sums);
        for (int row = begin; row < end; row++) {
            const int place = row * ROW + place_of(column);
#pragma unroll
            for (int c = 0; c < SIDE_BY_SIDE; c++) sums[c] += (A)shares[place + c];
        }
        if (!last || begin >= end) continue;
        A* const to = partial + (long long)(i / OF_ROW) * hidden_size + column;
        if constexpr (VECTOR % SIDE_BY_SIDE == 0) {
            if (FULL || column < hidden_size) store(to, sums);
        } else {
#pragma unroll
            for (int c = 0; c < SIDE_BY_SIDE; c++) {
                if (column + c < hidden_size) to[c] = sums[c];
            }
        }
    }
}

extern "C" __global__ void BOUNDS backward_blocks(const Arguments a) {
    const int mine = BLOCKS_ROW ? 0 : warp() * ROWS_PER_WARP;  // this warp's first row among the rows together
    const int several = a.block < TOGETHER ? TOGETHER / (int)a.block : 1;
    const long long all = several * a.block, begin = blockIdx.x * all;
    const long long end = begin + all < a.rows ? begin + all : a.rows;
    A* const partial = a.partial + (long long)blockIdx.x * several * a.hidden_size;
    wait_for_kernels_before();

    Dy dy[VECTORS][VECTOR];
    H h[VECTORS][VECTOR];
    DTotal d_total[VECTORS][VECTOR];
    A rstd_of_next[ROWS_IN_LANE];
    Weight weight[VECTORS_IN_ROW][VECTOR];
    Rows next = rows_of_warp(a, begin + mine, end, BLOCKS_ROW ? warp() * SEGMENT : 0, a.hidden_size);
    const auto load_factors = [&] {
        load_rows(dy, a.dy, a.dy_strides, next);
        load_rows(h, a.h, a.h_strides, next);
        load_rstd(rstd_of_next, a.rstd, next);
    };
    load_weight(weight, a.weight, next);
    load_factors();
    load_rows(d_total, a.d_total, a.d_total_strides, next);

    // If BLOCKS_ROW, the sums of the thread's own columns; else those of the columns that it adds in shared memory.
    A totals[VECTORS][VECTOR] = {}, sums[SIDE_BY_SIDE];
    int turn = 0;
    for (long long first = begin; first < end; first += TOGETHER, turn++) {
        SHARED(A, shares, BLOCKS_ROW ? 1 : WARPS * SEGMENT);
        const bool last = first + TOGETHER >= end;
        const Rows rows = next;
        next = rows_of_warp(a, first + TOGETHER + mine, end, rows.begin, a.hidden_size);
        if (BLOCKS_ROW || rows.count > 0) {
            A wdy[VECTORS][VECTOR], xhat[VECTORS][VECTOR], products[VECTORS][VECTOR], rstd[ROWS_IN_LANE];
            memcpy(rstd, rstd_of_next, sizeof rstd);
            Means means[ROWS_IN_LANE];
            load_means(means, dy, h, weight, a.weight_offset, a.hidden_size);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                weighted(wdy[k], xhat[k], products[k], dy[k], h[k], means[k / VECTORS_IN_ROW],
                         rstd[k / VECTORS_IN_ROW], weight[k % VECTORS_IN_ROW], a.weight_offset, rows.have_column(k));
                A share[VECTOR];
                shares_of(share, dy[k], xhat[k]);
                if constexpr (BLOCKS_ROW) add(totals[k], share);
                else keep_shares(shares, mine + row_of(k), column_of(k), share);
            }
            if (AHEAD && !last) load_factors();  // registers suffice for the next rows' factors beside these
            A sum = sums_of_rows(products);
            if constexpr (BLOCKS_ROW) {
                SHARED(A, of_segments, 2 * WARPS);
                auto half = &of_segments[turn % 2 * WARPS];
                sum = sum_of_segments(sum, half);
            }
            const A c = sum / (A)a.hidden_size;
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const long long at = rows.at(k, a.hidden_size);
                store_gradients(wdy[k], xhat[k], of_row(c, k / VECTORS_IN_ROW), rstd[k / VECTORS_IN_ROW], d_total[k],
                                rows.have(k), a.dx + at, a.dresidual + at);
            }
            if (!last) {
                if (!AHEAD) load_factors();
                load_rows(d_total, a.d_total, a.d_total_strides, next);
            }
        }
        if (last) let_next_kernel_begin();
        if constexpr (!BLOCKS_ROW) {
            const int together = last ? (int)(end - first) : TOGETHER, block = several == 1 ? together : (int)a.block;
            block_barrier();
            add_columns(sums, shares, together, several, block, turn == 0, last, partial, a.hidden_size);
            if (!last) block_barrier();
        }
    }
    if constexpr (BLOCKS_ROW) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            store_together(next.have_column(k), partial + next.begin + column_of(k), totals[k]);
        }
    }
}
