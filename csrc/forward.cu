// y, residual_out and rstd of rows that fit the registers.
#if NORM_BEFORE_ADD || AROUND
#define MANY_REGISTERS  // with fewer the compiler spills
#endif
#include "forward.cuh"
#if QUANTIZED
#include "quantize.cuh"
#endif
#if GATED
#include "activations.cuh"
#endif

// Fetches the weight of the columns of the warp's block.
template <class T> __device__ void fetch_weight_soon(const T* weight, int segment, int hidden_size) {
    if constexpr (PRESENT<T>) {
        int ahead = threadIdx.x * (128 / (int)sizeof(T)) + segment / WARPS * WARPS * SEGMENT;
        if (ahead < smaller(hidden_size, (segment / WARPS + 1) * WARPS * SEGMENT)) fetch_soon(weight + ahead);
    }
}

// Vectors that a lane has of the weight and of the bias: of one row, or of a row for each of its rows.
constexpr int OF_WEIGHT = OF_HEADS ? VECTORS : VECTORS_IN_ROW;

// Loads them; `begin(row)` is where the row for a row of the call begins.
template <class T, class BEGIN>
__device__ void load_weight_of(T (&to)[OF_WEIGHT][VECTOR], BEGIN begin, const Rows& rows) {
    if constexpr (OF_HEADS) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            load_if(rows.have(k), to[k], begin(rows.first + row_of(k)) + rows.begin + column_of(k));
        }
    } else {
        load_weight(to, begin(0), rows);
    }
}

// A part of a warp, the warps of a block, or those of a cluster hold each row.
extern "C" __global__ void BOUNDS forward(const Arguments a) {
    const int segment = BLOCKS_ROW ? (blockIdx.x % CLUSTER) * WARPS + warp() : 0;
    const long long first = BLOCKS_ROW ? blockIdx.x / CLUSTER : ((long long)blockIdx.x * WARPS + warp()) * ROWS_PER_WARP;
    if (CLUSTER > 1) cluster_arrive();
    fetch_weight_soon(a.weight_of_first(), segment, a.hidden_size);
    fetch_weight_soon(a.weight, segment, a.hidden_size);
    fetch_weight_soon(a.bias_of(0), segment, a.hidden_size);
    wait_for_kernels_before();

    const Rows rows = rows_of_warp(a, first, a.rows, segment * SEGMENT, a.hidden_size);
    X x[VECTORS][VECTOR];
    Residual residual[VECTORS][VECTOR];
    Weight weight[OF_WEIGHT][VECTOR];
    load_rows(x, a.x, a.x_strides, rows);
    load_rows(residual, a.residual, a.residual_strides, rows);
#if GATED
    Z z[VECTORS][VECTOR];
    load_rows(z, a.z, a.z_strides, rows);
#endif
    FirstWeight first_weight[VECTORS_IN_ROW][VECTOR];
    load_weight(first_weight, a.weight_of_first(), rows);
    const auto weight_of = [&](long long row) { return a.weight_of(row); };
    if (!NORM_BEFORE_ADD) load_weight_of(weight, weight_of, rows);
    let_next_kernel_begin();

    Between between[VECTORS][VECTOR];
    if constexpr (NORM_BEFORE_ADD) {
        A squares[VECTORS][VECTOR];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) square(squares[k], x[k]);
        const A rstd = rstd_of(sum_of_row<0>(squares), a.hidden_size, a.eps_of_first());
        if (CLUSTER > 1 && PRESENT<Out>) cluster_arrive();
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const A of_vector = of_row(rstd, k / VECTORS_IN_ROW);
            normalised_first(between[k], x[k], of_vector, first_weight[k % VECTORS_IN_ROW], a.weight_offset);
        }
        load_weight_of(weight, weight_of, rows);  // only now: there are registers for one of both weights
    }
    A h[VECTORS][VECTOR], squares[VECTORS][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        if constexpr (NORM_BEFORE_ADD) {
            added(h[k], between[k], residual[k], rows.have(k), a.residual_out + rows.at(k, a.residual_out_strides));
        } else {
            scale_first(x[k], a);
            added(h[k], x[k], residual[k], rows.have(k), a.residual_out + rows.at(k, a.residual_out_strides));
        }
#if GATED == 2
        multiply_by_gates(h[k], z[k]);
#endif
        if (!CENTER) square(squares[k], h[k]);
    }
    if constexpr (!PRESENT<Out>) return;
    Bias bias[OF_WEIGHT][VECTOR];  // only now: x and the residual have left their registers
    load_weight_of(bias, [&](long long row) { return a.bias_of(row); }, rows);
    if constexpr (CENTER) {
        const A mean = sum_of_row<0>(h) / (A)a.hidden_size;
        if (CLUSTER > 1) cluster_arrive();
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const A of_vector = of_row(mean, k / VECTORS_IN_ROW);
            subtract(h[k], rows.have_column(k) ? of_vector : 0);  // beyond the row's end +0 is squared
            square(squares[k], h[k]);
        }
    }
    const A rstd = rstd_of(sum_of_row<1>(squares), a.hidden_size, a.eps);
    if (RSTD) {
        bool mine = BLOCKS_ROW ? threadIdx.x == 0 && segment == 0 : first + row_of_sum() < a.rows;
        if (mine) a.rstd[first + (BLOCKS_ROW ? 0 : row_of_sum())] = rstd;
    }
#if QUANTIZED
    if (CLUSTER > 1 && OF_WARPS) cluster_arrive();
    float passing[VECTORS][VECTOR];
#endif
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        A y[VECTOR];
        normalised<Added>(y, h[k], of_row(rstd, k / VECTORS_IN_ROW), weight[k % OF_WEIGHT], a.weight_offset);
        add(y, bias[k % OF_WEIGHT]);
#if GATED == 1
        round_to<Between>(y);
        multiply_by_gates(y, z[k]);
#endif
        if (KEEPS) store_if(rows.have(k), a.out + rows.at(k, a.out_strides), y);
#if QUANTIZED
        passed<Out>(passing[k], y);
#endif
    }
#if QUANTIZED
    quantize_rows(passing, rows, a);
#endif
}
