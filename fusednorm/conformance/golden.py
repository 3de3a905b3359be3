"""Writes the golden vectors: small inputs and the bits that every backend must return.

    python -P -m fusednorm.conformance.golden

The file's name has SPEC_VERSION. Bits may change only together with that number, and then in a new file. The reference
computes them. The script refuses to write if the oracle, which shares no code with the reference, has other values.
"""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import torch

import fusednorm
from fusednorm.conformance import oracle, oracle_gated, oracle_quantized
from fusednorm.conformance.cases import (
    BF16,
    F16,
    F32,
    F64,
    INTEGERS,
    Case,
    differing,
    dtype_name,
    listed,
    operands,
    pairwise,
)

FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}

CASES = [
    Case(2, hidden, dtype, residual, weight, None, 1e-5, offset, round_sum, round_norm, data)
    for hidden, dtype, residual, weight, offset, round_sum, round_norm, data in (
        (1, BF16, BF16, BF16, 0.0, True, False, "normal"),
        (5, F16, F16, F16, 0.0, True, False, "normal"),
        (33, F32, F32, F32, 0.0, True, False, "normal"),
        (33, F64, F64, F64, 0.0, True, False, "normal"),
        (128, BF16, None, None, 0.0, True, False, "normal"),
        (130, BF16, F32, BF16, 0.0, True, False, "normal"),
        (130, BF16, BF16, F32, 0.0, True, True, "outliers"),
        (130, F16, BF16, F16, 1.0, False, False, "ties"),
        (130, F16, F16, F32, 1.0, False, True, "ties"),
        (130, F64, F16, BF16, 0.5, True, True, "ties"),
        (64, F16, F16, F16, 0.0, True, False, "overflowing"),
        (64, BF16, BF16, BF16, 0.0, True, False, "subnormal"),
        (64, F32, F32, None, 0.0, True, False, "subnormal"),
        (64, BF16, BF16, BF16, 0.0, True, False, "nan row"),
        (64, F32, F32, F32, 0.0, True, False, "zeros"),
        (896, BF16, BF16, BF16, 0.0, True, False, "normal"),
        (1024, F16, F16, F16, 0.0, True, False, "normal"),
        (1025, F32, BF16, F32, 0.0, True, False, "normal"),
        (2049, BF16, BF16, BF16, 1.0, True, False, "outliers"),
    )
]


def encoded(tensor):
    """dtype, shape, and the bits of each element in hexadecimal, the highest first, row by row."""
    if tensor is None:
        return None
    tensor = tensor.detach().contiguous()
    size = tensor.element_size()
    bits = [v % (1 << 8 * size) for v in tensor.view(INTEGERS[size]).flatten().tolist()]
    shape = list(tensor.shape)
    return {"dtype": dtype_name(tensor.dtype), "shape": shape, "bits": "".join(f"{b:0{2 * size}x}" for b in bits)}


def decoded(value):
    """The tensor that was encoded."""
    if value is None:
        return None
    dtype = getattr(torch, value["dtype"])
    size = torch.empty((), dtype=dtype).element_size()
    words = [int(value["bits"][i : i + 2 * size], 16) for i in range(0, len(value["bits"]), 2 * size)]
    memory = bytearray(struct.pack(f"={len(words)}{FORMATS[size]}", *words))
    return torch.frombuffer(memory, dtype=dtype).reshape(value["shape"]).to(torch.get_default_device())


