"""Where the parts of a book lie, and the one error that its tools raise."""

from __future__ import annotations

import re
import shutil
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "octavo"


class BookError(Exception):
    """Something in a chapter needs an author's hand; the message says where and what."""


@dataclass(frozen=True)
class Book:
    """The folders of one book. `root` holds chapters/, nbs/, src/ and settings.ini."""

    root: Path

    @property
    def chapters_dir(self) -> Path:
        """The MyST texts: the source that people edit."""
        return self.root / "chapters"

    @property
    def nbs_dir(self) -> Path:
        """The same chapters as notebooks, with outputs."""
        return self.root / "nbs"

    @property
    def package_dir(self) -> Path:
        """The generated package."""
        return self.root / "src" / PACKAGE

    def chapters(self) -> list[Path]:
        """The chapter texts in reading order: 01, 02, ... then the appendices a, b, ..."""
        return sorted(self.chapters_dir.glob("[0-9a-z]*_*.md"))

    def notebooks(self) -> list[Path]:
        """The notebook of every chapter, in the same order, whether or not it exists yet."""
        return [self.notebook(chapter) for chapter in self.chapters()]

    def notebook(self, chapter: Path) -> Path:
        """The notebook that belongs to a chapter text."""
        return self.nbs_dir / f"{chapter.stem}.ipynb"

    def copy_to(self, folder: Path, chapters: list[Path] | None = None) -> Book:
        """A book in another folder, made of some chapters' texts (default: all) and no outputs."""
        copy = Book(folder.resolve())
        shutil.rmtree(copy.chapters_dir, ignore_errors=True)
        copy.chapters_dir.mkdir(parents=True)
        for path in self.chapters() if chapters is None else chapters:
            shutil.copy(path, copy.chapters_dir)
        for name in ("settings.ini", "pyproject.toml"):
            if (self.root / name).exists():
                shutil.copy(self.root / name, copy.root)
        return copy

    def setting(self, name: str) -> str:
        """One value of settings.ini, or the empty string."""
        parser = ConfigParser(interpolation=None)
        parser.read(self.root / "settings.ini", encoding="utf-8")
        return parser.get("DEFAULT", name, fallback="")


def chapter_label(stem: str) -> str:
    """How a person calls a chapter: `04_blocks` is "Chapter 04", `c_measuring` "Appendix C"."""
    number = stem.split("_")[0]
    return f"Chapter {number}" if number.isdigit() else f"Appendix {number.upper()}"


def plain_title(heading: str) -> str:
    """A chapter's first heading without the number that authors put in front of it."""
    numbered = r"^(?:(?:chapter|appendix)\s+\w+|\d+|[a-z](?=[.:]))\s*[.:,)–—-]?\s+"
    return re.sub(numbered, "", heading.strip(), flags=re.IGNORECASE)
