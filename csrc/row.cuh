// Which thread has which elements of a row, and the row's halving sum. Constants that the compilation defines beside those
// of memory.cuh:
//
//   ROW         elements of a warp's 1024 that are reserved for one row: a power of two from 32 on
//   BLOCKS_ROW  whether all warps of a block work on one row; else each warp has rows of its own
//   WARPS       warps per block
//   CLUSTER     blocks per row
//   SEGMENTS    at least the segments of a row that is too long for registers: a power of two
//   FULL        whether rows fill their vectors, so that no column need be compared with the row's length
//
// A row longer than 1024 has a warp for each segment. Within a warp, the index of an element in its row is
//
//   (vector, lane, position)    most significant first: VECTORS_IN_ROW * LANES_PER_ROW * VECTOR == ROW
//
// which is the order in which the tree halves: over vectors, then lanes, then positions. The layout decides no bits.
#pragma once
#include "memory.cuh"

constexpr int SEGMENT = 1024;
constexpr int VECTORS = SEGMENT / LANES / VECTOR;  // that a lane has
constexpr int LANES_PER_ROW = ROW / VECTOR < LANES ? ROW / VECTOR : LANES;
constexpr int VECTORS_IN_ROW = ROW / VECTOR / LANES_PER_ROW;  // that a lane has of one row
static_assert(VECTORS_IN_ROW * LANES_PER_ROW * VECTOR == ROW, "the three fields of an element's index");
constexpr int ROWS_IN_LANE = VECTORS / VECTORS_IN_ROW;  // of which a lane has elements
constexpr int LANES_PER_SUM = LANES_PER_ROW / ROWS_IN_LANE;  // that end with the sum of the same row
constexpr int ROWS_PER_WARP = SEGMENT / ROW;
constexpr int ROWS_APART = LANES / LANES_PER_ROW;  // from one row of a lane to the lane's next row
constexpr int THREADS = WARPS * LANES;

__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int warp() { return threadIdx.x / LANES; }

// The position of the lane's vector `k`: its column in its segment or row, and its row's number in the warp.
__device__ inline int column_of(int k) {
    return (k % VECTORS_IN_ROW) * (LANES * VECTOR) + (lane() % LANES_PER_ROW) * VECTOR;
}
__device__ inline int row_of(int k) {
    return (k / VECTORS_IN_ROW) * ROWS_APART + lane() / LANES_PER_ROW;
}

// The rows of a warp: `count` rows from `first` on, and of these at most 1024 columns, from `begin` on.
struct Rows : Levels {
    long long first;
    int count, begin, hidden_size;

    // Whether the lane's vector `k` exists: whether rows are long enough for it, and whether there are enough rows.
    __device__ bool have_column(int k) const { return FULL || begin + column_of(k) < hidden_size; }
    __device__ bool have(int k) const { return have_column(k) && (BLOCKS_ROW || row_of(k) < count); }

    // Its index in an operand whose rows are `stride` apart. Only the lane's first vector takes a multiplication.
    __device__ long long at(int k, long long stride) const {
        const long long first_of_lane = (first + row_of(0)) * stride + begin + column_of(0);
        return first_of_lane + (k / VECTORS_IN_ROW) * (ROWS_APART * stride) + (k % VECTORS_IN_ROW) * (LANES * VECTOR);
    }
    __device__ long long at(int k, Strides strides) const {
        if (TWO_LEVELS) return begin_of(first + row_of(k), strides) + begin + column_of(k);
        return at(k, strides.stride);
    }
};

// The warp's rows from `first` on that are before the row `end`; `count` is 0 or less if there are none.
__device__ inline Rows rows_of_warp(const Levels& levels, long long first, long long end, int begin, int hidden_size) {
    return {levels, first, end - first < ROWS_PER_WARP ? (int)(end - first) : ROWS_PER_WARP, begin, hidden_size};
}

// Loads the lane's vectors of an operand.
template <class T>
__device__ void load_rows(T (&to)[VECTORS][VECTOR], const T* from, Strides strides, const Rows& rows) {
#pragma unroll
    for (int k = 0; k < VECTORS; k++) load_if(rows.have(k), to[k], from + rows.at(k, strides));
}

