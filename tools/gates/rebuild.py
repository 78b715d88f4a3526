"""Gates about what is generated: package and notebooks against the chapters."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tools.book import build
from tools.freshness import why_stale
from tools.layout import Book

HINT = "run `make book` (edit chapters/, never nbs/ or src/)"


def package_equals_book(book: Book) -> list[str]:
    """A rebuild from chapters/ alone gives the same notebook cells and the same package."""
    with tempfile.TemporaryDirectory() as scratch:
        rebuilt = book.copy_to(Path(scratch))
        build(rebuilt)
        notebooks = _compare(_notebook_cells(book), _notebook_cells(rebuilt), "nbs")
        modules = _compare(_modules(book), _modules(rebuilt), "src/octavo")
    return notebooks + modules


def _compare(ours: dict[str, Any], rebuilt: dict[str, Any], folder: str) -> list[str]:
    names = sorted(ours.keys() | rebuilt.keys())
    differing = [name for name in names if ours.get(name) != rebuilt.get(name)]
    return [f"{folder}/{name} differs from its chapter: {HINT}" for name in differing]


def _notebook_cells(book: Book) -> dict[str, Any]:
    """Everything in a notebook but its outputs."""
    keys = ("id", "cell_type", "source", "metadata")
    return {
        path.name: [{key: cell.get(key) for key in keys} for cell in _cells(path)]
        for path in book.nbs_dir.glob("*.ipynb")
    }


def _cells(path: Path) -> Any:
    return nbformat.read(path, as_version=4).cells


def _modules(book: Book) -> dict[str, str]:
    files = [*book.package_dir.rglob("*.py"), *book.package_dir.glob("py.typed")]
    return {str(p.relative_to(book.package_dir)): p.read_text("utf-8") for p in files}


def outputs_are_fresh(book: Book) -> list[str]:
    """Every notebook was executed with the code it has now and the modules it imports."""
    problems = []
    for path in book.notebooks():
        reason = why_stale(book, path) if path.exists() else "it is missing"
        if reason:
            problems.append(f"nbs/{path.name}: {reason}: run `make run-book`")
    return problems
