// Instructions of GPUs that C++ has no words for: the only file with PTX.
#pragma once

constexpr int LANES = 32;

// Older GPUs: one block per multiprocessor is enough. Otherwise the compiler leaves registers for a second block, and
// spills. For newer GPUs it does not spill; but to save registers it makes loads wait for each other, which
// MANY_REGISTERS prevents.
#if __CUDA_ARCH__ < 900 || defined(MANY_REGISTERS)
#define BOUNDS __launch_bounds__(THREADS, 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

// Memory that the threads of a block share. It is not initialised.
#define SHARED(TYPE, NAME, COUNT) __shared__ TYPE NAME[COUNT]

// Exact: every value of the narrow type is a value of the wide one.
__device__ inline float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The bits of numbers, for either type of arithmetic, and back.
__device__ inline unsigned bits_of(float value) { return __float_as_uint(value); }
__device__ inline unsigned long long bits_of(double value) { return (unsigned long long)__double_as_longlong(value); }
__device__ inline float number_of_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ inline double number_of_bits(unsigned long long bits) { return __longlong_as_double((long long)bits); }

// The nearest whole number, ties to even, of a value that an int holds.
__device__ inline int int_of_float(float value) { return __float2int_rn(value); }

// Rounds two values to nearest even; the first goes to the low half of the word.
__device__ inline unsigned halves_of_floats(float low, float high) {
    unsigned word;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(word)
        : "f"(low), "f"(high));
#endif
    return word;
}

__device__ inline unsigned short bfloat16_in_integers(float value) {
    unsigned bits = bits_of(value);
    return value != value ? 0x7FC0 : (unsigned short)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

__device__ inline unsigned bfloat16s_of_floats(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return bfloat16_in_integers(low) | (unsigned)bfloat16_in_integers(high) << 16;
#endif
}

// Whether the GPU rounds floats to 8 bits.
#define ROUNDS_TO_8_BITS (__CUDA_ARCH__ >= 890)

// Rounds two values to nearest even, to float8_e4m3fn or float8_e5m2, and those beyond the range to its end; the first
// goes to the low byte. Of a NaN the PTX ISA says only that it stays one, and not which one.
__device__ inline unsigned e4m3s_of_floats(float low, float high) {
    unsigned short codes = 0;
#if ROUNDS_TO_8_BITS
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#endif
    return codes;
}

__device__ inline unsigned e5m2s_of_floats(float low, float high) {
    unsigned short codes = 0;
#if ROUNDS_TO_8_BITS
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#endif
    return codes;
}

// A value cut to a range; a NaN stays one. Not for GPUs before compute capability 8.0.
__device__ inline float cut(float value, float least, float greatest) {
    float within = value;
#if __CUDA_ARCH__ >= 800
    asm("{.reg .f32 t; max.NaN.f32 t, %1, %2; min.NaN.f32 %0, t, %3;}" : "=f"(within) : "f"(value), "f"(least), "f"(greatest));
#endif
    return within;
}

// The greater of two values; a NaN is the greatest.
__device__ inline float greater(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
#else
    return b > a || b != b ? b : a;
#endif
}
__device__ inline double greater(double a, double b) { return b > a || b != b ? b : a; }

// The block's shared memory whose size is an argument of the launch.
__device__ inline void* shared_of_launch() {
    extern __shared__ uint4 memory[];
    return memory;
}

// Correctly rounded, because NVRTC's options keep subnormals and forbid approximations.
__device__ inline float root(float value) { return sqrtf(value); }
__device__ inline double root(double value) { return sqrt(value); }

// `exchanged` returns the value of lane number (lane ^ distance), `value_of_lane` that of lane number `lane`. All lanes
// of the warp must call them.
template <class T> __device__ T exchanged(T value, int distance) { return __shfl_xor_sync(~0u, value, distance); }
template <class T> __device__ T value_of_lane(T value, int lane) { return __shfl_sync(~0u, value, lane); }

__device__ inline void block_barrier() { __syncthreads(); }
__device__ inline void warp_barrier() { __syncwarp(); }

// GPUs of compute capability 10 and newer read and write 32 bytes of global memory, eight words, at once. A compiler
// that does not know this instruction yet takes two halves. These functions are not called on older GPUs.
#if __CUDA_ARCH__ >= 1000
template <class WORDS> __device__ void load_32_bytes(WORDS& to, const void* from) {
    unsigned(&w)[8] = to.word;
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209
    asm volatile("ld.global.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]), "=r"(w[4]), "=r"(w[5]), "=r"(w[6]), "=r"(w[7])
                 : "l"(from)
                 : "memory");
#else
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%8]; ld.global.v4.b32 {%4, %5, %6, %7}, [%8 + 16];"
                 : "=&r"(w[0]), "=&r"(w[1]), "=&r"(w[2]), "=&r"(w[3]), "=r"(w[4]), "=r"(w[5]), "=r"(w[6]), "=r"(w[7])
                 : "l"(from)
                 : "memory");
#endif
}

template <class WORDS> __device__ void store_32_bytes(void* to, const WORDS& from) {
    const unsigned(&w)[8] = from.word;
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209
    asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                 "r"(w[3]), "r"(w[4]), "r"(w[5]), "r"(w[6]), "r"(w[7])
                 : "memory");
#else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4}; st.global.v4.b32 [%0 + 16], {%5, %6, %7, %8};" ::"l"(to),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5]), "r"(w[6]), "r"(w[7])
                 : "memory");
#endif
}
#else
template <class WORDS> __device__ void load_32_bytes(WORDS&, const void*) {}
template <class WORDS> __device__ void store_32_bytes(void*, const WORDS&) {}
#endif

// Fetches memory into the second-level cache. That is safe before other kernels have ended, because every write goes
// through this cache.
__device__ inline void fetch_soon(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Programmatic dependent launch: the first waits until everything that earlier kernels wrote can be read; the second
// lets the next kernel begin.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Clusters: this block's number in its cluster, a store into a block's shared memory, and a barrier in two halves.
__device__ inline int rank_in_cluster() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return (int)rank;
}

template <class T> __device__ void store_in_block(T& to, int rank, T value) {
#if __CUDA_ARCH__ >= 900
    unsigned here = (unsigned)__cvta_generic_to_shared(&to), there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    if constexpr (sizeof(T) == 4) {
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
    } else {
        asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(value) : "memory");
    }
#endif
}

__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
