"""Writes the golden vectors: small inputs and the bits that every backend must return.

    python -P -m fusednorm.conformance.golden

Bits may change only together with SPEC_VERSION. So the vectors that a file has stay in their lines, and new ones come
at its end, wherever their cases are below; the script refuses to write if a vector that is there would change. The
reference computes the bits. The script also refuses if the oracle, which shares no code with the reference, has others.
"""

import inspect
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import fusednorm
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.conformance import oracle_quantized
from fusednorm.conformance.cases import (
    BF16,
    F16,
    F32,
    F64,
    INTEGERS,
    NAMES,
    OPERATIONS,
    Case,
    bytes_of,
    differing,
    dtype_name,
    incoming_of,
    of_oracle,
    operands,
    pairwise,
    recorded,
    weights_of,
)
from fusednorm.reference import norm as reference

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
    """dtype, shape, and the highest byte of each element, row by row, then the next byte of each, and so on."""
    if tensor is None:
        return None
    integers = tensor.detach().contiguous().view(INTEGERS[tensor.itemsize]).numpy()
    elements = integers.astype(integers.dtype.newbyteorder(">")).tobytes()
    places = np.frombuffer(elements, np.uint8).reshape(-1, tensor.itemsize).T
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "bits": places.tobytes()}


def decoded(value):
    """The tensor that was encoded."""
    if value is None:
        return None
    dtype = getattr(torch, value["dtype"])
    places = np.frombuffer(value["bits"], np.uint8).reshape(dtype.itemsize, -1)
    integers = np.frombuffer(places.T.tobytes(), f">i{dtype.itemsize}").astype(f"i{dtype.itemsize}")
    return torch.from_numpy(integers).view(dtype).reshape(value["shape"]).to(torch.get_default_device())


_FOLDER = Path(__file__).parent
SPECIFICATION = _FOLDER / f"golden-spec-{fusednorm.SPEC_VERSION}.json"
COMPOSITIONS, QUANTIZED, GATED, LOG_PROB, PRODUCTS, ATTENTION = (
    _FOLDER / f"golden-{name}.json"
    for name in ("compositions", "quantized", "gated", "log-prob", "products", "attention")
)


def function_of(vector):
    """The name of a vector's function."""
    if "flags" not in vector:
        return "rms_norm" if vector["residual"] is None else "fused_add_rms_norm"
    return vector.get("function", "fused_add_rms_norm_quant")


def _call(vector):
    """The function of a vector, its operands by name, the gradients of its outputs, and its flags."""
    function = function_of(vector)
    if "flags" not in vector:  # of the specification: it names its function, flags and gradients otherwise
        names = ("eps", "weight_offset", "round_norm", *([] if vector["residual"] is None else ["round_sum"]))
        flags = {name: vector[name] for name in names}
        vector = {**vector, "function": function, "flags": flags, "d_out": vector["dy"]}
    flags, (names, outputs) = dict(vector["flags"]), NAMES[function]
    flags |= {name: getattr(torch, flags[name]) for name in ("between", "out_dtype") if flags.get(name)}
    operands = {name: decoded(vector.get(name)) for name in names}
    if "quantization" in vector:
        flags["quantization"] = fusednorm.Quantization.parse(vector["quantization"])
        return function, operands, (), flags
    if not (OPERATIONS[function].exact_gradients and OPERATIONS[function].differentiable):
        return function, operands, (), flags
    return function, operands, [decoded(vector[f"d_{name}"]) for name in outputs], flags


def results(vector):
    """The current backend's results from a vector's inputs, by name: outputs (8 bits as bytes) and gradients."""
    function, operands, incoming, flags = _call(vector)
    if "quantization" not in flags:
        return recorded(function, operands, incoming, **flags)
    found, outputs = getattr(fusednorm, function)(**operands, **flags), NAMES[function][1]
    if len(found) > len(outputs):
        outputs = (*outputs[:2], "zero_point", *outputs[2:])
    return dict(zip(outputs, bytes_of(found), strict=True))


