"""How Sphinx builds these pages: ``tox -e docs``."""

from importlib import metadata

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
nitpick_ignore_regex = [("py:.*", r"(torch|collections)(\..*)?|Tensor")]

html_theme = "furo"
html_title = f"fusednorm {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
