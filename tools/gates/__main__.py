"""`python -m tools.gates [NAME ...]`: hold the book to its promises."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tools.gates import GATES
from tools.layout import Book, BookError


def check(name: str, book: Book) -> bool:
    """Run one gate and print its verdict with the time it took."""
    start = time.perf_counter()
    try:
        problems = GATES[name](book)
    except BookError as error:
        problems = [str(error)]
    verdict = "FAIL" if problems else "ok"
    print(f"{verdict:4} {name}  ({time.perf_counter() - start:.1f} s)", flush=True)
    for problem in problems:
        print("     " + problem.rstrip().replace("\n", "\n     "), flush=True)
    return not problems


def main(argv: list[str] | None = None) -> int:
    """Command line of `python -m tools.gates`."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the book's folder")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME")
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(GATES))
    args = parser.parse_args(argv)
    unknown = {*args.names, *args.skip} - set(GATES)
    if unknown:
        parser.error(f"no gate called {sorted(unknown)}; there are: {', '.join(GATES)}")
    names = [name for name in args.names or GATES if name not in args.skip]
    results = [check(name, Book(args.root.resolve())) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
