// Log-probabilities: a row is read for its greatest number, for the sum of its exponentials, and, where all of its
// log-probabilities are wanted, to write them. m and s are stored for the gradient.
#include "log_prob.cuh"

// The greatest of the row's numbers, of which each lane of all warps has some.
__device__ inline A greatest_of_row(A most) {
    SHARED(A, of_warps, SEGMENTS_APART);
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) most = greater(most, exchanged(most, distance));
    share<A, 1>({most}, of_warps);
#pragma unroll
    for (int i = 0; i < SEGMENTS_APART; i += LANES) {
        if (i + lane() < SEGMENTS_APART) most = greater(most, of_warps[i + lane()]);
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) most = greater(most, exchanged(most, distance));
    return most;
}

#if SELECTS
// The log-probabilities of the row's ids, and its entropy, by one warp.
__device__ inline void select(const Arguments& a, const Row& row, long long number, A m, A s, A log_s, A sum_of_z) {
    bool counted = false;
    for (long long k = number * a.count + lane(); k < (number + 1) * a.count; k += LANES) {
        const long long id = a.ids[k];
        A lp = a.ignored(id) ? 0 : not_a_number();
        if (!a.ignored(id) && a.has(id)) {
            A t[1], unused[1];
            row.find(t, unused, {row.x[id]});
            lp = (t[0] - m) - log_s;
        }
        a.out[k] = lp;
        counted |= !a.ignored(id);
    }
    if constexpr (ENTROPY) {
        int any = counted;
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) any |= exchanged(any, distance);
        if (lane() == 0) a.entropy[number] = any ? log_s - sum_of_z / s : 0;
    }
}
#endif

extern "C" __global__ void BOUNDS log_prob(const Arguments a) {
    SHARED(A, sums, SEGMENTS);
    SHARED(A, sums_of_z, ENTROPY ? SEGMENTS : 1);
    if (CLUSTER > 1) cluster_arrive();
    const long long number = row_of_block();
    const int segments = a.segments();
    wait_for_kernels_before();
    const Row row(a, number);
    A t[VECTOR], slope[VECTOR], most = -infinity();
    X x[VECTORS][VECTOR];
    for (int segment = first_segment(); segment < segments; segment += SEGMENTS_APART) {
        row.load(x, segment, a);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (!a.inside(segment, k)) continue;
            row.find(t, slope, x[k]);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) most = greater(most, t[v]);
        }
    }
    const A m = greatest_of_row(most);
    for (int segment = first_segment(); segment < segments; segment += SEGMENTS_APART) {
        A e[VECTORS][VECTOR], z[VECTORS][VECTOR];
        row.load(x, segment, a);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            row.find(t, slope, x[k]);
            subtract(t, m);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                e[k][v] = exp_of(a.inside(segment, k) ? t[v] : -infinity());
                z[k][v] = e[k][v] == 0 ? 0 : e[k][v] * t[v];
            }
        }
        give(sums, segment, sums_of_rows(e));
        if constexpr (ENTROPY) give(sums_of_z, segment, sums_of_rows(z));
    }
    let_next_kernel_begin();
    const A s = sum_of_all(sums, segments), log_s = logarithm(s);
    const A sum_of_z = ENTROPY ? sum_of_all_segments(sums_of_z, segments) : 0;
    if (first_segment() == 0) {
        if (lane() == 0) {
            a.m[number] = m;
            a.s[number] = s;
#if !WHOLE && !SELECTS
            a.out[number] = m == infinity() || m == -infinity() ? m : m + log_s;
#endif
        }
#if SELECTS
        select(a, row, number, m, s, log_s, sum_of_z);
#endif
    }
#if WHOLE
    Out* const out = a.out + a.begin_of(number, a.out_strides);
    for (int segment = first_segment(); segment < segments; segment += SEGMENTS_APART) {
        row.load(x, segment, a);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            row.find(t, slope, x[k]);
            subtract(t, m);
            subtract(t, log_s);
            store_if(a.inside(segment, k), out + segment * SEGMENT + column_of(k), t);
        }
    }
#endif
}
