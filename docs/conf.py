"""Sphinx settings of the book's site. `make docs` stages the sources and calls Sphinx."""

from __future__ import annotations

from typing import Any

from tools.docstrings import to_rst

project = "Octavo"
author = "The Octavo authors"
copyright = "The Octavo authors, Apache-2.0"
release = "0.1.0"

extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme = "sphinx_book_theme"
html_title = "Octavo"
html_static_path = ["_static"]
html_css_files = ["octavo.css"]
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
}
html_show_copyright = False
html_show_sphinx = False

# Notebooks arrive executed; the reader turns `#|` lines into tags and badges.
nb_execution_mode = "off"
nb_custom_formats = {".ipynb": ["tools.site_reader.read_notebook", {}, False]}
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Names outside the package (torch, typing) have no pages here; ours must resolve.
nitpick_ignore_regex = [("py:.*", r"(?!octavo\b).*")]


def _quote(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = to_rst(lines)


def setup(app: Any) -> None:
    """Let docstrings be plain text with `code` in backticks."""
    app.connect("autodoc-process-docstring", _quote)