def results(vector):
    """The results of the current backend from a vector's inputs: outputs and gradients, by name."""
    x, residual, weight, dy, d_residual_out = (
        decoded(vector[name]) for name in ("x", "residual", "weight", "dy", "d_residual_out")
    )
    options = {"weight_offset": vector["weight_offset"], "round_norm": vector["round_norm"]}
    leaves = {"x": x, "residual": residual, "weight": weight}
    leaves = {name: t.requires_grad_() for name, t in leaves.items() if t is not None}
    if residual is None:
        outputs = {"out": fusednorm.rms_norm(x, weight, vector["eps"], **options)}
    else:
        pair = fusednorm.fused_add_rms_norm(
            x, residual, weight, vector["eps"], round_sum=vector["round_sum"], **options
        )
        outputs = dict(zip(("out", "residual_out"), pair, strict=True))
    gradients = torch.autograd.grad(
        tuple(outputs.values()), tuple(leaves.values()), (dy, d_residual_out)[: len(outputs)]
    )
    return outputs | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def vectors():
    """All vectors, computed by the current backend."""
    made = []
    for case in CASES:
        x, residual, weight = operands(case)
        gradient = Case(case.rows, case.hidden, case.x, case.residual, case.weight, seed=1)
        dy, d_residual_out, _ = operands(gradient)
        vector = {
            "data": case.data,
            "eps": case.eps,
            "weight_offset": case.weight_offset,
            "round_sum": case.round_sum,
            "round_norm": case.round_norm,
        }
        inputs = {"x": x, "residual": residual, "weight": weight, "dy": dy, "d_residual_out": d_residual_out}
        vector |= {name: encoded(t) for name, t in inputs.items()}
        vector["expected"] = {name: encoded(t) for name, t in results(vector).items()}
        made.append(vector)
    return made


#: The golden vectors of the compositions.
COMPOSITIONS = Path(__file__).parent / "golden-compositions.json"

#: The operands and the outputs of each composition; each output has a gradient, in the same order.
_NAMES = {
    "rms_norm": (("x", "weight", "bias"), ("out",)),
    "fused_add_rms_norm": (("x", "residual", "weight", "bias"), ("out", "residual_out")),
    "rms_norm_add": (("x", "residual", "weight"), ("residual_out",)),
    "rms_norm_add_rms_norm": (("x", "residual", "weight", "next_weight"), ("out", "residual_out")),
    "qk_norm_rope": (("q", "k", "q_weight", "k_weight", "cos", "sin"), ("q_out", "k_out")),
}


def _dtypes(flags):
    """Flags of a vector as a call takes them."""
    return {**flags, "between": getattr(torch, flags["between"])} if flags.get("between") else flags


def results_of_composition(vector):
    """The results of a composition on the current backend: outputs and gradients, by name."""
    names, outputs = _NAMES[vector["function"]]
    leaves = {name: decoded(vector[name]) for name in names}
    tables = ("cos", "sin")  # which have no gradients
    present = {name: t.requires_grad_() for name, t in leaves.items() if t is not None and name not in tables}
    found = getattr(fusednorm, vector["function"])(**leaves, **_dtypes(vector["flags"]))
    found = dict(zip(outputs, listed(found), strict=True))
    incoming = [decoded(vector[f"d_{name}"]) for name in outputs]
    gradients = torch.autograd.grad(tuple(found.values()), tuple(present.values()), incoming)
    return found | {f"d_{name}": gradient for name, gradient in zip(present, gradients, strict=True)}


