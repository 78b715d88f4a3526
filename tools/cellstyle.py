"""Formatting and lint of the code cells in chapters/, by ruff, on the text itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tools.layout import Book
from tools.sync import read_text, write_if_changed

# A chapter shows imports where they are needed and ends cells with a value to look at.
LINT = ["--select", "E9,F63,F7,F82,F401", "--ignore", "F704"]


def _ruff(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *args]
    return subprocess.run(command, capture_output=True, text=True)


def format_chapter(book: Book, chapter: Path) -> str:
    """The chapter's text with each code cell as `ruff format` writes it."""
    notebook = read_text(chapter)
    with tempfile.TemporaryDirectory() as scratch:
        path = _write(notebook, Path(scratch) / "cells.ipynb")
        _ruff("format", "--quiet", "--config", str(book.root / "pyproject.toml"), str(path))
        formatted = nbformat.read(path, as_version=4)
    text = chapter.read_text("utf-8")
    for old, new in zip(notebook.cells, formatted.cells, strict=True):
        if old.cell_type == "code" and old.source != new.source:
            text = text.replace(f"\n{old.source}\n```", f"\n{new.source}\n```")
    return text


def _write(notebook: Any, path: Path) -> Path:
    path.write_text(json.dumps(json.loads(nbformat.writes(notebook))), "utf-8")
    return path


def problems(book: Book) -> list[str]:
    """Chapters whose cells are not formatted, use a name that nothing defines, or don't parse."""
    found = []
    for chapter in book.chapters():
        if format_chapter(book, chapter) != chapter.read_text("utf-8"):
            found.append(f"chapters/{chapter.name}: cells not formatted; run `make format`")
    names = [str(path) for path in book.notebooks() if path.exists()]
    done = _ruff(
        "check", "--isolated", "--quiet", "--output-format", "concise", *LINT, *names
    )
    return found + [line for line in done.stdout.splitlines() if names and line]


def main(argv: list[str] | None = None) -> int:
    """`python -m tools.cellstyle check` reports, `... format` rewrites the chapters."""
    book = Book(Path.cwd())
    if (sys.argv[1:] if argv is None else argv) == ["format"]:
        for chapter in book.chapters():
            if write_if_changed(chapter, format_chapter(book, chapter)):
                print(f"formatted chapters/{chapter.name}")
        return 0
    found = problems(book)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
