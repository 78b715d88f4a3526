"""`python -m tools.notebooks`: a failing cell fails the run, cells behind a flag wait for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools.book import build
from tools.layout import Book

from bookkit import ROOT, add_chapter

# Leaves a file beside the notebook, with what Triton would be told.
LEAVE_A_TRACE = """\
import os
from pathlib import Path
Path("trace.txt").write_text(os.environ.get("TRITON_INTERPRET", "compiled"))"""


def run_notebooks(book: Book, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a book's folder."""
    env = {**os.environ, "PYTHONPATH": f"{book.root / 'src'}{os.pathsep}{ROOT}"}
    env.pop("TRITON_INTERPRET", None)  # the tests of this process ask for it
    command = [sys.executable, "-m", "tools.notebooks", *flags]
    return subprocess.run(command, cwd=book.root, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_failing_cell_fails_the_run_and_names_its_notebook(book: Book) -> None:
    add_chapter(book, "02_wrong", "x = 1", "assert x == 2")
    add_chapter(book, "03_after", LEAVE_A_TRACE)
    build(book)
    done = run_notebooks(book)
    assert done.returncode == 1
    trace, failed = done.stderr.split("nbdev Tests Failed On The Following Notebooks:")
    assert "02_wrong.ipynb" in trace and "assert x == 2" in trace
    assert [word for word in failed.split() if "ipynb" in word] == ["02_wrong.ipynb"]
    assert (book.nbs_dir / "trace.txt").exists(), "notebooks behind a failing one run too"


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["gpu", "soak"])
def test_cells_behind_a_flag_run_when_it_is_given(book: Book, flag: str) -> None:
    add_chapter(book, "02_flag", f"#| {flag}\n{LEAVE_A_TRACE}")
    build(book)
    trace = book.nbs_dir / "trace.txt"
    done = run_notebooks(book)
    assert done.returncode == 0 and not trace.exists(), done.stderr
    done = run_notebooks(book, flag)
    assert done.returncode == 0, done.stderr
    assert trace.read_text("utf-8") == ("compiled" if flag == "gpu" else "1")


@pytest.mark.slow
def test_a_cell_behind_a_flag_can_fail_the_run(book: Book) -> None:
    add_chapter(book, "02_flag", "#| gpu\nraise SystemError('needs a card')")
    build(book)
    assert run_notebooks(book).returncode == 0
    done = run_notebooks(book, "gpu")
    assert done.returncode == 1 and "needs a card" in done.stderr
