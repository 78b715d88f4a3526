"""`make docs`: stage docs/, nbs/ and API stubs in one folder and let Sphinx build it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.gates.modules import module_names
from tools.layout import Book

CHAPTERS_MARK, API_MARK = "<!-- chapters -->", "<!-- api -->"


def build_site(book: Book, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site into out/html: missing references and warnings are errors, no network."""
    source = stage(book, out / "source")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-n",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
    ]
    command += ["-d", str(out / "doctrees"), str(source), str(out / "html")]
    here = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(book.root / "src"), str(here)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=book.root, env=env, capture_output=True, text=True)


def stage(book: Book, source: Path) -> Path:
    """Lay out Sphinx's source folder: pages, chapters, one API page a module, and the index."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(book.root / "docs", source, ignore=shutil.ignore_patterns("_build"))
    chapters = [path.stem for path in book.notebooks() if path.exists()]
    for stem in chapters:
        _copy(book.nbs_dir / f"{stem}.ipynb", source / "chapters")
    modules = module_names(book)
    for name in modules:
        _write_api_page(source / "api", name)
    index = source / "index.md"
    text = index.read_text("utf-8")
    text = text.replace(CHAPTERS_MARK, _toctree("Chapters", "chapters", chapters))
    index.write_text(text.replace(API_MARK, _toctree("Modules", "api", modules)), "utf-8")
    return source


def _copy(path: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy2(path, folder)


def _write_api_page(folder: Path, module: str) -> None:
    folder.mkdir(exist_ok=True)
    title = f"``{module}``"
    text = f"{title}\n{'=' * len(title)}\n\n.. automodule:: {module}\n   :members:\n   :ignore-module-all:\n"
    (folder / f"{module}.rst").write_text(text, "utf-8")


def _toctree(caption: str, folder: str, pages: list[str]) -> str:
    if not pages:
        return ""
    lines = "\n".join(f"{folder}/{page}" for page in pages)
    return f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n{lines}\n```"


def main(argv: list[str] | None = None) -> int:
    """Command line of `python -m tools.site`."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the book's folder")
    parser.add_argument("--out", type=Path, default=Path("build/site"))
    args = parser.parse_args(argv)
    done = build_site(Book(args.root.resolve()), args.out.resolve())
    print(done.stdout + done.stderr, end="")
    if done.returncode == 0:
        print(f"site: open {args.out}/html/index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
