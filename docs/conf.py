"""How Sphinx builds these pages: ``tox -e docs``."""

import re
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


def add_menu(_: Any, page: str, source: list[str]) -> None:
    """Makes a menu of the index's shelves, which GitHub would show as blocks of code."""
    if page == "index":
        for shelf, pages in re.findall(r"^\*\*(\w+)\*\*\n\n((?:- .+\n)+)", source[0], flags=re.M):
            names = "\n".join(re.findall(r"\((\w+)\.(?:md|rst)\)", pages))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {shelf}\n\n{names}\n```\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_menu)