// Loads the weight of the lane's columns.
template <class T> __device__ void load_weight(T (&to)[VECTORS_IN_ROW][VECTOR], const T* from, const Rows& rows) {
#pragma unroll
    for (int k = 0; k < VECTORS_IN_ROW; k++) load_if(rows.have_column(k), to[k], from + rows.begin + column_of(k));
}

// Multiplies values by the gain, the weight plus its offset, if there is a weight.
template <class T> __device__ void multiply_by_gain(A (&values)[VECTOR], const T (&weight)[VECTOR], A weight_offset) {
    if constexpr (PRESENT<T>) {
        A gain[VECTOR];
        widen(gain, weight);
        if (OFFSET) {
#pragma unroll
            for (int v = 0; v < VECTOR; v++) gain[v] += weight_offset;
        }
        multiply(values, gain);
    }
}

// values[i] += values[i + COUNT / 2], and so on until one is left.
template <int COUNT, int N> __device__ void halve(A (&values)[N]) {
    static_assert(COUNT <= N);
    if constexpr (COUNT > 1) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) values[i] += values[i + COUNT / 2];
        halve<COUNT / 2>(values);
    }
}

// Adds COUNT values of lanes that are DISTANCE apart, then half as far, and so on. If there are several values, a lane
// keeps one half of them and gives the other half away: a bit of the lane's number then selects the half.
template <int COUNT, int DISTANCE, int N> __device__ void add_lanes(A (&values)[N]) {
    if constexpr (DISTANCE > 0) {
        constexpr int LEFT = larger(COUNT / 2, 1);
        const bool second = COUNT > 1 && (lane() & DISTANCE);
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            A kept = second ? values[i + COUNT / 2] : values[i];
            A given = second ? values[i] : values[i + COUNT / 2];
            values[i] = kept + exchanged(given, DISTANCE);
        }
        add_lanes<LEFT, DISTANCE / 2>(values);
    }
}

// The sums of the warp's rows, or of its segment. LANES_PER_SUM adjacent lanes return the sum of the same row; see
// `of_row` and `row_of_sum`.
//
// An example: ROW is 64 and VECTOR is 8, so a row has eight lanes and a lane has one vector of each of four rows. Let p
// be the number of the lane among the eight, r that of the row among the lane's four, and v the position in the vector,
// with the bits p2 p1 p0, r1 r0 and v2 v1 v0. A row's element p2 p1 p0 v2 v1 v0 is added over p2 first, over v0 last.
//
//   step                      adds over    values of a lane after it       and the lane's number says
//                                          32, numbered r1 r0 v2 v1 v0
//   add_lanes, distance 4     p2           16, numbered r0 v2 v1 v0        p2 = r1
//   add_lanes, distance 2     p1            8, numbered v2 v1 v0           p1 = r0
//   add_lanes, distance 1     p0            4, numbered v1 v0              p0 = v2
//   exchanged, distance 1     v2            4, numbered v1 v0              (both lanes have the same)
//   halve                     v1, v0        1: the sum of row r = p2 p1    lanes 2r and 2r + 1 have it
__device__ inline A sums_of_rows(const A (&elements)[VECTORS][VECTOR]) {
    constexpr int COUNT = ROWS_IN_LANE * VECTOR;
    A sums[COUNT];
#pragma unroll
    for (int r = 0; r < ROWS_IN_LANE; r++) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            A column[VECTORS_IN_ROW];
#pragma unroll
            for (int k = 0; k < VECTORS_IN_ROW; k++) column[k] = elements[r * VECTORS_IN_ROW + k][v];
            halve<VECTORS_IN_ROW>(column);
            sums[r * VECTOR + v] = column[0];
        }
    }
    add_lanes<COUNT, LANES_PER_ROW / 2>(sums);
    // Lanes at this distance or a smaller one hold different positions of the same row; at larger ones, different rows.
    constexpr int APART = LANES_PER_SUM / 2;
    constexpr int LEFT = larger(COUNT / LANES_PER_ROW, 1);
