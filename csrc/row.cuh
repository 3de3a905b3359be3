// How a row lies over threads, and its halving sum. What is compiled in:
//
//   VECTOR   elements side by side that a thread takes together
//   ALIGNED  bytes of which the address of every such vector is a multiple, of the operand with the narrowest type
//   ROW      elements of a warp's 1024 that are kept for one row: a power of two from 32 on
//   WARPS    warps per block: of one row if BLOCKS_ROW, else each with rows of its own
//   CLUSTER  blocks per row
//   SEGMENTS of a row that is too long for registers, as a power of two
//
// Element i of a warp's 1024 belongs to lane (i / VECTOR) % 32. A row longer than 1024 has a warp for each segment.
// Which thread adds what decides no bits: the tree goes by the elements' numbers in their row alone.
#pragma once
#include "numbers.cuh"

constexpr int SEGMENT = 1024;
constexpr int VECTORS = SEGMENT / LANES / VECTOR;  // of a lane
constexpr int LANES_PER_ROW = ROW / VECTOR < LANES ? ROW / VECTOR : LANES;
constexpr int VECTORS_IN_ROW = ROW / VECTOR / LANES_PER_ROW;  // of a lane
constexpr int ROWS_IN_LANE = VECTORS / VECTORS_IN_ROW;
constexpr int ROWS_PER_WARP = SEGMENT / ROW;
constexpr int ROWS_APART = LANES / LANES_PER_ROW;  // from a row of a lane's to its next
constexpr int THREADS = WARPS * LANES;

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int warp() { return threadIdx.x / LANES; }

// Where the lane's vector `k` lies: its column in its segment or row, and the row's number in the warp.
__device__ inline int column_of(int k) {
    return (k % VECTORS_IN_ROW) * (LANES * VECTOR) + (lane() % LANES_PER_ROW) * VECTOR;
}
__device__ inline int row_of(int k) {
    return (k / VECTORS_IN_ROW) * ROWS_APART + lane() / LANES_PER_ROW;
}

// What a warp has: `count` rows from `first` on, of which it takes 1024 columns at most from `begin` on.
struct Rows {
    long long first;
    int count, begin, hidden_size;

    // Whether the lane's vector `k` is in them: whether they are so long, and whether they are so many.
    __device__ bool have_column(int k) const { return FULL || begin + column_of(k) < hidden_size; }
    __device__ bool have(int k) const { return have_column(k) && (BLOCKS_ROW || row_of(k) < count); }

    // Where it lies in an operand whose rows are `stride` apart: from the lane's first, which takes the multiplication.
    __device__ long long at(int k, long long stride) const {
        const long long first_of_lane = (first + row_of(0)) * stride + begin + column_of(0);
        return first_of_lane + (k / VECTORS_IN_ROW) * (ROWS_APART * stride) + (k % VECTORS_IN_ROW) * (LANES * VECTOR);
    }
};

// Those before the row `end`; none or fewer where `first` is not.
__device__ inline Rows rows_of_warp(long long first, long long end, int begin, int hidden_size) {
    return {first, end - first < ROWS_PER_WARP ? (int)(end - first) : ROWS_PER_WARP, begin, hidden_size};
}

template <int BYTES> struct alignas(BYTES) Words {
    unsigned word[BYTES / 4];
};
template <> struct alignas(2) Words<2> {
    unsigned short word[1];
};

// Bytes of an operand that are read or written at once.
template <class T> constexpr int AT_ONCE = larger(sizeof(T), smaller(VECTOR * sizeof(T), ALIGNED));

template <class T> __device__ void load(T (&to)[VECTOR], const T* from) {
    using Part = Words<AT_ONCE<T>>;
#pragma unroll
    for (int i = 0; i < VECTOR * (int)sizeof(T) / AT_ONCE<T>; i++) {
        Part part;
        if constexpr (AT_ONCE<T> == 32) load_32_bytes(part, reinterpret_cast<const Part*>(from) + i);
        else part = reinterpret_cast<const Part*>(from)[i];
        memcpy(to + i * (AT_ONCE<T> / sizeof(T)), &part, sizeof part);
    }
}

template <class T, int COUNT> __device__ void store(T* to, const T (&from)[COUNT]) {
    constexpr int BYTES = smaller(COUNT * sizeof(T), AT_ONCE<T>);
    using Part = Words<BYTES>;
#pragma unroll
    for (int i = 0; i < COUNT * (int)sizeof(T) / BYTES; i++) {
        Part part;
        memcpy(&part, from + i * (BYTES / sizeof(T)), sizeof part);
        if constexpr (BYTES == 32) store_32_bytes(reinterpret_cast<Part*>(to) + i, part);
        else reinterpret_cast<Part*>(to)[i] = part;
    }
}

// The vector there, or zeros.
template <class T> __device__ void load_if(bool inside, T (&to)[VECTOR], const T* from) {
    if constexpr (PRESENT<T>) {
        if (inside) load(to, from);
        else memset(to, 0, sizeof to);
    }
}

