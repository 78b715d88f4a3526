"""Gate: a reader who has come to chapter k has everything that chapter k needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.book import build
from tools.layout import Book, BookError

WORKERS = 2
TEST_ONE = (
    "import sys; from nbdev.test import nbdev_test; nbdev_test.__wrapped__(sys.argv[1])"
)


def chapters_stand_alone(book: Book) -> list[str]:
    """For every k: export chapters 1..k into an empty folder and run chapter k's notebook."""
    with ThreadPoolExecutor(WORKERS) as pool:
        found = pool.map(lambda k: _problem(book, k), range(1, len(book.chapters()) + 1))
    return [problem for problem in found if problem]


def _problem(book: Book, k: int) -> str | None:
    chapter = book.chapters()[k - 1]
    with tempfile.TemporaryDirectory() as scratch:
        prefix = book.copy_to(Path(scratch), book.chapters()[:k])
        skip_preview_cells(prefix)
        try:
            build(prefix)
        except BookError as error:
            return f"chapters up to {chapter.stem} don't export: {error}"
        done = _run_notebook(prefix, prefix.notebook(chapter))
    tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
    return f"{chapter.stem} fails on chapters 1..k:\n{tail}" if done.returncode else None


def skip_preview_cells(book: Book) -> None:
    """Add `preview` to tst_flags: such cells show the finished engine before it exists."""
    path = book.root / "settings.ini"
    text = path.read_text("utf-8")
    path.write_text(re.sub(r"(?m)^(tst_flags\s*=.*)$", r"\1 preview", text), "utf-8")


def _run_notebook(book: Book, notebook: Path) -> subprocess.CompletedProcess[str]:
    src = str(book.root / "src")
    env = {**os.environ, "PYTHONPATH": src, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", TEST_ONE, str(notebook)]
    return subprocess.run(command, cwd=book.root, env=env, capture_output=True, text=True)
