"""Fixtures: a small book, as text and built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.book import build
from tools.layout import Book

from bookkit import CHAPTER, ROOT


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """A fresh book with one chapter, not built yet."""
    book = Book(tmp_path / "book")
    book.chapters_dir.mkdir(parents=True)
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, book.root)
    shutil.copytree(ROOT / "docs", book.root / "docs")
    guard = "tools/make_book_replaces_nbdev_export"
    (book.root / "tools").mkdir()
    shutil.copy(ROOT / guard, book.root / guard)
    (book.chapters_dir / "01_boxes.md").write_text(CHAPTER, "utf-8")
    return book


@pytest.fixture
def built(book: Book) -> Book:
    """The same book after `make book`."""
    build(book)
    return book