#pragma unroll
    for (int i = 0; (VECTOR >> i) > LEFT; i++) {
#pragma unroll
        for (int j = 0; j < LEFT; j++) sums[j] += exchanged(sums[j], APART >> i);
    }
    halve<LEFT>(sums);
    return sums[0];
}

// Broadcasts the value for the lane's row `r` from a lane that holds it.
__device__ inline A of_row(A value, int r) {
    if constexpr (ROWS_PER_WARP == 1) return value;
    else return value_of_lane(value, lane() / LANES_PER_ROW * LANES_PER_ROW + r * LANES_PER_SUM);
}

// The number in the warp of the row whose sum this lane holds.
__device__ inline int row_of_sum() {
    return lane() % LANES_PER_ROW / LANES_PER_SUM * ROWS_APART + lane() / LANES_PER_ROW;
}

__device__ constexpr int padded(int count) {
    int power = 1;
    while (power < count) power *= 2;
    return power;
}

// Gives all warps of a row the values of each: value `i` of segment `s` is shared[i * CLUSTER * WARPS + s].
template <class T, int COUNT, class MEMORY> __device__ void share(const T (&values)[COUNT], MEMORY& shared) {
    constexpr int IN_ROW = CLUSTER * WARPS;
    if constexpr (CLUSTER > 1) {
        int segment = rank_in_cluster() * WARPS + warp();
        cluster_wait();  // until all blocks have started, or have read the values before these
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (lane() < CLUSTER) store_in_block(shared[i * IN_ROW + segment], lane(), values[i]);
        }
        cluster_arrive();
        cluster_wait();
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (lane() == 0) shared[i * IN_ROW + warp()] = values[i];
        }
        block_barrier();
    }
}

// Of COUNT numbers for each warp's segment, the row's sums. `sums` is shared memory for all of them. It may be used again
// after the next call, which must be given other memory.
template <int COUNT, class SUMS> __device__ void add_segments(A (&totals)[COUNT], SUMS& sums) {
    constexpr int IN_ROW = CLUSTER * WARPS, PADDED = padded(IN_ROW), OF_LANE = larger(PADDED / LANES, 1);
    share(totals, sums);
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        A halves[OF_LANE];
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
            int segment = lane() % PADDED + i * LANES;
            halves[i] = segment < IN_ROW ? (A)sums[n * IN_ROW + segment] : (A)0;
        }
        halve<OF_LANE>(halves);
#pragma unroll
        for (int distance = smaller(PADDED, LANES) / 2; distance > 0; distance /= 2) {
            halves[0] += exchanged(halves[0], distance);
        }
        totals[n] = halves[0];
    }
}

template <class SUMS> __device__ A sum_of_segments(A sum, SUMS& sums) {
    A totals[1] = {sum};
    add_segments(totals, sums);
    return totals[0];
}

// The sums of the warp's rows, or of the row of its block or cluster. Each NUMBER has memory of its own.
template <int NUMBER> __device__ A sum_of_row(const A (&elements)[VECTORS][VECTOR]) {
    A sum = sums_of_rows(elements);
    if constexpr (BLOCKS_ROW) {
        SHARED(A, sums, CLUSTER * WARPS);
        sum = sum_of_segments(sum, sums);
    }
    return sum;
}

// The same for a row that one block reads segment by segment: `sums` has all of them already, SEGMENTS at most.
template <class SUMS> __device__ A sum_of_all_segments(SUMS& sums, int segments) {
    for (int half = padded(segments) / 2; half > 0; half /= 2) {
        block_barrier();
        for (int i = threadIdx.x; i + half < smaller(segments, 2 * half); i += THREADS) sums[i] += (A)sums[i + half];
    }
    block_barrier();
    return sums[0];
}

// Subtracts a number from a vector's elements.
__device__ inline void subtract(A (&values)[VECTOR], A number) {
#pragma unroll
    for (int v = 0; v < VECTOR; v++) values[v] -= number;
}

// rstd, the reciprocal of the root mean square.
__device__ inline A rstd_of(A sum_of_squares, int hidden_size, A eps) {
    return (A)1 / root(sum_of_squares / (A)hidden_size + eps);
}
