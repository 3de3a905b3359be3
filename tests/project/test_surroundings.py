"""Surroundings that mean no good: variables, locales, encodings, folders, and packages that are broken or missing.

The folder of compiled kernels is in test_cuda.py, what is passed to the functions in test_front_end.py, other people's
backends are in test_registry.py. docs/faults.md lists them all.
"""

import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import processes
import pytest
import torch
from processes import printed_by

import fusednorm
from fusednorm import __main__ as command
from fusednorm import environment
from fusednorm.backends.triton import cpu as triton_cpu
from fusednorm.backends.triton import gpu as triton_gpu
from fusednorm.backends.triton import host as triton_host
from fusednorm.calls import must_be_seen
from fusednorm.engine import requested
from fusednorm.tools import check
from fusednorm.tools.measure import clock, compare

ROOT = Path(__file__).parents[2]
INSTALLED = Path(fusednorm.operations.norm.__file__).parents[1]
VARIABLES = ("OMP_NUM_THREADS", "TRITON_INTERPRET", *environment.VARIABLES)
RESULT = """
import torch, fusednorm
x = torch.linspace(-3, 5, 64 * 1000).reshape(64, 1000)
y, total = fusednorm.fused_add_rms_norm(x, x.flip(0), x[0])
print(fusednorm.explain(x).backend, y.view(torch.int32).sum().item(), total.view(torch.int32).sum().item())
"""


def python(code, *, modules=(), **environment):
    """Runs a program, without some modules; with these variables, and none else of those that fusednorm reads."""
    hide = "".join(f"import sys; sys.modules[{name!r}] = None\n" for name in modules)
    others = {*VARIABLES} - {"OMP_NUM_THREADS"}  # of which fusednorm hears from torch
    clean = {name: value for name, value in os.environ.items() if name not in others}
    done = processes.python("-c", hide + textwrap.dedent(code), env=clean | environment, fresh=bool(modules))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def usual():
    """What the program prints where nothing is unusual, by the reference's bits."""
    x = torch.linspace(-3, 5, 64 * 1000).reshape(64, 1000)
    with fusednorm.use_backend("reference"):
        outputs = fusednorm.fused_add_rms_norm(x, x.flip(0), x[0])
    return " ".join(["cpu", *(str(t.view(torch.int32).sum().item()) for t in outputs)]) + "\n"


@pytest.mark.parametrize(
    "values",
    [
        {**dict.fromkeys(VARIABLES, ""), "FUSEDNORM_BACKEND": "  ", "FUSEDNORM_CPU_ISA": "\t", "OMP_NUM_THREADS": " "},
        {"OMP_NUM_THREADS": "-3,é", "TRITON_INTERPRET": "é", "FUSEDNORM_VLLM": "é", "FUSEDNORM_É": "\udcff"},
    ],
    ids=["nothing in them", "rubbish"],
)
def test_variables_that_order_nothing(usual, values):
    """Empty ones are as good as none, rubbish in those of others changes no bits."""
    assert python(RESULT, **values) == usual


def test_every_variable_is_known_to_the_doctor():
    """Those that the sources read: what else begins with FUSEDNORM_ is a typing error, and shown as one."""
    read = set()
    for path in [*INSTALLED.rglob("*.py"), *Path(fusednorm.backends.__path__[0]).rglob("*.py")]:
        if "conformance" not in path.parts:
            read |= set(re.findall(r'environ\.get\("(FUSEDNORM_\w+)"', path.read_text(encoding="utf-8")))
    assert read == set(environment.VARIABLES)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("FUSEDNORM_BACKND", "did you mean FUSEDNORM_BACKEND?"),
        ("FUSEDNORM_BACKENDS", "did you mean FUSEDNORM_BACKEND?"),
        ("FUSEDNORM_cpu_isa", "did you mean FUSEDNORM_CPU_ISA?"),
        ("FUSEDNORM_CACHE", "did you mean FUSEDNORM_CACHE_DIR?"),
        ("FUSEDNORM_PRE_WARM", "did you mean FUSEDNORM_PREWARM?"),
        ("FUSEDNORM_XYZZY", "those that it reads are FUSEDNORM_BACKEND, FUSEDNORM_CACHE_DIR,"),
        ("FUSEDNORM_", "those that it reads are"),
    ],
)
def test_a_variable_that_nothing_reads(monkeypatch, name, cure):
    monkeypatch.setattr(os, "environ", {name: "cpu", "FUSEDNORM_BACKEND": "cpu", "FUSEDNORM_EMULATED_SM": "90"})
    with pytest.warns(
        RuntimeWarning, match=re.escape(f"fusednorm reads no environment variable {name}; {cure}")
    ) as all:
        environment.warn_of_unread()
    assert len(all) == 1