def of_oracles(vector):
    """The oracle's results from a vector's inputs, by name, as tensors or arrays."""
    function, operands, incoming, flags = _call(vector)
    if "quantization" not in flags:
        return of_oracle(function, operands, incoming, **flags)
    found = getattr(oracle_quantized, function)(**operands, **flags)
    return dict(zip(("out", "scale", "zero_point", "rows", "residual_out"), found, strict=False))


def read(file):
    """The vectors of a file. A tensor stands there once, with a number, and from then on the number alone.

    Beside it, a file `.bits` has the tensors' bits, so that they compress best: of all tensors, by their numbers, the
    highest bytes, and then the other ones.
    """
    tensors = {}

    def whole(value):
        return tensors.setdefault(value.pop("tensor"), value) if "tensor" in value else value

    vectors = json.loads(file.read_text(), object_hook=whole)
    bits = io.BytesIO(file.with_suffix(".bits").read_bytes())
    highest = [bits.read(math.prod(value["shape"])) for value in tensors.values()]
    for value, high in zip(tensors.values(), highest, strict=True):
        value["bits"] = high + bits.read(len(high) * (getattr(torch, value["dtype"]).itemsize - 1))
    return vectors


def write(file, vectors):
    """Writes files that `read` reads: one vector a line. Vectors that are added at its end change no line."""
    tensors = {}

    def once(value):
        if not isinstance(value, dict):
            return value
        if "bits" not in value:
            return {name: once(part) for name, part in value.items()}
        key = (value["dtype"], tuple(value["shape"]), value["bits"])
        if key in tensors:
            return {"tensor": tensors[key]}
        tensors[key] = len(tensors)
        return {"tensor": tensors[key], "dtype": value["dtype"], "shape": value["shape"]}

    file.write_text("[\n" + ",\n".join(json.dumps(once(vector)) for vector in vectors) + "\n]\n")
    parts = [(bits[: math.prod(shape)], bits[math.prod(shape) :]) for _, shape, bits in tensors]
    file.with_suffix(".bits").write_bytes(b"".join(high for high, _ in parts) + b"".join(low for _, low in parts))


def in_lines(name, there, made):
    """The vectors of a file, those that are there in their order, then the others of those that its function made.

    It ends the process if one that is there was not made again, with the same inputs and bits.
    """
    if gone := [at for at, vector in enumerate(there, 2) if vector not in made]:
        sys.exit(
            f"{name}: no case makes the inputs and bits of line {gone[0]} any more, nor of {len(gone) - 1} others; "
            "nothing was written. Leave cases that are there as they are, or remove the file for a new SPEC_VERSION"
        )
    return there + [vector for vector in made if vector not in there]


def compare(vector, agree):
    """Compares outputs and gradients of the current backend with a vector's."""
    for name, tensor in results(vector).items():
        agree(tensor, decoded(vector["expected"][name]), name)


def contradictions(vector):
    """The names of the expected tensors for which the oracle has other values."""
    other = of_oracles(vector)
    return [
        name
        for name, value in vector["expected"].items()
        if differing(decoded(value).double(), torch.as_tensor(other[name]).double()).any()
    ]


def _vector(fields, tensors):
    """A vector with the current backend's results, unless the oracle's are others."""
    vector = {**fields, **{name: encoded(tensor) for name, tensor in tensors.items()}}
    vector["expected"] = {name: encoded(tensor) for name, tensor in results(vector).items()}
    if wrong := contradictions(vector):
        sys.exit(f"{fields}: the oracle has other values for {', '.join(wrong)}; nothing was written")
    return vector


