"""Fold `@patch` methods into the classes they belong to, keeping every line as written.

A chapter may explain a method in a cell of its own. The package should still hold whole
classes, so the source lines of each patched function move to the end of their class.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace

from tools.cells import is_patch, patched_class
from tools.layout import BookError

Function = ast.FunctionDef | ast.AsyncFunctionDef
DECORATORS = {
    "as_prop": "property",
    "cls_method": "classmethod",
    "static_method": "staticmethod",
    "set_prop": "{name}.setter",
}


@dataclass(frozen=True)
class Piece:
    """One exported cell: its code, whether it counts for `__all__`, and where it stands."""

    source: str
    place: str
    line: int = 1
    public: bool = True
    order: int = 0

    def error(self, problem: str, line: int = 1) -> BookError:
        """An error that names the chapter's file and line."""
        return BookError(f"{self.place}:{self.line + line - 1}: {problem}")

    def parse(self) -> list[ast.stmt]:
        """The cell's statements, or a BookError that points to the line in the chapter."""
        try:
            return ast.parse(self.source).body
        except SyntaxError as error:
            problem = f"exported cell is not Python: {error.msg}"
            raise self.error(problem, error.lineno or 1) from None


@dataclass
class _Home:
    """A class that may receive methods: the cell it stands in, and the methods so far."""

    index: int
    node: ast.ClassDef
    methods: list[str] = field(default_factory=list)


def fold_patches(pieces: list[Piece]) -> list[Piece]:
    """The cells of one module with every `@patch` function moved into its class."""
    homes: dict[str, _Home] = {}
    sources = [piece.source.splitlines() for piece in pieces]
    for index, piece in enumerate(pieces):
        for node in piece.parse():
            if isinstance(node, ast.ClassDef):
                homes[node.name] = _Home(index, node)
            elif isinstance(node, Function) and any(map(is_patch, node.decorator_list)):
                _home_of(node, piece, homes).methods.append(_as_method(node, piece))
                _blank(node, sources[index])
    for home in sorted(homes.values(), key=lambda home: -home.node.lineno):
        _insert(home, sources[home.index])
    joined = ["\n".join(lines).strip("\n") for lines in sources]
    return [replace(p, source=s) for p, s in zip(pieces, joined, strict=True) if s.strip()]


def _home_of(node: Function, piece: Piece, homes: dict[str, _Home]) -> _Home:
    owner = patched_class(node)
    if owner is None:
        problem = f"@patch method `{node.name}` needs its class as the first annotation"
        raise piece.error(problem, node.lineno)
    if owner not in homes:
        problem = f"@patch method `{node.name}`: no class `{owner}` earlier in this module"
        raise piece.error(problem, node.lineno)
    return homes[owner]


def _first_line(node: Function, lines: list[str]) -> int:
    """The 1-based line where a function starts, counting decorators and comments above it."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return first


def _blank(node: Function, lines: list[str]) -> None:
    """Empty the function's lines, so that the numbers of the other lines stay true."""
    for number in range(_first_line(node, lines), (node.end_lineno or node.lineno) + 1):
        lines[number - 1] = ""


def _as_method(node: Function, piece: Piece) -> str:
    """The function's source as a method: no annotation on self, indented by four."""
    lines = piece.source.splitlines()
    _drop_self_annotation(node, lines)
    for decorator in node.decorator_list:
        if is_patch(decorator):
            start, end = decorator.lineno, decorator.end_lineno or decorator.lineno
            wanted = _decorators(decorator, node, piece)
            lines[start - 1 : end] = [wanted, *[""] * (end - start)]
    kept = _inside_strings(node)
    first = _first_line(node, piece.source.splitlines())
    numbers = range(first, (node.end_lineno or node.lineno) + 1)
    chosen = [(n, lines[n - 1]) for n in numbers if lines[n - 1].strip() or n in kept]
    chosen = _with_gaps(chosen, node, lines)
    return "\n".join(t if n in kept or not t else "    " + t for n, t in chosen)


def _with_gaps(
    chosen: list[tuple[int, str]], node: Function, lines: list[str]
) -> list[tuple[int, str]]:
    """Put back the blank lines of the body; those left above `def` by a decorator go."""
    head = [(n, text) for n, text in chosen if n < node.lineno]
    body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return head + [(n, lines[n - 1]) for n in body]


def _decorators(decorator: ast.expr, node: Function, piece: Piece) -> str:
    """What stands in for `@patch(...)`: nothing, or one of Python's own decorators."""
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    for keyword in keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg not in DECORATORS or not is_true:
            problem = (
                f"@patch({keyword.arg}=...) can't be folded; use {', '.join(DECORATORS)}"
            )
            raise piece.error(problem, node.lineno)
        return "@" + DECORATORS[keyword.arg].format(name=node.name)
    return ""


def _drop_self_annotation(node: Function, lines: list[str]) -> None:
    argument = [*node.args.posonlyargs, *node.args.args][0]
    if argument.annotation is None:
        return
    row = argument.lineno - 1
    raw = lines[row].encode()
    start = argument.col_offset + len(argument.arg.encode())
    end = argument.annotation.end_col_offset or start
    lines[row] = (raw[:start] + raw[end:]).decode()


def _inside_strings(node: Function) -> set[int]:
    """Lines that begin inside a string which isn't a docstring: indenting would change it."""
    docstrings = {
        id(child.body[0].value)
        for child in ast.walk(node)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and isinstance(child.body[0], ast.Expr)
    }
    inside: set[int] = set()
    for child in ast.walk(node):
        text = isinstance(child, ast.JoinedStr)
        text = text or (
            isinstance(child, ast.Constant) and isinstance(child.value, str | bytes)
        )
        if text and id(child) not in docstrings:
            last = child.end_lineno or child.lineno  # type: ignore[attr-defined]
            inside.update(range(child.lineno + 1, last + 1))  # type: ignore[attr-defined]
    return inside


def _insert(home: _Home, lines: list[str]) -> None:
    """Put a class's new methods below its last line (and the comments that close it)."""
    if not home.methods:
        return
    end = home.node.end_lineno or home.node.lineno
    if _is_empty(home.node):
        statement = home.node.body[0]
        raw = lines[statement.lineno - 1].encode()
        kept = raw[: statement.col_offset] + raw[statement.end_col_offset or 0 :]
        lines[statement.lineno - 1] = kept.decode().rstrip()
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    lines[end - 1] = "\n\n".join([lines[end - 1], *home.methods])


def _is_empty(node: ast.ClassDef) -> bool:
    """A body of `pass` or `...` alone, which the first method replaces."""
    only = node.body[0] if len(node.body) == 1 else None
    dots = isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)
    return isinstance(only, ast.Pass) or (dots and only.value.value is Ellipsis)  # type: ignore[union-attr]
