"""Text to notebook to package, on a small book."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools.book import build, main
from tools.cells import name_cells
from tools.layout import Book, BookError, chapter_label, plain_title

from bookkit import add_chapter, cell, edit

BOXES = '''\
"""Chapter 01, Boxes.

Generated from chapters/01_boxes.md; edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Box"]


@dataclass
class Box:
    """A box of `size` cm."""

    size: int

    def double(self, times: int = 2) -> int:
        """The size, `times` over."""
        return self.size * times
'''


def source(book: Book, module: str) -> str:
    """The text of a generated module."""
    return (book.package_dir / module).read_text("utf-8")


def test_module_is_plain_readable_python(built: Book) -> None:
    assert source(built, "boxes.py") == BOXES


def test_a_second_build_changes_nothing(built: Book) -> None:
    assert build(built) == []


def test_cell_ids_come_from_the_text(built: Book) -> None:
    notebook = nbformat.read(built.nbs_dir / "01_boxes.ipynb", as_version=4)
    ids = [cell.id for cell in notebook.cells]
    assert ids == [
        "1-boxes",
        "1-boxes-code",
        "1-boxes-code-2",
        "box",
        "doubling",
        "box-double",
        "doubling-code",
    ]
    assert list(name_cells(notebook.cells)) == ids


def test_outputs_survive_a_sync_unless_their_cell_changed(built: Book) -> None:
    path = built.nbs_dir / "01_boxes.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for code in (c for c in notebook.cells if c.cell_type == "code"):
        code.outputs = [nbformat.v4.new_output("stream", name="stdout", text=code.source)]
    nbformat.write(notebook, path)
    edit(built, "times: int = 2", "times: int = 3")
    build(built)
    cells = {c.id: c for c in nbformat.read(path, as_version=4).cells}
    assert cells["doubling-code"].outputs and not cells["box-double"].outputs


def test_nbdev_clean_agrees_with_ours(built: Book) -> None:
    before = (built.nbs_dir / "01_boxes.ipynb").read_bytes()
    code = "from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()"
    subprocess.run([sys.executable, "-c", code], cwd=built.root, check=True)
    assert (built.nbs_dir / "01_boxes.ipynb").read_bytes() == before


def test_plain_nbdev_export_stops_with_a_hint(built: Book) -> None:
    command = [
        sys.executable,
        "-c",
        "from nbdev.doclinks import nbdev_export; nbdev_export()",
    ]
    done = subprocess.run(command, cwd=built.root, capture_output=True, text=True)
    assert done.returncode != 0
    assert "make_book_replaces_nbdev_export" in done.stderr
    assert source(built, "boxes.py") == BOXES


def test_several_modules_and_sub_packages_from_one_chapter(book: Book) -> None:
    add_chapter(
        book,
        "02_more",
        "#| default_exp crates",
        "#| export models.tiny\nfrom octavo.boxes import Box\nTINY = Box(1)",
        "#| export crates\nA = 1",
        "#| export models\nfrom octavo.models.tiny import TINY\n__all__ = ['TINY']",
        "#| export\nB = A + 1",
        "#| exporti\nC = B + 1",
        "#| export __init__\nVERSION = '1'",
    )
    build(book)
    assert "TINY = Box(1)" in source(book, "models/tiny.py")
    assert source(book, "models/__init__.py").count("__all__") == 1
    crates = source(book, "crates.py")
    assert crates.index("A = 1") < crates.index("B = A + 1") < crates.index("C = B + 1")
    assert '__all__ = ["A", "B"]' in crates
    assert "VERSION" in source(book, "__init__.py")


def test_imports_move_to_the_head_once(book: Book) -> None:
    add_chapter(
        book,
        "02_more",
        "#| default_exp more",
        '#| export\n"""What more is."""\nimport os\nA = os.sep',
        "#| export\n# for joining\nimport json\nimport os\nfrom fastcore.basics import patch\nB = json",
        "#| export\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ast\nC = 1",
    )
    build(book)
    text = source(book, "more.py")
    head = text[: text.index("__all__")]
    assert text.startswith('"""What more is.\n\nChapter 02, 02_more.')
    assert head.count("import os") == 1 and "# for joining\nimport json" in head
    assert "if TYPE_CHECKING:\n    import ast" in head and "fastcore" not in text


def test_removed_chapters_take_their_files_along(built: Book) -> None:
    (built.chapters_dir / "01_boxes.md").rename(built.chapters_dir / "01_crates.md")
    build(built)
    assert [path.name for path in built.nbs_dir.iterdir()] == ["01_crates.ipynb"]


def test_an_empty_book_builds(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.chapters_dir.mkdir()
    assert [path.name for path in build(book)] == ["__init__.py", "py.typed"]


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (
            ["#| default_exp b", "#| export\nx = = 1"],
            "02_bad.md:9: exported cell is not Python",
        ),
        (["#| export\nx = 1"], "`#| export` before any"),
        (["#| default_exp b", "#| default_exp c"], "second default_exp"),
        (["#| export boxes\nx = 1"], "belongs to Chapter 01"),
        (["#| export b\n@patch\ndef f(self: Box): ..."], "no class `Box` earlier"),
    ],
)
def test_bad_chapters_get_an_error_that_says_where(
    book: Book, cells: list[str], problem: str
) -> None:
    add_chapter(book, "02_bad", *cells)
    with pytest.raises(BookError, match="02_bad.md") as caught:
        build(book)
    assert problem in str(caught.value)
    assert not book.package_dir.exists()


def test_unfinished_text_still_builds(book: Book) -> None:
    path = book.chapters_dir / "02_draft.md"
    path.write_text("Half a sentence\n\n```{code-cell}\nx = (1,", "utf-8")
    build(book)
    path.write_text("", "utf-8")
    build(book)
    assert "Box" in source(book, "boxes.py")


def test_command_line_builds_elsewhere(book: Book, tmp_path: Path) -> None:
    assert main(["--root", str(book.root), "--to", str(tmp_path / "out")]) == 0
    assert not book.package_dir.exists()
    assert source(Book(tmp_path / "out"), "boxes.py") == BOXES
    edit(book, "#| default_exp boxes", "")
    assert main(["--root", str(book.root)]) == 1


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("4. Blocks", "Blocks"),
        ("04 Blocks", "Blocks"),
        ("Chapter 04: Blocks", "Blocks"),
        ("Appendix C. Measuring", "Measuring"),
        ("A block of 16", "A block of 16"),
    ],
)
def test_titles_lose_their_number(heading: str, title: str) -> None:
    assert plain_title(heading) == title


def test_chapters_are_called_as_people_call_them() -> None:
    assert (chapter_label("04_blocks"), chapter_label("c_x")) == (
        "Chapter 04",
        "Appendix C",
    )


def test_jupyter_lab_keeps_text_and_notebook_paired(built: Book) -> None:
    """Saving a notebook in Jupyter rewrites its chapter's text, cell for cell."""
    code = (
        "from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class\n"
        "from jupyter_server.services.contents.largefilemanager import LargeFileManager\n"
        "manager = build_sync_jupytext_contents_manager_class(LargeFileManager)()\n"
        "manager.root_dir = '.'\n"
        "model = manager.get('nbs/01_boxes.ipynb')\n"
        "model['content']['cells'][-1]['source'] += '  # edited'\n"
        "manager.save(model, 'nbs/01_boxes.ipynb')\n"
    )
    env = {**os.environ, "HOME": str(built.root)}
    subprocess.run([sys.executable, "-c", code], cwd=built.root, check=True, env=env)
    text = (built.chapters_dir / "01_boxes.md").read_text("utf-8")
    assert "Box(2).double()  # edited\n```" in text
    changed = build(built)
    assert [path.name for path in changed if path.suffix == ".py"] == []


def test_notebooks_hold_no_stray_metadata(built: Book) -> None:
    notebook = json.loads((built.nbs_dir / "01_boxes.ipynb").read_text("utf-8"))
    assert set(notebook["metadata"]) == {"kernelspec"}
    assert all(not c["metadata"] for c in notebook["cells"])
    assert cell("x").startswith("\n```{code-cell}")