def _composition_cases():
    """Function, case, heads of the weight and of the bias (0: one row for all), and the flags that a case lacks."""
    for case, between, next_eps in (
        (Case(2, 33).of(BF16), None, 1e-6),
        (Case(2, 33).of(BF16), "float32", 1e-3),
        (Case(2, 130, F16, F16, F32, weight_offset=1.0, data="ties"), "float32", 1e-6),
        (Case(2, 130, BF16, F32, BF16, round_norm=True), None, 1e-6),
        (Case(2, 100, F16, BF16, None, round_sum=False), None, 1e-5),
        (Case(2, 1025).of(F32), None, 1e-6),
        (Case(2, 70, F64, F16, F32, weight_offset=0.5), None, 1e-6),
        (Case(2, 64, data="nan row").of(BF16), None, 1e-6),
        (Case(2, 64, data="zeros").of(F32), None, 0.0),
    ):
        flags = {"between": between, "next_eps": next_eps, "round_sum": case.round_sum}
        yield "rms_norm_add_rms_norm", case, 0, 0, flags
        yield "rms_norm_add", case, 0, 0, {"between": between}
    for case, weight_heads, bias_heads, x_scale in (
        (Case(4, 33).of(BF16), 0, 0, 1.0),
        (Case(4, 33, BF16, F32, F16, round_norm=True), 2, 0, 0.22),
        (Case(4, 130).of(F16, weight_offset=1.0, data="ties"), 2, 2, 0.5),
        (Case(4, 40).of(F32, round_sum=False), 0, 2, 3.0),
        (Case(4, 70, F64, F16, None), 0, 0, 0.1),
        (Case(4, 64, data="nan row").of(BF16), 2, 2, 1.0),
    ):
        yield "fused_add_rms_norm", case, weight_heads, bias_heads, {"round_sum": case.round_sum, "x_scale": x_scale}
        yield "rms_norm", replace(case, residual=None), weight_heads, bias_heads, {}


def _rows(case, heads, seed):
    """A weight or a bias."""
    rows = [operands(Case(case.rows, case.hidden, weight=case.weight, seed=seed + k))[2] for k in range(heads or 1)]
    return rows[0] if not heads else torch.stack(rows)


def vectors_of_compositions():
    """All vectors of compositions, computed by the current backend; none that the oracle contradicts."""
    made = []
    for function, case, weight_heads, bias_heads, flags in _composition_cases():
        names, outputs = _NAMES[function]
        x, residual, weight = operands(case)
        inputs = {"x": x, "residual": residual, "weight": weight, "next_weight": _rows(case, 0, 2), "bias": None}
        if "bias" in names:
            inputs["weight"] = None if weight is None else _rows(case, weight_heads, 10)
            inputs["bias"] = _rows(replace(case, weight=case.weight or F32), bias_heads, 20)
        d_out, d_residual_out, _ = operands(Case(case.rows, case.hidden, case.x, case.residual, seed=1))
        incoming = {"d_out": d_out, "d_residual_out": d_residual_out}
        if weight_heads or bias_heads:
            rows = {**inputs, **incoming}
            rows = {name: t.unflatten(0, (-1, 2)) for name, t in rows.items() if t is not None and t.shape == x.shape}
            inputs = {name: rows.get(name, t) for name, t in inputs.items()}
            incoming = {name: rows.get(name, t) for name, t in incoming.items()}
        inputs = {name: inputs[name] for name in names}
        incoming = {f"d_{name}": incoming[f"d_{name}"] for name in outputs}
        flags = {"eps": case.eps, "weight_offset": case.weight_offset, "round_norm": case.round_norm, **flags}
        made.append(_vector_of_composition(function, flags, inputs, incoming))
    return [*made, *_vectors_of_rotations()]


def _vectors_of_rotations():
    """q and k of two rows, 2 heads and 1, with partial rotation in some."""
    for dtype, table, size, pairs, data, flags in (
        (BF16, BF16, 16, 8, "normal", {"round_norm": True, "round_products": True}),
        (BF16, F32, 16, 8, "normal", {"between": "float32"}),
        (F16, F16, 10, 3, "ties", {"interleaved": True, "weight_offset": 1.0}),
        (F16, F32, 34, 17, "overflowing", {"norm": False}),
        (F32, BF16, 12, 6, "normal", {"interleaved": True}),
        (F64, F32, 12, 4, "normal", {}),
        (BF16, F32, 8, 4, "nan row", {"between": "float32", "round_products": True}),
    ):
        q, _, q_weight = operands(Case(4, size, data=data).of(dtype))
        k, _, k_weight = operands(Case(2, size, data=data, seed=1).of(dtype))
        dq, dk, _ = operands(Case(4, size, seed=2).of(dtype))
        cos, sin, _ = operands(Case(2, pairs, seed=3).of(table))
        if not flags.get("norm", True):
            q_weight = k_weight = None
        inputs = {"q": q.view(2, 2, size), "k": k.view(2, 1, size), "q_weight": q_weight, "k_weight": k_weight}
        incoming = {"d_q_out": dq.view(2, 2, size), "d_k_out": dk[:2].view(2, 1, size)}
        flags = {"eps": 1e-6, **flags}
        yield _vector_of_composition("qk_norm_rope", flags, {**inputs, "cos": cos, "sin": sin}, incoming)


