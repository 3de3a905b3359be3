// y, residual_out and rstd of rows that do not fit the registers, or numbers and scales. A block per row reads it twice,
// segment by segment; once more where a norm comes before the addition, where the mean is subtracted, and where a
// quantizer computes one scale for the row.
//
// KEPT says where the passes after the sum read h, the row that is normalised: in shared memory; in global memory, as x or
// residual_out; or nowhere: they add x and the residual again.
#if AROUND
#define MANY_REGISTERS  // with fewer the compiler spills
#endif
#include "forward.cuh"
#if QUANTIZED
#include "quantize.cuh"
#endif
#if GATED
#include "activations.cuh"
#endif

constexpr int NOWHERE = 0, IN_MEMORY = 1, IN_SHARED = 2;
static_assert(KEPT != IN_SHARED || ALIGNED < 32, "only global memory has accesses of 32 bytes");

// The type of h.
using Row = either<GATED == BEFORE_NORM, A, either<!PRESENT<Residual>, X, either<ROUND_SUM, ResidualOut, A>::type>::type>::type;

// The type of h where passes after the sum read it, in shared memory or in residual_out; none: they load x, and add again.
using Kept = either<KEPT == IN_SHARED, Row, either<KEPT == IN_MEMORY && PRESENT<Residual>, ResidualOut, none>::type>::type;

// Loads a vector that meets the residual: x, or x after its norm.
template <class T>
__device__ void load_added(bool inside, T (&to)[VECTOR], const Arguments& a, const X* x_row, int column, A first_rstd) {
    if constexpr (NORM_BEFORE_ADD) {
        X x[VECTOR];
        FirstWeight weight[VECTOR];
        load_if(inside, x, x_row + column);
        load_if(inside, weight, a.weight_of_first() + column);
        normalised_first(to, x, first_rstd, weight, a.weight_offset);
    } else {
        load_if(inside, to, x_row + column);
        scale_first(to, a);
    }
}

// Multiplies a vector by the gate, if that comes there.
template <int WHERE> __device__ void gate(A (&values)[VECTOR], bool inside, const Z* z_row, int column) {
#if GATED
    if constexpr (GATED == WHERE) {
        Z z[VECTOR];
        load_if(inside, z, z_row + column);
        multiply_by_gates(values, z);
    }
#endif
}

