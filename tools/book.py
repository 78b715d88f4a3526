"""Chapters to notebooks to package: what `make book` and `make run-book` call."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.export import export
from tools.layout import Book, BookError
from tools.sync import sync


def build(book: Book) -> list[Path]:
    """Bring notebooks and package up to date; return the files that changed."""
    return [*sync(book), *export(book)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.book", description=__doc__)
    add = parser.add_argument
    add("--root", type=Path, default=Path.cwd(), help="the book's folder (default: here)")
    add("--to", type=Path, help="build in this other folder and leave nbs/ and src/ alone")
    add("--execute", action="store_true", help="then run the notebooks whose code changed")
    add("--all", action="store_true", help="with --execute: run every notebook")
    add(
        "--flags", nargs="*", default=[], help="with --execute: also cells marked gpu, soak"
    )
    add("chapters", nargs="*", type=Path, help="with --to: only these texts")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line of `python -m tools.book`."""
    args = _parser().parse_args(argv)
    book = Book(args.root.resolve())
    try:
        if args.to:
            book = book.copy_to(args.to, sorted(args.chapters) or None)
        changed = build(book)
        if args.execute:
            from tools.execute import run_book

            changed += run_book(book, set(args.flags), args.all)
    except BookError as error:
        print(f"book: {error}", file=sys.stderr)
        return 1
    for path in dict.fromkeys(changed):
        print(f"  changed {path.relative_to(book.root)}")
    print(f"book: {len(book.chapters())} chapters, {len(changed)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
