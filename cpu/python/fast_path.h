/*
 * Shared by the files of the fast path, in the order in which they know each other: fast_path_operands.c reads a tensor,
 * fast_path_quantized.c, _gated.c, _rotated.c, _log_prob.c, _modulated.c, _products.c and _attention.c read the operands of those operations, and
 * fast_path_forward.c those of a norm before or after them; fast_path_backward.c reads gradients. fast_path_entries.c is what Python calls, fast_path.c the module.
 */
#ifndef FUSEDNORM_FAST_PATH_H
#define FUSEDNORM_FAST_PATH_H

#include <Python.h>

#include "run/run.h"

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
enum { TRITON_CPU = 0, DL_CPU = 1, DL_CUDA = 2, DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

/* fast_path_operands.c */
extern const exchange_api *fn_exchange_api; /* NULL until it is open */
extern PyTypeObject *fn_tensor_type, *fn_parameter_type; /* torch.Tensor and its Parameter */
/* Reads a plain tensor whose rows are one stride apart. Returns 0 for any other object, perhaps with a Python error. */
int fn_read(PyObject *object, tensor *t, struct fn_operand *o);
int fn_read_any(PyObject *object, tensor *t, struct fn_operand *o); /* also of a type that no kernel takes: FN_NONE */
/*
 * The same with any strides, which are left out. An empty tensor is no plain tensor, nor is one whose memory does not hold
 * its elements as they are.
 */
int fn_read_memory(PyObject *object, tensor *t, struct fn_operand *o);
int fn_open_operands(PyObject *found); /* keeps what fusednorm/calls/fast_path.py found in torch; 0 with a Python error */
int fn_is_inference(PyObject *object); /* whether a tensor was made in inference mode; -1 with a Python error */
/*
 * Reads tensors on one device of this type, those without a bit in `required` only if they are not None: then they have no
 * kind. Returns 0 as fn_read does.
 */
int fn_read_all(PyObject *const *objects, int count, unsigned required, long device_type, tensor *t, struct fn_operand *o);
int fn_same_shape(const tensor *a, const tensor *b);
int fn_same_rows(const tensor *a, const tensor *b, int64_t last); /* the same, but for a's last size, which is this one */
int fn_same_device(const tensor *a, const tensor *b);
int64_t fn_elements(const tensor *t); /* -1 if there are gaps between them */
void fn_take_rows(struct fn_call *c, const tensor *x); /* x's rows, all in one level, on x's device */
/* An operand's memory: rows of `bytes` bytes, `step` bytes apart. Of kind FN_NONE: there is no such operand. */
typedef struct {
    int64_t kind;
    uintptr_t begin;
    int64_t rows, step, bytes;
} fn_extent;
fn_extent fn_extent_of(const struct fn_call *c, int operand);
fn_extent fn_extent_of_rows(const struct fn_operand *o, int64_t rows, int64_t hidden);
int fn_apart(fn_extent a, fn_extent b); /* whether they share no memory, as far as that is cheap to tell */
/*
 * Whether the rows of the operand all[out], which is written, share no memory with each other nor with the operands before
 * it, unless it is exactly one of the first `in_place`, or there is no such operand.
 */
int fn_may_write(const fn_extent *all, int out, int in_place);

/* fast_path_interpreter.c */
/* A function of torch's with one argument or none. Where it is C's own, C calls it: Python would take as long again. */
typedef struct {
    PyObject *object;
    PyCFunction in_c; /* NULL where it is not */
} function;
function fn_function_of(PyObject *object, int flags);
PyObject *fn_call_function(const function *f, PyObject *argument);
/* 1 or 0, or -1 with a Python error: of an object, which it releases; and of a function without arguments. */
int fn_truth(PyObject *new_reference);
int fn_answer(const function *question);
/* The results of functions for Python: None, where Python must make the call; whether a call was made, as fn_run_in_c tells. */
PyObject *fn_refuse(void);
PyObject *fn_was_made(int failed);
int fn_takes(const char *function, Py_ssize_t count, int wanted); /* 0 with a Python error */
/* Around the tables of kernels that are held, where the interpreter has no lock of its own. */
void fn_lock(void);
void fn_unlock(void);
/* Reads calls, FN_PACKED at most, as fusednorm/calls/c_abi.py packs them; returns 0 with a Python error. */
int fn_unpack(PyObject *bytes, struct fn_call *calls);
void fn_open_threads(PyObject *found); /* torch.get_num_threads */
int fn_run_in_c(struct fn_call *c, fn_run_fn *run); /* nonzero if it refuses, or -1 with a Python error */

/*
 * fast_path_numbers.c: numbers rounded once to the type of the computation, before anybody asks for one. They return 0 for what
 * Python reports, or converts: of what is no float; or an int either; or is not positive and normal in that type.
 */
int fn_read_float(PyObject *number, int wide, double *value);
int fn_read_number(PyObject *number, int wide, double *value);
int fn_read_normal(PyObject *number, int wide, double *value);

/* fast_path_outputs.c */
/* torch.empty_like, torch.Tensor.new_empty, and (shape, strides, dtype) -> a tensor on a CPU, or None. */
void fn_open_outputs(PyObject *like, PyObject *empty, PyObject *on_cpu, PyObject *keywords);
PyObject *fn_keywords_of(PyObject *dtype); /* borrowed; NULL if outputs of a norm cannot have this dtype */
/* An output: the tensor that the caller gave, or a new one. */
typedef struct {
    PyObject *object; /* a reference of its own, or NULL */
    int given;
    tensor t;
    struct fn_operand o;
} output;
/*
 * Takes the tensor given, or makes one like x; with another last size unless that is 0, and of these keywords unless they are
 * NULL. Returns 0, nonzero if it is no tensor on x's device whose rows are one stride apart, or -1 with a Python error.
 */
int fn_take_output(output *out, PyObject *given, PyObject *x, const tensor *x_tensor, int64_t last, PyObject *keywords);
/* Makes a tensor of these sizes, of x's dtype or that of the keywords; returns in the same way. */
int fn_make_numbers(output *out, PyObject *x, const tensor *x_tensor, const int64_t *sizes, int count, PyObject *keywords);
/* Ends a call that failed or not: the outputs in a tuple, or one alone; or None if Python must make the call. */
PyObject *fn_hand_out(output *outputs, int count, int failed);

/* fast_path_listeners.c */
/* Keeps the tuples of fusednorm/calls/must_be_seen.py; whether they are of its form. */
int fn_open_listeners(PyObject *questions, PyObject *variables, PyObject *function_modes, PyObject *in_cpp);
/* Whether a mode, a tracer or a transform must see the operation; -1 with a Python error. */
int fn_is_heard(void);

/* fast_path_autograd.c */
/* Keeps torch's functions; 0 with a Python error. */
int fn_open_autograd(PyObject *tensor_type, PyObject *grad_enabled, PyObject *increment, PyObject *inference_enabled);
/* Whether autograd would have to know of a call with these operands, some of them None; -1 with a Python error. */
int fn_records_gradient(PyObject *const *operands, Py_ssize_t count);
/* 0 if the outputs that the caller gave may be written; nonzero if Python refuses that, or -1 with a Python error. */
int fn_refuses_writes(const output *outputs, int count);
/* Tells autograd which outputs were written that the caller gave; returns 0, or -1 with a Python error. */
int fn_count_writes(const output *outputs, int count);

/* cuda_launch.c; launches the kernels that are held for such a call, or for a chain, and the quantizer after it. */
enum { FN_LAUNCHED, FN_NOT_HELD = -1 }; /* else the driver's status */
int fn_launch_cuda(const struct fn_call *calls, void *stream);

/* triton_launch.c */
int fn_run_triton_kernel(struct fn_call *c); /* nonzero if it refuses, or -1 with a Python error */

/* fast_path_devices.c */
extern fn_run_fn *fn_run_on_cpu; /* NULL until it is open */
/* Runs a call whose x is this tensor, by Triton's kernels or by the kernels of x's device; returns as fn_run_in_c does. */
int fn_run_on_device(struct fn_call *c, const tensor *x, int triton);

/* fast_path_quantized.c; `passed_kind` is that of the rows which the norm passes. */
struct fn_quantized {
    struct fn_call call;
    struct fn_quantizer quantizer; /* follows the call in memory, as fn_run expects it */
    int64_t passed_kind;
    int points; /* whether there are zero points */
};
enum { FN_QUANTIZER_OUT_ARGUMENT = 5, FN_QUANTIZER_SCALE_OUT_ARGUMENT };
void fn_open_quantizer(PyObject *keywords); /* a tuple: for a dtype of each enum fn_byte_kind, for scales and for zero points */
PyObject *fn_keywords_of_float(void); /* borrowed: of float32 */
PyObject *fn_keywords_of_sums(int64_t kind); /* the same, or NULL where rows of this kind are summed in their own dtype */
/* Of the dtype of rows that pass to a next step: 1 if they are float, 0 if x's, -1 if it is none of both. */
int fn_between(PyObject *dtype);
/* Reads the arguments of a quantizer. Returns 0 if the fast path does not take them, perhaps with a Python error. */
int fn_read_quantizer(PyObject *const *arguments, const tensor *x, struct fn_quantized *given);
/*
 * Allocates what is not given, and quantizes, by Triton's kernel or by the kernels of x's device: the results, or None if
 * Python must make the call.
 */
PyObject *fn_quantize(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_quantized *given,
                      output *of_norm, int triton);

/* fast_path_gated.c */
struct fn_gated {
    struct fn_call call;
    struct fn_gate gate; /* follows the call in memory, as fn_run expects it */
    int how, between; /* the order, and whether what passes is float */
    int64_t groups; /* the parts of a row that are normalised */
};
enum { FN_GATE_OUT_ARGUMENT = 6 };
/* Reads the arguments of a gate. Returns 0 if the fast path does not take them, perhaps with a Python error. */
int fn_read_gate(PyObject *const *arguments, const tensor *x, struct fn_gated *given);
/* Allocates the output if it is not given, and makes the call in the same way: the output, or None if Python must make the call. */
PyObject *fn_run_gated(PyObject *const *arguments, PyObject *x, const tensor *x_tensor, struct fn_gated *given, int triton);

/*
 * A kind of call: the names of its arguments, with blanks between, and their number; `run` returns the results, or None if
 * Python must make the call, or with `may_record` NotImplemented if that is so because gradients are recorded, and only so.
 * `devices` has a bit for each type of device whose tensors are taken.
 */
struct fn_call_kind;
typedef PyObject *fn_call_run(const struct fn_call_kind *kind, PyObject **arguments, long devices, int may_record);
struct fn_call_kind {
    const char *name, *arguments;
    int count;
    fn_call_run *run;
};
fn_call_run fn_rotate; /* fast_path_rotated.c: heads that are normalised and rotated */
fn_call_run fn_find_log_prob, fn_find_log_prob_gradient; /* fast_path_log_prob.c: on a CPU */
fn_call_run fn_modulate, fn_modulate_gradients; /* fast_path_modulated.c: on a CPU */
fn_call_run fn_multiply, fn_multiply_int8; /* fast_path_products.c: on a CPU */
fn_call_run fn_attend_on_fast_path; /* fast_path_attention.c: on a CPU */
extern const struct fn_call_kind fn_call_kinds[]; /* fast_path_forward.c; the last has no name */
const struct fn_call_kind *fn_call_kind_named(const char *name); /* NULL if there is none */

/* Python's functions; fast_path.c has their documentation. */
PyObject *fn_new_entry(PyObject *module, PyObject *arguments);
PyObject *fn_follow(PyObject *module, PyObject *arguments);
PyObject *fn_open_modules(PyObject *module, PyObject *arguments);
PyObject *fn_taken(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *fn_expect_writes_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fn_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fn_gate_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fn_norm_gated_backward_on_fast_path(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fn_open_cuda(PyObject *module, PyObject *arguments);
PyObject *fn_hold_cuda(PyObject *module, PyObject *arguments);
PyObject *fn_launch_held(PyObject *module, PyObject *arguments);
PyObject *fn_open_triton(PyObject *module, PyObject *arguments);
PyObject *fn_hold_triton(PyObject *module, PyObject *arguments);

#endif