def _vector_of_composition(function, flags, inputs, incoming):
    """A vector, computed by the current backend, unless the oracle contradicts it."""
    vector = {"function": function, "flags": flags}
    vector |= {name: encoded(t) for name, t in {**inputs, **incoming}.items()}
    found = results_of_composition(vector)
    wanted = oracle.of_composition(function, inputs, tuple(incoming.values()), _dtypes(flags))
    for (name, got), array in zip(found.items(), wanted, strict=True):
        if differing(got.detach().double(), torch.from_numpy(array)).any():
            sys.exit(f"{function}, {flags}: the oracle has other values for {name}; nothing was written")
    return vector | {"expected": {name: encoded(t) for name, t in found.items()}}


#: The golden vectors of quantized rows.
QUANTIZED = Path(__file__).parent / "golden-quantized.json"


def results_of_quantized(vector):
    """The results of ``fused_add_rms_norm_quant`` on the current backend, by name; numbers as bytes."""
    inputs = {name: decoded(vector[name]) for name in ("x", "residual", "weight", "scale", "zero_point")}
    quantization = fusednorm.Quantization.parse(vector["quantization"])
    found = fusednorm.fused_add_rms_norm_quant(**inputs, quantization=quantization, **_dtypes(vector["flags"]))
    names = ["out", "scale", *["zero_point"] * (len(found) == 4), "residual_out"]
    results = dict(zip(names, found, strict=True))
    return results | {"out": results["out"].view(torch.uint8)}


