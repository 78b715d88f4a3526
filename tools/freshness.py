"""Do a notebook's outputs belong to its code? Two hashes in its metadata answer that.

`code` covers every code cell of the notebook. `package` covers the modules of src/ that the
notebook imports, directly or through other modules. Not covered: the versions of other
packages, the device, data files, and modules used only through a shell command.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from tools.layout import PACKAGE, Book


def stamp(book: Book, notebook: Any) -> dict[str, str]:
    """The hashes that fresh outputs of this notebook carry."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    modules = used_modules(cells, book.package_dir)
    package = [
        (str(p.relative_to(book.package_dir)), p.read_text("utf-8")) for p in modules
    ]
    return {"code": _digest(cells), "package": _digest(package)}


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def why_stale(book: Book, path: Path) -> str | None:
    """What changed since the notebook was executed, or None when its outputs are fresh."""
    notebook = nbformat.read(path, as_version=4)
    if not any(cell.cell_type == "code" for cell in notebook.cells):
        return None
    recorded = notebook.metadata.get("octavo", {})
    if not recorded:
        return "it was never executed"
    now = stamp(book, notebook)
    if recorded.get("code") != now["code"]:
        return "its code cells changed"
    return None if recorded == now else "a module that it imports changed"


def used_modules(sources: list[str], package_dir: Path) -> list[Path]:
    """The package's files that some code imports, followed through their own imports."""
    todo = [file for source in sources for file in _imported_files(source, package_dir)]
    found: set[Path] = set()
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += _imported_files(file.read_text("utf-8"), package_dir)
    return sorted(found)


def _imported_files(source: str, package_dir: Path) -> Iterator[Path]:
    for name in _imported_names(source):
        if name == PACKAGE:  # the lazy top level can reach everything
            yield from package_dir.rglob("*.py")
        path = package_dir.joinpath(*name.split(".")[1:])
        candidates = [path.with_suffix(".py"), path / "__init__.py"]
        yield from (file for file in candidates if name != PACKAGE and file.exists())


def _imported_names(source: str) -> Iterator[str]:
    """Every dotted name below the package that a cell or module may import."""
    code = "\n".join(
        "" if line.lstrip()[:1] in "%!" else line for line in source.splitlines()
    )
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == PACKAGE)