def test_it_is_warned_of_once_at_import():
    code = """
    import warnings
    with warnings.catch_warnings(record=True) as seen:
        import fusednorm, fusednorm.transformers, torch
        fusednorm.rms_norm(torch.ones(2, 8))
    print(*((warning.message, warning.filename) for warning in seen))
    """
    printed = python(code, FUSEDNORM_BACKND="cuda")
    assert printed.count("FUSEDNORM_BACKND; did you mean FUSEDNORM_BACKEND?") == 1
    assert python(code) == "\n"


def test_torch_without_numpy_is_not_announced():
    """By a program that imports fusednorm first, as the commands do."""
    code = "import sys; sys.modules['numpy'] = None\nimport fusednorm, torch\nfusednorm.rms_norm(torch.ones(2, 8))"
    printed_by(code, fresh=True)


@pytest.mark.parametrize("value", ["no", "2", "é", "\udcff"])
def test_rubbish_in_fusednorm_prewarm(monkeypatch, value):
    monkeypatch.setenv("FUSEDNORM_PREWARM", value)
    (reason,) = runpy.run_path(triton_cpu.__file__)["unavailable"]()
    assert reason == f"FUSEDNORM_PREWARM is {value!r}; it must be background, wait (or 1), or off (or 0)"
    for good, means in (
        ("0", "off"),
        (" 1 ", "wait"),
        ("", "background"),
        ("Wait", "wait"),
        ("background", "background"),
    ):
        monkeypatch.setenv("FUSEDNORM_PREWARM", good)
        assert runpy.run_path(triton_cpu.__file__)["_MODE"] == means


