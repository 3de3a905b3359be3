"""A backend that no test has run proves itself: its first call of each kind is compared with the reference."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from every_operation import DIFFERENTIATED, FUNCTIONS, MORE, clones, function_of, gradients, recorded
from processes import printed_by

import fusednorm
from fusednorm import BackendError, quantizations
from fusednorm.backends import cpu
from fusednorm.calls import fast_path
from fusednorm.calls import self_check as setting
from fusednorm.calls.call import Call, Forward
from fusednorm.engine import choose, requested, self_check, substitutes

pytestmark = pytest.mark.compiled

X = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
WEIGHT = X[0].clone()


@pytest.fixture(autouse=True)
def proving(monkeypatch):
    """Has all backends prove themselves, in a process that requests none, as if nothing had run yet."""
    monkeypatch.setattr(setting, "SETTING", setting.FIRST)
    for name in ("_selected", "_wrong"):
        monkeypatch.setattr(choose, name, type(getattr(choose, name))())
    monkeypatch.setattr(self_check, "compared", {})
    devices, closed = dict(fast_path.devices_of), set(fast_path.CLOSED)
    fast_path.devices_of.clear()
    fast_path.open_cpu()
    token = requested._request.set("")
    yield
    requested._request.reset(token)
    fast_path.CLOSED.clear()
    fast_path.CLOSED.update(closed)
    fast_path.devices_of.clear()
    fast_path.devices_of.update(devices)
    monkeypatch.undo()
    fast_path.open_cpu()


@pytest.fixture
def calls(monkeypatch):
    """The calls that Python has the backend make: those of checks, and the caller's."""
    made, forward = [], cpu.forward
    for name in ("forward", "backward"):
        monkeypatch.setattr(cpu, name, lambda call: (made.append(call), forward(call))[1])
    return made


def make_wrong(monkeypatch, *functions):
    """The last bit of the first number of the last row is wrong in results, or in gradients, from now on."""

    def wrong(call):
        made(call)
        for name, t in self_check.tensors_of(call).items():
            if name in ("out", "q_out", "dx") or (isinstance(call, Call) and name in ("dy", "dz", "dlogits")):
                element = t[(-1,) * (t.dim() - 1) + (slice(0, 1),)]
                element.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize]).bitwise_xor_(1)

    made = cpu.forward
    for name in functions or ("forward", "backward"):
        monkeypatch.setattr(cpu, name, wrong)


ALL = {**{name: (function_of(name), given) for name, given in FUNCTIONS.items()}, **MORE}
#: But for operations of tests, which no backend has.
ALL = {name: call for name, call in ALL.items() if not name.startswith(("pick", "divided_by", "rms_norm_scaled"))}


@pytest.mark.parametrize("name", ALL)
def test_each_function_is_compared_once(name, calls):
    """The first call of a kind; a second one takes the fast path, if any does, and the same backend."""
    function, given = ALL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**clones(given))
        first = len(calls)
        compared = dict(self_check.compared.get("cpu", {}))
        function(**clones(given))
    assert compared
    assert all(compared.values())
    assert self_check.compared["cpu"] == compared
    assert len(calls) - first <= len(compared) < first


def test_gradients_are_compared():
    for outputs, leaves in map(recorded, DIFFERENTIATED):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            gradients(outputs, leaves)
    names = {kind[0].name for kind in self_check.compared["cpu"]}
    assert names >= {"norm_backward", "gate", "norm_gated", "log_softmax", "selected"}


Y = X.flip(0).contiguous()
WRONG = {
    "norm": lambda: fusednorm.rms_norm(X, WEIGHT),
    "in place": lambda: fusednorm.fused_add_rms_norm_(X.clone(), Y.clone(), WEIGHT),
    "composition": lambda: fusednorm.layer_norm(X, WEIGHT, Y[0]),
    "gate": lambda: fusednorm.silu_and_mul(X),
    "quantize": lambda: fusednorm.rms_norm_quant(X, WEIGHT, quantization=quantizations.VLLM_INT8_TOKEN_CPU),
    "norm_gated": lambda: fusednorm.rms_norm_gated(X, Y, WEIGHT),
    "rotate": lambda: fusednorm.rotate(X.view(6, 2, 48), *torch.ones(2, 6, 24)),
    "log_softmax": lambda: fusednorm.log_softmax(X),
    "linear": lambda: fusednorm.linear(X, X),
    "attention": lambda: fusednorm.attention(*[X.view(1, 2, 6, 48)] * 3),
}


