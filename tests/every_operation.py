"""The public functions and the operators, each with operands that fit: tests of what holds for all take them here."""

import inspect

import torch
import toys  # noqa: F401 - declares them
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm import Quantization
from fusednorm.compat import functional
from fusednorm.declare.declaration import WHOLE, Role
from fusednorm.operations.composition import Composition
from fusednorm.operations.front_door import PUBLIC
from fusednorm.operations.norm_operation import Norm
from fusednorm.quantizations import SGLANG_FP8_TOKEN, VLLM_FP8_TOKEN, VLLM_INT8_STATIC_AZP, VLLM_INT8_TOKEN_AZP_CPU

BF16, F32 = torch.bfloat16, torch.float32
X, Z, D = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
Q, K = torch.randn(2, 4, 2, 6, generator=torch.Generator().manual_seed(1))
WEIGHT, BIAS = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))
MATRIX = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
COS, SIN = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(3))
NUMBERS, SCALES = torch.ones(4, 6, dtype=torch.int8), torch.ones(4, 1)
ADDED = {"x": X, "residual": Z, "weight": WEIGHT}
AFFINE = {"bias": BIAS}
GATED = {"x": X, "gate": Z, "weight": WEIGHT}
OUT = {"out": torch.zeros(4, 6)}
RESIDUAL_OUT = {"residual_out": torch.zeros(4, 6)}
QUANTIZED = {"quantization": VLLM_INT8_TOKEN_AZP_CPU, "out": NUMBERS, "scale_out": SCALES}
QUANTIZED |= {"zero_point_out": SCALES.int()}
GIVEN = {"quantization": VLLM_INT8_STATIC_AZP, "scale": torch.ones(1), "zero_point": torch.ones(1).int()}
NORMED = {"normed_out": torch.zeros(4, 6)}
TURN = {"cos": COS, "sin": SIN, "positions": torch.arange(4)}
HEADS = {"q": Q, "k": K, "q_weight": WEIGHT, "k_weight": BIAS, **TURN}

#: The public functions.
FUNCTIONS = {
    "fused_add_layer_norm": ADDED | AFFINE | OUT | RESIDUAL_OUT,
    "fused_add_layer_norm_": ADDED | AFFINE,
    "fused_add_layer_norm_quant": ADDED | AFFINE | QUANTIZED | NORMED | RESIDUAL_OUT,
    "fused_add_rms_norm": ADDED | AFFINE | OUT | RESIDUAL_OUT,
    "fused_add_rms_norm_": ADDED | AFFINE,
    "fused_add_rms_norm_quant": ADDED | QUANTIZED | NORMED | RESIDUAL_OUT,
    "gate": {"y": X, "z": Z} | OUT,
    "gate_": {"y": X, "z": Z},
    "gelu_tanh_and_mul": {"gate": X, "up": Z} | OUT,
    "gelu_and_mul": {"gate": X, "up": Z} | OUT,
    "l2_norm": {"x": X} | OUT,
    "layer_norm": {"x": X, "weight": WEIGHT} | AFFINE | OUT,
    "layer_norm_": {"x": X, "weight": WEIGHT} | AFFINE,
    "layer_norm_quant": {"x": X, "weight": WEIGHT} | AFFINE | QUANTIZED | NORMED,
    "qk_norm_rope": HEADS | {"q_out": torch.zeros(4, 2, 6), "k_out": torch.zeros(4, 2, 6)},
    "qk_norm_rope_": HEADS,
    "quantize": {"y": X} | QUANTIZED,
    "relu2_quant": {"z": X} | GIVEN | {"out": NUMBERS},
    "rms_norm": {"x": X, "weight": WEIGHT} | AFFINE | OUT,
    "rms_norm_": {"x": X, "weight": WEIGHT} | AFFINE,
    "rms_norm_add": ADDED | RESIDUAL_OUT,
    "rms_norm_add_": ADDED,
    "rms_norm_add_rms_norm": ADDED | {"next_weight": BIAS} | OUT | RESIDUAL_OUT,
    "rms_norm_add_rms_norm_": ADDED | {"next_weight": BIAS},
    "rms_norm_gated": GATED,
    "rms_norm_gated_": GATED,
    "rms_norm_quant": {"x": X, "weight": WEIGHT} | QUANTIZED | NORMED,
    "rotate": {"x": Q} | TURN | {"out": torch.zeros(4, 2, 6)},
    "silu_and_mul": {"gate": X, "up": Z} | OUT,
    "silu_and_mul_quant": {"gate": X, "up": Z} | GIVEN | {"out": NUMBERS},
}
#: The operands that a function in place writes.
IN_PLACE = {
    "fused_add_layer_norm_": ("x", "residual"),
    "fused_add_rms_norm_": ("x", "residual"),
    "gate_": ("y",),
    "layer_norm_": ("x",),
    "qk_norm_rope_": ("q", "k"),
    "rms_norm_": ("x",),
    "rms_norm_add_": ("residual",),
    "rms_norm_add_rms_norm_": ("x", "residual"),
    "rms_norm_gated_": ("x",),
}


