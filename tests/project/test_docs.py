"""Every Python example of README.md and docs/ runs as it stands, and prints what the page shows after it.

Examples of a page run in its order and share their names. One that cannot run has a comment before it, which readers of
the page do not see: ``<!-- skip: next "why" -->``. A condition there may look at ``processor``, what torch calls it,
and at ``compiled``, whether the C library is there.
"""

import ast
import contextlib
import doctest
import inspect
import io
import pkgutil
import re
import runpy
from importlib import import_module
from pathlib import Path

import public_api
import pytest
import torch

import fusednorm
from fusednorm.calls import fast_path
from fusednorm.operations.listed import every

sybil = pytest.importorskip("sybil", reason="`tox -e docs` installs sybil")

from sybil.evaluators.python import PythonEvaluator  # noqa: E402 - after the line that skips
from sybil.parsers.markdown import CodeBlockParser, SkipParser  # noqa: E402

ROOT = Path(__file__).parents[2]

#: An indented block right after an example.
SHOWN = re.compile(r"\n*((?:(?:    .*)?\n)*)")


def runs_and_prints(example):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        PythonEvaluator()(example)
    (shown,) = SHOWN.match(example.document.text, example.region.end).groups()
    assert printed.getvalue() == re.sub("^    ", "", shown.rstrip() + "\n", flags=re.M).lstrip("\n")


