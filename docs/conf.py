"""How Sphinx builds these pages: ``tox -e docs``."""

from importlib import metadata
from typing import Any

project = "fusednorm"
release = metadata.version("fusednorm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
highlight_language = "text"  # blocks that are only indented show what was printed

# As on GitHub, a heading of up to four signs can be linked to.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_use_rtype = False  # "Returns" are sentences

# Names of others, and names that torch hides, have no page here; no inventory is fetched, so that no network is needed.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|collections|os|pathlib)(\..*)?|Tensor|Strides")]

html_theme = "furo"
html_title = f"fusednorm {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

#: The menu. It is added to the index here, because GitHub would show it as three blocks of code.
MENU = {
    "Start": "tour install backends rounding training troubleshooting faults api",
    "In what you have": "torch transformers vllm rl onnx distributed compat",
    "How it works": "spec design performance bench compare cuda triton writing_a_backend stability releasing",
}


def add_menu(_: Any, page: str, source: list[str]) -> None:
    """Appends the menu to the index's source."""
    if page == "index":
        for caption, pages in MENU.items():
            names = "\n".join(pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_menu)