def partly(function, **arguments):
    """A function with arguments that are no operands."""
    return lambda **operands: function(**operands, **arguments)


HALF, BOTH, ROTATED = {"x": X.to(BF16), "residual": Z, "weight": WEIGHT}, {"gate": torch.cat((X, Z), -1)}, {"x": Q}
#: Calls with other operands and flags: a function of operands by name, and these. Names say where numbers are rounded.
MORE = {
    "heads": (fusednorm.rms_norm, {"x": Q, "weight": K[0], "bias": K[1]}),
    "heads, centered": (fusednorm.layer_norm, {"x": Q, "weight": K[0], "bias": K[1]}),
    "heads and x_scale": (
        partly(fusednorm.fused_add_rms_norm, x_scale=0.3, weight_offset=1.0),
        {"x": Q, "residual": K, "weight": K[0], "bias": BIAS},
    ),
    "offset": (partly(fusednorm.rms_norm_, weight_offset=1.0, round_norm=True), {"x": X, "weight": WEIGHT}),
    "dtypes": (partly(fusednorm.fused_add_rms_norm, round_sum=False, out_dtype=F32, residual_dtype=BF16), HALF),
    "between": (partly(fusednorm.rms_norm_add_rms_norm, between=F32, next_eps=1e-5), HALF),
    "between, quantized": (
        partly(fusednorm.fused_add_rms_norm_quant, between=F32, quantization=VLLM_FP8_TOKEN),
        HALF,
    ),
    "columns, quantized": (
        partly(fusednorm.rms_norm_quant, quantization=Quantization(torch.float8_e4m3fn, per=2, layout="column")),
        {"x": X, "weight": WEIGHT},
    ),
    "given scale, quantized": (fusednorm.fused_add_rms_norm_quant, ADDED | GIVEN | RESIDUAL_OUT),
    "rows of tables": (fusednorm.rotate, ROTATED | {"cos": COS, "sin": SIN}),
    "one row of tables": (fusednorm.rotate, ROTATED | {"cos": COS[0], "sin": SIN[0]}),
    "q and k": (
        partly(fusednorm.qk_norm_rope, interleaved=True, round_products=True),
        {"q": Q, "k": K, "q_weight": WEIGHT, "cos": COS, "sin": SIN},
    ),
    "q and k without tables": (fusednorm.qk_norm_rope, {"q": Q, "k": K}),
    "silu of halves": (fusednorm.silu_and_mul, BOTH),
    "gelu of halves, between": (partly(fusednorm.gelu_tanh_and_mul, between=F32), BOTH),
    "in steps": (partly(fusednorm.silu_and_mul, limit=0.5, alpha=1.702, up_offset=1.0), {"gate": X, "up": Z}),
    "in turns": (partly(fusednorm.silu_and_mul, limit=0.5, clamp="after", interleaved=True), BOTH),
    "in turns, quantized": (
        partly(fusednorm.silu_and_mul_quant, limit=0.5, interleaved=True, quantization=SGLANG_FP8_TOKEN),
        BOTH,
    ),
    "halves, quantized": (partly(fusednorm.silu_and_mul_quant, quantization=SGLANG_FP8_TOKEN), BOTH),
    "groups": (partly(fusednorm.rms_norm_gated, group_size=2), GATED),
    "groups after the gate": (partly(fusednorm.rms_norm_gated, norm_before_gate=False, group_size=2), GATED),
    "the gate first": (partly(fusednorm.rms_norm_gated, norm_before_gate=False, activation="gelu_tanh"), GATED),
    "functional": (lambda x, weight: functional.rms_norm(x, weight.shape, weight), {"x": Q, "weight": K[0]}),
}