def vectors():
    """The vectors of the specification, as all below computed by the current backend."""
    for case in CASES:
        x, residual, weight = operands(case)
        gradient = Case(case.rows, case.hidden, case.x, case.residual, case.weight, seed=1)
        dy, d_residual_out, _ = operands(gradient)
        flags = {name: getattr(case, name) for name in ("data", "eps", "weight_offset", "round_sum", "round_norm")}
        inputs = {"x": x, "residual": residual, "weight": weight, "dy": dy, "d_residual_out": d_residual_out}
        yield _vector(flags, inputs)


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
    for case, weight_heads, bias_heads in (
        (Case(4, 33).of(BF16), 0, 0),
        (Case(2, 33, BF16, F32, F16, round_norm=True, data="large"), 2, 0),
        (Case(2, 70).of(F16, weight_offset=1.0, data="ties"), 2, 2),
        (Case(2, 40).of(F32, round_sum=False), 0, 2),
        (Case(2, 20, F64, F16, None), 0, 0),
        (Case(2, 32, data="nan row").of(BF16), 2, 2),
    ):
        yield "fused_add_layer_norm", case, weight_heads, bias_heads, {"round_sum": case.round_sum}
        yield "layer_norm", replace(case, residual=None), weight_heads, bias_heads, {}
    yield "layer_norm", Case(1, 1026, F32, None, BF16), 0, 0, {}


def vectors_of_compositions():
    """The vectors of compositions."""
    for function, case, weight_heads, bias_heads, flags in _composition_cases():
        names, outputs = NAMES[function]
        x, residual, weight = operands(case)
        d_out, d_residual_out, _ = operands(Case(case.rows, case.hidden, case.x, case.residual, seed=1))
        rows = {"x": x, "residual": residual, "d_out": d_out, "d_residual_out": d_residual_out}
        if weight_heads or bias_heads:
            rows = {name: t if t is None else t.unflatten(0, (-1, 2)) for name, t in rows.items()}
        weights = {"weight": weight, "next_weight": weights_of(case, 0, 2)}
        if "bias" in names:
            weights["weight"] = weights_of(case, weight_heads, 10)
            weights["bias"] = weights_of(replace(case, weight=case.weight or F32), bias_heads, 20)
        tensors = {name: (rows | weights)[name] for name in (*names, *(f"d_{output}" for output in outputs))}
        flags = {"eps": case.eps, "weight_offset": case.weight_offset, "round_norm": case.round_norm, **flags}
        known = inspect.signature(getattr(fusednorm, function)).parameters
        flags = {name: value for name, value in flags.items() if name in known}
        yield _vector({"function": function, "flags": flags}, tensors)
    yield from _vectors_of_rotations()
    yield from _vectors_of_modulations()
    for dtype, hidden, data in ((BF16, 64, "normal"), (F16, 45, "ties"), (F32, 100, "normal"), (F64, 33, "zeros")):
        inputs = {name: operands(Case(2, hidden, dtype, data=data, seed=n))[0] for n, name in enumerate(("x", "d_out"))}
        yield _vector({"function": "l2_norm", "flags": {"eps": 1e-6}}, inputs)


def _vectors_of_modulations():
    """Three rows of two samples, which scale and shift have a row for, or for each row."""
    for case, of_samples, round_steps in (
        (Case(6, 33).of(BF16), (True, True), False),
        (Case(6, 40, BF16, F32, F32), (True, False), True),
        (Case(6, 20).of(F16), (False, True), True),
        (Case(6, 5, F64, F16, F32), (True, True), False),
    ):
        y, scale, _ = operands(case)
        _, shift, _ = operands(replace(case, seed=4))
        d_out = operands(replace(case, seed=1))[0]
        rows = [t.view(2, 3, -1) for t in (y, scale, shift, d_out)]
        given = [t[:, 0] if alike else t for t, alike in zip(rows[1:3], of_samples, strict=True)]
        tensors = {"y": rows[0], "scale": given[0], "shift": given[1], "d_out": rows[3]}
        yield _vector({"function": "modulate", "flags": {"round_steps": round_steps}}, tensors)


