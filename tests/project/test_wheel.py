"""The wheels: built for every system that clang compiles for here, looked at, and run where the system can be had.

``tox -e wheel`` installs what this takes: zig's clang, which brings the C libraries of other systems, cibuildwheel and
the tools that look at wheels. Nothing here needs a container.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("cibuildwheel", reason="tox -e wheel installs what this takes")
abi3info = pytest.importorskip("abi3info", reason="tox -e wheel installs what this takes")

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTENSIONS = ("_cpu", "_fast_path")
C_FILES = sorted((ROOT / "cpu").rglob("*.c"))
WHAT_LINUX_HAS = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libc.so", "ld-linux-aarch64.so.1"}


@dataclass(frozen=True)
class Target:
    """A system to build for: as zig, CMake and Python name it, and the tag of the wheel."""

    zig: str
    system: str
    processor: str
    platform: str
    tag: str


LINUX = [
    Target("x86_64-linux-gnu.2.28", "Linux", "x86_64", "linux-x86_64", r"manylinux_2_(1\d|2[0-8])_x86_64"),
    Target("aarch64-linux-gnu.2.28", "Linux", "aarch64", "linux-aarch64", r"manylinux_2_(1\d|2[0-8])_aarch64"),
    Target("x86_64-linux-musl", "Linux", "x86_64", "linux-x86_64", "linux_x86_64"),
    Target("aarch64-linux-musl", "Linux", "aarch64", "linux-aarch64", "linux_aarch64"),
]
MACOS = [
    Target("x86_64-macos", "Darwin", "x86_64", "macosx-11.0-x86_64", "macosx_11_0_x86_64"),
    Target("aarch64-macos", "Darwin", "arm64", "macosx-11.0-arm64", "macosx_11_0_arm64"),
]


def run(*command, **options):
    """The output of a program, which must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def module(name, *arguments, **options):
    return run(sys.executable, "-P", "-m", name, *arguments, **options)


def contents(wheel):
    """The bytes of each file."""
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    module("build", "-q", "--no-isolation", "--sdist", ROOT, "-o", folder)
    (file,) = folder.iterdir()
    return file


def source_of(sdist, folder):
    folder.mkdir(exist_ok=True)
    run("tar", "-xf", sdist, "-C", folder)  # tarfile's filter is not in each Python 3.11
    (source,) = folder.iterdir()
    return source


#: zig's linker stops at -bundle, which CMake asks for on macOS.
COMPILER = """#!/bin/sh
for word do
    shift
    [ "$word" = -bundle ] && word=-shared
    set -- "$@" "$word"
done
exec "{python}" -m ziglang cc -target {target} "$@"
"""

BUILT = {}


def build(target, sdist, tmp_path_factory):
    """The wheel for a target, built once from the sdist; not repaired."""
    if target not in BUILT:
        folder = tmp_path_factory.mktemp(target.zig)
        source = source_of(sdist, folder)
        compiler = folder / "cc"
        compiler.write_text(COMPILER.format(python=sys.executable, target=target.zig))
        compiler.chmod(0o755)
        defines = {"CMAKE_SYSTEM_NAME": target.system, "CMAKE_SYSTEM_PROCESSOR": target.processor}
        module(
            *("build", "-q", "--no-isolation", "--wheel", source, "-o", folder / "dist"),
            *(f"-Ccmake.define.{name}={value}" for name, value in defines.items()),
            env=os.environ | {"CC": str(compiler), "_PYTHON_HOST_PLATFORM": target.platform},
        )
        (BUILT[target],) = (folder / "dist").iterdir()
    return BUILT[target]


