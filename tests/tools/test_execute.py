"""Running notebooks: outputs are stored with hashes, and only stale ones run again."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tools import execute
from tools.book import build, main
from tools.execute import is_skipped, run_book
from tools.freshness import used_modules, why_stale
from tools.layout import Book, BookError

from bookkit import add_chapter, edit


def outputs(book: Book, stem: str = "01_boxes") -> dict[str, list[str]]:
    """The text of every output, by cell id."""
    cells = nbformat.read(book.nbs_dir / f"{stem}.ipynb", as_version=4).cells
    return {
        cell.id: [o.get("text") or o["data"]["text/plain"] for o in cell.outputs]
        for cell in cells
        if cell.get("outputs")
    }


@pytest.mark.slow
def test_run_book_stores_outputs_once_and_again_after_a_change(built: Book) -> None:
    add_chapter(
        built,
        "02_use",
        "import os\nfrom octavo.boxes import Box\nprint(os.path.basename(os.getcwd()))\nBox",
        "import asyncio\nasyncio.get_running_loop().is_running()",
        "#| gpu\nraise SystemError('needs a card')",
        "import sys, octavo\nprint(octavo.__file__)\nprint('late', file=sys.stderr)\nobject()",
    )
    build(built)
    paths = run_book(built, set())
    assert [path.stem for path in paths] == ["01_boxes", "02_use"]
    assert outputs(built) == {"doubling-code": ["4"]}
    first, loop, last = outputs(built, "02_use").values()
    assert first == ["nbs\n", "octavo.boxes.Box"] and loop == ["True"]
    assert last == ["src/octavo/__init__.py\n", "<object>", "late\n"]
    assert run_book(built, set()) == [] and build(built) == []

    edit(built, "self.size * times", "times * self.size")
    build(built)
    path = built.nbs_dir / "02_use.ipynb"
    assert why_stale(built, path) == "a module that it imports changed"
    assert why_stale(built, built.nbs_dir / "01_boxes.ipynb") == "its code cells changed"


@pytest.mark.slow
def test_a_failing_cell_is_named_and_leaves_the_notebook_alone(built: Book) -> None:
    edit(built, "== 4", "== 5")
    build(built)
    path = built.nbs_dir / "01_boxes.ipynb"
    before = path.read_bytes()
    with pytest.raises(
        BookError, match="(?s)chapters/01_boxes.md doesn't run.*AssertionError"
    ):
        run_book(built, set())
    assert path.read_bytes() == before
    assert main(["--root", str(built.root), "--execute"]) == 1


@pytest.mark.parametrize(
    ("source", "flags", "gpu", "skipped"),
    [
        ("x = 1", set(), False, False),
        ("#| export\n#| gpu\nx = 1", set(), True, True),
        ("#| gpu\nx = 1", {"gpu"}, True, False),
        ("#| gpu\nx = 1", {"gpu"}, False, True),
        ("#| soak\nx = 1", set(), True, True),
        ("#| soak\nx = 1", {"soak"}, False, False),
        ("#| preview\nx = 1", set(), False, False),
        ("#| eval: false\nx = 1", {"soak"}, True, True),
    ],
)
def test_cells_behind_a_flag(
    monkeypatch: pytest.MonkeyPatch, source: str, flags: set[str], gpu: bool, skipped: bool
) -> None:
    monkeypatch.setattr(execute, "has_gpu", lambda: gpu)
    assert is_skipped(source, flags) is skipped


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("import math", []),
        ("from octavo.a import x", ["a.py", "b.py"]),
        ("def f():\n    import octavo.b", ["b.py"]),
        ("%time 1\nfrom octavo.models import c", ["models/__init__.py", "models/c.py"]),
        (
            "from octavo import LLM",
            ["__init__.py", "a.py", "b.py"] + ["models/__init__.py", "models/c.py"],
        ),
    ],
)
def test_used_modules_follow_imports(tmp_path: Path, source: str, files: list[str]) -> None:
    (tmp_path / "models").mkdir()
    texts = {"a.py": "from octavo.b import y", "b.py": "", "__init__.py": ""}
    for name, text in {**texts, "models/__init__.py": "", "models/c.py": ""}.items():
        (tmp_path / name).write_text(text, "utf-8")
    used = [str(path.relative_to(tmp_path)) for path in used_modules([source], tmp_path)]
    assert used == files
