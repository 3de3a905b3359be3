// csrc/machine.cuh for a CPU: what is PTX there is C++ here, with the same results.
#pragma once
#include <cmath>
#include <cstring>

#include "emulation.h"

#define __global__
#define __device__
#define BOUNDS
#define threadIdx (emulation::now->thread_index)
#define blockIdx (emulation::now->block->index)

constexpr int LANES = 32;

#define SHARED(TYPE, NAME, COUNT) \
    static char NAME##_declared;  \
    auto& NAME = *emulation::shared<TYPE, COUNT>(&NAME##_declared)

template <class TO, class FROM> TO with_bits_of(FROM from) {
    static_assert(sizeof(TO) == sizeof(FROM));
    TO to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline float float_of_half(unsigned short bits) { return with_bits_of<_Float16>(bits); }
inline float float_of_bits(unsigned bits) { return with_bits_of<float>(bits); }
inline unsigned bits_of_float(float value) { return with_bits_of<unsigned>(value); }

inline unsigned halves_of_floats(float low, float high) {
    return with_bits_of<unsigned short>((_Float16)low) | (unsigned)with_bits_of<unsigned short>((_Float16)high) << 16;
}

inline unsigned bfloat16_of_float(float value) {
    unsigned bits = bits_of_float(value);
    return value != value ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
inline unsigned bfloat16s_of_floats(float low, float high) {
    return bfloat16_of_float(low) | bfloat16_of_float(high) << 16;
}

inline void* shared_of_launch() { return emulation::now->block->shared_of_launch; }

inline float root(float value) { return std::sqrt(value); }
inline double root(double value) { return std::sqrt(value); }

template <class T> T value_of_lane(T value, int lane) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulation::exchange(bits, lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> T exchanged(T value, int distance) {
    return value_of_lane(value, (int)(emulation::now->thread_index.x % LANES) ^ distance);
}

inline void block_barrier() { emulation::block_barrier(); }

template <class WORDS> void load_32_bytes(WORDS& to, const void* from) { to = *static_cast<const WORDS*>(from); }
template <class WORDS> void store_32_bytes(void* to, const WORDS& from) { *static_cast<WORDS*>(to) = from; }

inline void fetch_soon(const void*) {}
inline void wait_for_kernels_before() {}
inline void let_next_kernel_begin() {}

inline int rank_in_cluster() { return emulation::now->block->rank; }
template <class CELL, class T> void store_in_block(CELL& to, int rank, T value) {
    *static_cast<CELL*>(emulation::same_in_block(&to, rank)) = value;
}
inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_wait() { emulation::cluster_wait(); }
