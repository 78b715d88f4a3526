"""Module text from exported cells: docstring, imports, `__all__`, then the code as written."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass, field

from tools.cells import is_patch
from tools.fold import Piece, fold_patches
from tools.layout import chapter_label

PATCH_NAMES = {"patch", "patch_to"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Module:
    """One module of the package while its cells are collected, in the order of the chapter."""

    name: str
    chapter: str
    title: str
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class _Parts:
    """A module's text, sorted by where it goes."""

    docstring: str = ""
    future: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    type_imports: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def render(module: Module) -> str:
    """The module's source before `ruff format`."""
    parts = _Parts()
    public = [name for p in module.pieces if p.public for name in _public_names(p)]
    own_all = any("__all__" in _assigned(node) for p in module.pieces for node in p.parse())
    parts.names = [] if own_all else list(dict.fromkeys(public))
    for piece in fold_patches(module.pieces):
        _sort_into(parts, piece)
    return _assemble(parts, module)


def _sort_into(parts: _Parts, piece: Piece) -> None:
    """Move a cell's docstring and imports to the module's head; keep the rest as written."""
    lines = piece.source.splitlines()
    for position, node in enumerate(piece.parse()):
        if position == 0 and not parts.code and _is_docstring(node):
            parts.docstring = parts.docstring or ast.literal_eval(node.value)  # type: ignore[attr-defined]
            _cut(lines, node)
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            parts.future.append(_cut(lines, node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            text = _cut(lines, node, comments=True)
            parts.imports += [] if _only_patch(node) else [text]
        elif _is_type_checking(node):
            parts.type_imports += [_cut(lines, child) for child in node.body]  # type: ignore[attr-defined]
            _cut(lines, node)
    code = "\n".join(lines).strip("\n")
    parts.code += [code] if code.strip() else []


def _assemble(parts: _Parts, module: Module) -> str:
    blocks = [_docstring(parts.docstring, module), *dict.fromkeys(parts.future)]
    blocks += parts.imports
    if parts.type_imports:
        body = textwrap.indent("\n".join(dict.fromkeys(parts.type_imports)), "    ")
        blocks += ["from typing import TYPE_CHECKING", f"\nif TYPE_CHECKING:\n{body}\n"]
    if parts.names:
        blocks.append(
            "\n__all__ = [" + ", ".join(f'"{name}"' for name in parts.names) + "]\n"
        )
    return "\n".join(blocks) + "\n\n" + "\n\n\n".join(parts.code) + "\n"


def _docstring(own: str, module: Module) -> str:
    """The module's docstring, which always names the chapter to edit."""
    where = f"{chapter_label(module.chapter)}, {module.title}."
    hint = f"Generated from chapters/{module.chapter}.md; edit there."
    if own.strip():
        text = f"{own.strip()}\n\n{textwrap.fill(f'{where} {hint}', 92)}"
    else:
        text = f"{where}\n\n{hint}"
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{escaped}\n"""\n'


def _cut(lines: list[str], node: ast.stmt, comments: bool = False) -> str:
    """Take a statement's lines out (blanking them), with the comment lines right above."""
    first, last = node.lineno, node.end_lineno or node.lineno
    while comments and first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    text = "\n".join(lines[first - 1 : last])
    lines[first - 1 : last] = [""] * (last - first + 1)
    return textwrap.dedent(text)


def _is_docstring(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _only_patch(node: ast.stmt) -> bool:
    """An import of fastcore's patch: the fold has made it needless."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
        "fastcore"
    ):
        return False
    return {alias.name for alias in node.names} <= PATCH_NAMES


def _is_type_checking(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` with nothing but imports below it."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    named = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return named and all(isinstance(n, ast.Import | ast.ImportFrom) for n in node.body)


def _assigned(node: ast.stmt) -> list[str]:
    """The names that a plain assignment at module level gives a value to."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [target.id for target in flat if isinstance(target, ast.Name)]


def _public_names(piece: Piece) -> list[str]:
    """What a cell adds to `__all__`: its definitions and constants without an underscore."""
    names: list[str] = []
    for node in piece.parse():
        if not isinstance(node, Definition):
            names += _assigned(node)
        elif not any(map(is_patch, node.decorator_list)):
            names.append(node.name)
    return [name for name in names if not name.startswith("_")]