def _vectors_of_rotations():
    """Two heads of two rows; q and k of two rows, 2 heads and 1; with partial rotation in some."""
    for dtype, table, size, pairs, flags in (
        (BF16, F32, 16, 8, {}),
        (F16, F16, 10, 3, {"round_products": True}),
        (F32, BF16, 12, 6, {"interleaved": True}),
        (F64, F64, 8, 4, {}),
    ):
        x, d_out = (operands(Case(4, size, dtype, seed=seed))[0].view(2, 2, size) for seed in (0, 1))
        cos, sin, _ = operands(Case(2, pairs, seed=3).of(table))
        yield _vector({"function": "rotate", "flags": flags}, {"x": x, "cos": cos, "sin": sin, "d_out": d_out})
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
        fields = {"function": "qk_norm_rope", "flags": {"eps": 1e-6, **flags}}
        yield _vector(fields, {**inputs, "cos": cos, "sin": sin, **incoming})


#: The presets, each with a number that decides its rows, dtypes and flags, and stays.
PRESETS = {
    "VLLM_INT8_TOKEN_UNFUSED": 0,
    "VLLM_INT8_TOKEN_AZP_UNFUSED": 1,
    "VLLM_INT8_TOKEN_FUSED": 2,
    "VLLM_INT8_TOKEN_CPU": 3,
    "VLLM_INT8_TOKEN_AZP_CPU": 4,
    "VLLM_INT8_STATIC": 5,
    "VLLM_INT8_STATIC_CPU": 6,
    "VLLM_INT8_STATIC_AZP": 7,
    "VLLM_INT8_STATIC_AZP_CPU": 8,
    "VLLM_FP8_STATIC": 9,
    "VLLM_FP8_TOKEN": 10,
    "VLLM_FP8_BLOCK_FUSED": 11,
    "VLLM_FP8_BLOCK_UNFUSED": 12,
    "DEEPGEMM_FP8_BLOCK": 13,
    "SGLANG_FP8_BLOCK": 14,
    "SGLANG_INT8_TOKEN_CPU": 15,
    "TENSORRT_LLM_FP8_TOKEN": 16,
    "TORCHAO_FP8_ROW": 17,
    "SGLANG_FP8_TOKEN": 18,
    "VLLM_FP8_BLOCK_UE8M0": 19,
    "DEEPGEMM_FP8_BLOCK_UE8M0": 20,
    "SGLANG_FP8_BLOCK_UE8M0": 21,
    "DEEPGEMM_FP8_BLOCK_PACKED": 22,
    "DEEPSEEK_V4_FP8_BLOCK": 23,
}


