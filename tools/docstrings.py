"""Docstrings are plain text with `code` in backticks; the site's API pages want RST."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

CODE = re.compile(r"(`+)(.+?)\1")


def to_rst(lines: list[str]) -> list[str]:
    """Paragraph by paragraph: text stays text, hanging lines become a list, the rest code."""
    out: list[str] = []
    for blank, group in groupby(lines, key=lambda line: not line.strip()):
        if not blank:
            out += [*_paragraph(list(group)), ""]
    return out


def _paragraph(lines: list[str]) -> list[str]:
    indents = [len(line) - len(line.lstrip()) for line in lines]
    if min(indents) > 0 or lines[0].startswith(">>>"):
        return ["::", "", *(f"    {line}" for line in lines)]
    if max(indents) > 0 or lines[0].startswith(("- ", "* ")):
        return [line for item in _items(lines) for line in (f"* {quote(item)}", "")]
    return [quote(line) for line in lines]


def _items(lines: list[str]) -> Iterator[str]:
    """Lines without indentation begin an item; indented ones carry it on."""
    item: list[str] = []
    for line in lines:
        if item and not line.startswith(" "):
            yield " ".join(item)
            item = []
        item.append(line.strip().removeprefix("- ").removeprefix("* "))
    yield " ".join(item)


def quote(line: str) -> str:
    """One line with `code` as RST writes it, and RST's own marks escaped."""
    parts, position = [], 0
    for match in CODE.finditer(line):
        parts += [
            _escape(line[position : match.start()]),
            _code(match[2], line[match.end() :]),
        ]
        position = match.end()
    return "".join([*parts, _escape(line[position:])])


def _code(text: str, rest: str) -> str:
    return f"``{text.strip()}``" + ("\\ " if rest[:1].isalnum() else "")


def _escape(text: str) -> str:
    return re.sub(r"([*|_\\`])", r"\\\1", text)
