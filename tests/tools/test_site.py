"""How notebooks and docstrings reach the site's reader."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tools.book import build
from tools.docstrings import quote, to_rst
from tools.layout import Book
from tools.site import build_site
from tools.site_reader import read_notebook

from bookkit import add_chapter


def read(*sources: str) -> list[tuple[str, list[str]]]:
    """The cells that the site sees for some code cells: (source, tags)."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    return [(c.source, c.metadata.get("tags", [])) for c in read_notebook(text).cells]


def test_exported_cells_get_a_badge_and_lose_their_directives() -> None:
    start, badge, code, other, llama = read(
        "#| default_exp boxes", "#| export\nx = 1", "#| export models.llama\ny = 2"
    )
    assert start[1] == ["remove-cell"]
    assert "{py:mod}`octavo.boxes`" in badge[0] and code == ("x = 1", [])
    assert "{py:mod}`octavo.models.llama`" in other[0] and llama[0] == "y = 2"


def test_plumbing_and_hidden_cells_are_not_shown() -> None:
    cells = read("#| export x\nfrom __future__ import annotations", "#| hide\nsetup()", "z")
    assert [tags for _, tags in cells] == [["remove-cell"], ["remove-cell"], []]


def test_cells_with_needs_say_so() -> None:
    badge, _ = read("#| gpu\nx")
    assert "needs a CUDA card" in badge[0]


@pytest.mark.parametrize(
    ("line", "rst"),
    [
        ("`x` and `y`s", "``x`` and ``y``\\ s"),
        ("*args, a_ | b", "\\*args, a\\_ \\| b"),
        ("plain", "plain"),
        ("``q``", "``q``"),
    ],
)
def test_docstring_lines(line: str, rst: str) -> None:
    assert quote(line) == rst


def test_docstring_paragraphs() -> None:
    lines = ["One.", "", "size: the", "    size.", "name: its name.", "", "  code *x*"]
    assert to_rst(lines) == [
        "One.", "", "* size: the size.", "", "* name: its name.", "", "",
        "::", "", "      code *x*", "",
    ]  # fmt: skip


@pytest.mark.slow
def test_site_shows_chapters_and_modules(built: Book, tmp_path: Path) -> None:
    add_chapter(
        built,
        "02_more",
        "#| default_exp more",
        "#| export\nfrom __future__ import annotations\nfrom octavo.boxes import Box",
        '#| export\ndef pack(*boxes: Box) -> "list[Box]":\n    """Pack `boxes`.\n\n'
        '    boxes: of any size,\n        even *.\n    """\n    return list(boxes)',
    )
    build(built)
    done = build_site(built, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/html/chapters/01_boxes.html").read_text("utf-8")
    assert "#| export" not in page and "cell-badge" in page
    assert 'href="../api/octavo.boxes.html#module-octavo.boxes"' in page
    assert "of any size" in (tmp_path / "site/html/api/octavo.more.html").read_text("utf-8")