def repaired(target, sdist, tmp_path_factory):
    """The wheel after the command that cibuildwheel would run.

    Not for musl: where auditwheel looks for its libc.so, this machine has a text for the linker.
    """
    if "musl" in target.zig:
        return build(target, sdist, tmp_path_factory)
    wheel, folder = build(target, sdist, tmp_path_factory), tmp_path_factory.mktemp("repaired")
    command = SETTINGS["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
    run("sh", "-c", command.format(dest_dir=folder, wheel=wheel))
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize(
    ("platform", "processors", "systems"),
    [
        ("linux", "x86_64", ("manylinux_x86_64", "musllinux_x86_64")),
        ("linux", "aarch64", ("manylinux_aarch64", "musllinux_aarch64")),
        ("macos", "x86_64,arm64", ("macosx_x86_64", "macosx_arm64")),
        ("windows", "AMD64", ("win_amd64",)),
    ],
)
def test_cibuildwheel_builds_for_every_system(platform, processors, systems):
    found = module("cibuildwheel", "--print-build-identifiers", "--platform", platform, "--archs", processors, cwd=ROOT)
    assert set(found.split()) == {f"{python}-{s}" for python in ("cp311", "cp314", "cp314t") for s in systems}


def test_the_sdist_builds_the_wheel_that_the_checkout_builds(sdist, tmp_path):
    source = source_of(sdist, tmp_path / "source")
    wheels = []
    for name, tree in (("from_sdist", source), ("from_checkout", ROOT)):
        folder = tmp_path / name
        module(
            "build", "-q", "--no-isolation", "--wheel", tree, "-o", folder, f"-Cbuild-dir={tmp_path / 'build' / name}"
        )
        wheels += folder.iterdir()
    a, b = map(contents, wheels)
    assert [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)] == []
    assert wheels[0].name == wheels[1].name
    # 2 MB, and 0.15 for each family since: log-probabilities have 80 KB of kernels and 90 KB of golden vectors,
    # LayerNorm 70 and 40.
    assert wheels[0].stat().st_size < 2_300_000, "docs/releasing.md says what each part costs"


def test_the_python_files_alone_take_no_compiler(tmp_path):
    """The options are those of CONTRIBUTING.md and of `tox -e python`."""
    options = re.findall(r"-C (wheel\.[\w.-]+=\w+)", (ROOT / "CONTRIBUTING.md").read_text())
    tox = (ROOT / "tox.ini").read_text()
    assert len(options) == 2
    assert [option for option in options if option.replace("=", " = ") in tox] == options
    given = [part for option in options for part in ("-C", option)]
    hidden = os.environ | {"PATH": "/nonexistent"}
    module("pip", "wheel", "-q", "--no-build-isolation", "--no-deps", *given, "-w", tmp_path, ROOT, env=hidden)
    (wheel,) = tmp_path.iterdir()
    names = contents(wheel).keys()
    assert {"fusednorm/__init__.py", "fusednorm/backends/reference.py", "fusednorm/csrc/machine.cuh"} <= names
    assert [name for name in names if name.endswith((".so", ".pyd", ".dylib"))] == []


def test_texts_for_the_index(sdist, tmp_path_factory):
    module("twine", "check", "--strict", sdist, build(LINUX[0], sdist, tmp_path_factory))


def sources(folder, into):
    """Files of a folder that git knows, as the wheel names them."""
    listed = run("git", "-C", ROOT, "ls-files", folder).split()
    return {into + name.removeprefix(folder) for name in listed}


@pytest.mark.parametrize("target", LINUX + MACOS, ids=lambda t: t.zig)
def test_contents(target, sdist, tmp_path_factory):
    wheel = build(target, sdist, tmp_path_factory)
    module("check_wheel_contents", wheel)
    files = {name for name in contents(wheel) if ".dist-info/" not in name}
    wanted = sources("fusednorm", "fusednorm") | sources("backends", "fusednorm/backends")
    wanted |= sources("csrc", "fusednorm/csrc") | {f"fusednorm/{name}.abi3.so" for name in EXTENSIONS}
    assert files == wanted


@pytest.mark.parametrize("target", LINUX, ids=lambda t: t.zig)
def test_linux_wheels(target, sdist, tmp_path_factory):
    """The tag is an old system's, no library came along, and the extensions use the stable ABI of Python 3.11 alone."""
    wheel = repaired(target, sdist, tmp_path_factory)
    assert re.fullmatch(rf"fusednorm-[\d.]+-cp311-abi3-.*{target.tag}.*\.whl", wheel.name)
    assert not [name for name in contents(wheel) if ".libs/" in name]
    module("abi3audit", "--strict", wheel)
    folder = tmp_path_factory.mktemp("extensions")
    for name in EXTENSIONS:
        file = folder / f"{name}.so"
        file.write_bytes(contents(wheel)[f"fusednorm/{name}.abi3.so"])
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-dW", file)))
        assert needed <= WHAT_LINUX_HAS
        symbols = [line.split() for line in run("nm", "-D", file).splitlines()]
        assert [s[-1] for s in symbols if s[-2] in "TDBR"] == [f"PyInit_{name}"]
        assert not [s[-1] for s in symbols if re.match("omp_|GOMP_|__kmpc", s[-1])]


