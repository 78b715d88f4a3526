"""Gates about the package's modules: each whole, each alone, none tied to the build."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.layout import PACKAGE, Book

BUILD_TOOLS = {"nbdev", "fastcore", "execnb", "jupytext", "IPython", "nbformat", "nbclient"}
WORKERS = 2


def module_names(book: Book) -> list[str]:
    """The dotted names of the package's modules."""
    files = sorted(book.package_dir.rglob("*.py"))
    parts = [path.relative_to(book.package_dir).with_suffix("").parts for path in files]
    return [".".join((PACKAGE, *(p for p in part if p != "__init__"))) for part in parts]


def every_module_imports_alone(book: Book) -> list[str]:
    """Each module imports in an interpreter that has imported nothing else."""
    with ThreadPoolExecutor(WORKERS) as pool:
        found = pool.map(lambda name: _import_problem(book, name), module_names(book))
    return [problem for problem in found if problem]


def _import_problem(book: Book, name: str) -> str | None:
    env = {**os.environ, "PYTHONPATH": str(book.root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, env=env, cwd=book.root, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"import {name}: {last[0]}" if done.returncode else None


def no_undefined_names(book: Book) -> list[str]:
    """Ruff finds no name in the package that nothing defines (F821)."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache"]
    command += ["--select", "F821,F822,F823", "--output-format", "concise", "src"]
    done = subprocess.run(command, cwd=book.root, capture_output=True, text=True)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return [line for line in lines if ":" in line] if done.returncode else []


def runtime_needs_no_build_tools(book: Book) -> list[str]:
    """No module of the package imports what only the book's build needs."""
    problems = []
    for path in sorted(book.package_dir.rglob("*.py")):
        for name in sorted(_imported_packages(path) & BUILD_TOOLS):
            problems.append(f"{path.relative_to(book.root)} imports {name}")
    return problems


def _imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}
