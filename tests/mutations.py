"""Breaks the library on purpose, one way at a time, and demands that the tests notice.

    tox -e mutations

Each mutant is a copy of the repository with one text replaced, installed over this environment's fusednorm; the tests
must then fail. Exit status 1 if a mutant survives, or if a test that notices a mutant fails without one too. `--only
TEXT` runs the mutants whose description contains the text; it may be given several times.
"""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("fusednorm", "backends", "csrc", "cpu", "tests", "docs", ".github")
FILES = ("pyproject.toml", "tox.ini", "README.md", "LICENSE")


#: A mutant whose description begins so is run against the file of tests of that name alone.
ONE_FILE = (
    *("Triton_cpu", "Triton", "CUDA", "Distributed", "Registry", "Call", "Layout", "Front_end", "Listeners"),
    *("Derivatives", "Fuzz", "Torch", "Norm_before_add", "Affine"),
)


class Mutant(NamedTuple):
    """A promise, and a replacement in one file that breaks it."""

    promise: str
    fault: str
    file: str
    old: str
    new: str
    #: The one backend that the tests then run on; empty: all of this machine, and tests without a backend.
    backend: str = ""


SAME, FUSED, ROW = "same bits on every backend", "fused equals unfused", "a row is a row"

MUTANTS = (
    Mutant(
        SAME,
        "two levels of the tree swapped",
        "cpu/kernel_body.h",
        "u_add(u_add(u_add(unit(0 * (apart)), unit(4 * (apart)))",
        "u_add(u_add(u_add(unit(4 * (apart)), unit(1 * (apart)))",
    ),
    Mutant(
        SAME,
        "columns added in order",
        "cpu/kernel_body.h",
        "u_add(u_load(F32, v, i, UNIT), u_load(F32, v, i + width / 2, UNIT))",
        "u_add(u_load(F32, v, 2 * i, UNIT), u_load(F32, v, 2 * i + UNIT, UNIT))",
    ),
    Mutant(
        SAME,
        "segments added one after the other",
        "cpu/kernel_body.h",
        "    while (width > 1) {\n        width /= 2;\n        for (int64_t i = 0; i < width; i++) sums[i]",
        "    for (int64_t i = 1; i < width; i++) sums[0] += sums[i];\n    while (width > 1) {\n"
        "        width /= 2;\n        for (int64_t i = 1; i < width; i++) sums[i]",
    ),
    Mutant(
        SAME,
        "units that follow each other added first, where caches hold the row",
        "cpu/forward_body.h",
        "u_index(s * FN_SEGMENT + c + (k))",
        "u_index(s * FN_SEGMENT + 8 * c + (k) / 128 * UNIT)",
    ),
    Mutant(
        SAME,
        "the even and odd halves added too early",
        "cpu/pairs.h",
        "if (by_parity) return v_halve(u.a) + v_halve(u.b);",
        "",
    ),
    Mutant(
        SAME,
        "neighbours added first within a register (AVX-512)",
        "cpu/avx512.h",
        "z = _mm_add_ps(z, _mm_movehl_ps(z, z));",
        "z = _mm_hadd_ps(z, z);",
    ),
    Mutant(SAME, "fused multiply-add", "cpu/CMakeLists.txt", "-ffp-contract=off", "-ffp-contract=fast;-std=gnu11"),
    Mutant(
        SAME,
        "one rounding instead of two in 1 / sqrt",
        "cpu/forward_body.h",
        "1.0f / sqrtf(sum_of_squares / (float)hidden + (float)eps)",
        "(float)(1.0 / sqrt(sum_of_squares / (float)hidden + (float)eps))",
    ),
    Mutant(
        SAME,
        "the mean by the reciprocal of the hidden size",
        "cpu/forward_body.h",
        "/ (float)hidden",
        "* (1.0f / (float)hidden)",
    ),
    Mutant(
        SAME,
        "bfloat16 rounded toward zero (AVX-512)",
        "cpu/avx512.h",
        "_mm512_set1_epi32(0x7fff)), odd",
        "_mm512_setzero_si512()), _mm512_setzero_si512()",
    ),
    Mutant(
        SAME,
        "bfloat16 ties rounded toward zero (AVX-512, by parity)",
        "cpu/avx512.h",
        "_mm512_set1_epi16(1), 0xf8)",
        "_mm512_set1_epi16(1), 0xf0)",
    ),
    Mutant(
        SAME,
        "bfloat16 rounded by the wrong words (AVX-512, by parity)",
        "cpu/avx512.h",
        "return from_upper(_mm512_slli_epi32(o, 16), e);",
        "return from_upper(o, e);",
    ),
    Mutant(
        SAME,
        "bfloat16 ties rounded up (AVX2)",
        "cpu/kernel_avx2.c",
        "_mm256_set1_epi32(0x7fff)), odd",
        "_mm256_set1_epi32(0x8000)), _mm256_setzero_si256()",
    ),
    Mutant(
        SAME,
        "float16 rounded toward zero (AVX2)",
        "cpu/kernel_avx2.c",
        "_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)",
        "_mm256_cvtps_ph(a, _MM_FROUND_TO_ZERO)",
    ),
    Mutant(
        SAME,
        "float16 ties rounded up (scalar)",
        "cpu/half.h",
        "magnitude + 0xfff + (magnitude >> 13 & 1)",
        "magnitude + 0x1000",
    ),
    Mutant(
        SAME,
        "float16 subnormals flushed (scalar)",
        "cpu/half.h",
        "return (uint16_t)(sign | (bits_of_f32(shifted) - bits_of_f32(0.5f)));",
        "return (uint16_t)sign;",
    ),
    Mutant(
        SAME,
        "a NaN rounds to something else (AVX-512)",
        "cpu/avx512.h",
        "_mm512_mask_blend_epi32(nan, rounded_bf16(x), _mm512_set1_epi32(0x7fc00000))",
        "rounded_bf16(x)",
    ),
    Mutant(SAME, "float64 rounded twice", "cpu/half.h", "    return f32_of_bits(bits | 1);", "    return rounded;"),
    Mutant(
        SAME,
        "the last element of a masked tail forgotten (AVX-512)",
        "cpu/avx512.h",
        "(__mmask32)((1ull << n) - 1)",
        "(__mmask32)((1ull << (n - 1)) - 1)",
    ),
    Mutant(
        SAME,
        "the last odd element forgotten (AVX2)",
        "cpu/kernel_avx2.c",
        "return n & 1 ? _mm256_or",
        "return 0 ? _mm256_or",
    ),
    Mutant(
        SAME,
        "a tail stored a whole register wide",
        "cpu/pairs.h",
        "    else h2_store_n(p, n, h);",
        "    else h2_store(p, h);",
    ),
    Mutant(
        SAME, "the weight's offset dropped", "cpu/forward_body.h", "if (offset) g = u_add(g, u_set1(s->offset));", ""
    ),
    Mutant(
        SAME,
        "the normalised row not rounded",
        "cpu/forward_body.h",
        "if (norm != NONE) y = u_round(norm, y);",
        "",
    ),
    Mutant(
        SAME,
        "the reference sums in another order",
        "backends/reference.py",
        "value[..., :n] + value[..., n:]",
        "value[..., 0::2] + value[..., 1::2]",
    ),
    Mutant(
        SAME,
        "the reference rounds float64 twice",
        "backends/reference.py",
        "bits = torch.where(back == value, bits, bits | 1)",
        "bits = nearest.view(torch.int32)",
    ),
    Mutant(
        SAME,
        "the reference trusts torch.sqrt",
        "backends/reference.py",
        "return value.to(torch.float64).sqrt().to(value.dtype)",
        "return value.sqrt()",
    ),
    Mutant(SAME, "the reference sums rows pairwise", "backends/reference.py", "ROW_BLOCKS = 256", "ROW_BLOCKS = 512"),
    Mutant(
        SAME,
        "blocks of rows halved as neighbours",
        "cpu/backward.c",
        "int both = first + step < call->blocks; /* else the second half is padding: +0 */\n"
        "    sum_blocks(call, first, 2 * step, count / 2, sums, both ? 0 : merged, part);\n"
        "    if (both) sum_blocks(call, first + step, 2 * step, count / 2,",
        "int both = first + step * (count / 2) < call->blocks;\n"
        "    sum_blocks(call, first, step, count / 2, sums, both ? 0 : merged, part);\n"
        "    if (both) sum_blocks(call, first + step * (count / 2), step, count / 2,",
    ),
    Mutant(
        SAME,
        "overlapping rows past the caches share one buffer",
        "cpu/forward_body.h",
        "(m - begin) % 2 * kept",
        "0 * kept",
    ),
    Mutant(SAME, "a missing weight is not one", "cpu/kernel_body.h", "u = u_set1(fill);", "u = u_set1(fill + 1);"),
    Mutant(
        SAME,
        "a tail of the weight by parity",
        "cpu/forward_body.h",
        "weight == F32 && out == BF16P ? UNIT : n",
        "n",
    ),
    Mutant(
        SAME,
        "the offset of a weight that is widened once forgotten",
        "cpu/forward_body.h",
        "if (p->weight == F32 && !p->offset)",
        "if (p->weight == F32)",
    ),
    Mutant(
        SAME,
        "the end of a short row is not scaled",
        "cpu/forward_body.h",
        "            if (i < hidden) scale_unit(kind, norm, F32, 0, affine, kind, &s, i, (int)(hidden - i), 0);\n",
        "",
    ),
    Mutant(
        SAME,
        "the end of a short row is not squared",
        "cpu/forward_body.h",
        "add_and_square_unit(x, residual, round_sum, row, begin + i, (int)(n - i))",
        "u_mul(u_set1(0), add_and_square_unit(x, residual, round_sum, row, begin + i, (int)(n - i)))",
    ),
    Mutant(
        SAME,
        "rows of heads: two levels of the tree swapped",
        "cpu/forward_body.h",
        "u_add(u_add(SQUARE(0), SQUARE(2)), u_add(SQUARE(1), SQUARE(3)))",
        "u_add(u_add(SQUARE(0), SQUARE(1)), u_add(SQUARE(2), SQUARE(3)))",
    ),
    Mutant(
        SAME,
        "the halves of eight rows: two levels of the tree swapped",
        "cpu/avx512.h",
        "v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(u, w)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, w)))",
        "v_add(_mm512_shuffle_ps(_mm512_castpd_ps(u), _mm512_castpd_ps(w), 0x88),\n"
        "                 _mm512_shuffle_ps(_mm512_castpd_ps(u), _mm512_castpd_ps(w), 0xdd))",
    ),
    Mutant(
        SAME,
        "the halves of eight rows: rows mixed up",
        "cpu/avx512.h",
        "_mm256_set_epi32(13, 9, 5, 1, 12, 8, 4, 0)",
        "_mm256_set_epi32(13, 9, 5, 1, 12, 4, 8, 0)",
    ),
    Mutant(
        SAME,
        "rstd of short rows past those that there are",
        "cpu/forward_body.h",
        "memcpy((float *)job->rstd + m, rstd, (size_t)rows * sizeof(float))",
        "memcpy((float *)job->rstd + m, rstd, (size_t)batch * sizeof(float))",
    ),
    Mutant(
        SAME,
        "words below each other the wrong way round",
        "cpu/avx512.h",
        "_mm512_shrdi_epi32(e, o, 16)",
        "_mm512_shrdi_epi32(o, e, 16)",
    ),
    Mutant(
        SAME,
        "rstd of overlapping rows in one place",
        "cpu/forward_body.h",
        "((float *)job->rstd)[m] = copy.rstd;",
        "((float *)job->rstd)[begin] = copy.rstd;",
    ),
    Mutant(
        FUSED,
        "round_norm forgotten where rows overlap",
        "cpu/forward_body.h",
        "    else overlaps[p->x][residual][norm](",
        "    else overlaps[p->x][residual][0](",
    ),
    Mutant(
        FUSED,
        "round_norm forgotten in short rows",
        "cpu/forward_body.h",
        "        shorts[p.x][p.residual != NONE][p.norm != NONE]",
        "        shorts[p.x][p.residual != NONE][0]",
    ),
    Mutant(
        SAME,
        "one unit of eight is not scaled where rows overlap",
        "cpu/forward_body.h",
        "    for (int k = 0; k < 8; k++)\n        scale_unit(",
        "    for (int k = 1; k < 8; k++)\n        scale_unit(",
    ),
    Mutant(
        SAME,
        "the end of a row is not scaled where rows overlap",
        "cpu/forward_body.h",
        "        if (i < hidden) scale_unit(x, norm, F32, 0, affine, x, previous, i, (int)(hidden - i), 0);\n",
        "",
    ),
    Mutant(
        SAME,
        "half a tree of rows is forgotten where the other half is padding",
        "cpu/backward.c",
        "sums, both ? 0 : merged, part);",
        "sums, 0, part);",
    ),
    Mutant(
        SAME,
        "a block's last row is added to the block before it alone",
        "cpu/backward_body.h",
        "row.merged = (m > begin) + (m + 1 < end ? 0 : merged);",
        "row.merged = (m > begin) + (m + 1 < end ? 0 : merged > 1 ? 1 : merged);",
    ),
    Mutant(
        SAME,
        "rows of several types start a sum anew",
        "cpu/backward_body.h",
        "sums, (m > begin) + (m + 1 < end ? 0 : merged), part);",
        "sums, m + 1 < end ? 0 : merged, part);",
    ),
    Mutant(
        SAME,
        "the gradients of a block's last row with another row's mean",
        "cpu/backward_body.h",
        "        before.c = part->c;\n",
        "        before.c = 0;\n",
    ),
    Mutant(
        SAME, "another number of blocks of rows", "cpu/backward.c", "ROW_BLOCKS = 1 << FN_LEVELS", "ROW_BLOCKS = 128"
    ),
    Mutant(
        SAME,
        "the padding of the products is 0 * rstd",
        "cpu/backward_body.h",
        "products[done + (kind == BF16P ? k % 2 * (UNIT / 2) + k / 2 : k)] = 0;",
        "(void)products;",
    ),
    Mutant(
        SAME,
        "the sum's gradient added before the scaling",
        "cpu/backward_body.h",
        "U d = u_mul(u_add(wdy, u_mul(xhat, u_set1(-row->c))), u_set1(row->rstd));",
        "U d = u_add(u_mul(wdy, u_set1(row->rstd)), u_mul(u_mul(xhat, u_set1(-row->c)), u_set1(row->rstd)));",
    ),
    Mutant(
        SAME,
        "a weight's gradient in the kernels' own order",
        "cpu/backward_body.h",
        "        convert(F32, BF16P, sum, job->dweight, job->hidden);",
        "        from_float(job->weight_kind, sum, job->dweight, job->hidden);",
    ),
    Mutant(
        SAME,
        "the derivative of rstd with the wrong sign",
        "fusednorm/autograd.py",
        "d_rstd * -(rstd**3)",
        "d_rstd * (rstd**3)",
    ),
    Mutant(
        FUSED, "statistics from the unrounded sum", "cpu/forward_body.h", "        if (round_sum) h = rounded;\n", ""
    ),
    Mutant(
        FUSED,
        "the second pass reads the rounded sum where the unrounded is meant",
        "cpu/forward_body.h",
        "(p.residual && p.residual != F32 && !p.round_sum) || ",
        "",
    ),
    Mutant(
        FUSED,
        "the first pass squares the rounded sum where the unrounded is meant",
        "cpu/forward_body.h",
        "if (residual == F32 || round_sum) return u_load(residual",
        "if (1) return u_load(residual",
    ),
    Mutant(
        FUSED,
        "the unrounded sum where the rounded is meant (float64)",
        "cpu/kernel_f64.h",
        "if (job->flags & FN_ROUND_SUM)",
        "if (0)",
    ),
    Mutant(
        FUSED,
        "round_sum ignored by the reference",
        "backends/reference.py",
        "        if round_sum:\n",
        "        if False:\n",
    ),
    Mutant(
        ROW,
        "the padding keeps values of the row before",
        "cpu/forward_body.h",
        "for (; i < width; i += UNIT) u_store(F32, squares, i, UNIT, u_set1(0));",
        "",
    ),
    Mutant(
        ROW,
        "the first rows of a thread rounded otherwise",
        "cpu/forward_body.h",
        "            .rstd = batch->rstd[k],",
        "            .rstd = batch->rows > 1 && k == 0 ? nextafterf(batch->rstd[k], 0) : batch->rstd[k],",
    ),
    Mutant(
        ROW,
        "short rows share one buffer",
        "cpu/forward_body.h",
        "(float *)((char *)batch->kept + k * batch->h_stride)",
        "batch->kept + k",
    ),
    Mutant(
        ROW,
        "more short rows kept than there is room for",
        "cpu/forward_body.h",
        "BATCH_BYTES / element < FN_KEPT ? BATCH_BYTES / element / room : FN_KEPT / room",
        "BATCH_BYTES / element / room",
    ),
    Mutant(
        ROW,
        "a tail is not streamed",
        "cpu/pairs.h",
        "if (n != UNIT) return u_store(kind, row, i, n, value);",
        "if (n != UNIT) return value;",
    ),
    Mutant(
        ROW,
        "the cache bypassed although rows are not on a border",
        "cpu/dispatch.c",
        "return !((o->address | (uintptr_t)(o->stride | o->outer_stride | hidden) * item) % FN_ALIGNMENT);",
        "return 1;",
    ),
    Mutant(
        ROW,
        "the last thread's rows forgotten",
        "cpu/dispatch.c",
        "end = fn_first_row(rows, thread + 1, threads);",
        "end = begin + rows / threads;",
    ),
    Mutant(
        ROW,
        "the residual read with x's stride",
        "cpu/dispatch.c",
        "o[FN_RESIDUAL].stride * fn",
        "o[FN_X].stride * fn",
    ),
    Mutant(
        ROW,
        "row offsets of 32 bits",
        "cpu/forward_body.h",
        "part.x += m * job->x_stride;",
        "part.x += (int)(m * job->x_stride);",
    ),
    Mutant(
        ROW,
        "the caller's flush-to-zero obeyed",
        "cpu/ieee.h",
        "if (state & NOT_IEEE) _mm_setcsr(state & ~NOT_IEEE);",
        "",
    ),
    Mutant(
        ROW, "the caller's flush-to-zero not put back", "cpu/ieee.h", "if (state & NOT_IEEE) _mm_setcsr(state);", ""
    ),
    Mutant(
        ROW,
        "Front_end: partial overlap accepted",
        "fusednorm/run.py",
        "    if rows and written:",
        "    if False and written:",
    ),
    Mutant(
        ROW,
        "the fast path lets the outputs overlap",
        "cpu/fast_path.c",
        "for (int i = FN_X; i < out; i++)",
        "for (int i = FN_X; i < FN_OUT; i++)",
    ),
    Mutant(
        SAME,
        "the fast path forgets to round the normalised row",
        "cpu/fast_path.c",
        "(arguments[ROUND_NORM] == Py_True ? FN_ROUND_NORM : 0)",
        "0",
    ),
    Mutant(
        ROW,
        "the fast path takes rows that are not one stride apart",
        "cpu/fast_path.c",
        "else if (t->strides[i] != following) return -1;",
        "",
    ),
    Mutant(
        ROW,
        "the fast path overlooks columns that meet",
        "cpu/fast_path.c",
        "return a.bytes <= between && between + b.bytes <= a.step;",
        "return 1;",
    ),
    Mutant(
        SAME,
        "the fast path of a backward pass takes gaps in rstd",
        "cpu/fast_path_backward.c",
        "if (fn_elements(&t[i]) != rows * (i == FN_BACKWARD_RSTD ? 1 : c->hidden)) return 0;",
        "(void)rows;",
    ),
    Mutant(
        SAME,
        "the backward pass loses the stride of h",
        "cpu/backward.c",
        ".h_stride = o[FN_H].stride * ",
        ".h_stride = hidden * ",
    ),
    Mutant(
        SAME,
        "CUDA: backward passes with and without a weight offset share kernels",
        "cpu/cuda_launch.c",
        "(c->weight_offset != 0 ? OFFSET : 0)",
        "(c->weight_offset != 0 && c->pass == FN_FORWARD ? OFFSET : 0)",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the launcher overlooks strides that are not aligned",
        "cpu/cuda_launch.c",
        "if (f->of_rows >> i & 1) low |=",
        "if (0) low |=",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the launcher starts too few programs of a backward pass",
        "cpu/cuda_launch.c",
        "times = blocks;",
        "times = 1;",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the launcher starts a program for several blocks of many rows",
        "cpu/cuda_launch.c",
        "per_program > c->block ? per_program / c->block : 1",
        "per_program",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: a program for each block of few rows",
        "cpu/cuda_launch.c",
        "per_program > c->block ? per_program / c->block : 1",
        "1",
    ),
    Mutant(
        ROW,
        "CUDA: as many programs for few sums as for many",
        "cpu/cuda_launch.c",
        "more < blocks; more *= 2) per_program /= 2;",
        "more < BLOCKS_IN_LANE * 32; more *= 2) per_program /= 2;",
    ),
    Mutant(
        SAME,
        "CUDA: Python counts fewer programs than C",
        "backends/kernel_kinds.py",
        "(blocks if share == Share.COLUMNS_OF_BLOCKS else 1)",
        "1",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: Python and C number the shares differently",
        "backends/kernel_kinds.py",
        "    COLUMNS_OF_BLOCKS = 2\n",
        "    COLUMNS_OF_BLOCKS = 3\n",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the kernels of a backward pass are not given the number of blocks",
        "cpu/cuda_launch.c",
        "i < (backward ? 3 : 1)",
        "i < (backward ? 2 : 1)",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: calls with a sum of another dtype share kernels",
        "cpu/cuda_launch.c",
        "1 << FN_WEIGHT | 1 << FN_OUT | 1 << FN_RESIDUAL_OUT},",
        "1 << FN_WEIGHT | 1 << FN_OUT},",
        "cuda",
    ),
    Mutant(
        ROW,
        "the fast path does not tell autograd which tensors it wrote",
        "cpu/fast_path.c",
        "if (!number) return 0;",
        "return 0;",
    ),
    Mutant(ROW, "a forked child waits for its parent's threads", "cpu/threads.c", "forked = 1;", "forked = 0;"),
    Mutant(
        SAME,
        "Triton: neighbours added first",
        "backends/triton_numbers.py",
        "(value.shape[0], 2, value.shape[1] // 2)), axis=1)",
        "(value.shape[0], value.shape[1] // 2, 2)), axis=2)",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: neighbouring lanes added first",
        "backends/triton_kernels.py",
        "(value.shape[0], 2, value.shape[1] // 2, value.shape[2])), axis=1)",
        "(value.shape[0], value.shape[1] // 2, 2, value.shape[2])), axis=2)",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: lanes keep the values that they give away",
        "backends/triton_kernels.py",
        "exchanged(tl.where(upper, first, second))",
        "exchanged(tl.where(upper, second, first))",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: a block's share stored in the order of its registers",
        "backends/triton_kernels.py",
        "WIDTH // PARTS)), (0, 2, 1, 3))",
        "WIDTH // PARTS)), (0, 1, 2, 3))",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: more blocks than the code for a few adds",
        "backends/triton_kernels.py",
        "elif blocks > BLOCKS // 64:",
        "elif blocks > BLOCKS // 16:",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: a row is loaded again when there is no other",
        "backends/triton_kernels.py",
        "stored(rows_at(dy, following, dy_stride, dy_jump, inner) + column, there)",
        "stored(rows_at(dy, following, dy_stride, dy_jump, inner) + column, inside)",
    ),
    Mutant(
        SAME,
        "Triton: ties away from even",
        "backends/triton_numbers.py",
        "bits + 0x7FFF + ((bits >> 16) & 1)",
        "bits + 0x8000",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: float64 rounded twice on its way to 16 bits",
        "backends/triton_numbers.py",
        "value = rounded_to_odd(value)",
        "value = value.to(tl.float32)",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: padding that met an infinite root",
        "backends/triton_kernels.py",
        "product = tl.where(inside, product, 0)",
        "pass",
        "triton",
    ),
    Mutant(
        FUSED,
        "Triton: the sum normalised before it is rounded",
        "backends/triton_kernels.py",
        "            if ROUND_SUM:\n",
        "            if False:\n",
        "triton",
    ),
    Mutant(
        FUSED,
        "Triton: rows pass from the first norm to the addition unrounded",
        "backends/triton_numbers.py",
        'A if BETWEEN == "A" else X_TYPE), A)',
        "A), A)",
        "triton",
    ),
    Mutant(
        FUSED,
        "Triton: the norm before the addition has the eps of the one after it",
        "backends/triton_kernels.py",
        "per_element(rstd_of(sums, N, first_eps, A), SEGMENTS, DEPTH)",
        "per_element(rstd_of(sums, N, eps, A), SEGMENTS, DEPTH)",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: the last rows of a block left out",
        "backends/triton_kernels.py",
        "for row in range(rest, end):",
        "for row in range(end, end):",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton: blocks added in another order",
        "backends/triton_kernels.py",
        "tl.reshape(halved_first(shares, 1), (TILE,))",
        "tl.sum(shares, axis=0)",
        "triton",
    ),
    Mutant(
        SAME,
        "Triton on CPUs: tiles of a segment added in order",
        "backends/triton_cpu_kernels.py",
        "    return (s0 + s2) + (s1 + s3)",
        "    return (s0 + s1) + (s2 + s3)",
        "triton_cpu",
    ),
    Mutant(
        SAME,
        "Triton on CPUs: the last segment's tiles added in order",
        "backends/triton_cpu_kernels.py",
        "halved_vector((s0 + s2) + (s1 + s3))",
        "halved_vector((s0 + s1) + (s2 + s3))",
        "triton_cpu",
    ),
    Mutant(
        SAME,
        "Triton on CPUs: the end of a row in the wrong tile",
        "backends/triton_cpu_kernels.py",
        "tile = hidden_size // TILE % 4",
        "tile = hidden_size // TILE % 2",
        "triton_cpu",
    ),
    Mutant(
        SAME,
        "Triton on CPUs: zeros after a row's end that met an infinite root",
        "backends/triton_cpu_kernels.py",
        "return value if left is None else tl.where(tl.arange(0, SIZE) < left, value, 0)",
        "return value",
        "triton_cpu",
    ),
    Mutant(
        SAME,
        "Triton on CPUs: the second pass reads the rounded sum",
        "backends/triton_cpu.py",
        "KEEP=adds and (exact_sum or kind.round_sum),",
        "KEEP=adds,",
        "triton_cpu",
    ),
    Mutant(
        SAME,
        "Triton_cpu: kernels keep the caller's arithmetic",
        "cpu/triton_programs.c",
        "fn_fp_state state = fn_enter_ieee();",
        "fn_fp_state state = 0;",
    ),
    Mutant(
        ROW,
        "Triton_cpu: a mask for each access",
        "backends/triton_cpu_kernels.py",
        "        return tl.load(row + at + tl.arange(0, SIZE))",
        "        return tl.load(row + at + tl.arange(0, SIZE), mask=at + tl.arange(0, SIZE) >= 0)",
    ),
    Mutant(
        ROW,
        "Triton_cpu: a fork does not wait for a kernel that is being loaded",
        "backends/triton_cpu_host.py",
        "before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._in_child",
        "before=lambda: None, after_in_child=self._in_child",
    ),
    Mutant(
        SAME,
        "Triton_cpu: C's arguments in another order",
        "cpu/triton_programs.c",
        "o[FN_RESIDUAL].stride, o[FN_OUT].stride, o[FN_RESIDUAL_OUT].stride",
        "o[FN_OUT].stride, o[FN_RESIDUAL].stride, o[FN_RESIDUAL_OUT].stride",
    ),
    Mutant(
        ROW,
        "Triton_cpu: the outer level of rows is lost",
        "backends/triton_cpu_kernels.py",
        "    levels = inner if TWO_LEVELS & FLAGS else None\n    x_row",
        "    levels = None\n    x_row",
        "triton_cpu",
    ),
    Mutant(
        ROW,
        "Triton_cpu: the outer level of incoming gradients is lost in the weight's gradient",
        "backends/triton_cpu_kernels.py",
        "    levels = inner if TWO_LEVELS & FLAGS else None\n    if at",
        "    levels = None\n    if at",
        "triton_cpu",
    ),
    Mutant(
        ROW,
        "Triton: the outer level of rows is lost",
        "backends/triton_numbers.py",
        "(row * stride + row // inner * jump)",
        "row * stride",
        "triton",
    ),
    Mutant(
        ROW,
        "CUDA: the outer level of rows is lost",
        "csrc/row.cuh",
        "row * strides.stride + row / inner * strides.jump",
        "row * strides.stride",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: calls with rows in one level and in two share kernels",
        "backends/kernel_kinds.py",
        "            _alignment(tuple(rows), others),\n            call.inner != call.rows,",
        "            _alignment(tuple(rows), others),\n            False,",
        "cuda",
    ),
    Mutant(
        ROW,
        "Gradients: the outer level of rows is lost",
        "cpu/fusednorm_cpu.h",
        "(jump ? m / inner * jump : 0)",
        "0",
        "cpu",
    ),
    Mutant(
        ROW,
        "Gradients: the outer level of residual_out's gradient is lost",
        "cpu/backward.c",
        ".d_total_jump = fn_jump(c, FN_D_RESIDUAL_OUT)",
        ".d_total_jump = 0 * fn_jump(c, FN_D_RESIDUAL_OUT)",
        "cpu",
    ),
    Mutant(
        SAME,
        "Triton: multiplications and additions fused",
        "backends/triton_host.py",
        '"enable_fp_fusion": False',
        '"enable_fp_fusion": True',
    ),
    Mutant(
        ROW,
        "Triton: names that are gone are not asked for",
        "backends/kernel_kinds.py",
        "found = operator.attrgetter(name)(package)",
        "return True",
    ),
    Mutant(
        ROW,
        "Triton: arguments that names no longer take are not asked for",
        "backends/kernel_kinds.py",
        "return not arguments or set(arguments) <= set(inspect.signature(found).parameters)",
        "return found is not None",
    ),
    Mutant(
        ROW,
        "Triton: a driver's target is taken as it is",
        "backends/triton_host.py",
        'lacked = lacking(target, {"backend": (), "warp_size": ()})',
        'lacked = ""',
    ),
    Mutant(
        SAME,
        "Triton: options that it ignores do not matter",
        "backends/triton_host.py",
        "getattr(kernel.metadata, name, None) != value",
        "False",
    ),
    Mutant(
        ROW,
        "Triton: its launcher is called by position",
        "backends/triton_host.py",
        "self._kernel[programs, 1, 1](*",
        "self._kernel.run(programs, 1, 1, 0, self._kernel.function, self._kernel.packed_metadata, None, None, None, *",
    ),
    Mutant(SAME, "Triton: divides roughly", "backends/triton_numbers.py", "tl.div_rn(a, b)", "a / b"),
    Mutant(SAME, "Triton: takes roots roughly", "backends/triton_numbers.py", "tl.sqrt_rn(mean)", "tl.sqrt(mean)"),
    Mutant(
        SAME,
        "Triton: the eps of a float64 call in float32",
        "backends/triton_host.py",
        "found[name] = (_NAMES[self.accumulator], 1)",
        'found[name] = ("fp32", 1)',
    ),
    Mutant(
        ROW,
        "Triton: wide accesses to rows that begin anywhere",
        "backends/triton_gpu.py",
        "        kind.alignment >= 16,\n        bits=INTERPRETED,",
        "        True,\n        bits=INTERPRETED,",
    ),
    Mutant(
        ROW,
        "Triton: a kernel for each kind of call",
        "backends/triton_host.py",
        "identity = (key[0], *variant.identity())",
        "identity = (key[0], id(variant))",
    ),
    Mutant(
        SAME,
        "CUDA: multiplications are fused with additions",
        "backends/cuda_compiler.py",
        '"--fmad=false"',
        '"--fmad=true"',
        "cuda",
    ),
    Mutant(
        SAME, "CUDA: a block's threads do not wait for each other", "csrc/machine.cuh", "__syncthreads();", "", "cuda"
    ),
    Mutant(
        SAME,
        "CUDA: half of a warp's lanes are said to exchange",
        "csrc/machine.cuh",
        "__shfl_xor_sync(~0u, value, distance)",
        "__shfl_xor_sync(0xFFFFu, value, distance)",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: pairs of bfloat16 in the wrong order",
        "csrc/machine.cuh",
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));',
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(low), "f"(high));',
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: a kernel does not wait for the kernel before",
        "csrc/machine.cuh",
        'asm volatile("griddepcontrol.wait;" ::: "memory");',
        "",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: neighbours added first",
        "csrc/row.cuh",
        "values[i] += values[i + COUNT / 2];",
        "values[i] = values[2 * i] + values[2 * i + 1];",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: two levels of the tree swapped, between warps",
        "csrc/row.cuh",
        "int distance = smaller(PADDED, LANES) / 2; distance > 0; distance /= 2",
        "int distance = 1; distance < smaller(PADDED, LANES); distance *= 2",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: segments added in sequence",
        "csrc/row.cuh",
        "    for (int half = padded(segments) / 2; half > 0; half /= 2) {",
        "    block_barrier();\n    for (int i = 1; threadIdx.x == 0 && i < segments; i++) sums[0] += (A)sums[i];\n"
        "    for (int half = 0; half > 0; half /= 2) {",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: no barrier before segments are added",
        "csrc/row.cuh",
        "        if (lane() == 0) sums[warp()] = sum;\n        block_barrier();",
        "        if (lane() == 0) sums[warp()] = sum;",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: no barrier between the halvings of a wide row",
        "csrc/row.cuh",
        "half /= 2) {\n        block_barrier();",
        "half /= 2) {",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: a cluster does not wait for its blocks",
        "csrc/row.cuh",
        "        cluster_arrive();\n        cluster_wait();\n    } else",
        "        block_barrier();\n    } else",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the rows' products are overwritten while they are added",
        "csrc/backward_blocks.cu",
        "            if (!last) block_barrier();\n",
        "",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the sums of the row before are overwritten while they are added",
        "csrc/backward_blocks.cu",
        "&of_segments[turn % 2 * WARPS]",
        "&of_segments[0]",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: rows' products added in another order",
        "csrc/weight_blocks.cu",
        "        normalised(xhat, h[i], rstd[i]);\n        shares_of(shares, dy[i], xhat);",
        "        normalised(xhat, h[i ^ (COUNT > 1)], rstd[i ^ (COUNT > 1)]);\n"
        "        shares_of(shares, dy[i ^ (COUNT > 1)], xhat);",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: blocks of rows added in another order",
        "csrc/weight_sum.cu",
        "halve<IN_LANE>(sums);",
        "for (int i = 1; i < IN_LANE; i++) sums[0] += sums[i];",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: a block's sums of columns go on into the next block",
        "csrc/backward_blocks.cu",
        "end = smaller(begin + block, rows)",
        "end = rows",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: sums of columns begin again with each turn",
        "csrc/backward_blocks.cu",
        "if (first) memset",
        "memset",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: lanes side by side exchange the parts that they should keep",
        "csrc/backward.cuh",
        "exchanged(second ? low : high, 1)",
        "exchanged(second ? high : low, 1)",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: a lane that has no columns writes none of its neighbour's",
        "csrc/backward.cuh",
        "if (second ? others : inside) at[i]",
        "if (inside) at[i]",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the mean by the reciprocal of the hidden size",
        "csrc/row.cuh",
        "sum_of_squares / (A)hidden_size",
        "sum_of_squares * ((A)1 / (A)hidden_size)",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: float64 rounded twice",
        "csrc/numbers.cuh",
        "    if (back == value || value != value) return nearest;",
        "    return nearest;",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: a tail read too far",
        "csrc/row.cuh",
        "FULL || begin + column_of(k) < hidden_size",
        "FULL || begin + column_of(k) <= hidden_size",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: products beyond the row's end are not left out",
        "csrc/backward.cuh",
        "inside ? wdy[v] * xhat[v] : (A)0",
        "wdy[v] * xhat[v]",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: the sum is not rounded",
        "csrc/forward.cuh",
        "if (ROUND_SUM) widen(h, total);",
        "",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: a wide row is always kept as it is stored",
        "backends/cuda_kernels.py",
        "int(kind.residual_out is None or row == kind.residual_out)",
        "1",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: rows pass from the first norm to the addition unrounded",
        "csrc/forward.cuh",
        "using Added = either<NORM_BEFORE_ADD, Between, X>::type;",
        "using Added = either<NORM_BEFORE_ADD, A, X>::type;",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: two sums of a row in one memory",
        "csrc/forward.cu",
        "rstd_of(sum_of_row<1>(squares)",
        "rstd_of(sum_of_row<0>(squares)",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: a block of a cluster stores its second sum before others have read the first",
        "csrc/forward.cu",
        "if (CLUSTER > 1 && PRESENT<Out>) cluster_arrive();",
        "",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: sums of a wide row take the place of the first norm's before all have read these",
        "csrc/forward_wide.cu",
        "        block_barrier();  // all",
        "        // all",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: x is not multiplied before the addition",
        "csrc/forward.cu",
        "            scale_first(x[k], a);\n",
        "",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: x is not multiplied where rows are too long for registers",
        "csrc/forward_wide.cu",
        "        scale_first(to, a);\n",
        "",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: all vectors of a lane have the first one's bias",
        "csrc/forward.cu",
        "bias[k % OF_WEIGHT]",
        "bias[0]",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: a bias is lost where rows are too long for registers",
        "csrc/forward_wide.cu",
        "            add_bias(y, bias);\n",
        "",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: all rows of a warp have one head",
        "csrc/forward.cu",
        "begin(rows.first + row_of(k))",
        "begin(rows.first)",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: heads are counted from the first one only once",
        "csrc/forward.cuh",
        "bias + row % heads * bias_stride",
        "bias + (row < heads ? row : 0) * bias_stride",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: the factor of x is the eps of the norm",
        "cpu/cuda_launch.c",
        "w->scaling ? w->scaling->eps : 1",
        "w->scaling ? c->eps : 1",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: a bias of any dtype has the same kernel",
        "cpu/cuda_launch.c",
        "k.kinds |= bias_of(c).kind << 4 * (at + 2);",
        "",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: rows of heads have the kernel of one row",
        "cpu/cuda_launch.c",
        "(has_heads(c) ? OF_HEADS : 0)",
        "0",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: the norm before the addition has the eps of the one after it",
        "cpu/cuda_launch.c",
        "append_real(to, &at, w->first->eps, is_wide(c));",
        "append_real(to, &at, c->eps, is_wide(c));",
        "cuda",
    ),
    Mutant(
        FUSED,
        "CUDA: kernels with and without a norm before the addition are one kind",
        "cpu/cuda_launch.c",
        "    if (w->first) k.kinds |=",
        "    if (0) k.kinds |=",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: the addresses of the first weight and of a bias are not looked at",
        "cpu/cuda_launch.c",
        "low |= more[i].address | (uint64_t)(more[i].stride * item);",
        "",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: rows beyond the last are written",
        "csrc/row.cuh",
        "(BLOCKS_ROW || row_of(k) < count)",
        "(BLOCKS_ROW || row_of(k) <= count)",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: wide accesses to rows that begin anywhere",
        "backends/kernel_kinds.py",
        "return low & -low",
        "return 32",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: one old GPU disables the others",
        "backends/cuda.py",
        "newest = max(capability(device)",
        "newest = min(capability(device)",
    ),
    Mutant(
        ROW,
        "CUDA: the current GPU's age decides",
        "backends/cuda.py",
        "found = capability(operation.device.index)",
        "found = capability(None)",
    ),
    Mutant(
        ROW,
        "CUDA: names that NVIDIA's bindings lack are not asked for",
        "backends/cuda.py",
        "(lacking(driver, DRIVER), lacking(nvrtc, COMPILER))",
        "()",
    ),
    Mutant(
        ROW,
        "CUDA: a thread without a context gets none",
        "backends/cuda.py",
        'checked(driver.cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")',
        "pass",
    ),
    Mutant(
        ROW,
        "CUDA: the launcher uses whichever GPU is the current one",
        "cpu/cuda_launch.c",
        "if (driver.current_device(&device) || device != c->device) {",
        "if (driver.current_device(&device)) {",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: the launcher starts kernels where no GPU is the current one",
        "cpu/cuda_launch.c",
        "driver.current_device(&device) || device",
        "!driver.current_device(&device) && device",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: the launcher leaves the context in which the caller launches",
        "cpu/cuda_launch.c",
        "driver.current_device(&device) || device != c->device",
        "driver.current_device(&device) || 1",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: the launcher does not put the caller's context back",
        "cpu/cuda_launch.c",
        "    if (pushed) driver.pop(&popped);\n",
        "    (void)popped, (void)pushed;\n",
        "cuda",
    ),
    Mutant(
        ROW,
        "CUDA: a table of kernels that grows forgets the kernels that it held",
        "cpu/cuda_launch.c",
        "        if (before[i].count) *place_of(&before[i].key) = before[i];\n",
        "        (void)before[i];\n",
        "cuda",
    ),
    Mutant(
        SAME,
        "CUDA: fused multiply-add",
        "backends/cuda_compiler.py",
        "--fmad=false",
        "--fmad=true",
    ),
    Mutant(
        ROW,
        "CUDA: damaged code is loaded",
        "backends/cuda_compiler.py",
        "_checksum(path, code) == checksum",
        "True",
    ),
    Mutant(
        ROW,
        "CUDA: another kernel's code is loaded",
        "backends/cuda_compiler.py",
        "path.name.encode() + code",
        "code",
    ),
    Mutant(
        ROW,
        "CUDA: others' code is loaded",
        "backends/cuda_compiler.py",
        "not (_is_ours(found) and stat.S_ISREG(found.st_mode))",
        "False",
    ),
    Mutant(
        ROW,
        "Distributed: parts of rows are normalised by themselves",
        "fusednorm/distributed.py",
        "< most - whole]",
        "< most]",
    ),
    Mutant(
        ROW,
        "Distributed: the residual's rows are moved to everybody",
        "fusednorm/distributed.py",
        'for name in ("x", "residual") if name in operands',
        'for name in ("x",) if name in operands',
    ),
    Mutant(
        SAME,
        "Distributed: a weight's gradient is this rank's alone",
        "fusednorm/distributed.py",
        "else Partial() for placement",
        "else Replicate() for placement",
    ),
    Mutant(
        SAME,
        "Distributed: operands that are written in place are redistributed",
        "fusednorm/distributed.py",
        "if spec.placements != rows.placements:",
        "if False:",
    ),
    Mutant(
        SAME,
        "Distributed: calls with other dtypes share a decision",
        "fusednorm/distributed.py",
        "RuntimeSchemaInfo(static_argnum=6)",
        "RuntimeSchemaInfo()",
    ),
    Mutant(
        SAME,
        "Distributed: a gradient that is not needed is sharded",
        "fusednorm/distributed.py",
        "spec if need else _replicated(rows) for",
        "spec for",
    ),
    Mutant(
        SAME,
        "Distributed: gradients lie where dy does",
        "fusednorm/distributed.py",
        '("h", "dy", "d_residual_out")',
        '("dy", "d_residual_out", "h")',
    ),
    Mutant(
        FUSED,
        "Distributed: the style forgets arguments that are given by name",
        "fusednorm/distributed.py",
        "{name: sharded(value) for name, value in kwargs.items()}",
        "kwargs",
    ),
    Mutant(
        FUSED, "Distributed: a hook loses the residual", "fusednorm/modules.py", "if kept < len(inputs):", "if False:"
    ),
    Mutant(
        ROW,
        "Distributed: rows of a flattened batch are gathered",
        "fusednorm/distributed.py",
        'if getattr(placement, "dim", most) < most - whole',
        "if placement.is_shard() and placement.dim < most - whole",
    ),
    Mutant(
        SAME,
        "Distributed: operands on different ranks",
        "fusednorm/distributed.py",
        "    schema.get_mesh_from_args()  # refuses operands on different meshes\n",
        "",
    ),
    Mutant(
        SAME,
        "Distributed: the rules are not registered",
        "fusednorm/dispatcher.py",
        "if tensor is not None and any(",
        "if tensor is None and any(",
    ),
    Mutant(
        SAME,
        "Distributed: the rules are loaded for plain tensors too",
        "fusednorm/dispatcher.py",
        "any(isinstance(operand, tensor.DTensor) for operand in operands)",
        "operands",
    ),
    Mutant(
        SAME,
        "Listeners: dispatch modes are not asked for",
        "fusednorm/listeners.py",
        '(_torchs("_len_torch_dispatch_stack"), _torchs("_is_tracing"))',
        '(_torchs("_is_tracing"),)',
    ),
    Mutant(
        SAME,
        "Listeners: torch.jit.trace is not asked for",
        "fusednorm/listeners.py",
        '(_torchs("_len_torch_dispatch_stack"), _torchs("_is_tracing"))',
        '(_torchs("_len_torch_dispatch_stack"),)',
    ),
    Mutant(
        SAME,
        "Listeners: profilers are not asked for by the fast path",
        "fusednorm/listeners.py",
        '((profiler, "_is_profiler_enabled", False), (forward_ad, "_current_level", -1))',
        '((forward_ad, "_current_level", -1),)',
    ),
    Mutant(
        SAME,
        "Listeners: profilers are not asked for beyond the fast path",
        "fusednorm/listeners.py",
        'if getattr(profiler, "_is_profiler_enabled", True):',
        "if False:",
    ),
    Mutant(
        SAME,
        "Derivatives: levels of forward mode are not asked for by the fast path",
        "fusednorm/listeners.py",
        ', (forward_ad, "_current_level", -1))',
        ",)",
    ),
    Mutant(
        SAME,
        "Derivatives: operands with a tangent are taken as plain ones",
        "fusednorm/listeners.py",
        "return bool(_transforms_active()) or has_tangent(*operands)",
        "return bool(_transforms_active())",
    ),
    Mutant(
        SAME,
        "Derivatives: torch.func is not asked for",
        "fusednorm/listeners.py",
        "return bool(_transforms_active()) or has_tangent(*operands)",
        "return has_tangent(*operands)",
    ),
    Mutant(
        SAME,
        "Listeners: the fast path does not count dispatch modes",
        "cpu/fast_path.c",
        "if (listeners.dispatch_modes() || *listeners.trace()) return 1;",
        "if (*listeners.trace()) return 1;",
    ),
    Mutant(
        SAME,
        "Listeners: the fast path does not look for a trace",
        "cpu/fast_path.c",
        "if (listeners.dispatch_modes() || *listeners.trace()) return 1;",
        "if (listeners.dispatch_modes()) return 1;",
    ),
    Mutant(
        SAME,
        "Listeners: function modes are not asked for by the fast path",
        "cpu/fast_path.c",
        "if (modes != 1) return modes != 0;",
        "return 0;",
    ),
    Mutant(
        SAME,
        "Listeners: function modes above a default device are not asked for",
        "fusednorm/listeners.py",
        "or modes > 1 or (modes == 1",
        "or (modes == 1",
    ),
    Mutant(
        SAME,
        "Listeners: a default device listens",
        "cpu/fast_path.c",
        "int ours = (PyObject *)Py_TYPE(mode) == listeners.default_device_mode;",
        "int ours = 0;",
    ),
    Mutant(
        SAME,
        "Listeners: subclasses that override functions are not asked for",
        "fusednorm/listeners.py",
        "return has_torch_function(others)",
        "return False",
    ),
    Mutant(
        SAME,
        "Torch: operands that override operations are not asked for",
        "fusednorm/listeners.py",
        "return not plain(*operands) and any(overrides_operations(t) for t in operands)",
        "return False",
    ),
    Mutant(
        SAME,
        "Listeners: listeners do not see how gradients are computed",
        "fusednorm/autograd.py",
        "if backend is not None and not listeners.below(dy, d_total, h, rstd, weight):",
        "if backend is not None:",
    ),
    Mutant(
        SAME,
        "Derivatives: a gradient's tangent takes rstd without its own",
        "fusednorm/autograd.py",
        "if torch.is_grad_enabled() or listeners.level_entered():",
        "if torch.is_grad_enabled():",
    ),
    Mutant(
        SAME,
        "Derivatives: forward mode over forward mode loses the outer level",
        "fusednorm/autograd.py",
        "with forward_ad._set_fwd_grad_enabled(True):  # torch",
        "with forward_ad._set_fwd_grad_enabled(False):  # torch",
    ),
    Mutant(
        SAME,
        "Derivatives: operators lose tangents",
        "fusednorm/library.py",
        "if has_tangent(*operands):",
        "if False:",
    ),
    Mutant(
        SAME,
        "Derivatives: operators that write lose gradients",
        "fusednorm/library.py",
        "elif operation._schema.is_mutable and torch.is_grad_enabled()",
        "elif False",
    ),
    Mutant(
        SAME,
        "Derivatives: float64 that is rounded to 16 bits has none",
        "backends/reference.py",
        "return gradient.to(torch.float64)",
        "return torch.zeros_like(gradient, dtype=torch.float64)",
    ),
    Mutant(
        SAME,
        "Listeners: torch.fx looks into modules",
        "fusednorm/modules.py",
        "if not isinstance(x, Tensor) and (node := _one_node(self, x)) is not None:",
        "if False and (node := None):",
    ),
    Mutant(
        SAME,
        "Fuzz: the backward operator trusts its operands",
        "fusednorm/library.py",
        "    check_gradients(dy, d_residual_out, h, rstd, weight, dtypes, needs)\n",
        "",
    ),
    Mutant(
        SAME,
        "Registry: a backward pass in another thread forgets the request",
        "fusednorm/library.py",
        "requested = request_of_backward()",
        "requested = request()",
    ),
    Mutant(
        SAME,
        "a NaN of the caller's keeps its payload",
        "cpu/ieee.h",
        "return number == number ? number : (double)NAN;",
        "return number;",
    ),
    Mutant(
        SAME,
        "Registry: a pass may return something",
        "fusednorm/contract.py",
        "if found is not None:",
        "if False:",
    ),
    Mutant(
        SAME,
        "Registry: outputs that forward leaves unwritten are not seen",
        "fusednorm/contract.py",
        "            if missing:",
        "            if False:",
    ),
    Mutant(
        SAME,
        "Registry: outputs that the caller gave are filled",
        "fusednorm/contract.py",
        " or any(output is tensor for tensor in given)",
        "",
    ),
    Mutant(
        SAME,
        "Registry: gradients of another shape or dtype are taken from a backend of the old style",
        "fusednorm/old_style.py",
        "if described(gradient) != described(output):",
        "if False:",
    ),
    Mutant(
        SAME,
        "Registry: every call of an operation is checked",
        "fusednorm/contract.py",
        "        self._forward = self._backend.forward\n",
        "",
    ),
    Mutant(
        SAME,
        "Registry: outputs are marked by a NaN that arithmetic returns",
        "fusednorm/contract.py",
        "0x7FA5A5A5",
        "0x7FE5A5A5",
    ),
    Mutant(
        SAME,
        "Registry: an error does not name the backend",
        "fusednorm/contract.py",
        "        error.add_note(",
        "        str(",
    ),
    Mutant(
        SAME,
        "Call: a composition rounds the sum to the residual's dtype",
        "fusednorm/composition.py",
        "reference.rounded(total, call.residual_out.dtype)",
        "reference.rounded(total, call.residual.dtype)",
    ),
    Mutant(
        SAME,
        "Call: a composition writes the exact sum to the residual",
        "fusednorm/composition.py",
        "copy=True, ",
        "",
    ),
    Mutant(
        SAME,
        "Call: a composition converts a residual that it would have to keep",
        "fusednorm/composition.py",
        "return torch.promote_types(operation.residual, operation.residual_out) == operation.residual_out",
        "return True",
    ),
    Mutant(
        SAME,
        "Call: residual_dtype is ignored",
        "fusednorm/call.py",
        "flags.residual_dtype or residual.dtype",
        "residual.dtype",
    ),
    Mutant(
        SAME,
        "Call: out_dtype is ignored",
        "fusednorm/call.py",
        "flags.out_dtype or (x.dtype if out is None else out.dtype)",
        "x.dtype if out is None else out.dtype",
    ),
    Mutant(
        SAME,
        "Call: calls with dtypes of outputs take the fast path",
        "fusednorm/run.py",
        "if take is not None and flags[FAST:] == DEFAULTS:",
        "if take is not None:",
    ),
    Mutant(
        SAME,
        "Call: kernels without residual_dtype are given such calls",
        "fusednorm/registry.py",
        " or _unknown(backend, operation) or ",
        " or ",
    ),
    Mutant(
        SAME,
        "Call: the residual is packed with the strides of x",
        "fusednorm/packing.py",
        "residual.data_ptr(), *residual_strides",
        "residual.data_ptr(), *x_strides",
    ),
    Mutant(
        SAME,
        "Call: the gradients of x and of the residual are packed in each other's place",
        "fusednorm/packing.py",
        "        *_operand(dx),\n        *_operand(dresidual),\n",
        "        *_operand(dresidual),\n        *_operand(dx),\n",
    ),
    Mutant(
        ROW,
        "Layout: the residual stays in the first step of the outer level",
        "cpu/dispatch.c",
        "outer_bytes(&c->operand[FN_RESIDUAL], outer)",
        "outer_bytes(&c->operand[FN_RESIDUAL], 0 * outer)",
    ),
    Mutant(
        ROW,
        "Layout: rstd of each step of the outer level in one place",
        "cpu/dispatch.c",
        "(char *)job.rstd + first *",
        "(char *)job.rstd + 0 * first *",
    ),
    Mutant(
        ROW,
        "Layout: rows of all steps of the outer level one stride apart",
        "cpu/dispatch.c",
        "first + c->inner < end ? first + c->inner : end;",
        "end;",
    ),
    Mutant(
        ROW,
        "Layout: the strides of the outer level are lost",
        "fusednorm/layout.py",
        "        if outer > 1:\n            return inner,",
        "        if False:\n            return inner,",
    ),
    Mutant(
        ROW,
        "Layout: operands in other levels are read in the levels of the first",
        "fusednorm/layout.py",
        "return (inner * self.stride, self.stride) if self.outer == 1 else None",
        "return inner * self.stride, self.stride",
    ),
    Mutant(
        ROW,
        "Layout: rows of an outer level with gaps are taken for rows one stride apart",
        "fusednorm/layout.py",
        "if levels and stride == levels[-1][0] * levels[-1][1]:",
        "if levels:",
    ),
    Mutant(
        SAME,
        "Registry: a backend of the old style is given a call",
        "fusednorm/old_style.py",
        "if not any(_takes_operands(function) for function in (backend.forward, backend.backward)):",
        "if True:",
    ),
    Mutant(
        ROW,
        "Registry: a backend of the old style is given the strides of the outer level",
        "fusednorm/old_style.py",
        "[stride for _, stride in one.strides]",
        "[stride for stride, _ in one.strides]",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: a block of rows begins where the first one begins",
        "cpu/dispatch.c",
        "if (k > 0) job.x = passed - row * job.x_stride;",
        "if (k > 0) job.x = passed;",
    ),
    Mutant(
        SAME,
        "quantized: a NaN is no magnitude",
        "cpu/quantize_body.h",
        "& 0x7fffffff);\n            greatest = bits > greatest ? bits",
        "& 0x7fffffff);\n            greatest = bits > greatest && bits <= 0x7f800000 ? bits",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: float8 rounds ties away from zero",
        "cpu/quantize_body.h",
        "int32_t within = magnitude;",
        "int32_t within = magnitude | 1;",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: the least normal number of float8 is one step later",
        "cpu/quantize_body.h",
        "lowest = (127 + least_exponent) << 23;",
        "lowest = (128 + least_exponent) << 23;",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: amax_floor is left out",
        "cpu/quantize_body.h",
        "at_most(at_least(s->high[k], amax_floor), amax_limit)",
        "at_most(s->high[k], amax_limit)",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: a scale of 0 divides",
        "cpu/quantize_body.h",
        "s->how[k] = scale == 0 ? ZERO : ",
        "s->how[k] = ",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: a zero point that is added after rounding is not limited",
        "backends/quantizer.py",
        "shift.clamp(-MOST, MOST)",
        "shift",
        "reference",
    ),
    Mutant(
        SAME,
        "quantized: rows with a limit are tame",
        "cpu/quantize_body.h",
        "(s->high[k] <= span) & ",
        "",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: rows with a subnormal scale are tame",
        "cpu/quantize_body.h",
        " & (scale >= 0x1p-126f)",
        "",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: a bfloat16 NaN is no magnitude",
        "cpu/quantize_body.h",
        "bits &= 0x7fff;\n        greatest = bits > greatest ? bits",
        "bits &= 0x7fff;\n        greatest = bits > greatest && bits <= 0x7f80 ? bits",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: the fast path gives all groups one scale",
        "cpu/fast_path_quantized.c",
        "q->scale_group_stride = 4;",
        "q->scale_group_stride = 0;",
        "cpu",
    ),
    Mutant(
        SAME,
        "quantized: the fast path lets no float rows pass",
        "cpu/fast_path_quantized.c",
        "given->passed_kind = between ? FN_F32",
        "given->passed_kind = 0 ? FN_F32",
        "cpu",
    ),
    Mutant(
        ROW,
        "quantized: all rows have the scale of the first one",
        "cpu/quantize_body.h",
        "inner * q->scale_stride;",
        "0 * inner * q->scale_stride;",
        "cpu",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: rows in two levels pass as if they lay in one",
        "fusednorm/packing.py",
        "return KINDS[dtype], 0, inner * hidden_size, hidden_size",
        "return KINDS[dtype], 0, 0, hidden_size",
    ),
    Mutant(
        SAME,
        "Norm_before_add: a backend that lacks the feature is given such calls",
        "fusednorm/call.py",
        '"norm_before_add": self.first is not None,',
        '"norm_before_add": False,',
    ),
    Mutant(
        SAME,
        "Norm_before_add: an addition is given to a backend that refuses it",
        "fusednorm/composition.py",
        "return norm, *((rest,) if takes(rest) else Composition.parts(rest, takes) or (rest,))",
        "return norm, rest",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: float32 passes although x's dtype was asked for",
        "cpu/fast_path.c",
        "arguments[BETWEEN_IS_F32] == Py_True ? FN_F32 : next->operand[FN_X].kind",
        "arguments[BETWEEN_IS_F32] == Py_True ? next->operand[FN_X].kind : FN_F32",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: the first weight's memory is not looked at",
        "cpu/fast_path.c",
        "first->operand[FN_WEIGHT].kind && !fn_apart(a, fn_extent_of(first, FN_WEIGHT))",
        "0",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: a gradient of the first weight is lost",
        "cpu/fast_path.c",
        "return !records && count == ARGUMENTS_OF_CHAIN ? requires_gradient(arguments[FIRST_WEIGHT]) : records;",
        "return records;",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: the gradient of a sum is rounded twice",
        "backends/reference.py",
        "    return Widened.apply(value)",
        "    return value.to(dtype)",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: the end of a row is not added",
        "cpu/forward_body.h",
        "        if (i < job->hidden) add_residual(x, residual, 1, 0, &row, i, (int)(job->hidden - i));\n",
        "",
    ),
    Mutant(
        SAME,
        "Distributed: heads with a row each lie on several ranks",
        "fusednorm/distributed.py",
        "whole=2 if of_heads else 1",
        "whole=1",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: the second norm takes the first one's eps",
        "cpu/two_norms_body.h",
        "segments), hidden, next->eps);",
        "segments), hidden, first->eps);",
    ),
    Mutant(
        FUSED,
        "Norm_before_add: from memory, a row's first pass is made of the row before",
        "cpu/two_norms_body.h",
        "row.next_x = together && !last ? row.x + first->x_stride : NULL;",
        "row.next_x = together && !last ? row.x : NULL;",
    ),
    Mutant(
        FUSED,
        "Affine: rows take the next head's weight",
        "cpu/forward_body.h",
        "return head + 1 == a->heads ? 0 : head + 1;",
        "return head == a->heads - 1 ? head : head + 1;",
    ),
    Mutant(
        FUSED,
        "Affine: a batch of rows begins with the first head",
        "cpu/forward_body.h",
        "int64_t head = affine ? job->first_row % batch->affine->heads : 0;",
        "int64_t head = 0;",
    ),
    Mutant(
        FUSED,
        "Affine: rows that overlap begin with the first head",
        "cpu/forward_body.h",
        "int64_t head = affine ? (job->first_row + begin - 1) % a->heads : 0;",
        "int64_t head = 0;",
    ),
    Mutant(
        FUSED,
        "Affine: a thread's short rows begin with the first head",
        "cpu/forward_body.h",
        "head = affine ? (job->first_row + begin) % a->heads : 0;",
        "head = 0;",
    ),
    Mutant(
        FUSED,
        "Affine: a bias that is absent turns -0 into +0",
        "cpu/forward_body.h",
        "bias_stride, 0, -0.0f,",
        "bias_stride, 0, 1.0f,",
    ),
    Mutant(
        FUSED,
        "Affine: the bias of float64 rows is that of the first head",
        "cpu/kernel_f64.h",
        "job->bias + head * job->bias_stride",
        "job->bias",
    ),
    Mutant(
        FUSED,
        "Affine: the offset of the weights of heads is lost",
        "cpu/forward_body.h",
        "h * job->weight_stride, offset, 1,",
        "h * job->weight_stride, 0, 1,",
    ),
    Mutant(
        FUSED,
        "Affine: a gradient of the bias is lost",
        "cpu/fast_path.c",
        "    records = requires_gradient(arguments[BIAS]);\n",
        "",
    ),
    Mutant(
        FUSED,
        "Affine: the bias's memory is not looked at",
        "cpu/fast_path.c",
        "if (o[FN_BIAS].kind && !fn_apart(a, fn_extent_of(c, FN_BIAS))) return 1;",
        "",
    ),
    Mutant(
        FUSED,
        "Affine: an operator takes weights of heads",
        "cpu/fast_path.c",
        "if (!of_heads || t->ndim != 2",
        "if (t->ndim != 2",
    ),
    Mutant(
        FUSED,
        "Affine: calls beyond the fast path have one head",
        "fusednorm/packing.py",
        "0, call.heads, call.eps",
        "0, 1, call.eps",
    ),
    Mutant(
        FUSED,
        "Affine: a composition does not round what meets the weight",
        "fusednorm/composition.py",
        "rounded_to = x.dtype if operation.round_norm else None",
        "rounded_to = None",
    ),
    Mutant(
        SAME,
        "Affine: a backend that scales no x is given such calls",
        "fusednorm/call.py",
        '"x_scale": self.around is not None and self.around.scaled,',
        '"x_scale": False,',
    ),
    Mutant(
        SAME,
        "Affine: the memory of the last heads is not looked at",
        "fusednorm/checks.py",
        "Rows(1, w.numel() // hidden_size, 0, hidden_size)",
        "Rows(1, 1, 0, hidden_size)",
    ),
    Mutant(
        FUSED,
        "Affine: the gradient of a weight is that of the rounded rows",
        "backends/reference.py",
        "summed(d * n, weight)",
        "summed(d * rounded(n, dy.dtype).to(n.dtype), weight)",
    ),
    Mutant(
        ROW,
        "Registry: copies of outputs in two levels are not copied back",
        "fusednorm/layout.py",
        "    if out is not call.out:\n",
        "    if False:\n",
    ),
)