PARSER = sybil.Sybil([CodeBlockParser("python", runs_and_prints), SkipParser()])
PAGES = [PARSER.parse(page) for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
for page in PAGES:
    page.namespace |= {"processor": torch.backends.cpu.get_cpu_capability(), "compiled": fast_path.COMPILED}
EXAMPLES = [example for page in PAGES for example in page.examples()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{Path(example.path).name}:{example.line}")
def test_example(example):
    example.evaluate()


def test_links_of_the_readme():
    """Those of docs/ are checked where the pages are built."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_name_benchmarks_and_options_that_are_there():
    """In blocks of commands: the file, and every option that follows it."""
    found = []
    for page in ROOT.glob("docs/*.md"):
        commands = "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)).replace("\\\n", " ")
        found += re.findall(r"(benchmarks/\w+\.py)([^\n#|;&]*)", commands)
    assert len(found) > 10
    for file, options in found:
        code = (ROOT / file).read_text()
        assert [option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in code] == [], file


def test_commands_name_the_torch_that_they_install():
    """pip would take PyPI's, on Linux with gigabytes of CUDA."""
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"))
    blocks = [(page.name, block) for page in pages for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)]
    pulls = re.compile(r"pip install (\.\s|.*\b(torch|tox)\b).*")
    found = [(name, block[: match.end()]) for name, block in blocks if (match := pulls.search(block))]
    assert {name for name, _ in found} == {"README.md", "CONTRIBUTING.md", "install.md"}
    assert [name for name, until in found if "pytorch.org/whl/" not in until] == []


def documented(page):
    """The full names in tables of calls (docs/api.md), and in directives of Sphinx (docs/docstrings.rst)."""
    in_tables = {f"fusednorm.{name}" for name in re.findall(r"^\| `([\w.]+)\(", page, flags=re.M)}
    directives = set(re.findall(r"^\.\. [\w:]+:: (fusednorm\.[\w.]+)", page, flags=re.M))
    for module, options in re.findall(r"^\.\. automodule:: (fusednorm\S*)\n((?:   .*\n)*)", page, flags=re.M):
        excluded = re.findall(r":exclude-members: (.*)", options)
        left_out = {name.strip() for names in excluded for name in names.split(",")}
        if ":members:" in options:
            members = public_api.names(import_module(module))
            directives |= {f"{module}.{name}" for name in members if name not in left_out and name != "__version__"}
    return in_tables, directives


def test_every_public_name_is_in_the_reference():
    """By one of its names: `use_backend` has two. Functions and modules of `fusednorm` itself are in a table."""
    in_tables, directives = documented(
        "".join((ROOT / "docs" / page).read_text() for page in ("api.md", "docstrings.rst"))
    )
    known, missing = [pkgutil.resolve_name(name) for name in in_tables | directives], []
    for module in map(import_module, public_api.MODULES):
        for name in public_api.names(module):
            value, full = getattr(module, name), f"{module.__name__}.{name}"
            if full not in in_tables | directives and not any(value is other for other in known):
                missing.append(full)
            called = inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
            if module is fusednorm and called and full not in in_tables:
                missing.append(f"{full}, in a table")
    assert not missing, (
        f"lacking: {missing}; write `name(operands)` in docs/api.md, or a directive in docs/docstrings.rst"
    )


def test_every_operation_is_in_the_specification():
    """The table of its first section says where, and that section names it outside of examples."""
    page = re.sub(r"```.*?```", "", (ROOT / "docs" / "spec.md").read_text(), flags=re.DOTALL)
    sections = {int(number): text for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", page, re.M | re.S)}
    sections[0] = ""
    rows = re.findall(r"^\| (\d+) \| (`.*`) \|$", sections[1], flags=re.M)
    places = {name: int(number) for number, names in rows for name in re.findall(r"`(\w+)`", names)}
    operations = [name for name, one in every().items() if one.function.__module__.startswith("fusednorm.")]
    lacks = [name for name in operations if not re.search(rf"\b{name}\b", sections[places.get(name, 0)])]
    assert not lacks, f"docs/spec.md lacks {lacks}: name each in section 1's table, and its formula in that section"
    assert places.keys() == set(operations), "docs/spec.md names functions that fusednorm does not have"


def test_the_attributes_of_a_backend():
    """The table of docs/writing_a_backend.md has the names of the protocol's arguments."""
    page = (ROOT / "docs" / "writing_a_backend.md").read_text()
    written = re.findall(r"^\| `(\w+)\((\w*)\)` \|", page, flags=re.M)
    assert [name for name, _ in written] == ["unavailable", "unsuitable", "plan"]
    for name, argument in written:
        (_, *arguments) = inspect.signature(getattr(fusednorm.registry.Backend, name)).parameters
        assert arguments == [argument] * bool(argument), name


def test_docstring_of_the_package():
    assert doctest.testmod(fusednorm) == (0, 3)


def test_pictures_show_what_the_tables_say():
    draw = runpy.run_path(str(ROOT / "docs" / "images" / "draw.py"))
    pictures = {path.name: path.read_text() for path in (ROOT / "docs" / "images").glob("*.svg")}
    assert pictures == {name: picture() for name, picture in draw["PICTURES"].items()}, "python docs/images/draw.py"
    pages = ("README.md", "docs/performance.md", "docs/bench.md")
    readme, performance, bench = ((ROOT / page).read_text() for page in pages)
    assert "\n".join(draw["figures"]()) in performance
    assert "\n".join(draw["by_group"]()) in readme
    for name, median in draw["medians"]().items():
        assert f"{median} ({name})" in readme  # the picture in words
        assert readme.count(f"{median} times") == 1
        assert f"{median} times" in bench


def test_pictures_are_small_and_their_text_is_text():
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        drawn = picture.read_text()
        assert len(drawn) < 10_000, picture.name
        assert drawn.count("<text") > 5, picture.name


#: Files that keep to the words of the glossary, beside README.md, SECURITY.md and CONTRIBUTING.md itself.
PLAIN = ("docs/**/*.md", "docs/**/*.py", "fusednorm/**/*.py", "backends/**/*.py")


def test_docstrings_begin_with_a_thing():
    """And not with "What" or "Who"; comments that describe a name too."""
    found = []
    for file in (*ROOT.glob("fusednorm/**/*.py"), *ROOT.glob("backends/**/*.py")):
        text = file.read_text("utf-8")
        found += [(file.name, line) for line in text.splitlines() if re.search("#: (What|Who) ", line)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words = ast.get_docstring(node) or ""
                found += [(file.name, words)] * words.startswith(("What ", "Who "))
    assert found == []


def test_files_keep_to_the_words_of_the_glossary():
    """No file has a word of the last column of the table in CONTRIBUTING.md, except between backticks."""
    contributing, glossary = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Words\n")
    table = [line.strip("|").split("|") for line in glossary.splitlines() if line.startswith("|")][2:]
    banned = {words.strip() for *_, column in table for words in column.split(",")} - {""}
    assert len(banned) > 10
    files = (ROOT / "README.md", ROOT / "SECURITY.md", *(file for glob in PLAIN for file in ROOT.glob(glob)))
    found = []
    for name, text in (("CONTRIBUTING.md", contributing), *((file.name, file.read_text()) for file in files)):
        prose = " ".join(re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", text, flags=re.DOTALL).split())
        found += [(name, words) for words in banned if re.search(rf"\b{words}\b", prose, flags=re.IGNORECASE)]
    assert found == []


def test_calls_in_the_reference():
    """The tables of docs/api.md show each argument that a call needs, under its name and in its place."""
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^\| `([\w.]*?)(\w+)\((.*?)\)` \|", page, flags=re.M)
    assert len(shown) > 15
    for module, name, written in shown:
        parameters = inspect.signature(pkgutil.resolve_name(f"fusednorm.{module}".rstrip(".") + f":{name}")).parameters
        first, _, by_name = written.partition(", *, ")
        positional = [argument.lstrip("*") for argument in first.split(", ") if argument]
        assert [*parameters][: len(positional)] == positional, name
        needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        assert needed <= {*positional, *by_name.split(", ")} <= {*parameters, ""}, name


def test_cells_of_the_reference_are_short():
    """A table is read where one glance takes in a cell: at most 120 characters."""
    page = (ROOT / "docs" / "api.md").read_text()
    cells = [cell.strip() for line in re.findall(r"^\|.*\|$", page, flags=re.M) for cell in line.strip("|").split("|")]
    assert len(cells) > 100
    assert [cell for cell in cells if len(cell) > 120] == []
