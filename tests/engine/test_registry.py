"""Who takes a call: availability, suitability, and the user's request."""

import importlib
import os
import re
import shutil
import sys
import textwrap
import threading
import traceback
import zipfile
from types import SimpleNamespace

import processes
import pytest
import torch

import fusednorm
from fusednorm import BackendError
from fusednorm.backends import cpu
from fusednorm.calls.call import RMSNorm
from fusednorm.engine import checked_backend, choose, requested
from fusednorm.reference import norm as reference

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """Each test registers and chooses for itself, in an environment that requests nothing."""
    monkeypatch.setattr(choose, "_registered", {})
    monkeypatch.setattr(choose, "_selected", {})
    token = requested._request.set("")
    yield
    requested._request.reset(token)


def backend(**changes):
    """A copy of the reference that counts its calls."""
    calls = []

    def forward(call):
        calls.append(call)
        reference.forward(call)

    parts = {
        "DEVICES": ("cpu",),
        "unavailable": list,
        "unsuitable": lambda operation: [],
        "plan": lambda operation: "counted",
        "forward": forward,
        "backward": reference.backward,
        "calls": calls,
    }
    return SimpleNamespace(**{**parts, **changes})


def plug_in(monkeypatch, name, load):
    entry = SimpleNamespace(name=name, load=load)
    monkeypatch.setattr(choose, "entry_points", lambda group: [entry] if group == "fusednorm.backends" else [])


def test_the_list():
    infos = {info.name: info for info in fusednorm.backends()}
    assert list(infos) == ["cpu", "cuda", "triton", "triton_cpu", "reference"]
    assert infos["reference"].available
    assert str(infos["reference"]) == "reference: on any"


def test_a_backend_that_is_not_available_says_why(monkeypatch):
    from fusednorm.backends import cuda

    monkeypatch.setattr(cuda, "unavailable", lambda: ["there is no GPU", "and no compiler"])
    info = next(info for info in fusednorm.backends() if info.name == "cuda")
    assert not info.available
    assert str(info) == "cuda: no: there is no GPU; and no compiler"


def test_backends_is_a_function_and_a_package():
    import fusednorm.backends.reference as module

    assert module is fusednorm.backends.reference
    assert module.treesum is reference.treesum
    assert callable(fusednorm.backends)


def test_a_request_is_obeyed():
    for name in ("cpu", "reference"):
        with fusednorm.use_backend(name):
            assert fusednorm.explain(X).backend == name
    with fusednorm.use_backend("reference, cpu"):
        assert fusednorm.explain(X).backend == "reference"
        with fusednorm.use_backend("cpu"):
            assert fusednorm.explain(X).backend == "cpu"
        assert fusednorm.explain(X).backend == "reference"
    again = fusednorm.use_backend("reference")
    with again, fusednorm.use_backend("cpu"), again:
        assert fusednorm.explain(X).backend == "reference"
    assert fusednorm.explain(X).request == ""


@pytest.mark.parametrize("names", [None, 5, ["cpu", None], {"cpu"}])
def test_names_of_another_type(names):
    with pytest.raises(TypeError, match="names must be str such as 'cpu' or 'triton,reference', got"):
        fusednorm.use_backend(names)


@pytest.mark.parametrize(
    "names", [("reference, cpu",), ("reference", "cpu"), (["reference", "cpu"],), (("Reference", "CPU"),)]
)
def test_names_as_they_are_written(names):
    """In one text, as several arguments, or as a list; in any case."""
    request = fusednorm.use_backend(*names)
    with request:
        explanation = fusednorm.explain(X)
    assert (explanation.backend, explanation.request) == ("reference", "reference,cpu")
    assert repr(request) == (
        "<fusednorm.use_backend('reference,cpu'), which takes effect in a block: "
        "`with fusednorm.use_backend('reference,cpu'):`>"
    )


def test_case_tells_two_registered_backends_apart():
    for name in ("Mine", "mine"):
        fusednorm.register_backend(name, backend())
        with fusednorm.use_backend(name):
            assert fusednorm.explain(X).backend == name
    with fusednorm.use_backend("MINE"):
        assert fusednorm.explain(X).backend == "Mine"