FLAGS = {"eps": 1e-6, "weight_offset": 0.0, "round_sum": True, "round_norm": False}
AFFINE_OF_ROWS = {"n": X, "weight": WEIGHT, "bias": BIAS, "weight_offset": 0.0}
GATE = {"y": X, "z": Z, "activation": "silu", "between": None}
GATE |= {"limit": 0.0, "alpha": 1.0, "up_offset": 0.0, "clamp": "before", "round_steps": False}
FORWARD = {"h": X, "rstd": X[:, 0].abs(), "weight": WEIGHT, "weight_offset": 0.0, "x_dtype": F32}
FORWARD |= {"residual_dtype": F32, "round_sum": True, "round_norm": False}
DTYPES = {"out_dtype": F32, "residual_dtype": F32}

#: The operators of torch.ops.fusednorm.
OPERATORS = {
    "fused_add_rms_norm": ADDED | FLAGS | DTYPES,
    "rms_norm": {"x": X, "weight": WEIGHT} | FLAGS | {"out_dtype": F32},
    "fused_add_layer_norm": ADDED | AFFINE | FLAGS | DTYPES,
    "layer_norm": {"x": X, "weight": WEIGHT} | AFFINE | FLAGS | {"out_dtype": F32},
    "fused_add_layer_norm_": ADDED | AFFINE | FLAGS,
    "layer_norm_": {"x": X, "weight": WEIGHT} | AFFINE | FLAGS,
    "fused_add_rms_norm_": ADDED | FLAGS,
    "rms_norm_": {"x": X, "weight": WEIGHT} | FLAGS,
    "into": ADDED | OUT | RESIDUAL_OUT | FLAGS | {"center": True} | AFFINE,
    "add": {"x": X, "residual": Z, "dtype": F32},
    "scale": {"x": X, "factor": 2.0},
    "affine": AFFINE_OF_ROWS | {"rounded_to": F32, "out_dtype": F32},
    "affine_backward": AFFINE_OF_ROWS | {"dy": D, "needs": [True, True, True]},
    "rotate": {"x": Q, "cos": COS, "sin": SIN, "interleaved": False, "rounded_to": F32, "dtype": F32},
    "gate": GATE | {"out_dtype": F32},
    "gate_backward": GATE | {"d": D, "needs": [True, True]},
    "quantize": {"y": X, "quantization": str(VLLM_INT8_STATIC_AZP), "scale": SCALES[0], "zero_point": SCALES[0].int()},
    "backward": FORWARD | {"dy": D, "d_residual_out": Z, "needs": [True, True, True]}
    | {"out_dtype": F32, "residual_out_dtype": F32},
    "layer_norm_backward": FORWARD | AFFINE | {"dy": D, "d_residual_out": Z, "needs": [True] * 4}
    | {"out_dtype": F32, "residual_out_dtype": F32},
}  # fmt: skip


def of_role(role, count):
    """A tensor of 4 rows of 6 with this role; of several operands each has its own numbers."""
    if role in (Role.IDS, Role.CHOSEN):
        return (torch.arange(4) + count) % 6
    rows = (X, Z, D)[count % 3]
    if role is Role.SETTINGS:
        return rows[:, 0].abs() + 1
    if role is Role.SCALES:
        return rows[:, :1].abs() + 1
    whole = {Role.ROWS: rows, Role.SAMPLES: rows, Role.WEIGHT: (WEIGHT, BIAS)[count % 2]}
    whole |= {Role.MATRIX: MATRIX, Role.COLUMNS: MATRIX[:, 0], Role.PRODUCTS: rows[:, :5]}
    return whole.get(role, rows[:, 0]).clone()


def of_operand(operand, count):
    """The same, of the only dtype that an operand may have, if there is one."""
    t = of_role(operand.role, count)
    if operand.dtype is None:
        return t
    return (t if operand.dtype.is_floating_point else t * 20).to(operand.dtype)


