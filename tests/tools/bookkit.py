"""A book of one short chapter, and ways to change it."""

from __future__ import annotations

from pathlib import Path

from tools.layout import Book

ROOT = Path(__file__).resolve().parents[2]

CHAPTER = '''\
# 1. Boxes

A box has a size.

```{code-cell}
#| default_exp boxes
```

```{code-cell}
from fastcore.basics import patch
```

```{code-cell}
#| export
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Box:
    """A box of `size` cm."""

    size: int
```

## Doubling

```{code-cell}
#| export
@patch
def double(self: Box, times: int = 2) -> int:
    """The size, `times` over."""
    return self.size * times
```

```{code-cell}
assert Box(2).double() == 4
Box(2).double()
```
'''


def cell(source: str) -> str:
    """A code cell in a chapter's text."""
    return f"\n```{{code-cell}}\n{source}\n```\n"


def edit(book: Book, old: str, new: str, chapter: str = "01_boxes") -> None:
    """Replace a piece of a chapter's text, which must be there."""
    path = book.chapters_dir / f"{chapter}.md"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def add_chapter(book: Book, name: str, *cells: str) -> None:
    """Write one more chapter."""
    text = f"# {name}\n" + "".join(cell(source) for source in cells)
    (book.chapters_dir / f"{name}.md").write_text(text, "utf-8")
