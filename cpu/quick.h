/* What the two halves of the quick way share: quick.c reads operands and runs C kernels, quick_cuda.c launches CUDA's. */
#ifndef FUSEDNORM_QUICK_H
#define FUSEDNORM_QUICK_H

#include <Python.h>
#include <stdint.h>

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

enum { DL_CPU = 1, DL_CUDA = 2, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

enum { X, RESIDUAL, WEIGHT, OUT, RESIDUAL_OUT, OPERANDS };

/* A call: its operands without gaps, whose kind is FN_NONE where one is absent. */
typedef struct {
    tensor t[OPERANDS];
    int kind[OPERANDS];
    int flags;
    int64_t rows, hidden;
    double eps, weight_offset;
} call;

static inline uintptr_t address(const tensor *t) { return (uintptr_t)t->data + t->byte_offset; }

/* Launches the kernel that is held for such a call; nonzero if there is none, or it cannot be launched. */
int fn_launch(const exchange_api *api, const call *c);

/* Python's functions; their words are in quick.c. */
PyObject *fn_open_cuda(PyObject *module, PyObject *arguments);
PyObject *fn_hold(PyObject *module, PyObject *arguments);

#endif
