"""Declares the C library to cffi; run by CMake, which compiles what this generates."""

import re
from pathlib import Path

from cffi import FFI


def declared(name):
    """The enumerations, structures and unions of a header."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return "".join(re.findall(r"(?ms)^(?:enum|struct|union)\b[\w ]*\{.*?\};\n", text))


ffibuilder = FFI()
for header in ("abi/enums.h", "abi/call.h", "abi/gate.h", "abi/declared.h", "abi/rotation.h", "run/tuning.h"):
    ffibuilder.cdef(declared(header))
ffibuilder.cdef("""
    int fn_isa_count(void);
    const char *fn_isa_name(int isa);
    int fn_isa_usable(int isa);
    int fn_isa(void);
    void fn_use_isa(int isa);
    struct fn_tuning *fn_tuning(void);
    const char *fn_openmp_path(void);
    void fn_after_fork(void);
    uint64_t fn_enter_arithmetic(void);
    void fn_leave_arithmetic(uint64_t state);
    /* A `struct fn_call`, as fusednorm/calls/c_abi.py packs it: cffi passes bytes as a pointer to void. */
    int fn_run(const void *call);
    void fn_run_gate(const void *packed); /* a `struct fn_gate` */
    int fn_run_rotation(const void *packed); /* a `struct fn_rotation` */
    int fn_run_declared(const void *packed); /* a `struct fn_declared` or a `struct fn_attention` */
    int fn_run_if_checked(const void *call);
    void fn_note_checked(const void *packed);
    int fn_run_triton(uintptr_t kernel, const void *call, int64_t programs);
    #define FN_PARALLEL_ELEMENTS ...
    #define FN_PRODUCT_OF_A_CALL ...
    #define FN_ATTENTION_OF_A_CALL ...
""")
ffibuilder.set_source("fusednorm._cpu", '#include "run/tuning.h"\n#include "abi/triton_programs.h"')
