"""`make run-book`: run the notebooks whose code changed, and store outputs with their hashes.

Each runs under a kernel of its own, in nbs/, with src/ importable. Cells marked `#| gpu` or
`#| soak` run only when that flag is asked for (and `gpu` only where there is a card); a cell
that is left out keeps the outputs it has.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from tools.cells import directives
from tools.freshness import stamp, why_stale
from tools.layout import Book, BookError
from tools.sync import write_notebook

OPTIONAL = {"gpu", "soak", "notest"}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
CELL_FILE = re.compile(r"\S*/ipykernel_\d+/\d+\.py")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def has_gpu() -> bool:
    """Is an NVIDIA card visible to this process?"""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def is_skipped(source: str, flags: set[str]) -> bool:
    """Is a cell left out under these flags?"""
    found = directives(source)
    wanted = flags if has_gpu() else flags - {"gpu"}
    never = found.get("eval", [""])[:1] == ["false"]
    return never or bool(OPTIONAL & found.keys() - wanted)


class _Client(NotebookClient):
    """A client that passes over the cells which the flags leave out."""

    flags: set[str] = set()

    async def async_execute_cell(self, cell: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one cell unless it is left out."""
        if cell.cell_type == "code" and is_skipped(cell.source, self.flags):
            return cell
        return await super().async_execute_cell(cell, *args, **kwargs)


def run_notebook(book: Book, path: Path, flags: set[str]) -> None:
    """Execute one notebook and store its outputs; on an error the file stays as it was."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(book.nbs_dir)}}
    client = _Client(notebook, timeout=1200, resources=where, kernel_name="python3")
    client.extra_arguments = ["--IPKernelApp.log_level=40"]
    client.record_timing, client.coalesce_streams, client.flags = False, True, flags
    try:
        client.execute(env=_environment(book))
    except (CellExecutionError, DeadKernelError) as error:
        message = ANSI.sub("", str(error))[-3000:]
        raise BookError(f"chapters/{path.stem}.md doesn't run:\n{message}") from None
    for cell in notebook.cells:
        cell.get("outputs", []).sort(key=lambda output: output.get("name") == "stderr")
        for output in cell.get("outputs", []):
            _clean_output(output, book)
    notebook.metadata["octavo"] = stamp(book, notebook)
    write_notebook(book, path, notebook)


def _environment(book: Book) -> dict[str, str]:
    path = [str(book.root / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _clean_output(output: Any, book: Book) -> None:
    """Take this machine's paths and memory addresses out of an output's text."""
    if "text" in output:
        output["text"] = _clean_text(output["text"], book)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") and isinstance(value, str):
            output["data"][kind] = _clean_text(value, book)


def _clean_text(text: str, book: Book) -> str:
    text = ADDRESS.sub("", CELL_FILE.sub("cell", text))
    text = text.replace(f"{book.root}/", "").replace(sys.prefix, "<venv>")
    return text.replace(str(Path.home()), "~")


def run_book(book: Book, flags: set[str], everything: bool = False) -> list[Path]:
    """Execute the notebooks whose outputs are stale (or all), in reading order."""
    done = []
    for path in book.notebooks():
        reason = "asked for" if everything else why_stale(book, path)
        if reason:
            print(f"  running {path.stem}: {reason}", flush=True)
            run_notebook(book, path, flags)
            done.append(path)
    return done