@pytest.mark.parametrize("names", ["nonsense", "cpu,nonsense", "", ",", []])
def test_unknown_names_raise_and_list_the_valid_ones(names):
    with pytest.raises(BackendError, match=r"^use_backend names .* cpu, cuda, triton, triton_cpu, reference"):
        fusednorm.use_backend(names)


def test_a_forced_backend_never_falls_back():
    picky = backend(unsuitable=lambda operation: ["rows are too narrow", "and it rains"])
    absent = backend(unavailable=lambda: ["no such processor"])
    elsewhere = backend(DEVICES=("npu", "tpu"))
    for name, b in (("picky", picky), ("absent", absent), ("elsewhere", elsewhere)):
        fusednorm.register_backend(name, b)
    with fusednorm.use_backend("picky,absent,elsewhere,cuda"), pytest.raises(BackendError) as raised:
        fusednorm.rms_norm(X)
    for reason in (
        "picky: rows are too narrow",
        "picky: and it rains",
        "absent: no such processor",
        "elsewhere: it runs on npu and tpu tensors, and these are on cpu",
        "cuda: it runs on cuda tensors, and these are on cpu",
        "'picky,absent,elsewhere,cuda,reference'",
        "python -m fusednorm",
        "x float32, out float32, hidden size 8, on cpu",
    ):
        assert reason in str(raised.value)
    with fusednorm.use_backend("picky,reference"):
        assert fusednorm.explain(X).passed_over == {"picky": ["rows are too narrow", "and it rains"]}
        fusednorm.rms_norm(X)
    assert not picky.calls


def test_an_error_in_a_backend_is_not_a_reason_to_pass_it_over():
    def broken(operation):
        raise ZeroDivisionError

    fusednorm.register_backend("broken", backend(unsuitable=broken))
    with fusednorm.use_backend("broken,reference"), pytest.raises(ZeroDivisionError):
        fusednorm.rms_norm(X)


def copied(call):
    """The first mistake of an author: a new tensor instead of `out`."""
    reference.forward(call._replace(out=(y := torch.empty_like(call.out))))
    return y


def half(call):
    """Writes all but the last element of the sum."""
    kept = call.residual_out.flatten()[-1].clone()
    reference.forward(call)
    call.residual_out.flatten()[-1] = kept


def not_at_all(call):
    call.residual_out.copy_(call.x)


def without_rstd(call):
    reference.forward(call._replace(rstd=None))