def vectors_of_quantized():
    """A vector for each preset, and some for each function that quantizes."""
    flags = [{"between": None}, {"between": "float32", "round_norm": True}, {"between": None, "round_sum": False}]
    for preset, index in PRESETS.items():
        quantization = getattr(fusednorm.quantizations, preset)
        hidden = 640 if quantization.scale_dtype == torch.int32 else 128  # words with and without padding
        case = Case(3, hidden, (BF16, F16)[index % 2], (F32, BF16)[index // 2 % 2], F32, data="outliers", seed=index)
        x, residual, weight = operands(case)
        x[1], residual[1] = 0, 0
        fields = {"quantization": str(quantization), "flags": {"eps": 1e-6, **flags[index % 3]}}
        yield _vector(fields, {"x": x, "residual": residual, "weight": weight, **_scale_given(quantization)})
    for function, case, (preset, changes), flags in _quantizing_cases():
        quantization = replace(getattr(fusednorm.quantizations, preset), **changes)
        x, residual, weight = operands(case)
        bias = weights_of(replace(case, weight=BF16), 0, 20)
        tensors = {"x": x, "y": x, "z": x, "residual": residual, "weight": weight, "bias": bias}
        tensors |= _scale_given(quantization)
        fields = {"function": function, "quantization": str(quantization), "flags": flags}
        yield _vector(fields, {name: tensors[name] for name in NAMES[function][0]})


def _scale_given(quantization):
    """The scale and the zero point that a call needs, or None."""
    static = quantization.per == "tensor"
    return {
        "scale": torch.tensor([0.0371]) if static else None,
        "zero_point": torch.tensor([-7], dtype=torch.int32) if static and quantization.zero_point else None,
    }


def _quantizing_cases():
    """Function, case, a preset with its changes, and flags."""
    per_token, groups, static = ("VLLM_FP8_TOKEN", {}), ("SGLANG_FP8_BLOCK", {"per": 16}), ("VLLM_FP8_STATIC", {})
    azp, static_azp = ("VLLM_INT8_TOKEN_AZP_CPU", {}), ("VLLM_INT8_STATIC_AZP", {})
    int8, wide = ("VLLM_INT8_TOKEN_CPU", {}), {"between": "float32"}
    for dtype, quantization in ((BF16, azp), (F16, groups), (F32, static_azp), (F64, per_token)):
        yield "quantize", Case(2, 48, dtype, data="outliers"), quantization, {}
    of_norms = (
        (Case(2, 48, BF16, F32, BF16), per_token, {}),
        (Case(2, 48, F16, F16, F32), groups, {**wide, "weight_offset": 1.0, "round_norm": True}),
        (Case(2, 45, F32, BF16, F16), azp, {"eps": 1e-3}),
        (Case(2, 45, F64, F32, F64), static, {}),
    )
    for case, quantization, flags in of_norms:
        yield "rms_norm_quant", case, quantization, flags
        yield "layer_norm_quant", case, quantization, flags
        yield "fused_add_layer_norm_quant", case, quantization, {**flags, "round_sum": case.hidden != 45}
    for dtype, quantization, flags in ((BF16, int8, {}), (F16, groups, wide), (F32, static, {}), (F64, per_token, {})):
        yield "relu2_quant", Case(2, 48, dtype, data="nan row"), quantization, flags


def _gate_cases():
    """Function, dtypes of both operands, factor of the gate, and flags."""
    for activation in ACTIVATIONS:
        for (y, z), factor in zip(((BF16, BF16), (F16, F32), (F32, BF16), (F64, F64)), (2, 20, 60, 400), strict=True):
            yield "gate", y, z, factor, {"activation": activation}
    for function in ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"):
        for (gate, up), between in zip(((BF16, BF16), (F16, F16), (BF16, F32)), (None, "float32", None), strict=True):
            yield function, gate, up, 3, {"between": between}


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


def vectors_of_gated():
    """The vectors of gates, of gated norms, and of quantized gates."""
    for function, first, second, factor, flags in _gate_cases():
        x, residual, _ = operands(Case(2, 45, first, second))
        inputs = dict(zip(NAMES[function][0], (x, residual), strict=True))
        gate = "z" if function == "gate" else "gate"
        inputs[gate] = inputs[gate] * factor
        d = operands(Case(2, 45, first, seed=1))[0]
        yield _vector({"function": function, "flags": flags}, {**inputs, "d_out": d})
    for dtypes, flags in _norm_gated_cases():
        x, gate, weight = operands(Case(2, 45, *dtypes))
        d = operands(Case(2, 45, dtypes[0], seed=1))[0]
        inputs = {"x": x, "gate": gate * 4, "weight": weight, "d_out": d}
        yield _vector({"function": "rms_norm_gated", "flags": {"eps": 1e-6, **flags}}, inputs)
    for text, dtype, between in (
        ("VLLM_FP8_TOKEN", BF16, None),
        ("VLLM_FP8_TOKEN", BF16, "float32"),
        ("SGLANG_FP8_BLOCK", F16, None),
        ("VLLM_INT8_TOKEN_FUSED", F32, "float32"),
    ):
        quantization = getattr(fusednorm.quantizations, text)
        gate, up, _ = operands(Case(2, 128).of(dtype))
        fields = {"function": "silu_and_mul_quant", "quantization": str(quantization), "flags": {"between": between}}
        yield _vector(fields, {"gate": gate * 3, "up": up})
    for function, first, second, flags in _stepped_cases():
        x, other, weight = operands(Case(2, 45, first, second or first, F32))
        inputs = OPERATIONS[function].tensors(x * 4, other * 4, weight)
        d = operands(Case(2, 45, first, seed=1))[0]
        yield _vector({"function": function, "flags": flags}, {**inputs, "d_out": d})


def _stepped_cases():
    """Function, dtypes of the operands, and flags: the gates of models, and functions alone."""
    gpt_oss = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    yield "silu_and_mul", BF16, BF16, {**gpt_oss, "round_steps": True}
    yield "silu_and_mul", BF16, BF16, {**gpt_oss, "between": "float32"}
    yield "silu_and_mul", F16, F16, {"limit": 4.1}
    yield "silu_and_mul", F32, BF16, {"limit": 4.1, "clamp": "after"}
    yield "silu_and_mul", F64, F64, gpt_oss
    for function in ("gelu", "relu2"):
        for dtype in (BF16, F16, F32, F64):
            yield function, dtype, None, {}
    for dtype in (BF16, F16, F32, F64):
        yield "softcap", dtype, None, {"cap": 2.5, "round_steps": dtype == BF16}


def vectors_of_log_probabilities():
    """The vectors of the logarithm's operations."""
    several = {"softcap": 3.0, "ignore_index": 7}
    for dtype, hidden, factor, data, flags in (
        (BF16, 45, 4, "normal", {}),
        (BF16, 1030, 4, "normal", several),
        (F16, 45, 8, "inf row", {}),
        (F16, 33, 2, "normal", several),
        (F32, 45, 60, "normal", {}),
        (F32, 100, 4, "normal", several),
        (F64, 45, 4, "normal", {}),
        (F64, 33, 400, "normal", several),
        (F32, 40, 1, "nan row", {"ignore_index": 7}),
        (F32, 1, 1, "normal", {}),
    ):
        case = Case(3, hidden, dtype, dtype, None, data=data)
        logits, other, _ = operands(case)
        logits = logits * factor
        if hidden == 45:  # what an engine does not let a model say
            logits[:, 3:9] = -torch.inf
        ids = torch.tensor([[hidden // 2, 0], [0, 7 if flags else 0], [7 if flags else hidden - 1] * 2])
        temperature = (other[:, 0].abs() + 0.5) if flags else None
        for function, given, more in (
            ("log_softmax", {}, {}),
            ("logsumexp", {}, {}),
            ("selected_log_prob", {"ids": ids, "temperature": temperature}, flags),
            ("selected_log_prob_and_entropy", {"ids": ids[:, 0].int(), "temperature": temperature}, flags),
        ):
            inputs = {"logits": logits, **given}
            incoming = incoming_of(function, inputs)
            inputs |= {f"d_{name}": d for name, d in zip(NAMES[function][1], incoming, strict=True)}
            yield _vector({"function": function, "flags": more}, inputs)


def vectors_of_products():
    """The vectors of products; ``spread``: the least and the greatest exponents of x and of the weight."""
    none = ((0, 0), (0, 0))
    for x_dtype, weight_dtype, bias_dtype, out_dtype, size, columns, spread in (
        (BF16, BF16, BF16, None, 40, 5, none),
        (BF16, BF16, None, F32, 133, 3, ((-4, 4), (-4, 4))),
        (F16, F16, F16, None, 17, 3, none),
        (F16, F16, F32, F32, 70, 2, ((-3, 3), (-3, 3))),
        (F16, BF16, F32, F32, 15, 7, none),
        (F32, F32, F32, None, 33, 5, none),
        (F32, BF16, None, BF16, 16, 1, none),
        (F32, F16, F16, None, 133, 2, none),
        (BF16, F32, F16, F16, 17, 5, none),
        (F64, F64, F64, None, 17, 3, none),
        (F64, F16, F32, F16, 40, 5, ((-12, 2), (-12, 2))),
        (BF16, BF16, BF16, None, 1, 1, none),
        (F32, F16, None, None, 1, 4, none),
        (BF16, BF16, BF16, F32, 40, 5, ((-75, -62), (-75, -62))),  # products that float32 does not hold
        (BF16, BF16, None, F32, 33, 5, ((-85, -60), (-85, -60))),
        (F16, BF16, None, BF16, 33, 3, ((-24, -2), (-125, -110))),
        (BF16, BF16, None, F32, 17, 3, ((-64, 63), (-64, 63))),
        (F32, F32, None, None, 33, 3, ((-80, -60), (-80, -60))),
        (BF16, BF16, BF16, F32, 40, 5, ((60, 65), (60, 65))),  # products and sums beyond float32, of both signs
        (F32, BF16, None, None, 40, 5, ((60, 65), (60, 65))),
        (F16, F16, F16, None, 40, 5, ((7, 10), (3, 6))),
    ):
        generator = torch.Generator().manual_seed(size + columns)
        inputs, of_bias = {}, tuple(a + b for a, b in zip(*spread, strict=True))
        for name, dtype, shape, (least, greatest) in (
            ("x", x_dtype, (2, size), spread[0]),
            ("weight", weight_dtype, (columns, size), spread[1]),
            ("bias", bias_dtype, (columns,), of_bias),
        ):
            normal = torch.randn(shape, generator=generator, dtype=F64)
            scaled = normal * 2.0 ** torch.randint(least, greatest + 1, shape, generator=generator)
            inputs[name] = None if dtype is None else reference.rounded(scaled, dtype)
        yield _vector({"function": "linear", "flags": {"out_dtype": out_dtype and dtype_name(out_dtype)}}, inputs)
    x, weight = torch.zeros(2, 17), torch.zeros(1, 17)
    x[:, 0], x[:, 16], weight[:] = torch.tensor([-(2.0**63), 2.0**63]), 2.0**64, 2.0**64  # only a fused sum is finite
    tensors = {"x": x.bfloat16(), "weight": weight.bfloat16(), "bias": None}
    yield _vector({"function": "linear", "flags": {"out_dtype": None}}, tensors)
    for dtype in (BF16, F16, F32, F64):  # infinities, NaNs and zeros of both signs, each with each
        most = torch.finfo(dtype).max
        first = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, most], dtype=dtype)
        x, weight = (torch.nn.functional.pad(first.unsqueeze(-1), (0, 16), value=other) for other in (1.0, 0.0))
        inputs = {"x": x, "weight": weight, "bias": -first}
        yield _vector({"function": "linear", "flags": {"out_dtype": None}}, inputs)
    for rows, columns, size, bias_dtype, with_zeros, out_dtype in (
        (2, 5, 70, BF16, False, BF16),
        (3, 2, 17, None, True, None),
        (1, 7, 130, F16, True, F16),
        (2, 1, 1, F32, False, None),
    ):
        generator = torch.Generator().manual_seed(size)
        q, weight = (torch.randint(-128, 128, (n, size), generator=generator).to(torch.int8) for n in (rows, columns))
        scale, weight_scale, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 1), columns, columns))
        zero_point = torch.randint(-(2**30), 2**30, (rows, 1), generator=generator).int() if with_zeros else None
        inputs = {"q": q, "scale": scale, "weight": weight, "weight_scale": weight_scale}
        inputs |= {"bias": None if bias_dtype is None else bias.to(bias_dtype), "zero_point": zero_point}
        yield _vector({"function": "int8_linear", "flags": {"out_dtype": out_dtype and dtype_name(out_dtype)}}, inputs)
    q, weight = torch.full((1, 500), -128, dtype=torch.int8), torch.full((1, 500), -128, dtype=torch.int8)
    special = torch.tensor([math.inf, math.nan, -0.0, 2.0**127, 1e-45])  # scales of one row each
    inputs = {"q": q.expand(5, -1).clone(), "scale": special.unsqueeze(-1), "weight": weight}
    inputs |= {"weight_scale": torch.ones(1), "bias": None, "zero_point": None}
    yield _vector({"function": "int8_linear", "flags": {"out_dtype": None}}, inputs)


