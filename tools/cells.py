"""What a notebook cell says about itself: directives, definitions, and a stable id."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(.*?)\s*$")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
MAGIC = re.compile(r"^\s*[%!?]")
MAX_ID = 64


def directives(source: str) -> dict[str, list[str]]:
    """The `#| name args` lines at the top of a cell, by name."""
    found: dict[str, list[str]] = {}
    for line in source.splitlines():
        match = DIRECTIVE.match(line)
        if not match and line.strip():
            break
        words = match[1].replace(":", " ").split() if match else []
        if words:
            found[words[0]] = words[1:]
    return found


def without_directives(source: str) -> str:
    """A cell's code below its leading `#|` lines."""
    lines = source.splitlines()
    while lines and (not lines[0].strip() or DIRECTIVE.match(lines[0])):
        lines.pop(0)
    return "\n".join(lines).rstrip()


def export_target(source: str, default: str | None) -> str | None:
    """The module a cell goes to, or None for a cell that stays in the notebook."""
    for name, args in directives(source).items():
        if name in ("export", "exporti", "exports"):
            return args[0] if args else default
    return None


def slug(text: str) -> str:
    """Lower-case words joined by hyphens, short enough to leave room for a suffix."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower().replace("`", ""))
    return words.strip("-")[: MAX_ID - 8].strip("-")


def patched_class(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The class that a `@patch` method belongs to, from its first argument's annotation."""
    args = [*node.args.posonlyargs, *node.args.args]
    annotation = args[0].annotation if args else None
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return annotation.id if isinstance(annotation, ast.Name) else None


def is_patch(decorator: ast.expr) -> bool:
    """Is this `@patch` or `@patch(...)`?"""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Name) and target.id == "patch"


def first_definition(source: str) -> str | None:
    """The name that a cell defines first, as `Class.method` for a patched method."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    for node in body:
        if isinstance(node, ast.ClassDef):
            return node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            owner = patched_class(node) if any(map(is_patch, node.decorator_list)) else None
            return f"{owner}.{node.name}" if owner else node.name
    return None


def name_cells(cells: Iterable[Any]) -> Iterator[str]:
    """Yield one id a cell: the slug of its definition, else of its heading, else of its section.

    The same text gives the same ids; a repeated slug gets `-2`, `-3`, ...
    """
    section = "top"
    taken: set[str] = set()
    for cell in cells:
        heading = (
            HEADING.search(cell["source"]) if cell["cell_type"] == "markdown" else None
        )
        if heading:
            section = slug(heading[1]) or section
        name = section
        if cell["cell_type"] == "code":
            name = slug(first_definition(cell["source"]) or "") or f"{section}-code"
        elif not heading:
            name = f"{section}-text"
        yield _unique(name, taken)


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}-{count}"
    taken.add(candidate)
    return candidate
