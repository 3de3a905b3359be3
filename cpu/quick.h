/*
 * What the files of the quick way share: quick.c reads the operands of a forward pass, quick_backward.c
 * those of a backward pass, and both run C kernels; quick_cuda.c launches CUDA's, quick_programs.c runs Triton's.
 */
#ifndef FUSEDNORM_QUICK_H
#define FUSEDNORM_QUICK_H

#include <Python.h>
#include <stdint.h>

#include "fusednorm_cpu.h"
#include "programs.h"

/* DLPack 1.3, as far as it is used here (dmlc.github.io/dlpack/latest/c_api.html). */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides in elements */
    uint64_t byte_offset;
} tensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*tensor_from)(void *object, tensor *out); /* borrows; sets a Python error and returns -1 */
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} exchange_api;

/* DLPack numbers no device 0: here it stands for the CPU where Triton's kernels are to run. */
enum { PROGRAMS = 0, DL_CPU = 1, DL_CUDA = 2, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

/* An operand; its kind is FN_NONE where it is absent. The stride is in elements, from row to row. */
typedef struct {
    tensor t;
    int kind;
    int64_t stride;
} operand;

static inline uintptr_t fn_address(const operand *o) {
    return o->kind ? (uintptr_t)o->t.data + o->t.byte_offset : 0;
}
static inline int64_t fn_item_bytes(const operand *o) { return o->t.dtype.bits / 8; }

enum { X, RESIDUAL, WEIGHT, OUT, RESIDUAL_OUT, RSTD, OPERANDS };

/* A forward pass. */
typedef struct {
    operand o[OPERANDS];
    int flags;
    int64_t rows, hidden;
    double eps, weight_offset;
} call;

enum { DY, D_TOTAL, H, ROOT, GAIN, DX, DRESIDUAL, PARTIAL, DWEIGHT, GRADIENT_OPERANDS };

/* A backward pass; csrc/backward.cuh says what the operands are. */
typedef struct {
    operand o[GRADIENT_OPERANDS];
    int64_t rows, hidden, block, blocks;
    double weight_offset;
} gradient_call;

/* quick.c */
extern const exchange_api *fn_exchange_api; /* NULL until it is open */
int fn_read(PyObject *object, operand *o); /* whether it is a plain tensor whose rows are one stride apart; else perhaps a Python error */
int fn_same_shape(const operand *a, const operand *b);
int fn_same_device(const operand *a, const operand *b);
int64_t fn_elements(const operand *o); /* -1 if there are gaps between them */
int fn_threads(int64_t elements); /* -1 with a Python error */

/* quick_backward.c */
extern fn_backward_fn *fn_backward_on_cpu; /* NULL until it is open */

/* quick_cuda.c; nonzero if no kernel is held for such a call, or it cannot be launched */
int fn_launch(const call *c);
int fn_launch_backward(const gradient_call *c);

/* quick_programs.c */
uintptr_t fn_held_program(const call *c); /* 0 if no kernel is held for such a call */
int fn_run_program(const call *c, uintptr_t kernel); /* nonzero if it refuses, or -1 with a Python error */

/* Python's functions; their words are in quick.c. */
PyObject *fn_backward_quickly(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fn_open_cuda(PyObject *module, PyObject *arguments);
PyObject *fn_hold(PyObject *module, PyObject *arguments);
PyObject *fn_open_programs(PyObject *module, PyObject *arguments);
PyObject *fn_hold_program(PyObject *module, PyObject *arguments);

#endif