def vectors_of_attention():
    """The vectors of attention: of few queries and keys, of keys in pages, and of what is not finite."""
    usual = {"scale": None, "causal": True, "window": None, "softcap": None}
    for dtype, heads, kv_heads, queries, keys, size, values, flags, masked in (
        (BF16, 2, 1, 3, 5, 8, 8, {}, False),
        (F16, 2, 2, 2, 7, 5, 3, {"scale": 0.3}, True),
        (F32, 3, 1, 2, 9, 4, 2, {"window": 3}, False),
        (F32, 1, 1, 3, 6, 7, 4, {"causal": False, "window": 2}, True),
        (BF16, 2, 1, 2, 6, 4, 4, {"softcap": 1.5}, True),
        (F64, 2, 1, 2, 5, 3, 3, {"softcap": 4.0}, True),
        (BF16, 1, 1, 1, 131, 2, 2, {}, False),  # two blocks of keys
        (F32, 1, 1, 4, 2, 3, 2, {}, False),  # more queries than keys: the first ones see none
    ):
        normal = torch.Generator().manual_seed(keys * size)
        q, k, v = (
            reference.rounded(2 * torch.randn(shape, generator=normal, dtype=F64), dtype)
            for shape in ((1, heads, queries, size), (1, kv_heads, keys, size), (1, kv_heads, keys, values))
        )
        sinks = torch.randn(heads, generator=normal) if masked else None
        mask = torch.rand((1, 1, queries, keys), generator=normal) > 0.4 if masked else None
        fields = {"function": "attention", "flags": usual | flags}
        yield _vector(fields, {"q": q, "k": k, "v": v, "sinks": sinks, "mask": mask})
    for flags in (usual, usual | {"window": 2}):
        q, k, v = (operands(Case(rows, 4, seed=rows).of(BF16))[0] for rows in (10, 12, 24))
        places = {"pages": torch.tensor([[2, 0], [1, -1]]), "starts": torch.tensor([1, 2, 4])}
        inputs = {"q": q.view(5, 2, 4), "k": k.view(3, 1, 4, 4), "v": v[:12].view(3, 1, 4, 4), **places}
        fields = {"function": "paged_attention", "flags": flags}
        yield _vector(fields, inputs | {"lengths": torch.tensor([6, 3]), "sinks": None})
    for dtype in (BF16, F16, F32, F64):  # of one query, scores and values that are not finite, or 0
        q, k = torch.ones(1, 6, 1, 1, dtype=dtype), torch.zeros(1, 6, 3, 1, dtype=dtype)
        k[0, :, 1, 0] = torch.tensor([math.inf, -math.inf, math.nan, -400.0, 0.0, -0.0])
        v = torch.ones(1, 6, 3, 2, dtype=dtype)
        v[0, :, 1], v[0, 4] = torch.tensor([math.inf, math.nan]), torch.tensor([-0.0, math.inf])
        yield _vector({"function": "attention", "flags": usual}, {"q": q, "k": k, "v": v, "sinks": None, "mask": None})


#: The files of the golden vectors, and the functions that make these.
FILES = {
    SPECIFICATION: vectors,
    COMPOSITIONS: vectors_of_compositions,
    QUANTIZED: vectors_of_quantized,
    GATED: vectors_of_gated,
    LOG_PROB: vectors_of_log_probabilities,
    PRODUCTS: vectors_of_products,
    ATTENTION: vectors_of_attention,
}


def main(folder=_FOLDER):
    """Writes the files into a folder."""
    with fusednorm.use_backend("reference"):
        made = {file: list(of_file()) for file, of_file in FILES.items()}
    made = {file.name: in_lines(file.name, read(file) if file.exists() else [], made[file]) for file in made}
    for name, of_file in made.items():
        write(folder / name, of_file)


if __name__ == "__main__":
    main()
