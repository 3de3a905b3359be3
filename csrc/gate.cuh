// Arguments of a gate (docs/spec.md, section 10), and which elements a thread takes: a vector of a row. VECTOR divides the
// length of a row. Constants that the compilation defines beside those of memory.cuh and activations.cuh:
//
//   WARPS   of a block
//   PACKED  whether the rows of all operands lie side by side
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
};
