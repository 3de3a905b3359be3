"""Declares the C library to cffi; run by CMake, which compiles what this generates."""

from cffi import FFI

ffibuilder = FFI()
ffibuilder.cdef("""
    struct fn_operand {
        int64_t kind;
        uintptr_t address;
        int64_t outer_stride, stride;
    };
    struct fn_call {
        int64_t pass, flags, device, threads, rows, inner, hidden, block, following, heads;
        double eps, weight_offset;
        struct fn_operand operand[9];
    };
    int fn_isa_count(void);
    const char *fn_isa_name(int isa);
    int fn_isa_usable(int isa);
    int fn_isa(void);
    void fn_use_isa(int isa);
    const char *fn_openmp_path(void);
    void fn_after_fork(void);
    /* A `struct fn_call`, as fusednorm/calls/c_abi.py packs it: cffi passes bytes as a pointer to void. */
    int fn_run(const void *call);
    void fn_run_gate(const void *packed); /* a `struct fn_gate` */
    int fn_run_rotation(const void *packed); /* a `struct fn_rotation` */
    int fn_run_triton(uintptr_t kernel, const void *call, int64_t programs);
    #define FN_PARALLEL_ELEMENTS ...
    enum fn_kind { FN_NONE, FN_F32, FN_F16, FN_BF16, FN_F64 };
    enum fn_pass { FN_FORWARD, FN_BACKWARD };
    enum fn_flag { FN_ROUND_SUM, FN_ROUND_NORM, ... };
""")
ffibuilder.set_source("fusednorm._cpu", '#include "abi/fusednorm_cpu.h"\n#include "abi/triton_programs.h"')