def _of_keys():
    """Operands of attention: 3 queries and 5 keys of each of 4 samples; 4 queries of two sequences, in pages of 4."""
    normal = torch.Generator().manual_seed(5)
    q, v = torch.randn(2, 4, 2, 3, 6, generator=normal), torch.randn(4, 1, 5, 6, generator=normal)
    k, sinks = torch.randn(4, 1, 5, 6, generator=normal), torch.randn(2, generator=normal)
    mask = torch.rand(4, 1, 3, 5, generator=normal) > 0.3
    yield {"q": q[0], "k": k, "v": v, "sinks": sinks, "mask": mask}, {"d": q[1], "out": torch.zeros(4, 2, 3, 6)}
    of_pages = {"pages": torch.tensor([[2, 0], [1, -1]]), "starts": torch.tensor([0, 1, 4])}
    of_pages |= {"lengths": torch.tensor([5, 3]), "sinks": sinks}
    operands = {"q": q[0, :, :, 0].contiguous(), "k": k[:3, :, :4].contiguous(), "v": v[:3, :, :4].contiguous()}
    yield operands | of_pages, {"out": torch.zeros(4, 2, 6)}


#: Of operations whose rows meet keys: the operands, and the incoming gradient and the output, by name.
OF_KEYS = dict(zip(("attention", "paged_attention"), _of_keys(), strict=True))
#: Their changes that are right, as :func:`right` has them.
RIGHT_OF_KEYS = {("attention", "v", "columns"), ("paged_attention", "v", "columns")}
RIGHT_OF_KEYS |= {("paged_attention", "q", "rows"), ("paged_attention", "pages", "columns")}
RIGHT_OF_KEYS |= {(name, "mask", "no dimension") for name in ("attention", "attention_backward")}


def right(name, operands, roles, first="x", kept=(), fixed=False):
    """Changes of one operand that fit the others: the name, the operand, the kind. The first one decides dtypes.

    ``kept``: what a forward pass kept, in the type of its computation; ``fixed``: whether the first one has one dtype.
    """
    others = [key for key in tensors(operands) if key != first]
    opposed = {roles[key] for key in others}
    fit = {
        "wider": not (kept or fixed),
        "a device": not others,
        "columns": not {Role.ROWS, Role.SAMPLES, *WHOLE} & opposed,
    }
    fit["rows"] = opposed <= {*WHOLE}
    fit["one dimension more"] = opposed <= {Role.SAMPLES, *WHOLE}
    more = {Role.WEIGHT} if Role.OF_CHOSEN in opposed else {Role.WEIGHT, Role.CHOSEN}
    heads = {(name, key, "one dimension more") for key in others if roles[key] in more}
    return heads | {(name, first, kind) for kind, fits in fit.items() if fits}


def defaulted(parameter):
    """Whether it may be left out."""
    return parameter.default is not parameter.empty


def tensors(operands):
    """The names of those operands that are tensors."""
    return [key for key, t in operands.items() if isinstance(t, torch.Tensor)]


#: The changes of operands of declared functions and operators that are right.
RIGHT = right("scale", OPERATORS["scale"], {"x": Role.ROWS})
# Declared operations but norms and compositions, by their declarations.
for operation in dict.fromkeys(one for one in PUBLIC.values() if not isinstance(one, (Composition, Norm))):
    declaration = operation.declaration
    roles = declaration.roles | {one.name: one.role for one in declaration.returned}
    operands, others = OF_KEYS.get(declaration.name, ({}, {}))
    fixed = declaration.operands[0].dtype is not None
    operands = operands or {one.name: of_operand(one, count) for count, one in enumerate(declaration.operands)}
    for name, function in operation.functions.items():
        outputs = {one.name: torch.zeros_like(of_role(one.role, 0)) for one in declaration.returned} | others
        taken = inspect.signature(function).parameters
        must = {key: declaration.flags[key] for key in declaration.flags if key in taken and not defaulted(taken[key])}
        FUNCTIONS[name] = operands | must | {key: t for key, t in outputs.items() if key in taken}
        RIGHT |= RIGHT_OF_KEYS if others else right(name, FUNCTIONS[name], roles, next(iter(operands)), fixed=fixed)
        if name.endswith("_"):
            IN_PLACE[name] = tuple(one.overwrites for one in declaration.returned)
            continue
        samples = [flags for flags in declaration.samples if flags]
        MORE |= {f"{name} with {' '.join(flags)}": (partly(function, **flags), operands) for flags in samples}
        needed = {one.name: operands[one.name] for one in declaration.operands if not one.optional}
        if len(needed) < len(operands):
            MORE[f"{name} without optional operands"] = (function, needed)
    given = {name: F32 if default in (torch.dtype, None) else default for name, default in declaration.flags.items()}
    for name, value in [flag for sample in declaration.samples for flag in sample.items()]:
        if declaration.flags[name] in (float, int):
            given[name] = value
    of_operators = {declaration.name: operands | given}
    if declaration.gradient is not None:
        given = {name: given[name] for name in declaration.gradient_flags}
        given["needs"] = [True] * len(declaration.with_gradient)
        kept = {name: of_role(roles[name], count) for count, name in enumerate(declaration.backward_tensors)}
        if others:
            kept |= operands | {name: t for name, t in others.items() if name in kept}
        kept |= {one.name: kept[one.name].abs() + 1 for one in declaration.kept}
        if not declaration.exact_gradients:  # of whole numbers they have the same bits in any order
            kept = {name: (t * 8).round() if t.is_floating_point() else t for name, t in kept.items()}
        of_operators[f"{declaration.name}_backward"] = kept | given
    for name, arguments in of_operators.items():
        OPERATORS[name] = arguments
        kept = [one.name for one in declaration.kept if one.name in arguments]
        RIGHT |= RIGHT_OF_KEYS if others else right(name, arguments, roles, next(iter(operands)), kept, fixed)