def of(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_found_at_its_first_use(name, monkeypatch):
    """It warns once, the caller's results are the reference's, and so are all later ones."""
    call = WRONG[name]
    with fusednorm.use_backend("reference"):
        wanted = of(call())
    make_wrong(monkeypatch)
    with pytest.warns(RuntimeWarning, match="has other bits than the reference here.*check --report FILE") as caught:
        found = [of(call()), of(call())]
    assert len(caught) == [*self_check.compared["cpu"].values()].count(False) > 0
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    assert not all(self_check.compared["cpu"].values())


BETWEEN = {
    "rounded": lambda: fusednorm.fused_add_rms_norm(X, Y.half(), WEIGHT, residual_dtype=torch.bfloat16),
    "scaled": lambda: fusednorm.fused_add_rms_norm(X, Y, WEIGHT, x_scale=0.3),
    "added": lambda: fusednorm.rms_norm_add(X, Y, WEIGHT),
}


@pytest.mark.parametrize("step", BETWEEN)
def test_a_step_of_torch_between_kernels_is_compared_too(step, monkeypatch):
    """Those of another device, which may flush what is subnormal."""
    call, right = BETWEEN[step], getattr(substitutes.reference, step)
    with fusednorm.use_backend("reference"):
        wanted = of(call())
    monkeypatch.setattr(cpu, "unsuitable", lambda norm: ["in parts"] * any((norm.first, norm.around)))
    steps = {**vars(substitutes.reference), step: lambda *given: right(*given).mul_(1.01)}
    monkeypatch.setattr(substitutes, "reference", SimpleNamespace(**steps))
    with pytest.warns(RuntimeWarning, match="has other bits than the reference here"):
        found = of(call())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_wrong_gradient_is_found(monkeypatch):
    def gradient():
        leaf = X.clone().requires_grad_()
        return torch.autograd.grad(fusednorm.rms_norm(leaf, WEIGHT), leaf, X.flip(0).contiguous())[0]

    with fusednorm.use_backend("reference"):
        wanted = gradient()
    make_wrong(monkeypatch, "backward")
    with pytest.warns(RuntimeWarning, match="in dx of norm_backward, hidden size 96"):
        assert torch.equal(gradient(), wanted)
    assert torch.equal(gradient(), wanted)


def test_the_next_backend_takes_such_calls_and_explain_says_why(monkeypatch):
    make_wrong(monkeypatch)
    assert "the first call of each kind is compared" in str(fusednorm.explain(X))
    with pytest.warns(RuntimeWarning, match="self-check|other bits"):
        fusednorm.rms_norm(X, WEIGHT)
    found = fusednorm.explain(X, weight=WEIGHT)
    assert found.backend == "reference"
    assert "its self-check found other bits" in str(found)
    assert fusednorm.explain(X, function=fusednorm.silu_and_mul).backend == "cpu"  # of which nothing is known


def test_a_requested_backend_that_is_wrong_raises(monkeypatch):
    make_wrong(monkeypatch)
    with fusednorm.use_backend("cpu"):
        with pytest.warns(RuntimeWarning), pytest.raises(BackendError, match="which was requested, returns other bits"):
            fusednorm.rms_norm(X, WEIGHT)
        with pytest.raises(BackendError, match="its self-check found other bits"):
            fusednorm.rms_norm(X, WEIGHT)


def test_a_wrong_kernel_closes_the_fast_path(monkeypatch):
    """C would run it without asking."""
    forward, seen = cpu.forward, []
    fusednorm.rms_norm(X, WEIGHT)
    make_wrong(monkeypatch)
    with pytest.warns(RuntimeWarning):
        fusednorm.layer_norm(X, WEIGHT)
    monkeypatch.setattr(cpu, "forward", lambda call: (seen.append(call), forward(call))[1])
    fusednorm.silu_and_mul(X)
    checks = len(seen)
    fusednorm.silu_and_mul(X)
    assert len(seen) == checks + 1


def test_the_caller_notices_nothing(monkeypatch):
    """Neither its numbers, nor the state of its generator, nor its modes, nor gradients."""
    x, state = X.clone(), torch.get_rng_state()
    given = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda call: (given.append(call), forward(call))[1])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("kept"), lambda t: t):
        fusednorm.fused_add_rms_norm_(x, X.clone(), WEIGHT)
    assert torch.equal(torch.get_rng_state(), state)
    *checks, last = given
    assert last.x.data_ptr() == x.data_ptr()
    assert all(call.x.data_ptr() != x.data_ptr() and not torch.equal(call.x, X) for call in checks)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rows_are_of_all_sorts(rows):
    """However few there are: normal numbers, then rows with zeros, with a NaN, with infinities, and subnormal ones."""
    seen, x = [], torch.ones(rows, 40)
    backend = SimpleNamespace(forward=lambda call: (seen.append(call.x.clone()), cpu.forward(call)), backward=None)
    numbers = (rows, rows, ((0, 40), (0, 0), (0, 40), (0, 0)), 1e-6, 0.0)
    call = Forward(x, None, None, torch.empty_like(x), None, None, fusednorm.explain(x).operation, *numbers)
    self_check.SelfChecked("mine", backend, lambda *_: pytest.fail("wrong")).forward(call)
    assert not seen[0].isnan().any()
    found = torch.cat(seen[:-1])
    sorts = [found.isnan().any(-1), found.isinf().any(-1), (found == 0).all(-1), found.abs().amax(-1) < 1e-37]
    assert all(some.any() for some in sorts)


