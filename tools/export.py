"""Notebook to package: nbdev's exporter with a module maker of our own, then ruff."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from nbdev.export import nb_export

from tools.cells import HEADING, directives, without_directives
from tools.fold import Piece
from tools.layout import Book, BookError, chapter_label, plain_title
from tools.render import Module, render
from tools.sync import write_if_changed


@dataclass
class Package:
    """Every module that the notebooks export, collected before anything is written."""

    book: Book
    modules: dict[str, Module] = field(default_factory=dict)

    def module(self, name: str, chapter: str, title: str) -> Module:
        """The module called `name`, opened the first time that a chapter names it."""
        module = self.modules.setdefault(name, Module(name, chapter, title))
        if module.chapter != chapter:
            owner = f"{chapter_label(module.chapter)} ({module.chapter})"
            problem = f"exports into `{name}`, which belongs to {owner}"
            raise BookError(f"chapters/{chapter}.md: {problem}; a module has one chapter")
        return module


class ModuleMaker:
    """What `nb_export` calls for each module of a notebook; it collects instead of writing."""

    def __init__(self, package: Package, name: str, nb_path: str, **_: Any) -> None:
        self.package, self.name, self.notebook = package, name, Path(nb_path)

    def make(self, cells: Any, all_cells: Any, lib_path: Any = None) -> None:
        """Take the exported cells of one module of one notebook."""
        chapter = self.package.book.chapters_dir / f"{self.notebook.stem}.md"
        text = chapter.read_text(encoding="utf-8")
        module = self.package.module(self.name, chapter.stem, _title(text, chapter.stem))
        public = {id(cell) for cell in all_cells}
        for cell in cells:
            if cell.cell_type == "code":
                piece = _piece(cell, text, f"chapters/{chapter.name}", id(cell) in public)
                module.pieces.append(piece)
        module.pieces.sort(key=lambda piece: piece.order)


def _title(text: str, stem: str) -> str:
    heading = HEADING.search(text)
    return plain_title(heading[1]) if heading else stem.partition("_")[2].replace("_", " ")


def _piece(cell: Any, text: str, place: str, public: bool) -> Piece:
    source = without_directives(cell.source)
    line = text[: max(text.find(source), 0)].count("\n") + 1
    return Piece(source, place, line, public, cell.idx_)


def check_directives(notebook: Path) -> None:
    """One `default_exp` a chapter, and one before any bare `#| export`."""
    default = False
    for cell in nbformat.read(notebook, as_version=4).cells:
        found = directives(cell.source) if cell.cell_type == "code" else {}
        where = f"chapters/{notebook.stem}.md, cell `{cell.id}`"
        if "default_exp" in found and default:
            raise BookError(
                f"{where}: a second default_exp; write `#| export NAME` instead"
            )
        default = default or "default_exp" in found
        if not default and [] in (found.get("export"), found.get("exporti")):
            raise BookError(f"{where}: `#| export` before any `#| default_exp NAME`")


def collect(book: Book, notebooks: list[Path]) -> Package:
    """Read the exported cells of some notebooks, in reading order."""
    package = Package(book)
    for notebook in notebooks:
        check_directives(notebook)
        maker = partial(ModuleMaker, package)
        nb_export(str(notebook), lib_path=str(book.package_dir), mod_maker=maker)
    return package


def module_files(package: Package) -> dict[str, str]:
    """The package's files, by path below the package's folder, before formatting."""
    files: dict[str, str] = {}
    for name, module in package.modules.items():
        is_folder = any(other.startswith(f"{name}.") for other in package.modules)
        path = name.replace(".", "/") + ("/__init__.py" if is_folder else ".py")
        files[path] = render(module)
    folders = {str(parent) for path in files for parent in Path(path).parents} | {"."}
    for folder in sorted(folders):
        path = str(Path(folder) / "__init__.py")
        files.setdefault(
            path, '"""Generated: the chapters below it fill this package."""\n'
        )
    return {**files, "py.typed": ""}  # PEP 561: its types are for its users too


def tidy(folder: Path, config: Path) -> None:
    """Sort imports and format every file below a folder."""
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache"]
        ruff += ["--config", str(config)] if config.exists() else []
        done = subprocess.run([*ruff, "."], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise BookError(f"ruff {command[0]} failed:\n{done.stdout}{done.stderr}")


def export(book: Book, notebooks: list[Path] | None = None) -> list[Path]:
    """Write the package from notebooks (default: all), and return the files that changed."""
    package = collect(book, book.notebooks() if notebooks is None else notebooks)
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "src" / book.package_dir.name
        for path, text in module_files(package).items():
            write_if_changed(staged / path, text)
        tidy(staged, book.root / "pyproject.toml")
        return _install(staged, book.package_dir)


def _install(staged: Path, target: Path) -> list[Path]:
    """Make `target` hold exactly the staged modules, touching only what differs."""
    files = (path for path in staged.rglob("*") if path.is_file())
    wanted = {path.relative_to(staged): path for path in files}
    changed = []
    for old in target.rglob("*.py"):
        if old.relative_to(target) not in wanted:
            old.unlink()
            changed.append(old)
    for path, source in sorted(wanted.items()):
        if write_if_changed(target / path, source.read_text(encoding="utf-8")):
            changed.append(target / path)
    return changed
