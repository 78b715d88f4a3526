"""Gates about what people read: the site builds without a warning, words are spelt right."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.layout import Book
from tools.site import build_site

SPELT = (
    "chapters",
    "tools",
    "tests",
    "docs",
    "benchmarks",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)


def site_has_no_warnings(book: Book) -> list[str]:
    """Sphinx builds every page with missing references and warnings as errors, offline."""
    with tempfile.TemporaryDirectory() as scratch:
        done = build_site(book, Path(scratch))
    marks = ("WARNING", "ERROR", "error:", "Exception")
    lines = [line for line in done.stderr.splitlines() if any(m in line for m in marks)]
    return (lines or done.stderr.splitlines()[-5:]) if done.returncode else []


def spelling_is_right(book: Book) -> list[str]:
    """codespell knows no better spelling for any word in text, code or comments."""
    paths = [name for name in SPELT if (book.root / name).exists()]
    command = [sys.executable, "-m", "codespell_lib", *paths]
    done = subprocess.run(command, cwd=book.root, capture_output=True, text=True)
    return done.stdout.splitlines() or done.stderr.splitlines() if done.returncode else []
