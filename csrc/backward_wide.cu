// The gradients of rows that do not fit the registers. A block per row reads it twice, segment by segment; h once more,
// for the means, if rows are centered. If KEPT, passes after the first read dy and h in shared memory.
#if CENTER
#define MANY_REGISTERS  // with fewer the compiler spills
#endif
#include "backward.cuh"

static_assert(!KEPT || ALIGNED < 32, "only global memory has accesses of 32 bytes");

extern "C" __global__ void BOUNDS backward_wide(const Arguments a) {
    SHARED(A, sums, SEGMENTS);
    Dy* const kept_dy = static_cast<Dy*>(shared_of_launch());
    H* const kept_h = reinterpret_cast<H*>(kept_dy + a.hidden_size);
    wait_for_kernels_before();
    const long long row = blockIdx.x;
    const Dy* const dy_row = a.dy + a.begin_of(row, a.dy_strides);
    const H* const h_row = a.h + a.begin_of(row, a.h_strides);
    const A rstd = a.rstd[row];
    const int segments = (a.hidden_size + SEGMENT - 1) / SEGMENT;

    Means means = {0, 0};
    if constexpr (CENTER) {
        for (int segment = warp(); segment < segments; segment += WARPS) {
            A wide[VECTORS][VECTOR];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int column = segment * SEGMENT + column_of(k);
                const bool inside = FULL || column < a.hidden_size;
                H h[VECTOR];
                load_if(inside, h, h_row + column);
                if (KEPT && inside) store(kept_h + column, h);
                widen(wide[k], h);
            }
            const A sum = sums_of_rows(wide);
            if (lane() == 0) sums[segment] = sum;
        }
        means.h = sum_of_all_segments(sums, segments) / (A)a.hidden_size;
        if (a.partial && threadIdx.x == 0) a.means()[row] = means.h;
        if constexpr (!PRESENT<Dx> && !PRESENT<DResidual>) return;
        block_barrier();  // all have read the sum, and others take its place
    }
    SHARED(A, sums_of_wdy, CENTER ? SEGMENTS : 1);
    for (int segment = warp(); segment < segments; segment += WARPS) {
        A products[VECTORS][VECTOR], wdy[VECTORS][VECTOR];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            const bool inside = FULL || column < a.hidden_size;
            Dy dy[VECTOR];
            H h[VECTOR];
            Weight weight[VECTOR];
            load_if(inside, dy, dy_row + column);
            load_if(inside, h, (KEPT && CENTER ? kept_h : h_row) + column);
            load_if(inside, weight, a.weight + column);
            if (KEPT && inside) {
                store(kept_dy + column, dy);
                if (!CENTER) store(kept_h + column, h);
            }
            A xhat[VECTOR];
            weighted(wdy[k], xhat, products[k], dy, h, means, rstd, weight, a.weight_offset, inside);
        }
        const A sum = sums_of_rows(products);
        if (lane() == 0) sums[segment] = sum;
        if constexpr (CENTER) {
            const A sum_of_wdy = sums_of_rows(wdy);
            if (lane() == 0) sums_of_wdy[segment] = sum_of_wdy;
        }
    }
    if constexpr (CENTER) means.wdy = sum_of_all_segments(sums_of_wdy, segments) / (A)a.hidden_size;
    const A c = sum_of_all_segments(sums, segments) / (A)a.hidden_size;
    let_next_kernel_begin();

    // Each thread reads what it wrote itself, so no barrier is needed.
    for (int segment = warp(); segment < segments; segment += WARPS) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            const bool inside = FULL || column < a.hidden_size;
            const long long at = row * a.hidden_size + column;
            Dy dy[VECTOR];
            H h[VECTOR];
            Weight weight[VECTOR];
            DTotal d_total[VECTOR];
            load_if(inside, dy, (KEPT ? kept_dy : dy_row) + column);
            load_if(inside, h, (KEPT ? kept_h : h_row) + column);
            load_if(inside, weight, a.weight + column);
            load_if(inside, d_total, a.d_total + a.begin_of(row, a.d_total_strides) + column);
            A wdy[VECTOR], xhat[VECTOR], products[VECTOR];
            weighted(wdy, xhat, products, dy, h, means, rstd, weight, a.weight_offset, inside);
            store_gradients(wdy, xhat, c, rstd, d_total, inside, a.dx + at, a.dresidual + at);
        }
    }
}
