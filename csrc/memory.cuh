// Where rows lie in memory, and accesses to it. Constants that the compilation defines:
//
//   VECTOR      adjacent elements that a thread loads together
//   ALIGNED     the address of such a vector, of the operand with the narrowest type, is a multiple of so many bytes
//   TWO_LEVELS  whether rows lie in two levels: `inner` rows one stride apart, and then a jump
#pragma once
#include "numbers.cuh"

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// The strides of an operand's rows, in elements.
struct Strides {
    long long stride;
#if TWO_LEVELS
    long long jump;  // what leads from the end of the inner level to its next begin, beyond the stride
#endif
};

// Where a row begins, in elements from the first row.
struct Levels {
#if TWO_LEVELS
    long long inner;
    __device__ long long begin_of(long long row, Strides strides) const {
        return row * strides.stride + row / inner * strides.jump;
    }
#else
    __device__ long long begin_of(long long row, Strides strides) const { return row * strides.stride; }
#endif
};

template <int BYTES> struct alignas(BYTES) Words {
    unsigned word[BYTES / 4];
};
template <> struct alignas(2) Words<2> {
    unsigned short word[1];
};
template <> struct Words<1> {
    unsigned char word[1];
};

// Bytes of an operand that one access reads or writes.
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

// Loads the vector if it is inside, else zeros.
template <class T> __device__ void load_if(bool inside, T (&to)[VECTOR], const T* from) {
    if constexpr (PRESENT<T>) {
        if (inside) load(to, from);
        else memset(to, 0, sizeof to);
    }
}

// Rounds and stores the vector if it is inside and the operand is present.
template <class T> __device__ void store_if(bool inside, T* to, const A (&from)[VECTOR]) {
    if constexpr (PRESENT<T>) {
        T rounded[VECTOR];
        narrow(rounded, from);
        if (inside) store(to, rounded);
    }
}
