"""The folders of the library are rooms whose doors open one way: a module knows only rooms before its own."""

import ast
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: In the order in which one may know the ones before it.
ROOMS = ("calls", "declare", "reference", "backends", "engine", "torch_ops", "operations")
ROOMS += ("clients", "conformance", "tools")
CLIENTS = ("compat", "transformers", "vllm", "sglang", "onnx", "onnx_limits", "onnx_operators", "accelerate")

#: Public names that modules outside of all rooms hand on.
HANDED_ON = {
    "call": "calls",
    "layout": "calls",
    "quantizations": "calls",
    "Quantization": "calls",
    "BackendError": "calls",
}
HANDED_ON |= {"registry": "engine", "distributed": "torch_ops", "modules": "operations"}


def room_of(first):
    """The number of the room of a module, by the first part of its name after ``fusednorm``; None outside of all."""
    name = "clients" if first in CLIENTS else HANDED_ON.get(first, first)
    return ROOMS.index(name) if name in ROOMS else None


def imported(path):
    """All modules of fusednorm that a file imports, at its top or in a function, for types or not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        for name in names:
            if name.startswith("fusednorm."):
                yield name.removeprefix("fusednorm.")


def modules():
    """Each module, by its name after ``fusednorm.``, with all that its file imports of fusednorm."""
    for folder in ("fusednorm", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT if folder == "backends" else ROOT / folder).with_suffix("")
            yield ".".join(place.parts).removesuffix(".__init__"), set(imported(path))


def test_no_import_goes_up():
    up = []
    for module, names in modules():
        room = room_of(module.split(".")[0])
        for name in names if room is not None else ():
            other = room_of(name.split(".")[0])
            if other is not None and other > room:
                up.append((module, name))
    assert up == []


def circles(names):
    """The modules that know each other, directly or by others, of the names that each module imports.

    Imports in functions and for types count: who changes one of these modules must understand the others. ``fusednorm``
    itself does not: it runs before each of its modules.
    """

    def module_of(name):
        parts = name.split(".")
        return next((found for n in range(len(parts), 0, -1) if (found := ".".join(parts[:n])) in names), None)

    known = {module: {module_of(name) for name in of} - {module, None} for module, of in names.items()}
    reached = {}
    for module in known:
        reached[module], new = set(), {module}
        while new:
            reached[module] |= new
            new = set().union(*(known[one] for one in new)) - reached[module]
    return {" ".join(sorted(other for other in of if module in reached[other])) for module, of in reached.items()}


def test_no_circle_of_imports():
    found = sorted(circle for circle in circles(dict(modules())) if " " in circle)
    assert not found, f"these modules import each other: {found}; move to a module of its own what both sides need"


def test_circles_are_found():
    """Of names in modules and of packages; through others; and two apart."""
    known = {"a": {"b.name"}, "b": {"c"}, "c": {"a", "d.inner.name"}, "d.inner": {"d"}, "d": set(), "e": {"e"}}
    assert circles(known) == {"a b c", "d", "d.inner", "e"}
    assert circles(known | {"d": {"d.inner"}}) == {"a b c", "d d.inner", "e"}


#: Those of cpu/, each with the others that it may know.
C_ROOMS = {
    "abi": "",
    "machine": "abi",
    "kernels": "abi machine",
    "variants": "abi machine kernels",
    "run": "abi machine kernels variants",
    "launch": "abi",
    "python": "abi machine kernels variants run launch",
}


def c_files():
    """Each C file, by its place in cpu/, without comments."""
    for path in sorted((ROOT / "cpu").rglob("*.[ch]")):
        text = re.sub(r"(?s)/\*.*?\*/", "", path.read_text(encoding="utf-8"))
        yield path.relative_to(ROOT / "cpu"), text


def may_know(place, other):
    """Whether a file in cpu/ may know another."""
    return other.parts[0] in (place.parts[0], *C_ROOMS[place.parts[0]].split())


def test_no_include_goes_up():
    up = []
    for place, text in c_files():
        up += [(str(place), name) for name in re.findall(r'# *include "(.*)"', text) if not may_know(place, Path(name))]
        assert ("<Python.h>" in text) <= (place.parts[0] == "python"), place
    assert up == []


def uses():
    """The names that C files use of others', by place: those of the names, and what each is called."""
    texts = {place: re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text) for place, text in c_files()}
    texts = {place: re.sub(r"FN_VARIANT\((\w+)\)", r"fn_kernels_\1", text) for place, text in texts.items()}
    defined = {}
    for place, text in texts.items():
        # At the beginning of a line: functions with a body, and variables, of which some share a line.
        names = re.findall(r"(?m)^(?!static|typedef|extern)[A-Za-z][\w *]*\b(fn_\w+)\([^;{}]*\) \{", text)
        for line in re.findall(r"(?m)^(?!static|typedef|extern)[A-Za-z][^(){}\n]*;|^const .* = \{", text):
            names += re.findall(r"\b(fn_\w+)(?=[,;]| = )", line)
        names += [f"fn_kernels_{isa}" for isa in re.findall(r"#define ISA (\w+)", text)]
        for name in names if place.suffix == ".c" else ():
            assert defined.setdefault(name, place) == place, name
    for place, text in texts.items():
        declarations = r"(?m)^(?!static)[A-Za-z][^{}=#]*?;" if place.suffix == ".h" else r"(?m)^extern .*;"
        for name in set(re.findall(r"\b(?<!struct )fn_\w+", re.sub(declarations, "", text))) & defined.keys():
            if defined[name] != place:
                yield place, defined[name], name


def test_no_symbol_goes_up():
    found = list(uses())
    assert {name for _, _, name in found} > {"fn_parallel", "fn_run_in_c", "fn_exchange_api", "fn_kernels_scalar"}
    assert [(str(place), name) for place, of, name in found if not may_know(place, of)] == []


def test_c_files_know_each_other_in_one_order():
    known = {}
    for place, of, _ in uses():
        known.setdefault(place, set()).add(of)
    assert Path("run/chain.c") in known[Path("run/run.c")]
    graphlib.TopologicalSorter(known).prepare()  # an error names the circle
