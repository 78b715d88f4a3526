"""Text to notebook: chapters/*.md to nbs/*.ipynb, keeping the outputs of unchanged cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from nbdev.clean import clean_nb

from tools.cells import name_cells
from tools.layout import Book, BookError

TEXT_FORMAT = "md:myst"
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}


def sync_chapter(book: Book, chapter: Path) -> bool:
    """Bring one notebook up to date with its text; say whether the file changed.

    Outputs stay with a cell whose source is unchanged; an edited cell loses its outputs.
    """
    notebook = read_text(chapter)
    target = book.notebook(chapter)
    if target.exists():
        notebook = _with_outputs(notebook, nbformat.read(target, as_version=4))
    notebook.metadata["kernelspec"] = dict(KERNEL)
    notebook.metadata.pop("jupytext", None)
    for cell, name in zip(notebook.cells, list(name_cells(notebook.cells)), strict=True):
        cell["id"] = name
    return write_notebook(book, target, notebook)


def read_text(chapter: Path) -> Any:
    try:
        notebook = jupytext.read(chapter, fmt=TEXT_FORMAT)
    except Exception as error:  # jupytext raises whatever its parsers raise
        raise BookError(
            f"chapters/{chapter.name}: jupytext can't read it: {error}"
        ) from error
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _with_outputs(text: Any, old: Any) -> Any:
    text.nbformat_minor = old.nbformat_minor = 5
    metadata = {key: value for key, value in old.metadata.items() if key == "octavo"}
    combined = combine_inputs_with_outputs(text, old, fmt=TEXT_FORMAT)
    known = {cell.source for cell in old.cells if cell.cell_type == "code"}
    for cell in combined.cells:
        if cell.cell_type == "code" and cell.source not in known:
            cell.outputs = []
    combined.metadata.update(metadata)
    return combined


def write_notebook(book: Book, target: Path, notebook: Any) -> bool:
    """Clean a notebook as `nbdev_clean` does and write it if that changes the file."""
    plain = json.loads(nbformat.writes(notebook))
    clean_nb(
        plain,
        allowed_metadata_keys=book.setting("allowed_metadata_keys").split(),
        allowed_cell_metadata_keys=book.setting("allowed_cell_metadata_keys").split(),
    )
    text = json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    return write_if_changed(target, text)


def write_if_changed(path: Path, text: str) -> bool:
    """Write a file only when its content differs, so that file times mean something."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def sync(book: Book) -> list[Path]:
    """Sync every chapter, drop notebooks whose text is gone, return the changed ones."""
    changed = [chapter for chapter in book.chapters() if sync_chapter(book, chapter)]
    wanted = set(book.notebooks())
    for stray in set(book.nbs_dir.glob("*.ipynb")) - wanted:
        stray.unlink()
    return [book.notebook(chapter) for chapter in changed]