extern "C" __global__ void BOUNDS forward_wide(const Arguments a) {
    SHARED(A, sums, SEGMENTS);
    Row* const kept = static_cast<Row*>(shared_of_launch());
    wait_for_kernels_before();
    const X* const x_row = a.x + a.begin_of(blockIdx.x, a.x_strides);
    const Residual* const residual_row = a.residual + a.begin_of(blockIdx.x, a.residual_strides);
    ResidualOut* const residual_out_row = a.residual_out + a.begin_of(blockIdx.x, a.residual_out_strides);
    Out* const out_row = a.out + a.begin_of(blockIdx.x, a.out_strides);
    const Z* const z_row = a.gates_of(blockIdx.x);
    const Weight* const weight_row = a.weight_of(blockIdx.x);
    const Bias* const bias_row = a.bias_of(blockIdx.x);
    const auto* const kept_row = static_cast<const Kept*>(KEPT == IN_SHARED ? shared_of_launch() : residual_out_row);
    const int segments = (a.hidden_size + SEGMENT - 1) / SEGMENT;

    A first_rstd = 0;
    if constexpr (NORM_BEFORE_ADD) {
        for (int segment = warp(); segment < segments; segment += WARPS) {
            A squares[VECTORS][VECTOR];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int column = segment * SEGMENT + column_of(k);
                X x[VECTOR];
                load_if(FULL || column < a.hidden_size, x, x_row + column);
                square(squares[k], x);
            }
            const A sum = sums_of_rows(squares);
            if (lane() == 0) sums[segment] = sum;
        }
        first_rstd = rstd_of(sum_of_all_segments(sums, segments), a.hidden_size, a.eps_of_first());
        block_barrier();  // all have read the sum, and other sums take its place
    }
    for (int segment = warp(); segment < segments; segment += WARPS) {
        Added x[VECTORS][VECTOR];
        Residual residual[VECTORS][VECTOR];
        A squares[VECTORS][VECTOR];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            load_added(FULL || column < a.hidden_size, x[k], a, x_row, column, first_rstd);
            load_if(FULL || column < a.hidden_size, residual[k], residual_row + column);
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            const bool inside = FULL || column < a.hidden_size;
            A h[VECTOR];
            added(h, x[k], residual[k], inside && KEPT != NOWHERE, residual_out_row + column);
            gate<BEFORE_NORM>(h, inside, z_row, column);
            if (KEPT == IN_SHARED) store_if(inside, kept + column, h);
            if constexpr (CENTER) memcpy(squares[k], h, sizeof h);
            else square(squares[k], h);
        }
        if constexpr (PRESENT<Out>) {
            const A sum = sums_of_rows(squares);
            if (lane() == 0) sums[segment] = sum;
        }
    }
    if constexpr (!PRESENT<Out>) return;

    // Each thread reads what it wrote itself, so no barrier is needed.
    A mean = 0;
    if constexpr (CENTER) {
        mean = sum_of_all_segments(sums, segments) / (A)a.hidden_size;
        block_barrier();  // the sum has been read, and those of squares take its place
        for (int segment = warp(); segment < segments; segment += WARPS) {
            A squares[VECTORS][VECTOR];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int column = segment * SEGMENT + column_of(k);
                const bool inside = FULL || column < a.hidden_size;
                A h[VECTOR];
                Kept row[VECTOR];
                load_if(inside, row, kept_row + column);
                if constexpr (PRESENT<Kept>) {
                    widen(h, row);
                } else {
                    Added x[VECTOR];
                    Residual residual[VECTOR];
                    load_added(inside, x, a, x_row, column, first_rstd);
                    load_if(inside, residual, residual_row + column);
                    added(h, x, residual, false, residual_out_row + column);
                    gate<BEFORE_NORM>(h, inside, z_row, column);
                }
                subtract(h, inside ? mean : 0);  // beyond the row's end +0 is squared
                square(squares[k], h);
            }
            const A sum = sums_of_rows(squares);
            if (lane() == 0) sums[segment] = sum;
        }
    }
    const A rstd = rstd_of(sum_of_all_segments(sums, segments), a.hidden_size, a.eps);
    if (RSTD && threadIdx.x == 0) a.rstd[blockIdx.x] = rstd;
    let_next_kernel_begin();

#if QUANTIZED
    Passes passes(a, blockIdx.x);
    for (; passes.left > 0; passes.end())
#endif
    for (int segment = warp(); segment < segments; segment += WARPS) {
#if QUANTIZED
        float passing[VECTORS][VECTOR];
        const bool stored = passes.left == 1;
#else
        constexpr bool stored = true;
#endif
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int column = segment * SEGMENT + column_of(k);
            const bool inside = FULL || column < a.hidden_size;
            A h[VECTOR], y[VECTOR];
            Kept row[VECTOR];
            load_if(inside, row, kept_row + column);
            if constexpr (PRESENT<Kept>) {
                widen(h, row);
            } else {
                Added x[VECTOR];
                Residual residual[VECTOR];
                load_added(inside, x, a, x_row, column, first_rstd);
                load_if(inside, residual, residual_row + column);
                added(h, x, residual, inside && stored, residual_out_row + column);
                gate<BEFORE_NORM>(h, inside, z_row, column);
            }
            if (CENTER) subtract(h, mean);
            Weight weight[VECTOR];
            load_if(inside, weight, weight_row + column);
            normalised<Added>(y, h, rstd, weight, a.weight_offset);
            Bias bias[VECTOR];
            load_if(inside, bias, bias_row + column);
            add(y, bias);
            if (GATED == AFTER_NORM) round_to<Between>(y);
            gate<AFTER_NORM>(y, inside, z_row, column);
            if (KEEPS) store_if(inside && stored, out_row + column, y);
#if QUANTIZED
            passed<Out>(passing[k], y);
#endif
        }
#if QUANTIZED
        passes.take(passing, segment);
#endif
    }
}
