"""Each gate passes on a sound book and fails on one that breaks its promise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.book import build
from tools.execute import run_book
from tools.gates import GATES
from tools.gates.__main__ import main
from tools.layout import Book

from bookkit import add_chapter, edit


def problems(book: Book, name: str) -> str:
    """What one gate says, in one string; empty when the promise holds."""
    return "\n".join(GATES[name](book))


@pytest.mark.slow
def test_a_sound_book_passes_every_gate(
    built: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    run_book(built, set())
    assert main(["--root", str(built.root)]) == 0
    assert capsys.readouterr().out.count("ok   ") == len(GATES)


@pytest.mark.parametrize("file", ["src/octavo/boxes.py", "nbs/01_boxes.ipynb"])
def test_package_equals_book(built: Book, file: str) -> None:
    assert not problems(built, "package equals book")
    path = built.root / file
    path.write_text(path.read_text("utf-8").replace("of `size` cm", "of `size` m"), "utf-8")
    assert f"{file} differs" in problems(built, "package equals book")


def test_package_equals_book_sees_edited_text_and_stray_modules(built: Book) -> None:
    (built.package_dir / "stray.py").write_text("X = 1\n", "utf-8")
    assert "stray.py differs" in problems(built, "package equals book")
    build(built)
    (built.package_dir / "py.typed").unlink()
    assert "py.typed differs" in problems(built, "package equals book")
    build(built)
    edit(built, "## Doubling", "## Twice")
    assert "nbs/01_boxes.ipynb differs" in problems(built, "package equals book")


def test_every_module_imports_alone(built: Book) -> None:
    assert not problems(built, "every module imports alone")
    add_chapter(built, "02_more", "#| default_exp more", "#| export\nA = Box(1)")
    build(built)
    found = problems(built, "every module imports alone")
    assert "import octavo.more: NameError: name 'Box' is not defined" in found


def test_no_undefined_names(built: Book) -> None:
    assert not problems(built, "no undefined names")
    source = "#| export\ndef late():\n    return missing"
    add_chapter(built, "02_more", "#| default_exp more", source)
    build(built)
    assert not problems(built, "every module imports alone")
    assert "F821 Undefined name `missing`" in problems(built, "no undefined names")


@pytest.mark.parametrize("line", ["import nbdev", "from fastcore.basics import patch, L"])
def test_runtime_needs_no_build_tools(built: Book, line: str) -> None:
    assert not problems(built, "runtime needs no build tools")
    add_chapter(built, "02_more", "#| default_exp more", f"#| export\ndef f():\n    {line}")
    build(built)
    assert "src/octavo/more.py imports" in problems(built, "runtime needs no build tools")


@pytest.mark.slow
def test_chapters_stand_alone(book: Book) -> None:
    look_ahead = "#| preview\nimport octavo.crates"
    add_chapter(book, "02_early", "from octavo.boxes import Box\nassert Box(1)", look_ahead)
    add_chapter(book, "03_crates", "#| default_exp crates", "#| export\nA = 1")
    build(book)
    assert not problems(book, "chapters 1..k stand alone")
    edit(book, "#| preview\n", "", "02_early")
    found = problems(book, "chapters 1..k stand alone")
    assert "02_early fails" in found and "No module named 'octavo.crates'" in found
    assert "03_crates" not in found


@pytest.mark.slow
def test_outputs_are_fresh(built: Book) -> None:
    assert "never executed" in problems(built, "outputs are fresh")
    run_book(built, set())
    assert not problems(built, "outputs are fresh")
    edit(built, "== 4", ">= 4")
    build(built)
    assert "its code cells changed" in problems(built, "outputs are fresh")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A box has a size.", "A box has a {py:func}`octavo.boxes.nothing`."),
        ("A box has a size.", "See [elsewhere](nowhere.md)."),
        ("## Doubling", "#### Doubling"),
    ],
)
def test_site_has_no_warnings(built: Book, old: str, new: str) -> None:
    edit(built, old, new)
    build(built)
    assert "WARNING" in problems(built, "site has no warnings")


def test_spelling(built: Book) -> None:
    assert not problems(built, "spelling")
    wrong = "te" + "h"
    edit(built, "has a size", f"has {wrong} size")
    assert f"chapters/01_boxes.md:3: {wrong} ==> the" in problems(built, "spelling")


@pytest.mark.parametrize("name", ["notes.md", "measure.py"])
def test_spelling_of_what_lies_in_benchmarks(built: Book, name: str) -> None:
    path = built.root / "benchmarks" / name
    path.parent.mkdir()
    path.write_text("# measured on " + "te" + "h card\n", "utf-8")
    assert f"benchmarks/{name}:1: " in problems(built, "spelling")


def test_unknown_names_are_refused(book: Book) -> None:
    with pytest.raises(SystemExit):
        main(["--root", str(book.root), "no such gate"])


def test_a_broken_chapter_is_a_problem_not_a_crash(
    built: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(built, "class Box:", "class Box")
    assert main(["--root", str(built.root), "package equals book"]) == 1
    assert "01_boxes.md:21: exported cell is not Python" in capsys.readouterr().out


def test_an_empty_book_passes(tmp_path: Path, built: Book) -> None:
    book = Book(tmp_path / "empty")
    book.chapters_dir.mkdir(parents=True)
    shutil.copytree(built.root / "docs", book.root / "docs")
    build(book)
    names = [name for name in GATES if name != "site has no warnings"]
    assert not any(problems(book, name) for name in names)