def vectors_of_quantized():
    """A vector for each preset, computed by the current backend; none that the oracle contradicts."""
    made = []
    presets = {str(q): q for q in vars(fusednorm.quantizations).values() if isinstance(q, fusednorm.Quantization)}
    flags = [{"between": None}, {"between": "float32", "round_norm": True}, {"between": None, "round_sum": False}]
    for index, (text, quantization) in enumerate(presets.items()):
        case = Case(3, 128, (BF16, F16)[index % 2], (F32, BF16)[index // 2 % 2], F32, data="outliers", seed=index)
        x, residual, weight = operands(case)
        x[1], residual[1] = 0, 0
        static = quantization.per == "tensor"
        inputs = {"x": x, "residual": residual, "weight": weight}
        more = {
            "scale": torch.tensor([0.0371]) if static else None,
            "zero_point": torch.tensor([-7], dtype=torch.int32) if static and quantization.zero_point else None,
        }
        vector = {"quantization": text, "flags": {"eps": 1e-6, **flags[index % 3]}}
        vector |= {name: encoded(t) for name, t in {**inputs, **more}.items()}
        found = results_of_quantized(vector)
        wanted = oracle_quantized.after_norm(
            *inputs.values(), quantization=quantization, **_dtypes(vector["flags"]), **more
        )
        wanted = dict(zip(("out", "scale", "zero_point", "rows", "residual_out"), wanted, strict=True))
        for name, got in found.items():
            if differing(got.double(), torch.from_numpy(wanted[name]).double()).any():
                sys.exit(f"{text}: the oracle has other values for {name}; nothing was written")
        made.append(vector | {"expected": {name: encoded(t) for name, t in found.items()}})
    return made


#: The golden vectors of gates.
GATED = Path(__file__).parent / "golden-gated.json"

_GATES = {
    "gate": ("y", "z"),
    "silu_and_mul": ("gate", "up"),
    "gelu_tanh_and_mul": ("gate", "up"),
    "rms_norm_gated": ("x", "gate", "weight"),
    "silu_and_mul_quant": ("gate", "up"),
}


def results_of_gated(vector):
    """The result of a gate on the current backend, and its gradients, by name; numbers of 8 bits as bytes."""
    function, flags = getattr(fusednorm, vector["function"]), _dtypes(vector["flags"])
    operands_ = {name: decoded(vector[name]) for name in _GATES[vector["function"]]}
    if function is fusednorm.silu_and_mul_quant:
        out, scale = function(**operands_, quantization=fusednorm.Quantization.parse(vector["quantization"]), **flags)
        return {"out": out.view(torch.uint8), "scale": scale}
    leaves = {name: t.requires_grad_() for name, t in operands_.items() if t is not None}
    out = function(**operands_, **flags)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), decoded(vector["d_out"]))
    return {"out": out.detach()} | {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _gate_cases():
    """Function, dtypes of both operands, factor of the gate, and flags."""
    for activation in ("silu", "sigmoid", "gelu_tanh"):
        for (y, z), factor in zip(((BF16, BF16), (F16, F32), (F32, BF16), (F64, F64)), (2, 20, 60, 400), strict=True):
            yield "gate", y, z, factor, {"activation": activation}
    for function in ("silu_and_mul", "gelu_tanh_and_mul"):
        for (gate, up), between in zip(((BF16, BF16), (F16, F16), (BF16, F32)), (None, "float32", None), strict=True):
            yield function, gate, up, 3, {"between": between}


def vectors_of_gated():
    """All vectors of gates, computed by the current backend; none that the oracle contradicts."""
    made = []
    for function, first, second, factor, flags in _gate_cases():
        x, residual, _ = operands(Case(2, 45, first, second))
        inputs = dict(zip(_GATES[function], (x, residual), strict=True))
        gate = "z" if function == "gate" else "gate"
        inputs[gate] = inputs[gate] * factor
        inputs["d_out"] = operands(Case(2, 45, first, seed=1))[0]
        vector = {"function": function, "flags": flags, **{name: encoded(t) for name, t in inputs.items()}}
        between = None if function == "gate" or flags["between"] else first
        activation = flags.get("activation") or function.removesuffix("_and_mul")
        wanted = oracle_gated.gated(
            inputs.get("y", inputs.get("up")), inputs[gate], activation, between, first, inputs["d_out"]
        )
        names = ("out", "d_y", "d_z") if function == "gate" else ("out", "d_up", "d_gate")
        made.append(_vector_of_gated(vector, dict(zip(names, wanted, strict=True))))
    made += [_vector_of_norm_gated(*case) for case in _norm_gated_cases()]
    return [*made, *_vectors_of_quantized_gates()]


def _norm_gated_cases():
    """Dtypes of the rows, the gate and the weight, the activation, and all flags: any two of them stand together."""
    flags = {
        "activation": ("silu", "sigmoid", "gelu_tanh"),
        "round_norm": (False, True),
        "group_size": (None, 15, 45),
        "weight_offset": (0.0, 1.0),
    }
    dtypes = ((BF16, BF16, BF16), (F16, F32, None), (F32, BF16, F32), (BF16, F32, F32))
    orders = ((True, None), (True, "float32"), (False, None))
    wide = (
        ((F64, F64, F16), (True, None), "silu", False, 15, 1.0),
        ((F64, F32, F64), (False, None), "sigmoid", True, None, 0.0),
    )
    for kinds, (first, between), *values in (*pairwise(dtypes, orders, *flags.values()), *wide):
        yield kinds, {"norm_before_gate": first, "between": between, **dict(zip(flags, values, strict=True))}


def _vector_of_norm_gated(kinds, flags):
    """A vector of ``rms_norm_gated``, unless the oracle contradicts it."""
    x, gate, weight = operands(Case(2, 45, *kinds))
    d = operands(Case(2, 45, kinds[0], seed=1))[0]
    inputs = {"x": x, "gate": gate * 4, "weight": weight, "d_out": d}
    flags = {"eps": 1e-6, **flags}
    vector = {"function": "rms_norm_gated", "flags": flags, **{name: encoded(t) for name, t in inputs.items()}}
    wanted = oracle_gated.rms_norm_gated(x, inputs["gate"], weight, d, **_dtypes(flags))
    return _vector_of_gated(vector, dict(zip(("out", "d_x", "d_gate", "d_weight"), wanted, strict=True)))


def _vectors_of_quantized_gates():
    """Vectors of ``silu_and_mul_quant``: rows, groups and a given scale, unless the oracle contradicts one."""
    for text, dtype, between in (
        ("VLLM_FP8_TOKEN", BF16, None),
        ("VLLM_FP8_TOKEN", BF16, "float32"),
        ("SGLANG_FP8_BLOCK", F16, None),
        ("VLLM_INT8_TOKEN_FUSED", F32, "float32"),
    ):
        quantization = getattr(fusednorm.quantizations, text)
        gate, up, _ = operands(Case(2, 128).of(dtype))
        inputs = {"gate": gate * 3, "up": up}
        vector = {"function": "silu_and_mul_quant", "quantization": str(quantization), "flags": {"between": between}}
        vector |= {name: encoded(t) for name, t in inputs.items()}
        passed = None if between or dtype == F32 else dtype
        (product,) = oracle_gated.gated(up, inputs["gate"], "silu", passed, F32 if between else dtype)
        out, scale, _ = oracle_quantized.quantized(product, quantization)
        yield _vector_of_gated(vector, {"out": torch.from_numpy(out), "scale": torch.from_numpy(scale)})


def _vector_of_gated(vector, wanted):
    """A vector, computed by the current backend, unless the oracle has other values; of None it has none."""
    found = results_of_gated(vector)
    for name, tensor in wanted.items():
        if tensor is not None and differing(found[name].double(), tensor.double()).any():
            about = f"{vector['function']} {vector['flags']}"
            sys.exit(f"{about}: the oracle has other values for {name}; nothing was written")
    return vector | {"expected": {name: encoded(t) for name, t in found.items()}}


def contradictions(vector):
    """The names of the expected tensors for which the oracle has other values."""
    x, residual, weight, dy, d_residual_out = (
        decoded(vector[name]) for name in ("x", "residual", "weight", "dy", "d_residual_out")
    )
    options = (vector["eps"], vector["weight_offset"], vector["round_sum"], vector["round_norm"])
    y, total, rstd, h = oracle.forward(x, residual, weight, *options)
    residual_dtype = None if residual is None else residual.dtype
    gradients = oracle.backward(dy, d_residual_out, h, rstd, weight, vector["weight_offset"], x.dtype, residual_dtype)
    other = dict(zip(("out", "residual_out", "d_x", "d_residual", "d_weight"), (y, total, *gradients), strict=True))
    return [
        name
        for name, value in vector["expected"].items()
        if differing(decoded(value).double(), torch.from_numpy(other[name])).any()
    ]


def path(version):
    return Path(__file__).parent / f"golden-spec-{version}.json"


def main():
    with fusednorm.use_backend("reference"):
        made = vectors()
    for case, vector in zip(CASES, made, strict=True):
        if wrong := contradictions(vector):
            sys.exit(f"{case}: the oracle has other values for {', '.join(wrong)}; nothing was written")
    with fusednorm.use_backend("reference"):
        compositions = vectors_of_compositions()
        quantized = vectors_of_quantized()
        gated = vectors_of_gated()
    written = {path(fusednorm.SPEC_VERSION): made, COMPOSITIONS: compositions, QUANTIZED: quantized, GATED: gated}
    for file, of_file in written.items():  # one vector a line
        file.write_text("[\n" + ",\n".join(map(json.dumps, of_file)) + "\n]\n")


if __name__ == "__main__":
    main()