LAYOUTS = {
    "strided": lambda: torch.randn(9, 2, 64)[:, 1],
    "two levels": lambda: torch.randn(3, 5, 2, 64)[:, :, 0],
    "one row": lambda: torch.randn(64).expand(5, 64),
    "at any address": lambda: torch.randn(5 * 64 + 3)[3:].view(5, 64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generated_tensors_lie_as_the_callers_do(layout, calls):
    x = LAYOUTS[layout]()
    fusednorm.rms_norm(x)
    *checks, last = calls
    assert checks
    for call in checks:
        assert (call.x.shape, call.x.stride()) == (last.x.shape, last.x.stride())
        assert call.x.data_ptr() % 64 == last.x.data_ptr() % 64
        assert (call.rows, call.inner, call.strides) == (last.rows, last.inner, last.strides)


def test_outputs_share_memory_as_the_callers_do(calls):
    x = X.clone()
    fusednorm.fused_add_rms_norm(x, X.flip(0).contiguous(), WEIGHT, out=x)
    *checks, _ = calls
    assert checks
    assert all(call.out.data_ptr() == call.x.data_ptr() for call in checks)


def test_an_id_is_there_twice(calls):
    ids = torch.arange(12).view(6, 2)
    fusednorm.selected_log_prob(torch.randn(6, 40), ids)
    *checks, last = calls
    assert last.tensors["ids"].equal(ids)
    assert checks
    assert all((call.tensors["ids"].diff() == 0).any() for call in checks)


LARGE = {
    "rows": lambda: fusednorm.rms_norm(torch.zeros(20_000, 512)),
    "levels": lambda: fusednorm.rms_norm(torch.zeros(20, 600, 2, 512)[:, :, 0]),
    "quantized": lambda: fusednorm.rms_norm_quant(
        torch.zeros(20_000, 512), quantization=quantizations.VLLM_INT8_TOKEN_CPU
    ),
    "ids": lambda: fusednorm.selected_log_prob(torch.zeros(300, 32_000), torch.zeros(300, dtype=torch.int64)),
    "products": lambda: fusednorm.linear(torch.zeros(300, 512), torch.zeros(20_000, 512)),
    "heads": lambda: fusednorm.rotate(torch.zeros(3000, 32, 128), *torch.zeros(2, 3000, 64)),
    "queries": lambda: fusednorm.attention(*[torch.zeros(2, 4, 1024, 64)] * 3),
}


@pytest.mark.parametrize("name", LARGE)
def test_of_large_calls_a_part_is_compared(name, calls):
    LARGE[name]()
    *checks, last = calls
    assert all(self_check.compared["cpu"].values())
    assert checks
    for call in checks:
        tensors = self_check.tensors_of(call)
        assert max(t.numel() for t in tensors.values()) <= self_check.MOST
        assert call.rows < last.rows or name == "products"
        assert call.rows == last.rows or call.rows % call.inner == 0


def test_what_a_graph_captures_is_not_compared(calls, monkeypatch):
    monkeypatch.setattr(self_check, "_may_be_generated", lambda call: False)
    fusednorm.rms_norm(X, WEIGHT)
    assert len(calls) == 1
    assert self_check.compared["cpu"] == {}


def test_another_layout_is_another_kind(calls):
    """C's fast path refuses it too, until it was compared."""
    fusednorm.rms_norm(X, WEIGHT)
    before = len(self_check.compared["cpu"])
    fusednorm.rms_norm(X, WEIGHT)
    assert len(self_check.compared["cpu"]) == before
    for x in (X[:1], X[:, :95], X.float(), torch.randn(7, 2, 96).bfloat16()[:, 1], X.repeat(100, 1)):
        fusednorm.rms_norm(x)
        assert len(self_check.compared["cpu"]) == (before := before + 1)


@pytest.mark.parametrize(
    ("value", "compares"), [("", False), ("first", True), ("off", False)], ids=["unset", "first", "off"]
)
def test_the_variable(value, compares):
    """Where tests have run, such as here, nothing is compared unless it says so."""
    code = """
        import torch, fusednorm
        from fusednorm.engine import self_check
        fusednorm.rms_norm(torch.ones(3, 8))
        fusednorm.rms_norm(torch.ones(3, 8))
        print(sum(map(len, self_check.compared.values())))
    """
    assert printed_by(code, FUSEDNORM_SELF_CHECK=value, FUSEDNORM_BACKEND="") == f"{int(compares)}\n"


def test_platforms(monkeypatch):
    monkeypatch.setattr(setting, "SETTING", "")
    monkeypatch.setattr(setting, "_ON_TESTED_PROCESSORS", True)
    assert [name for name in choose.NAMES if setting.wanted(name)] == ["cuda", "triton"]
    monkeypatch.setattr(setting, "_ON_TESTED_PROCESSORS", False)
    assert [name for name in choose.NAMES if not setting.wanted(name)] == ["reference"]