@pytest.mark.parametrize("value", [" 1 ", "1", "TRUE", "off", "", "é"])
def test_triton_interpret_is_read_as_triton_reads_it(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    found = runpy.run_path(triton_host.__file__, run_name="fusednorm.backends.triton.host_again")["INTERPRETED"]
    assert found == (value in ("1", "TRUE"))


@pytest.fixture
def no_request():
    token = requested._request.set("")
    yield
    requested._request.reset(token)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that puts a package named triton, of these files, before any other."""

    def imported():
        return [name for name in sys.modules if name.partition(".")[0] == "triton"]

    def put(files):
        for name, text in files.items():
            path = tmp_path / "triton" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name in imported():
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)

    yield put
    for name in imported():  # where there is no real one, monkeypatch has none to put back
        del sys.modules[name]


DRIVER = {"__init__.py": "__version__ = '3.9.0'", "runtime/__init__.py": ""}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"__init__.py": "raise ImportError('libtriton.so: no such file')"}, "ImportError: libtriton.so: no such file"),
        ({"__init__.py": "raise OSError('truncated')"}, "cannot be imported (OSError: truncated)"),
        ({"__init__.py": "1 / 0"}, "cannot be imported (ZeroDivisionError: division by zero)"),
        ({"__init__.py": "__version__ = '9.0'"}, "cannot be imported (ModuleNotFoundError: No module named 'triton.r"),
        ({**DRIVER, "__init__.py": "", "runtime/driver.py": ""}, "AttributeError: module 'triton' has no attribute"),
        ({**DRIVER, "__init__.py": "__version__ = 'new'", "runtime/driver.py": ""}, "cannot be imported (ValueError"),
        ({**DRIVER, "__init__.py": "__version__ = '2.1.0'", "runtime/driver.py": ""}, "Triton 2.1.0 is too old"),
    ],
    ids=["missing library", "damaged", "fails", "empty", "no version", "odd version", "old"],
)
@pytest.mark.usefixtures("no_request")
def test_a_triton_that_cannot_be_used(package, files, reason):
    """Both backends say why, with a cure; the list has it, and without an order nobody is disturbed."""
    package(files)
    listed = {info.name: info for info in fusednorm.backends()}
    for name, backend in (("triton", triton_gpu), ("triton_cpu", triton_cpu)):
        (found,) = backend.unavailable()
        assert reason in found
        from_index = name == "triton" or triton_host.INTERPRETED  # which has none for CPUs
        assert ("pip install" if from_index else "from source, github.com/triton-lang/triton-cpu") in found
        assert listed[name].reasons == [found]
    assert fusednorm.explain(torch.ones(2, 8).to("meta")).backend == "reference"
    with fusednorm.use_backend("triton_cpu"), pytest.raises(fusednorm.BackendError, match=re.escape(found)):
        fusednorm.rms_norm(torch.ones(2, 8))


@pytest.mark.skipif(triton_host.INTERPRETED, reason="the interpreter needs no driver")
@pytest.mark.parametrize(
    "error", ["RuntimeError('0 active drivers')", "OSError('libcuda.so')", "AssertionError('gcc')"]
)
def test_a_triton_whose_driver_fails(package, error):
    text = f"""
    class driver:
        class active:
            def get_current_target():
                raise {error}
    """
    package({**DRIVER, "runtime/driver.py": textwrap.dedent(text)})
    (found,) = triton_gpu.unavailable()
    assert "finds no GPU driver" in found
    assert re.search(error[:-2].replace("('", ": "), found)
    assert re.search(error[:-2].replace("('", ": "), triton_cpu.unavailable()[0])


def on_ascii(monkeypatch, *arguments):
    """What the command prints to an output that takes ASCII only."""
    raw = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        patched.setattr(sys, "argv", ["fusednorm", *arguments])
        assert command.main() == 0
        sys.stdout.flush()
        return raw.getvalue().decode("ascii")


def test_the_doctor_on_an_output_without_unicode(monkeypatch, tmp_path):
    """What a variable has beyond ASCII, or beyond UTF-8, is shown by numbers; so is one that nothing reads."""
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "été 中 \udcff"))
    monkeypatch.setenv("FUSEDNORM_BACKENDS", "cpu")
    text = on_ascii(monkeypatch)
    assert "\\xe9t\\xe9 \\u4e2d \\udcff" in text
    (line,) = (line for line in text.splitlines() if "FUSEDNORM_BACKENDS" in line)
    assert "nothing reads this variable" in line
    (line,) = (line for line in text.splitlines() if "FUSEDNORM_CACHE_DIR" in line)
    assert "nothing" not in line


def test_the_check_on_an_output_without_unicode(monkeypatch):
    monkeypatch.setattr(check, "HIDDEN_SIZES", (64,))
    monkeypatch.setattr(check, "ROWS", (2,))
    monkeypatch.setattr(clock, "TURN_SECONDS", 0.0)
    text = on_ascii(monkeypatch, "check")
    assert "cases are exact" in text
    assert "\\u" not in text


def test_compare_on_an_output_without_unicode(monkeypatch):
    monkeypatch.setattr(compare, "BATCHES", (1, 2))
    monkeypatch.setattr(compare, "ROWS", 2)
    monkeypatch.setattr(compare, "THREADED", (1, 2))
    options = ["--peers", "fusednorm", "--dtypes", "bfloat16", "--hidden-size", "64"]
    text = on_ascii(monkeypatch, "compare", *options)
    assert "\nfusednorm " in text
    assert "\\u" not in text


@pytest.mark.skipif(
    not (shutil.which("localedef") and Path("/usr/share/i18n/locales/tr_TR").exists()),
    reason="takes localedef and the sources of locales, which Debian's package `locales` has",
)
def test_locales_change_nothing(usual, tmp_path):
    """Neither a decimal comma nor Turkish letters."""
    subprocess.run(["localedef", "-i", "tr_TR", "-f", "UTF-8", tmp_path / "tr_TR.UTF-8"], check=True)
    code = f"""
    import locale
    locale.setlocale(locale.LC_ALL, "tr_TR.UTF-8")
    assert locale.str(1.5) == "1,5"
    {textwrap.indent(RESULT, "    ").strip()}
    """
    assert python(code, LOCPATH=str(tmp_path)) == usual


@pytest.mark.skipif(INSTALLED == ROOT / "fusednorm", reason="an editable install has no files of its own")
def test_folders_with_spaces_and_letters_of_all_kinds(usual, tmp_path):
    """The install, the cache and the working directory, where the system's encoding has none of the letters."""
    folder = tmp_path / "ein Ort – été 中 (1) 100% 'q'"
    shutil.copytree(INSTALLED, folder / "fusednorm", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
    import os
    os.chdir(os.environ["PYTHONPATH"])
    {textwrap.indent(RESULT, "    ").strip()}
    from fusednorm.tools import doctor
    from fusednorm.backends.cuda import compiler as cuda
    path = cuda.cache_directory() / "kernel.bin"
    cuda._write(path, b"code")
    print(os.path.dirname(fusednorm.__file__) == os.path.abspath("fusednorm"))
    print(cuda._read(path), doctor.report()["cache"]["kernels"], len(cuda._sources()) > 5)
    """
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables = {"PYTHONPATH": str(folder), "FUSEDNORM_CACHE_DIR": str(folder / "cache")}
    lines = python(code, **variables, **plain).splitlines()
    assert lines == [usual.strip(), "True", "b'code' 1 True"]


def test_without_what_is_optional(usual):
    """NumPy, Matplotlib, Triton and NVIDIA's bindings."""
    code = RESULT + "from fusednorm.tools import console, doctor\nprint(doctor.show(console.console()))\n"
    lines = python(code, modules=("numpy", "matplotlib", "triton", "cuda")).splitlines()
    assert lines[0] == usual.strip()
    assert lines[-1] == "0"


def test_the_table_names_tests_that_exist():
    """docs/faults.md: each fault with a test, by its file and its name."""
    rows = [line.split("|") for line in (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines() if "::" in line]
    assert len(rows) > 60
    for row in rows:
        assert len(row) == 5, row
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row[3])
        assert named, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), (file, name)


OF_TORCH = [
    *(f"_C.{question.__name__}" for question in must_be_seen.QUESTIONS),
    *("_C._len_torch_function_stack", "_C._dispatch_tls_is_dispatch_key_included"),
    "autograd.profiler._is_profiler_enabled",
]


@pytest.mark.parametrize("names", [OF_TORCH, OF_TORCH[-1:], ["_library.autograd"]], ids=["all", "one", "a module"])
def test_names_that_torch_no_longer_has(names):
    """Where torch lacks a name that is not public, calls go through its dispatcher: slower, and right."""
    code = f"""
import sys, torch
import torch.utils._device  # torch's own code takes the name from here on
class Gone:
    def find_spec(name, *_):
        if name == "torch._library.autograd":
            raise ImportError(name)
names = {names}
if names == ["_library.autograd"]:
    import torch._library.autograd
    del sys.modules["torch._library.autograd"]
    sys.meta_path.insert(0, Gone)
else:
    for name in names:
        exec(f"del torch.{{name}}")
import fusednorm
from fusednorm.calls import must_be_seen
from fusednorm.calls import fast_path
asked = names != ["_library.autograd"]
assert sorted(must_be_seen.MISSING) == sorted(name.rpartition(".")[2] for name in names if asked), must_be_seen.MISSING
assert fast_path.OPEN == (not asked and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"))
x, weight = torch.randn(3, 16), torch.rand(16)
with fusednorm.use_backend("reference"):
    expected = fusednorm.fused_add_rms_norm(x, x, weight)
assert all(map(torch.equal, fusednorm.fused_add_rms_norm(x, x, weight), expected))
assert torch.equal(fusednorm.rms_norm_(x.clone(), weight), fusednorm.rms_norm(x, weight))
leaf = x.clone().requires_grad_()
fusednorm.rms_norm(leaf, weight).sum().backward()
assert torch.ops.fusednorm.scale(x.to("meta"), 2.0).is_meta
"""
    done = processes.python("-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
