"""Each public function and module, compiled and exported in each way that torch has: the bits of the eager call.

Numbers that a compiled function takes from elsewhere, such as a group size, may become inputs: here they are literals.
"""

import copy

import pytest
import torch
from every_operation import FUNCTIONS, MORE, function_of, have_gradients, partly, without_outputs

import fusednorm
from fusednorm.compat import (
    fla,
    flag_gems,
    flashinfer,
    liger,
    mamba_ssm,
    quack,
    sgl_kernel,
    transformers,
    verl,
    vllm,
)

# What torch's own compilers warn of while they trace.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

X, HEADS, BOTH = torch.ones(4, 6), torch.ones(4, 2, 6), torch.ones(4, 12)
NUMBERS, SCALES = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.ones(4, 1)
NORM = {"x": X, "residual": X, "weight": torch.ones(6)}

#: A function or a module, and its operands by name: 4 rows of 6, heads of [4, 2, 6], tables of [4, 3]; a test makes
#: others of the same kind.
CALLS = {}
for name, operands in FUNCTIONS.items():
    CALLS[name] = function_of(name), without_outputs(operands)
    if len(without_outputs(operands)) < len(operands):
        CALLS[f"{name} with outputs"] = function_of(name), operands
CALLS |= MORE
#: But for what takes places in pages, which others may not be made of: test_attention.py has it.
CALLS = {name: call for name, call in CALLS.items() if "pages" not in call[1]}
#: Their rows have one length. The peers' classes, and of their functions those that do more than to pass arguments on.
MODULES = {
    "RMSNorm": (fusednorm.RMSNorm(6), {"x": X}),
    "RMSNorm of two dimensions": (fusednorm.RMSNorm((2, 6), weight_offset=1.0), {"x": HEADS}),
    "AddRMSNorm": (fusednorm.AddRMSNorm(6), {"x": X, "residual": X}),
    "AddRMSNorm begins": (fusednorm.AddRMSNorm(6), {"x": X}),
    "LayerNorm of two dimensions": (fusednorm.LayerNorm((2, 6)), {"x": HEADS}),
    "AddLayerNorm": (fusednorm.AddLayerNorm(6, bias=False), {"x": X, "residual": X}),
    "RMSNormGated": (fusednorm.RMSNormGated(6, group_size=3), {"x": X, "gate": X}),
    "fla": (fla.FusedRMSNormGated(6), {"x": X, "g": X}),
    "liger": (liger.LigerRMSNorm(6, casting_mode="gemma"), {"hidden_states": X}),
    "liger, added": (liger.LigerFusedAddRMSNorm(6), {"hidden_states": X, "residual": X}),
    "mamba_ssm": (mamba_ssm.RMSNorm(6, group_size=3), {"x": X, "z": X}),
    "quack": (quack.QuackRMSNorm(6), {"x": X}),
    "Qwen3-Next": (transformers.Qwen3NextRMSNormGated(6), {"hidden_states": X, "gate": X}),
    "Zamba 2": (transformers.Zamba2RMSNormGated(6, 3), {"hidden_states": X, "gate": X}),
    "flag_gems": (partly(flag_gems.fused_add_rms_norm, normalized_shape=(6,)), NORM),
    "flashinfer": (flashinfer.gemma_fused_add_rmsnorm, {"input": X, "residual": X, "weight": NORM["weight"]}),
    "sgl_kernel": (sgl_kernel.sgl_per_token_quant_fp8, {"input": X, "output_q": NUMBERS, "output_s": SCALES}),
    "verl": (verl.entropy_from_logits, {"logits": X}),
    "vllm": (partly(vllm.fused_add_rms_norm, epsilon=1e-6), {"input": X, "residual": X, "weight": NORM["weight"]}),
    "vllm, rows": (partly(vllm.scaled_fp8_quant, use_per_token_if_dynamic=True), {"input": X}),
    "vllm, blocks": (
        lambda input: vllm.silu_and_mul_per_block_quant(input, group_size=2, quant_dtype=torch.int8),
        {"input": BOTH},
    ),
}
EVERY = CALLS | MODULES
#: Export traces these in both ways: the compiler, which `strict` has trace, traces all calls in other tests.
STRICT = ["fused_add_rms_norm", "rms_norm_add_rms_norm", "qk_norm_rope", "gate", "quantize", "AddRMSNorm", "Zamba 2"]
#: How a dimension follows from the number of rows and their length, by its size in the tables.
SIZES = {4: lambda rows, length: rows, 6: lambda rows, length: length, 3: lambda rows, length: length // 2}
SIZES[12] = lambda rows, length: 2 * length


def made(name, rows=4, length=6):
    """Operands of a call, with random values."""
    generator = torch.Generator().manual_seed(rows)

    def like(t):
        shape = [SIZES[size](rows, length) if size in SIZES else size for size in t.shape]
        if t.dtype == torch.int64:
            return torch.arange(rows).flip(0) % 4
        if t.numel() == 1:
            return t.clone()
        return torch.randn(shape, generator=generator).to(t.dtype)

    found = {key: like(t) if isinstance(t, torch.Tensor) else t for key, t in EVERY[name][1].items()}
    return found | {key: found[key].abs() + 0.5 for key in found if key == "temperature"}


def called(name):
    """A function of the operands that are tensors: all that the call returns and writes."""
    function, operands = EVERY[name]
    others = {key: value for key, value in operands.items() if not isinstance(value, torch.Tensor)}

    def call(given):
        found = function(**given, **others)
        returned = [found] if isinstance(found, torch.Tensor) else [] if found is None else list(found)
        return [*returned, *given.values()]

    return call


def tensors(operands):
    return {key: t for key, t in operands.items() if isinstance(t, torch.Tensor)}


def halves(operands):
    """The same in bfloat16, but for scales: in float32 no compiler would show that it leaves out a rounding."""
    scales = ("scale", "scale_out", "output_s", "weight_scale")
    return {key: t.bfloat16() if t.dtype == torch.float32 and key not in scales else t for key, t in operands.items()}


def of_rows(operands):
    """The names of operands with one entry for each row."""
    tables = ("cos", "sin") if "positions" in operands else ()
    return [key for key, t in operands.items() if t.dim() and t.shape[0] == 4 and key not in tables]


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.equal(b) if a.dtype.itemsize > 1 else a.view(torch.int8).equal(b.view(torch.int8))


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def leaves_of(name):
    """The operands that have gradients: none where the function writes to operands, or makes 8-bit numbers."""
    operands = halves(tensors(made(name)))
    keys = have_gradients(operands)
    try:
        called(name)({key: t.requires_grad_(key in keys) for key, t in operands.items()})
    except RuntimeError:
        return []
    return keys


#: Those that write to operands have no gradients: below they are compiled in one graph.
@pytest.mark.parametrize("name", [name for name in EVERY if not name.endswith(("_", " with outputs"))])
def test_compiled(name):
    """With graph breaks, if there must be some; and gradients, where the function has some."""
    leaves, found = leaves_of(name), []
    parameters = list(EVERY[name][0].parameters()) if isinstance(EVERY[name][0], torch.nn.Module) else []
    for call in (called(name), torch.compile(called(name), backend="aot_eager")):
        operands = {key: t.requires_grad_(key in leaves) for key, t in halves(tensors(made(name))).items()}
        outputs = call(operands)
        results = [t for t in outputs if t.requires_grad and not t.is_leaf]
        wanted = [operands[key] for key in leaves] + parameters
        found.append([*outputs, *(torch.autograd.grad(results, wanted, results) if wanted else ())])
    same(*found)


@pytest.mark.parametrize(
    ("name", "operators"),
    [("heads and x_scale", {"scale", "affine"}), ("rms_norm_add", {"add"}), ("rotate", {"rotate"}), ("gate", {"gate"})],
)
def test_what_is_rounded_is_an_operator(name, operators):
    """A compiler that saw an addition would leave out its rounding before the next operation.

    Where gradients are recorded; else the whole call is one operator: test_inference.py.
    """
    seen = set()

    def backend(graph, inputs):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    operands = {key: t.requires_grad_(key in ("x", "y")) for key, t in tensors(made(name)).items()}
    torch.compile(called(name), fullgraph=True, backend=backend)(operands)
    assert {f"fusednorm.{operator}" for operator in operators} <= seen


#: Functions that write, one of each kind: one mechanism makes them of the others.
WRITING = ("fused_add_rms_norm_", "gate_", "qk_norm_rope_", "rms_norm with outputs")
WRITING += ("rms_norm_quant with outputs", "linear with outputs", "attention with outputs", "modulate with outputs")
#: All others that write, modules but one, and more calls of the same operators, which the test above compiles too, are
#: compiled so before a release alone.
LATER = [name for name in EVERY if name in MORE or (name.endswith(("_", " with outputs")) and name not in WRITING)]
LATER += [name for name in MODULES if name != "AddRMSNorm"]
LATER += ["gelu_and_mul", "gelu_tanh_and_mul", "layer_norm_quant", "logsumexp", "relu2", "rms_norm_quant"]
ONE_GRAPH = [pytest.param(name, marks=[pytest.mark.release] * (name in LATER)) for name in EVERY]


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_one_graph_for_all_shapes(name):
    """Whatever the length of rows (modules have one), and their number, which the compiler does not know.

    Without gradients a call is one operator: ``fusednorm/operations/inference.py``. In float32 no compiler would show
    that it leaves out a rounding.
    """
    call, graphs, made_at_first, aot_eager = called(name), [], 0, torch._dynamo.lookup_backend("aot_eager")
    chosen = of_rows(tensors(made(name)))

    def packed(mask, operands):
        index = mask.nonzero()[:, 0]
        return call({key: t[index] if key in chosen else t for key, t in operands.items()})

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return aot_eager(graph, inputs)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(packed, fullgraph=True, dynamic=name in CALLS, backend=backend)
        for rows, length, left_out in ((4, 6, 1), (5, 8, 2), (7, 12, 1), (9, 16, 3)):
            operands = halves(tensors(made(name, rows, length) if name in CALLS else made(name)))
            mask = torch.arange(len(operands[chosen[0]])) >= left_out
            same(compiled(mask, operands), packed(mask, operands))
            made_at_first = made_at_first or len(graphs)  # more than one: torch begins again to make floats constants
    assert len(graphs) == made_at_first
    operators = [target for target in graphs[-1] if target.startswith("fusednorm.")]
    if name in CALLS:  # modules have parameters
        assert len(operators) == (2 if "normed_out" in EVERY[name][1] else 1)  # the quantizer alone makes 8-bit numbers


class Program(torch.nn.Module):
    """A call as a module, which torch.export takes."""

    def __init__(self, name):
        super().__init__()
        self.function, self.call = EVERY[name][0], called(name)

    def forward(self, operands):
        return self.call(operands)


#: More calls of the same functions are exported before a release alone.
EXPORTED = [pytest.param(name, False, marks=[pytest.mark.release] * (name in MORE)) for name in EVERY]


@pytest.mark.parametrize(("name", "strict"), [*EXPORTED, *[(name, True) for name in STRICT]])
def test_exported(name, strict):
    operands = tensors(made(name))
    rows = torch.export.Dim("rows")
    tables = "positions" in operands
    shapes = ({key: {0: rows} if key in of_rows(operands) else None for key in operands},)
    exported = torch.export.export(Program(name), (copy.deepcopy(operands),), dynamic_shapes=shapes, strict=strict)
    assert any(str(node.target).startswith("fusednorm.") for node in exported.graph.nodes)
    exported = exported.module()
    for rows in (4, 7):
        given = tensors(made(name, rows))
        if tables:
            given |= {key: operands[key] for key in ("cos", "sin")} | {"positions": torch.arange(rows) % 4}
        wanted = called(name)(copy.deepcopy(given))
        found = exported(given)
        same(found, wanted)
        assert [t.stride() for t in found] == [t.stride() for t in wanted]