// The lane's vectors of an operand whose rows are `stride` apart.
template <class T>
__device__ void load_rows(T (&to)[VECTORS][VECTOR], const T* from, long long stride, const Rows& rows) {
#pragma unroll
    for (int k = 0; k < VECTORS; k++) load_if(rows.have(k), to[k], from + rows.at(k, stride));
}

// The weight of the lane's columns.
template <class T> __device__ void load_weight(T (&to)[VECTORS_IN_ROW][VECTOR], const T* from, const Rows& rows) {
#pragma unroll
    for (int k = 0; k < VECTORS_IN_ROW; k++) load_if(rows.have_column(k), to[k], from + rows.begin + column_of(k));
}

// Rounds and stores, if there is somewhere to.
template <class T> __device__ void store_if(bool inside, T* to, const A (&from)[VECTOR]) {
    if constexpr (PRESENT<T>) {
        T rounded[VECTOR];
        narrow(rounded, from);
        if (inside) store(to, rounded);
    }
}

// The weight plus its offset.
template <class T> __device__ void gain(A (&to)[VECTOR], const T (&weight)[VECTOR], A weight_offset) {
    widen(to, weight);
    if (OFFSET) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) to[v] += weight_offset;
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

// Adds COUNT values of lanes that are DISTANCE apart, then half as far, and so on. Of several values each lane keeps one
// half and gives the other away: bits of the lane's number then stand for bits of the value's.
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

// The sums of the warp's rows, or of its segment, from the elements to be added. A lane gets the sum of the row
// lane % LANES_PER_ROW * ROWS_IN_LANE / LANES_PER_ROW of those that it has elements of; see `of_row`.
//
// Of the bits of an element's number, those of the vector come first, then those of the lane, then those in the vector.
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
    // Lanes that far apart hold different rows, then different elements of a vector.
    constexpr int APART = LANES_PER_ROW / ROWS_IN_LANE / 2;
    constexpr int LEFT = larger(COUNT / LANES_PER_ROW, 1);
#pragma unroll
    for (int i = 0; (VECTOR >> i) > LEFT; i++) {
#pragma unroll
        for (int j = 0; j < LEFT; j++) sums[j] += exchanged(sums[j], APART >> i);
    }
    halve<LEFT>(sums);
    return sums[0];
}

// The value that the lanes with the sum of a lane's row `r` have.
__device__ inline A of_row(A value, int r) {
    if constexpr (ROWS_PER_WARP == 1) return value;
    else return value_of_lane(value, lane() / LANES_PER_ROW * LANES_PER_ROW + r * (LANES_PER_ROW / ROWS_IN_LANE));
}

// The row that the sum of a lane is of, by its number in the warp.
__device__ inline int row_of_sum() {
    return lane() % LANES_PER_ROW * ROWS_IN_LANE / LANES_PER_ROW * ROWS_APART + lane() / LANES_PER_ROW;
}

__device__ constexpr int padded(int count) {
    int power = 1;
    while (power < count) power *= 2;
    return power;
}

// A row's sum from the sums of its segments, which its warps bring; `sums` is room in shared memory for all, and
// may be used again after the next call with another.
template <class SUMS> __device__ A sum_of_segments(A sum, SUMS& sums) {
    constexpr int IN_ROW = CLUSTER * WARPS, PADDED = padded(IN_ROW), COUNT = larger(PADDED / LANES, 1);
    if constexpr (CLUSTER > 1) {
        int segment = rank_in_cluster() * WARPS + warp();
        cluster_wait();  // for all blocks to be there, or to have read what was here
        if (lane() < CLUSTER) store_in_block(sums[segment], lane(), sum);
        cluster_arrive();
        cluster_wait();
    } else {
        if (lane() == 0) sums[warp()] = sum;
        block_barrier();
    }
    A halves[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int segment = lane() % PADDED + i * LANES;
        halves[i] = segment < IN_ROW ? (A)sums[segment] : (A)0;
    }
    halve<COUNT>(halves);
#pragma unroll
    for (int distance = smaller(PADDED, LANES) / 2; distance > 0; distance /= 2) {
        halves[0] += exchanged(halves[0], distance);
    }
    return halves[0];
}

// The same for a row that one block goes through segment by segment: the sums are all there, SEGMENTS at most.
template <class SUMS> __device__ A sum_of_all_segments(SUMS& sums, int segments) {
    for (int half = padded(segments) / 2; half > 0; half /= 2) {
        block_barrier();
        for (int i = threadIdx.x; i + half < smaller(segments, 2 * half); i += THREADS) sums[i] += (A)sums[i + half];
    }
    block_barrier();
    return sums[0];
}

__device__ inline A reciprocal_root(A sum_of_squares, int hidden_size, A eps) {
    return (A)1 / root(sum_of_squares / (A)hidden_size + eps);
}
