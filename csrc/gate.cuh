// Arguments of a gate (docs/spec.md, section 10), and which elements a thread takes: a vector of a row. VECTOR divides the
// length of a row. Constants that the compilation defines beside those of memory.cuh and activations.cuh:
//
//   WARPS   of a block
//   PACKED  whether the rows of all operands lie side by side
//
// and, where there is more than rows times the function of others, as 1:
//
//   IN_TURNS  z and y take turns in memory, z before y, and their gradients too
//   STEPS     there are optional steps, see gate_steps.cuh
#pragma once
#include "activations.cuh"

using D = D_TYPE;
using Y = Y_TYPE;
using Z = Z_TYPE;
using Out = OUT_TYPE;
using Dz = DZ_TYPE;

constexpr int THREADS = WARPS * LANES;

// In a backward pass d is the gradient of the products, and out and dz are the gradients of y and z.
struct Arguments : Levels {
    const D* d;
    const Y* y;
    const Z* z;
    Out* out;
    Dz* dz;
    Strides d_strides, y_strides, z_strides, out_strides, dz_strides;
    long long rows;
    int hidden_size;
};

// Multiplies values by rows, if they are present.
template <class T> __device__ void multiply_if(A (&values)[VECTOR], const T (&rows)[VECTOR]) {
    if constexpr (PRESENT<T>) {
        A factors[VECTOR];
        widen(factors, rows);
        multiply(values, factors);
    }
}

// Where the thread's vector lies in an operand.
struct Place {
    const Arguments& a;
    long long row, column;
    bool inside;

    __device__ Place(const Arguments& a) : a(a) {
        const unsigned in_row = a.hidden_size / VECTOR;  // vectors, as everywhere here
        const long long first = (long long)blockIdx.x * THREADS;
        if (PACKED) {
            row = 0;
            column = (first + threadIdx.x) * VECTOR;
            inside = column < a.rows * a.hidden_size;
        } else {
            const unsigned long long row_of_first = (unsigned long long)first / in_row;
            const unsigned ahead = (unsigned)(first - row_of_first * in_row) + threadIdx.x;
            row = row_of_first + ahead / in_row;
            column = ahead % in_row * VECTOR;
            inside = row < a.rows;
        }
    }
    __device__ long long in(Strides strides) const { return a.begin_of(row, strides) + column; }
    __device__ long long in_turns(Strides strides) const { return a.begin_of(row, strides) + 2 * column; }
};

// Loads what the thread has of y and z.
__device__ inline void load_both(const Place& at, Y (&y)[VECTOR], Z (&z)[VECTOR]) {
#if IN_TURNS
    Z turns[2][VECTOR];
    load_if(at.inside, turns[0], at.a.z + at.in_turns(at.a.z_strides));
    load_if(at.inside, turns[1], at.a.z + at.in_turns(at.a.z_strides) + VECTOR);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        z[i] = turns[2 * i / VECTOR][2 * i % VECTOR];
        y[i] = turns[(2 * i + 1) / VECTOR][(2 * i + 1) % VECTOR];
    }
#else
    load_if(at.inside, y, at.a.y + at.in(at.a.y_strides));
    load_if(at.inside, z, at.a.z + at.in(at.a.z_strides));
#endif
}

// Rounds and stores the gradients of y and z.
__device__ inline void store_both(const Place& at, const A (&dy)[VECTOR], const A (&dz)[VECTOR]) {
#if IN_TURNS
    A turns[2][VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        turns[2 * i / VECTOR][2 * i % VECTOR] = dz[i];
        turns[(2 * i + 1) / VECTOR][(2 * i + 1) % VECTOR] = dy[i];
    }
    store_if(at.inside, at.a.dz + at.in_turns(at.a.dz_strides), turns[0]);
    store_if(at.inside, at.a.dz + at.in_turns(at.a.dz_strides) + VECTOR, turns[1]);
#else
    store_if(at.inside, at.a.out + at.in(at.a.out_strides), dy);
    store_if(at.inside, at.a.dz + at.in(at.a.dz_strides), dz);
#endif
}