@pytest.mark.parametrize("target", MACOS, ids=lambda t: t.zig)
def test_macos_wheels(target, sdist, tmp_path_factory):
    wheel = build(target, sdist, tmp_path_factory)
    assert wheel.name.endswith(f"-cp311-abi3-{target.tag}.whl")
    magic, processor = b"\xcf\xfa\xed\xfe", {"x86_64": b"\x07\0\0\x01", "arm64": b"\x0c\0\0\x01"}[target.processor]
    for name in EXTENSIONS:
        assert contents(wheel)[f"fusednorm/{name}.abi3.so"].startswith(magic + processor)


WINDOWS_PYCONFIG = """
#define MS_WINDOWS
#define MS_WIN32
#define MS_WIN64
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_TIME_T 8
#define HAVE_PY_SSIZE_T 1
typedef long long Py_ssize_t;
#define PY_SSIZE_T_MAX 0x7fffffffffffffff
"""


def test_windows_extensions_compile_and_link(tmp_path):
    """With Python's own headers but for ``pyconfig.h``, and with a library of all that the stable ABI exports."""

    def zig(*command):
        module("ziglang", *command)

    headers = tmp_path / "include"
    shutil.copytree(sysconfig.get_path("include"), headers)
    (headers / "pyconfig.h").write_text(WINDOWS_PYCONFIG)
    exports = [s.name for s in abi3info.FUNCTIONS] + [f"{s.name} DATA" for s in abi3info.DATAS]
    (tmp_path / "python3.def").write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *exports]))
    zig("dlltool", "-m", "i386:x86-64", "-d", tmp_path / "python3.def", "-l", tmp_path / "python3.lib")
    module("cffi.gen_src", "exec-python", ROOT / "cpu" / "ffi.py", tmp_path / "_cpu.c")
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-DPy_LIMITED_API=0x030b0000"]
    flags += [f"-I{headers}", f"-I{ROOT / 'cpu'}"]
    objects = {name: [] for name in EXTENSIONS}
    for file in [*C_FILES, tmp_path / "_cpu.c"]:
        made = tmp_path / f"{file.stem}.o"
        lax = ["-Wno-error"] if file.stem == "_cpu" else []  # cffi's
        zig("cc", "-target", "x86_64-windows-gnu", *flags, *lax, "-c", file, "-o", made)
        objects["_fast_path" if file.parent.name in ("launch", "python") else "_cpu"].append(made)
    for name in EXTENSIONS:
        dll = tmp_path / f"{name}.pyd"
        zig("cc", "-target", "x86_64-windows-gnu", "-shared", "-o", dll, *objects[name], tmp_path / "python3.lib")
        assert dll.read_bytes().startswith(b"MZ")


def test_free_threaded_python_takes_no_stable_abi(sdist, tmp_path):
    """What the wheel for free-threaded Python is built with; here with this Python, which is not."""
    source = source_of(sdist, tmp_path / "source")
    module("build", "-q", "--no-isolation", "--wheel", source, "-o", tmp_path / "dist", "-Cwheel.py-api=")
    (wheel,) = (tmp_path / "dist").iterdir()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-" in wheel.name
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {f"fusednorm/{name}{suffix}" for name in EXTENSIONS} <= contents(wheel).keys()


GOLDEN = ("fusednorm", "conformance", "--backend", "cpu", "-k", "golden")


def test_x86_64_in_a_clean_environment(sdist, tmp_path_factory, tmp_path):
    """README's first command and the golden vectors, from the finished wheel."""
    wheel = repaired(LINUX[0], sdist, tmp_path_factory)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[conformance]")
    assert "cases are exact" in run(python, "-m", "fusednorm", "check", cwd=tmp_path)
    assert "comparisons, bit for bit" in run(python, "-m", *GOLDEN, cwd=tmp_path)


def test_aarch64_on_an_emulated_processor(sdist, tmp_path_factory, tmp_path):
    """The same; emulated, ``check`` takes minutes."""
    wheel, emulated = repaired(LINUX[1], sdist, tmp_path_factory), (ROOT / "tests/machines/emulation/aarch64", "--")
    run(*emulated, "python", "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    assert "cases are exact" in run(*emulated, "python", "-m", "fusednorm", "check", cwd=tmp_path)
    assert "comparisons, bit for bit" in run(*emulated, "python", "-m", *GOLDEN, cwd=tmp_path)