def function_of(name):
    """The public function of that name, of the library or a toy."""
    return getattr(fusednorm, name, None) or next(one for one in PUBLIC if one.__name__ == name)


def clones(operands, convert=torch.clone):
    return {key: convert(t) if isinstance(t, torch.Tensor) else t for key, t in operands.items()}


def without_outputs(operands):
    return {key: t for key, t in operands.items() if not key.endswith("out")}


def written_by(name):
    """The operands that a public function writes."""
    return IN_PLACE.get(name) or tuple(key for key in FUNCTIONS[name] if key.endswith("out"))


def have_gradients(operands):
    """The names of those operands that may have a gradient."""
    others = ("cos", "sin", "temperature", *["scale"] * ("quantization" in operands))
    given = without_outputs(operands)
    return [key for key in tensors(given) if given[key].is_floating_point() and key not in others]


#: The functions and operators that have none, but those that quantize or write in place.
WITHOUT_GRADIENT = {"into", "quantize"}
WITHOUT_GRADIENT |= {one.__name__ for one, operation in PUBLIC.items() if not operation.differentiable}

#: The functions that have gradients, and the names of those operands that have some.
DIFFERENTIATED = {
    name: have_gradients(operands)
    for name, operands in FUNCTIONS.items()
    if not (name.endswith(("_", "quant")) or name in WITHOUT_GRADIENT)
}
#: All calls with gradients whose flags name no dtype: a function, and its operands.
CALLS = {name: (function_of(name), without_outputs(FUNCTIONS[name])) for name in DIFFERENTIATED}
CALLS |= {
    name: call
    for name, call in MORE.items()
    if not {"offset", "dtypes"} & {name} and "," not in name and name.split()[0] not in WITHOUT_GRADIENT
}
CALLS.pop("between")


def called(function, operands):
    """What a function returns, in a list."""
    found = function(**operands)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def leaves_of(name, dtype):
    """The function of a call's operands with gradients, and these."""
    function, operands = CALLS[name]
    keys = have_gradients(operands)

    def of_leaves(*leaves):
        found = called(function, clones(operands) | dict(zip(keys, leaves, strict=True)))
        return found[0] if len(found) == 1 else tuple(found)

    return of_leaves, [operands[key].to(dtype, copy=True).requires_grad_() for key in keys]


def called_with(function, leaves):
    found = function(*leaves)
    return [found] if isinstance(found, torch.Tensor) else found


def recorded(name):
    """The outputs of a function whose operands require gradients, and these."""
    operands = clones(without_outputs(FUNCTIONS[name]))
    leaves = [operands[key].requires_grad_() for key in DIFFERENTIATED[name]]
    return called(function_of(name), operands), leaves


def gradients(outputs, leaves, **flags):
    """Those of one output or of several; the graph is kept."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return torch.autograd.grad(outputs, leaves, [t.detach().cos() for t in outputs], retain_graph=True, **flags)


def same(a, b):
    """Whether tensors have the same dtypes and the same numbers."""
    return all(p.dtype == q.dtype and torch.equal(p.float(), q.float()) for p, q in zip(a, b, strict=True))


class Named(TorchFunctionMode):
    """Keeps the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


class Seen(TorchDispatchMode):
    """Keeps the operations that it sees, and the tensors that they write."""

    def __init__(self):
        super().__init__()
        self.operations, self.written = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations.append(operation)
        for argument, given in zip(operation._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append(given)
        return operation(*args, **(kwargs or {}))