def misplaced(mutants=MUTANTS):
    """Why mutants cannot be made: their text is not found exactly once."""
    found = []
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.old) if path.exists() else 0
        if count != 1:
            found.append(f"{mutant.fault}: {mutant.file} has {mutant.old!r} {count} times, and must have it once")
    return found


def copy_if_changed(source, target):
    """Only a file that differs gets a new time: ninja then compiles that file alone, and a mutant's file again."""
    if not (os.path.exists(target) and filecmp.cmp(source, target, shallow=False)):
        shutil.copy(source, target)


def build(mutant, folder):
    """Copies the repository with the mutant's change and installs it."""
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True, ignore=ignore, copy_function=copy_if_changed)
    for name in FILES:
        copy_if_changed(ROOT / name, folder / name)
    if mutant is not None:
        path = folder / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    install = ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--force-reinstall", str(folder))
    subprocess.run((sys.executable, "-m", *install), check=True)


def run_tests(folder, backend, tests):
    """Runs tests until one fails; on one backend if it has a name."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDNORM_")}
    if backend:
        clean["FUSEDNORM_BACKEND"] = backend
    options = ("pytest", "-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "--pyargs")
    command = (sys.executable, "-P", "-m", *options, *tests)
    if backend == "cuda":  # -s: the last words of a process that dies are not lost
        command = (folder / "tests/emulation/ptx", "cuda", "--sm", "90", "--", *command, "-s")
    return subprocess.run(command, env=clean, capture_output=True, text=True)


def first_failure(folder, mutant):
    """A test that fails, or how the tests end; None if all pass. The kit goes first: it guards the kernels."""
    kit = "fusednorm.conformance.test_"
    first = [kit + name for name in ("forward", "one_rule", "golden", "gradients")]
    never = ("test_install.py", "test_mutations.py")  # the second would notice the change of the text itself
    others = [path for path in sorted(folder.glob("tests/test_*.py")) if path.name not in never]
    if mutant.backend:  # interpreted: the quickest first
        first = [kit + name for name in ("golden", "gradients", "forward", "one_rule", "norm_before_add")]
        others = []
        if mutant.backend == "cuda":
            first = [folder / "tests/test_cuda_launch.py", *first]
    elif mutant.fault.partition(":")[0] in ONE_FILE:
        first, others = list(folder.glob(f"tests/**/test_{mutant.fault.partition(':')[0].lower()}.py")), []
    done = run_tests(folder, mutant.backend, dict.fromkeys(map(str, [*first, *others])))
    if done.returncode == 0:
        return None
    found = [line for line in done.stderr.splitlines() if line.startswith("executed PTX:")]
    if found:
        return found[0]
    if done.returncode < 0 or done.returncode > 128:
        return f"the tests die of signal {max(-done.returncode, done.returncode - 128)}"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed:
        sys.exit(f"the tests did not run:\n{done.stdout}{done.stderr}")
    return failed[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", default=[])
    only = parser.parse_args().only or [""]
    chosen = [m for m in MUTANTS if any(text in m.fault for text in only)]
    survivors, killers = 0, set()
    if wrong := misplaced(chosen):  # before the first is built, which takes a while
        sys.exit("\n".join(wrong))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mutant in chosen:
            build(mutant, folder)
            killer = first_failure(folder, mutant)
            survivors += killer is None
            if killer and "::" in killer:
                killers.add((mutant.backend, killer.partition("[")[0]))
            how = "SURVIVED" if killer is None else "caught"
            print(f"{how}: {mutant.promise}: {mutant.fault}: {(killer or '').split('/')[-1]}", flush=True)
        build(None, folder)
        broken = [test for backend, test in sorted(killers) if run_tests(folder, backend, [test]).returncode]
    for test in broken:
        print(f"{test} fails without a mutant too, and shows nothing")
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return int(bool(survivors or broken))


if __name__ == "__main__":
    sys.exit(main())
