"""How the site reads a notebook: `#|` lines become tags, exported cells get a badge."""

from __future__ import annotations

from typing import Any

import nbformat

from tools.cells import directives, export_target, without_directives
from tools.layout import PACKAGE

PLUMBING = {
    "",
    "from __future__ import annotations",
    "from fastcore.basics import patch",
}
NOTES = {
    "gpu": "needs a CUDA card",
    "soak": "runs for minutes",
    "preview": "a look ahead: uses the finished engine",
}


def read_notebook(text: str) -> Any:
    """A notebook for MyST-NB, from the text of an .ipynb file."""
    notebook = nbformat.reads(text, as_version=4)
    default: str | None = None
    cells: list[Any] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found = directives(cell.source)
            default = " ".join(found.get("default_exp", [])) or default
            badge, shown = _badge(cell.source, default), _for_readers(cell)
            cells += [shown] if "remove-cell" in shown.metadata["tags"] else [*badge, shown]
        else:
            cells.append(cell)
    notebook.cells = cells
    return notebook


def _badge(source: str, default: str | None) -> list[Any]:
    """A small note above the cell: the module it goes to, or what it needs."""
    target = export_target(source, default)
    notes = [NOTES[name] for name in directives(source) if name in NOTES]
    if target:
        module = f"{PACKAGE}.{target}".removesuffix(".__init__")
        notes.insert(0, f"{{py:mod}}`{module}`")
    if not notes:
        return []
    note = f"```{{container}} cell-badge\n{' · '.join(notes)}\n```"
    return [nbformat.v4.new_markdown_cell(note)]


def _for_readers(cell: Any) -> Any:
    """The cell without its directive lines; a cell that tells a reader nothing vanishes."""
    found = directives(cell.source)
    cell.source = without_directives(cell.source)
    tags = list(cell.metadata.get("tags", []))
    if set(cell.source.splitlines()) <= PLUMBING or "hide" in found:
        tags.append("remove-cell")
    if "hide_input" in found or "hide-input" in found:
        tags.append("hide-input")
    cell.metadata["tags"] = [*dict.fromkeys(tags)]
    return cell
