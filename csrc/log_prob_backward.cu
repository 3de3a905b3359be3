// The gradient of log-probabilities: the row is read once. That of all log-probabilities is read before, for its sum.
#define BACKWARD 1
#include "log_prob.cuh"

// Of the row: the sum of its gradient d, and what else the gradient of each number is computed from.
struct Gradient {
    A m, s, log_s, d, entropy, entropy_d;

    __device__ Gradient(const Arguments& a, long long number) : m(a.m[number]), s(a.s[number]), d(0) {
        if constexpr (ENTROPY) {
            log_s = logarithm(s);
            entropy = a.entropy[number];
            entropy_d = number_at(a.entropy_d, number);
        }
    }

    // p of numbers t, from which m is subtracted.
    template <int COUNT> __device__ void probabilities(A (&p)[COUNT], A (&t)[COUNT]) const {
#pragma unroll
        for (int v = 0; v < COUNT; v++) {
            t[v] -= m;
            p[v] = exp_of(t[v]) / s;
        }
    }

    // From the gradient of log-probabilities alone to that of x.
    template <int COUNT>
    __device__ void finish(
        A (&d)[COUNT], const A (&p)[COUNT], const A (&t)[COUNT], const A (&slope)[COUNT], const Row& row) const {
#pragma unroll
        for (int v = 0; v < COUNT; v++) {
            if (ENTROPY) d[v] -= p[v] == 0 ? 0 : entropy_d * (p[v] * ((t[v] - log_s) + entropy));
            if (PRESENT<Temperature>) d[v] /= row.temperature;
        }
        if constexpr (CAPPED) {
            round_to<X>(d);
#pragma unroll
            for (int v = 0; v < COUNT; v++) d[v] *= slope[v];
        }
    }
};

#if SELECTS
// The gradient of the log-probability of the id `k` of all; 0 where it is ignored.
__device__ inline A d_of_id(const Arguments& a, long long k) {
    const long long id = a.ids[k];
    return a.ignored(id) ? 0 : a.has(id) ? number_at(a.d, k) : not_a_number();
}

// Writes the gradients of those numbers of the block's that have ids, again.
__device__ inline void write_chosen(const Arguments& a, const Row& row, long long number, const Gradient& g, Out* out) {
    block_barrier();  // until all have been written
    const long long first = number * a.count, end = first + a.count;
    for (long long k = first + threadIdx.x; k < end; k += THREADS) {
        const long long id = a.ids[k];
        if (!a.has(id) || id / SEGMENT / WARPS % CLUSTER != rank()) continue;
        A own = 0, others = 0;
        bool before = false;  // whether another thread writes it
        for (long long j = first; j < end; j++) {
            const A d = d_of_id(a, j);
            const bool same = a.ids[j] == id;
            before |= same && j < k;
            if (same) own += d;
            else others += d;
        }
        if (before) continue;
        A d[1], p[1], t[1], slope[1];
        row.find(t, slope, {row.x[id]});
        g.probabilities(p, t);
        d[0] = own * (1 - p[0]) + others * (0 - p[0]);
        g.finish(d, p, t, slope, row);
        Out rounded[1];
        narrow(rounded, d);
        out[id] = rounded[0];
    }
}
#endif

extern "C" __global__ void BOUNDS log_prob_backward(const Arguments a) {
    if (WHOLE && CLUSTER > 1) cluster_arrive();
    const long long number = row_of_block();
    const int segments = a.segments();
    wait_for_kernels_before();
    const Row row(a, number);
    Gradient g(a, number);
    Out* const out = a.out + a.begin_of(number, a.out_strides);
    bool counted = true;
#if WHOLE
    SHARED(A, sums, SEGMENTS);
    const D* const d_row = a.d + a.begin_of(number, a.d_strides);
    D given[VECTORS][VECTOR];
    const auto load_given = [&](int segment) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) load_if(a.inside(segment, k), given[k], d_row + segment * SEGMENT + column_of(k));
    };
    if (CLUSTER > 1) cluster_wait();  // until all blocks have started
    for (int segment = first_segment(); segment < segments; segment += SEGMENTS_APART) {
        A d[VECTORS][VECTOR];
        load_given(segment);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) widen(d[k], given[k]);
        give(sums, segment, sums_of_rows(d));
    }
    g.d = sum_of_all(sums, segments);
#elif SELECTS
    counted = false;
    for (long long k = number * a.count; k < (number + 1) * a.count; k++) {
        g.d += d_of_id(a, k);
        counted |= !a.ignored(a.ids[k]);
    }
#else
    g.d = number_at(a.d, number);
#endif
    let_next_kernel_begin();
    for (int segment = first_segment(); segment < segments; segment += SEGMENTS_APART) {
        X x[VECTORS][VECTOR];
        row.load(x, segment, a);
#if WHOLE
        load_given(segment);
#endif
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            A d[VECTOR], p[VECTOR], t[VECTOR], slope[VECTOR];
            row.find(t, slope, x[k]);
            g.probabilities(p, t);
#if WHOLE
            widen(d, given[k]);
#endif
#pragma unroll
            for (int v = 0; v < VECTOR; v++) d[v] = WHOLE ? d[v] - p[v] * g.d : g.d * (SELECTS ? 0 - p[v] : p[v]);
            g.finish(d, p, t, slope, row);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) d[v] = counted ? d[v] : 0;
            store_if(a.inside(segment, k), out + segment * SEGMENT + column_of(k), d);
        }
    }
#if SELECTS
    if (counted) write_chosen(a, row, number, g, out);
#endif
}