@pytest.mark.parametrize(
    ("forward", "error", "words"),
    [
        (copied, TypeError, "[3, 8] on cpu from forward; it must write the outputs that the call has, and return None"),
        (lambda: None, TypeError, "takes 0 positional arguments but 1 was given"),
        (lambda *_: None, RuntimeError, "backend 'mine' did not write 24 of the 24 elements of out in forward"),
        (not_at_all, RuntimeError, "backend 'mine' did not write 24 of the 24 elements of out in forward"),
        (half, RuntimeError, "backend 'mine' did not write 1 of the 24 elements of residual_out in forward"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_forward_that_breaks_the_contract(forward, error, words, dtype):
    """The error says so at the first call, and at the next, and which backend it was."""
    fusednorm.register_backend("mine", backend(forward=forward))
    x = X.to(dtype)
    with fusednorm.use_backend("mine"):
        for _ in range(2):
            with pytest.raises(error, match=re.escape(words)) as raised:
                fusednorm.fused_add_rms_norm(x, x)
            assert "'mine'" in "".join(traceback.format_exception_only(raised.value))


def test_a_forward_that_leaves_rstd_unwritten():
    fusednorm.register_backend("mine", backend(forward=without_rstd))
    with fusednorm.use_backend("mine"), pytest.raises(RuntimeError, match="3 of the 3 elements of rstd in forward"):
        fusednorm.rms_norm(X.clone().requires_grad_())


def test_only_new_outputs_are_marked():
    """Memory of the caller is left alone: x in place, and `out`, where forward writes nothing."""
    seen = []

    def forward(call):
        seen.append([tensor.clone() for tensor in (call.out, call.residual_out)])
        call.residual_out.zero_()

    fusednorm.register_backend("mine", backend(forward=forward))
    with fusednorm.use_backend("mine"):
        fusednorm.fused_add_rms_norm(X, X, out=(out := torch.full_like(X, 5)))
        fusednorm.register_backend("another", backend())  # forgets what was tried
        fusednorm.fused_add_rms_norm_(out, torch.ones_like(out))
    assert [total.isnan().all().item() for _, total in seen] == [True, False]
    assert all((each[0] == 5).all() for each in seen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_nan_is_a_result(dtype):
    """Whatever its payload, also that of the mark: of x, of the residual, or made on the way."""
    integers, unwritten = checked_backend._UNWRITTEN[dtype]
    every = torch.arange(2**16).mul(1 << (8 * dtype.itemsize - 16)).to(integers)
    x = torch.cat([every, torch.full_like(every, unwritten)]).view(dtype)
    fusednorm.register_backend("mine", backend())
    with fusednorm.use_backend("mine"):
        found = fusednorm.fused_add_rms_norm(x, x.flip(-1))
    with fusednorm.use_backend("reference"):
        wanted = fusednorm.fused_add_rms_norm(x, x.flip(-1))
    assert all(torch.equal(a.view(integers), b.view(integers)) for a, b in zip(found, wanted, strict=True))


def without(name):
    """A backward that leaves one gradient unwritten."""
    return lambda call: reference.backward(call._replace(**{name: None}))


@pytest.mark.parametrize(
    ("backward", "error", "words"),
    [
        (lambda _: None, RuntimeError, "backend 'mine' did not write 24 of the 24 elements of dx in backward"),
        (
            lambda _: X,
            TypeError,
            "backend 'mine' returned float32 [3, 8] on cpu from backward; it must write the outputs",
        ),
        (lambda _: (X, X), TypeError, "backend 'mine' returned a tuple of 2 from backward"),
        (without("dresidual"), RuntimeError, "did not write 24 of the 24 elements of dresidual in backward"),
        (without("dweight"), RuntimeError, "did not write 8 of the 8 elements of dweight in backward"),
        (lambda: None, TypeError, "takes 0 positional arguments but 1 was given"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
def test_a_backward_that_breaks_the_contract(backward, error, words, compiled):
    fusednorm.register_backend("mine", backend(backward=backward))
    leaves = [X.clone().requires_grad_(), X.half().requires_grad_(), X[0].clone().requires_grad_()]
    with fusednorm.use_backend("mine"):
        if compiled:
            y = torch.ops.fusednorm.fused_add_rms_norm(*leaves, 1e-6, 0.0, True, False)[0]
        else:
            y = fusednorm.fused_add_rms_norm(*leaves)[0]
        for _ in range(2):
            with pytest.raises(error, match=re.escape(words)) as raised:
                y.backward(y, retain_graph=True)
            assert "'mine'" in "".join(traceback.format_exception_only(raised.value))


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_an_operation_is_checked_once(pass_):
    """The first call of an operation finds what is wrong; later ones reach the backend itself."""
    fusednorm.register_backend("mine", b := backend())
    x = X.clone().requires_grad_()
    with fusednorm.use_backend("mine"):
        fusednorm.rms_norm(x).sum().backward()
        chosen = choose.selected(RMSNorm(X.device, X.dtype, None, None, X.dtype, 8, True, False, None))
        assert (chosen.forward_into([]) if pass_ == "forward" else chosen.backward) is getattr(b, pass_)


@pytest.mark.parametrize("function", ["unavailable", "unsuitable", "plan", "forward", "backward"])
def test_what_a_backend_raises_names_it(function):
    """Its own error, with a line more."""
    fusednorm.register_backend("mine", backend(**{function: lambda *_: {}["nothing"]}))
    with fusednorm.use_backend("mine"), pytest.raises(KeyError, match="nothing") as raised:
        fusednorm.rms_norm(X.clone().requires_grad_()).sum().backward()
    assert f"in {function} of the backend 'mine'" in raised.value.__notes__[0]
    assert len(raised.value.__notes__) == 1


def test_the_backend_of_an_operation_is_chosen_once():
    asked = []
    fusednorm.register_backend("mine", b := backend(unsuitable=lambda operation: asked.append(operation) or []))
    with fusednorm.use_backend("mine"):
        for rows in (1, 2, 3):
            fusednorm.rms_norm(X[:rows])
        assert len(asked) == 1
        assert len(b.calls) == 3
        fusednorm.rms_norm(X.half())
        fusednorm.rms_norm(X[:, :7])
        fusednorm.fused_add_rms_norm(X, X)
        assert len(asked) == 4


@pytest.mark.compiled
def test_explain():
    fusednorm.register_backend("mine", backend())
    with fusednorm.use_backend("mine"):
        explanation = fusednorm.explain(X, X.half(), X[0])
    assert explanation.backend == "mine"
    assert explanation.plan == "counted"
    assert explanation.request == "mine"
    assert "residual float16" in str(explanation)
    assert "mine: counted" in str(explanation)
    assert "C kernels for" in fusednorm.explain(X).plan


@pytest.mark.compiled
def test_automatic_choice_prefers_ours_then_plug_ins_then_the_reference(monkeypatch):
    plug_in(monkeypatch, "theirs", lambda: backend(DEVICES=("meta", "cpu")))
    assert fusednorm.explain(X).backend == "cpu"
    elsewhere = fusednorm.explain(X.to("meta"))
    assert elsewhere.backend == "theirs"
    assert list(elsewhere.passed_over) == ["cpu", "cuda", "triton", "triton_cpu"]
    assert "on meta" in elsewhere.passed_over["cpu"][0]
    monkeypatch.setattr(choose, "entry_points", lambda group: [])
    monkeypatch.setattr(choose, "_registered", {})
    assert fusednorm.explain(X.to("meta")).backend == "reference"


def test_plug_ins_are_listed_and_loaded_by_name(monkeypatch):
    plug_in(monkeypatch, "theirs", backend)
    with fusednorm.use_backend("theirs"):
        fusednorm.rms_norm(X)
    assert "theirs" in [info.name for info in fusednorm.backends()]


def test_a_plug_in_that_another_thread_loads_meanwhile(monkeypatch):
    first = backend()
    plug_in(monkeypatch, "theirs", backend)
    found = choose.entry_points

    def while_another_loads(group):
        choose._registered["theirs"] = first
        return found(group)

    monkeypatch.setattr(choose, "entry_points", while_another_loads)
    assert choose.load("theirs") is first


def test_a_backend_registered_while_another_thread_chooses():
    def unavailable():
        if "late" not in choose._registered:
            fusednorm.register_backend("late", backend())
        return ["not today"]

    fusednorm.register_backend("slow", backend(DEVICES=("meta",), unavailable=unavailable))
    explanation = fusednorm.explain(X.to("meta"))
    assert (explanation.backend, explanation.passed_over["slow"]) == ("reference", ["not today"])


def raising(error):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (raising(ImportError("no module named theirs")), "ImportError: no module named theirs"),
        (raising(ZeroDivisionError("theirs")), "ZeroDivisionError: theirs"),
        (raising(SystemExit("theirs wants to leave")), "SystemExit: theirs wants to leave"),
        (lambda: None, "TypeError: backend 'theirs' lacks DEVICES, unavailable, unsuitable, plan, forward, backward"),
        (lambda: backend(DEVICES="cpu"), "TypeError: backend 'theirs' has DEVICES 'cpu'; it must be a tuple of names"),
        (lambda: backend(forward=None), "TypeError: backend 'theirs': forward must be a function, got NoneType"),
    ],
    ids=["missing", "fails", "exits", "nothing", "devices", "no function"],
)
def test_a_plug_in_that_does_not_load(monkeypatch, load, reason):
    """A line in the list; passed over where nothing was requested; an error, with the reason, where it was."""
    plug_in(monkeypatch, "theirs", load)
    (info,) = (info for info in fusednorm.backends() if info.name == "theirs")
    assert not info.available
    assert reason in info.reasons[0]
    elsewhere = X.to("meta")
    assert fusednorm.explain(elsewhere).backend == "reference"
    assert reason in fusednorm.explain(elsewhere).passed_over["theirs"][0]
    fusednorm.rms_norm(elsewhere)
    with fusednorm.use_backend("theirs"), pytest.raises(BackendError) as raised:
        fusednorm.rms_norm(X)
    assert reason in str(raised.value)
    assert "uninstall the package" in str(raised.value)


@pytest.mark.parametrize(
    ("unavailable", "reason"),
    [
        (lambda: None, "TypeError: backend 'theirs' gives its reasons as None; they must be a list of str"),
        (lambda: "no GPU", "TypeError: backend 'theirs' gives its reasons as 'no GPU'"),
        (raising(ZeroDivisionError("theirs")), "ZeroDivisionError: theirs"),
    ],
    ids=["nothing", "text", "fails"],
)
def test_a_backend_that_answers_nonsense(monkeypatch, unavailable, reason):
    """A line in the list; where a call asks it, that call raises."""
    plug_in(monkeypatch, "theirs", lambda: backend(unavailable=unavailable))
    (info,) = (info for info in fusednorm.backends() if info.name == "theirs")
    assert not info.available
    assert info.reasons == [reason] or info.reasons[0].startswith(reason)
    error, _, words = reason.partition(": ")
    with fusednorm.use_backend("theirs"), pytest.raises((TypeError, ZeroDivisionError), match=words) as raised:
        fusednorm.rms_norm(X)
    assert type(raised.value).__name__ == error


def test_a_plug_in_cannot_take_a_name_of_ours(monkeypatch):
    plug_in(monkeypatch, "cpu", lambda: pytest.fail("loaded"))
    with fusednorm.use_backend("cpu"):
        fusednorm.rms_norm(X)


def test_registering():
    with pytest.raises(ValueError, match="'cpu' is taken"):
        fusednorm.register_backend("cpu", backend())
    with pytest.raises(ValueError, match="'triton' is taken"):
        fusednorm.register_backend("triton", backend())
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        fusednorm.register_backend("a,b", backend())
    with pytest.raises(TypeError, match=r"has DEVICES 'cpu'; it must be a tuple of names such as \('cpu',\)"):
        fusednorm.register_backend("mine", backend(DEVICES="cpu"))
    with pytest.raises(TypeError, match="backend 'mine': backward must be a function, got str"):
        fusednorm.register_backend("mine", backend(backward="later"))
    with pytest.raises(TypeError, match="lacks unavailable, unsuitable, plan, forward, backward"):
        fusednorm.register_backend("half", SimpleNamespace(DEVICES=("cpu",)))
    fusednorm.register_backend("mine", backend())
    with pytest.raises(ValueError, match="'mine' is taken"):
        fusednorm.register_backend("mine", backend())


def test_a_request_holds_in_its_own_thread_only():
    seen = []
    other = "cpu" if requested.ENVIRONMENT == "reference" else "reference"
    with fusednorm.use_backend(other):
        assert fusednorm.explain(X).backend == other
        thread = threading.Thread(target=lambda: seen.append(fusednorm.explain(X).backend))
        thread.start()
        thread.join()
    inherited = getattr(sys.flags, "thread_inherit_context", 0)  # on free-threaded Python, from 3.14 on
    assert seen == [other if inherited else requested.ENVIRONMENT.split(",")[0] or "cpu"]


def test_one_request_in_two_threads_at_once():
    request, before, failed = fusednorm.use_backend("reference"), requested.request(), []
    entered, left = threading.Event(), threading.Event()

    def within():
        try:
            with request:
                entered.set()
                left.wait(60)
                assert requested.request() == "reference"
            assert requested.request() == requested.ENVIRONMENT
        except (AssertionError, ValueError) as error:
            failed.append(error)

    thread = threading.Thread(target=within)
    with request, request:
        thread.start()
        entered.wait(60)
    left.set()
    thread.join()
    assert requested.request() == before
    assert not failed


def python(code, **environment):
    """Runs a program in a process of its own, with these FUSEDNORM_ variables and no others."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDNORM_")}
    program = "import torch, fusednorm\nx = torch.ones(2, 8)\n" + textwrap.dedent(code)
    return processes.python("-c", program, env=clean | environment)


@pytest.mark.compiled
def test_the_environment_requests():
    show = "print(fusednorm.explain(x).backend)"
    within = f"{show}\nwith fusednorm.use_backend('cpu'): {show}"
    assert python(within, FUSEDNORM_BACKEND=" Reference , CPU ").stdout == "reference\ncpu\n"
    assert python(show, FUSEDNORM_BACKEND="cuda,reference").stdout == "reference\n"
    assert python(show, FUSEDNORM_BACKEND="").stdout == "cpu\n"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "nonsense",
            "FUSEDNORM_BACKEND names the backend 'nonsense', which does not exist; the names are cpu, cuda, triton",
        ),
        ("cuda", "cuda: it runs on cuda tensors, and these are on cpu"),
    ],
)
def test_the_environment_never_falls_back(value, message):
    done = python("fusednorm.rms_norm(x)", FUSEDNORM_BACKEND=value)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.compiled
def test_the_instruction_set_can_be_capped():
    for name in {cpu.variants()[0], cpu.variants()[-2]} if len(cpu.variants()) > 1 else cpu.variants():
        done = python("fusednorm.rms_norm(x); print(fusednorm.explain(x).plan)", FUSEDNORM_CPU_ISA=name.upper())
        assert f"C kernels for {name}," in done.stdout
    (ladder,) = (ladder for ladder in cpu.LADDERS if set(cpu._names) <= set(ladder))
    assert [name for name in ladder if name in cpu._names] == cpu._names  # the C library's order


@pytest.mark.parametrize(
    ("usable", "cap", "best"),
    [
        ("scalar avx2", "avx512", "avx2"),
        ("scalar avx2 avx512 zen4", "avx512_fp16", "avx512"),
        ("scalar avx2 avx512 avx512_fp16", "zen4", "avx512_fp16"),
        ("scalar avx2 avx512", "avx2", "avx2"),
        ("scalar avx2 avx512", "scalar", "scalar"),
        ("scalar avx2", "neon", "avx2"),
        ("neon sve neon_bf16", "sve_bf16", "neon_bf16"),
        ("neon sve", "avx2", "sve"),
        ("neon sve", "scalar", "sve"),
        ("scalar", "sve", "scalar"),
        ("scalar avx2", "", "avx2"),
    ],
)
def test_a_cap_is_any_instruction_set(usable, cap, best):
    """Also one that this processor lacks, which is then no limit; so is one of another architecture."""
    from fusednorm.backends import cpu

    assert cpu.best(usable.split(), cap) == best


@pytest.mark.compiled
def test_an_unknown_instruction_set_is_a_reason():
    show = "print(*fusednorm.backends(), sep='\\n'); fusednorm.rms_norm(x)"
    done = python(show, FUSEDNORM_CPU_ISA="sse9")
    reason = "FUSEDNORM_CPU_ISA is 'sse9', which is no instruction set; they are scalar, avx2, avx512,"
    assert f"cpu: no: {reason}" in done.stdout
    assert f"the backend 'cpu' cannot be used: {reason}" in done.stderr
    assert done.stderr.startswith("<string>:3: RuntimeWarning")  # the caller's line
    assert python(show, FUSEDNORM_CPU_ISA="sse9", FUSEDNORM_BACKEND="cpu").returncode == 1


@pytest.mark.compiled
def test_the_plan_says_how_many_threads():
    """Also after a fork, which leaves one, whatever torch says."""
    show = "print(fusednorm.explain(x).plan.partition(', ')[2], flush=True)"
    expected = ["one thread"]
    program = (
        f"import os\nfrom fusednorm.tools import doctor\ntorch.set_num_threads(1); {show}\ntorch.set_num_threads(3)"
    )
    if cpu.openmp():
        program += f"\n{show}"
        expected.append("up to 3 threads from 4096 rows")
    if hasattr(os, "fork"):  # not on Windows
        for before in ("", "fusednorm.rms_norm(x)"):
            program += f"\n{before}\nif os.fork(): os.wait()\nelse: {show}; os._exit(0)"
            expected.append("one thread, because this process was forked after fusednorm was imported")
        program += "\nif os.fork(): os.wait()\nelse: print(doctor.report()['devices'], flush=True); os._exit(0)"
    found = python(program).stdout.splitlines()
    assert found[: len(expected)] == expected
    assert not hasattr(os, "fork") or expected[-1] in found[len(expected)]


def test_without_the_compiled_extension():
    """Says why, once, and works through the reference."""
    hide = """
    import sys, warnings
    class Hide:
        def find_spec(name, path=None, target=None):
            if name == "fusednorm._cpu":
                raise ModuleNotFoundError("No module named 'fusednorm._cpu'")
    sys.meta_path.insert(0, Hide)
    """
    done = python(hide + "print(fusednorm.rms_norm(x)[0, 0].item()); fusednorm.rms_norm(x)")
    assert done.returncode == 0
    assert abs(float(done.stdout) - 1) < 1e-6  # 1 / sqrt(1 + eps) is 1 - eps / 2
    assert done.stderr.count("RuntimeWarning") == 1
    assert "No module named 'fusednorm._cpu'" in done.stderr
    assert "C compiler" in done.stderr
    done = python(hide + "print(fusednorm.backends()[0])")
    assert "cpu: no: its compiled extension cannot be imported" in done.stdout
    done = python(hide + "fusednorm.rms_norm(x)", FUSEDNORM_BACKEND="cpu")
    assert done.returncode == 1
    assert "cpu: its compiled extension cannot be imported" in done.stderr


@pytest.mark.parametrize(
    ("missing", "archive", "cure"),
    [
        ("fusednorm._cpu", "", "`pip install --force-reinstall --no-deps .` in the checkout builds it"),
        ("_cffi_backend", "", "`pip install cffi` brings the package that it needs"),
        ("fusednorm._cpu", "archive.zip", "Python imports none from a zip archive: install fusednorm with pip"),
    ],
)
def test_what_the_compiled_extension_lacks(missing, archive, cure, monkeypatch, tmp_path):
    """The cure is that of what is missing."""

    class Hide:
        def find_spec(self, name, path=None, target=None):
            if name == "fusednorm._cpu":  # whose own import of cffi fails so
                raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    folder = tmp_path / archive
    if archive:
        with zipfile.ZipFile(folder, "w") as file:
            file.write(cpu.__file__, "again.py")
    else:
        shutil.copy(cpu.__file__, tmp_path / "again.py")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "fusednorm._cpu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hide(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "again", raising=False)
    [reason] = importlib.import_module("again").unavailable()
    assert cure in reason
    assert missing in reason


class Nested(torch.autograd.Function):
    """Its backward pass starts another one, so many deep. Autograd takes the 62nd to a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, innermost):
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            leaf = torch.ones(2, 4, requires_grad=True)
            y = Nested.apply(leaf, ctx.depth - 1, ctx.innermost) if ctx.depth else ctx.innermost(leaf)
            y.sum().backward()
        return gradient, None, None


def test_a_backward_pass_in_another_thread_follows_the_request(monkeypatch):
    """As a GPU's does: `use_backend` around an operator's call, which compiled code makes, and its backward pass."""
    threads, plain = [], reference.backward
    backend = choose.load("reference")
    monkeypatch.setattr(backend, "backward", lambda call: threads.append(threading.current_thread()) or plain(call))
    with fusednorm.use_backend("reference"):
        x = torch.ones(2, 4, requires_grad=True)
        operator = torch.ops.fusednorm.rms_norm
        Nested.apply(x, 60, lambda leaf: operator(leaf, None, 1e-6, 0.0, True, False)[0]).sum().backward()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
