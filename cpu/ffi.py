"""Declares the C library to cffi; run by CMake, which compiles what this generates."""

from cffi import FFI

ffibuilder = FFI()
ffibuilder.cdef("""
    int fn_isa_count(void);
    const char *fn_isa_name(int isa);
    int fn_isa_usable(int isa);
    int fn_isa(void);
    void fn_use_isa(int isa);
    const char *fn_openmp_path(void);
    void fn_after_fork(void);
    int fn_forward(int x_kind, int residual_kind, int weight_kind, int out_kind, int flags,
                   uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, uintptr_t residual_out,
                   uintptr_t rstd, int64_t rows, int64_t hidden, int64_t x_stride, int64_t residual_stride,
                   int64_t out_stride, int64_t residual_out_stride, double eps, double weight_offset,
                   int threads);
    int fn_backward(int wide, int dy_kind, int d_total_kind, int h_kind, int weight_kind, int dx_kind,
                    int dresidual_kind, uintptr_t dy, uintptr_t d_total, uintptr_t h, uintptr_t rstd,
                    uintptr_t weight, uintptr_t dx, uintptr_t dresidual, uintptr_t dweight, int64_t rows,
                    int64_t hidden, int64_t dy_stride, int64_t d_total_stride, int64_t h_stride,
                    double weight_offset, int threads);
    int fn_run_forward(uintptr_t kernel, int wide, const uintptr_t *operands, const int64_t *numbers, double eps,
                       double weight_offset, int64_t programs, int threads);
    int fn_run_backward(uintptr_t kernel, int wide, const uintptr_t *operands, const int64_t *numbers,
                        double weight_offset, int64_t programs, int threads);
    #define FN_PARALLEL_ELEMENTS ...
    enum fn_kind { FN_NONE, FN_F32, FN_F16, FN_BF16, FN_F64 };
    enum fn_flag { FN_ROUND_SUM, FN_ROUND_NORM, ... };
""")
ffibuilder.set_source("fusednorm._cpu", '#include "fusednorm_cpu.h"\n#include "programs.h"')
