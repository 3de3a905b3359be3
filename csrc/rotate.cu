// Heads of q, or of q and of k, that are normalised, rotated, or both (docs/spec.md, section 8). A part of a warp has each
// head; the rows of row.cuh are heads here: those of q first, then those of k. Constants that the compilation defines
// beside those of row.cuh:
//
//   SIZE         elements of a head
//   PAIRS        pairs of a head that are rotated; VECTOR divides it. INTERLEAVED: twice their number
//   INTERLEAVED  whether pairs lie side by side; else the second numbers of all pairs follow the first ones
//   NORMALISED   whether heads are normalised; ROUND_NORM and OFFSET as everywhere, RSTD whether rstd is stored
#define MANY_REGISTERS  // with fewer the compiler spills
#include "row.cuh"

using X = X_TYPE;
using Out = OUT_TYPE;
using Weight = WEIGHT_TYPE;
using Between = BETWEEN_TYPE;    // what normalised heads are rounded to before they are rotated; none: not rounded
using Products = PRODUCTS_TYPE;  // what products are rounded to before two are added; none: not rounded
using Cos = COS_TYPE;
using Sin = SIN_TYPE;
using Position = POSITION_TYPE;  // of the numbers that say which row of the tables a row takes; none: there are none

// Heads of q or of k. The strides lead from row to row; those of heads, from head to head.
struct Heads {
    const X* x;
    Out* out;
    const Weight* weight;
    A* rstd;
    Strides x_strides;
    long long x_head;
    Strides out_strides;
    long long out_head, weight_head, count;
};

struct Arguments : Levels {
    Heads q, k;
    const Cos* cos;
    const Sin* sin;
    const Position* positions;
    Strides cos_strides, sin_strides, position_strides;
    long long rows;
    A eps, weight_offset;
};

// A head, where its operands begin, and the row of heads that it belongs to.
struct Head {
    const X* x;
    Out* out;
    const Weight* weight;
    A* rstd;
    long long row;
    bool inside;

    __device__ void find(const Arguments& a, long long number) {
        const long long of_q = a.rows * a.q.count;
        inside = number < of_q + a.rows * a.k.count;
        if (number < of_q) find(a, a.q, number);
        else if (inside) find(a, a.k, number - of_q);
    }
    __device__ void find(const Arguments& a, const Heads& heads, unsigned long long number) {
        row = number / (unsigned long long)heads.count;
        const long long head = number - row * heads.count;
        x = heads.x + a.begin_of(row, heads.x_strides) + head * heads.x_head;
        out = heads.out + a.begin_of(row, heads.out_strides) + head * heads.out_head;
        weight = heads.weight + head * heads.weight_head;
        rstd = heads.rstd + number;
    }
};

#if PAIRS
// Where a row of a table begins.
template <class T, class P>
__device__ const T* row_of_table(const T* table, Strides strides, const P* positions, long long row, const Arguments& a) {
    if constexpr (PRESENT<P>) {
        return table + (long long)positions[a.begin_of(row, a.position_strides)] * strides.stride;
    } else {
        return table + a.begin_of(row, strides);
    }
}

// Loads the numbers of a table for the elements from `column` on.
template <class T> __device__ void load_turns(A (&to)[VECTOR], const T* row, int column) {
    T found[VECTOR];
    if constexpr (INTERLEAVED) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) found[v] = row[(column + v) / 2];
    } else {
        load(found, row + column % PAIRS);
    }
    widen(to, found);
}

// Rotates a vector of the elements of a head; all of them are in `all`.
__device__ inline void turn(A (&y)[VECTOR], const A* all, int column, const Head& head, const Arguments& a) {
    A cos[VECTOR], sin[VECTOR], others[VECTOR];
    load_turns(cos, row_of_table(a.cos, a.cos_strides, a.positions, head.row, a), column);
    load_turns(sin, row_of_table(a.sin, a.sin_strides, a.positions, head.row, a), column);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        const int at = column + v;
        others[v] = all[INTERLEAVED ? at ^ 1 : at < PAIRS ? at + PAIRS : at - PAIRS];
        y[v] *= cos[v];
        others[v] *= sin[v];
    }
    round_to<Products>(y);
    round_to<Products>(others);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        const bool first = INTERLEAVED ? (column + v) % 2 == 0 : column < PAIRS;
        y[v] = first ? y[v] - others[v] : y[v] + others[v];
    }
}

#endif

extern "C" __global__ void BOUNDS rotate(const Arguments a) {
    const long long first = ((long long)blockIdx.x * WARPS + warp()) * ROWS_PER_WARP;
    Head heads[ROWS_IN_LANE];
#pragma unroll
    for (int r = 0; r < ROWS_IN_LANE; r++) heads[r].find(a, first + row_of(r * VECTORS_IN_ROW));
    const auto inside = [&](int k) { return (FULL || column_of(k) < SIZE) && heads[k / VECTORS_IN_ROW].inside; };
    wait_for_kernels_before();
    X x[VECTORS][VECTOR];
    A y[VECTORS][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) load_if(inside(k), x[k], heads[k / VECTORS_IN_ROW].x + column_of(k));
    let_next_kernel_begin();
#pragma unroll
    for (int k = 0; k < VECTORS; k++) widen(y[k], x[k]);
    if constexpr (NORMALISED) {
        A squares[VECTORS][VECTOR];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) square(squares[k], y[k]);
        const A rstd = rstd_of(sums_of_rows(squares), SIZE, a.eps);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const Head& head = heads[k / VECTORS_IN_ROW];
            const A of_head = of_row(rstd, k / VECTORS_IN_ROW);
            if (RSTD && k % VECTORS_IN_ROW == 0 && lane() % LANES_PER_ROW == 0 && head.inside) *head.rstd = of_head;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) y[k][v] *= of_head;
            if constexpr (ROUND_NORM) round_to<X>(y[k]);
            Weight weight[VECTOR];
            load_if(inside(k), weight, head.weight + column_of(k));
            multiply_by_gain(y[k], weight, a.weight_offset);
            round_to<Between>(y[k]);
        }
    }
#if PAIRS
    SHARED(A, shared, WARPS * SEGMENT);
    A* const of_warp = shared + warp() * SEGMENT;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) of_warp[row_of(k) * ROW + column_of(k) + v] = y[k][v];
    }
    warp_barrier();
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        if (inside(k) && column_of(k) < 2 * PAIRS) {
            turn(y[k], of_warp + row_of(k) * ROW, column_of(k), heads[k / VECTORS_IN_ROW], a);
        }
    }
#endif
#pragma unroll
    for (int k = 0; k < VECTORS; k++) store_if(inside(k), heads[k / VECTORS_IN_ROW].out + column_of(k), y[k]);
}
