"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import Any

from octavo.config import ConfigError
from octavo.drawing import MARGIN, WIDTH, Drawing, text_width
from octavo.plotting import Picture, spread

__all__ = ["Span", "timeline", "bar", "Rung", "read_results", "ladder", "engine_map"]


Span = tuple[float, float, str, int]  # start, length, label, kind


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, at most about a dozen, 1, 2 or 5 times 10**n apart."""
    rough = (high - low) / 12
    power = 10.0 ** floor(log10(rough))
    apart = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    apart = max(apart, 1.0) if high - low >= 3 and low == int(low) else apart
    first = -floor(-low / apart)
    return [apart * i for i in range(int(first), int(high / apart + 1e-9) + 1)]


def timeline(
    rows: Mapping[str, Sequence[Span]],
    *,
    title: str,
    alt: str,
    caption: str = "",
    xlabel: str = "step",
) -> Picture:
    """Rows of spans (start, length, label, kind) over one axis, from 0 or the first start.

    Raises `ConfigError` when there is nothing to draw.
    """
    spans = [span for row in rows.values() for span in row if span[1] > 0]
    if not spans:
        raise ConfigError("a timeline without spans: give rows with (start, length, ...)")
    low = min(0.0, *(span[0] for span in spans))
    high = max(start + length for start, length, *_ in spans)
    left = max(text_width(name, 9) for name in rows) / (WIDTH - 2 * MARGIN) * 100 + 1.5
    unit, bottom = (99 - left) / (high - low), 5.5 * len(rows)
    sheet = Drawing(100, bottom + 8, title, alt, caption)
    for tick in _ticks(low, high):
        x = left + (tick - low) * unit
        sheet.line(x, 0, x, bottom + 0.8, dashed=True).text(
            x, bottom + 2.3, f"{tick:,g}", size=8
        )
    for place, (name, row) in enumerate(rows.items()):
        top = 5.5 * place
        sheet.text(left - 1.5, top + 2.75, name, align="right")
        for start, length, label, kind in row:
            x = left + (start - low) * unit
            sheet.box(x, top + 0.4, length * unit, 4.7, label, kind=kind, size=8)
    return sheet.text((left + 99) / 2, bottom + 6, xlabel).show()


def bar(
    parts: Sequence[tuple[str, float]],
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "GiB",
) -> Picture:
    """One bar cut into (name, size) parts with their sizes in `unit`; zero parts are left out.

    Raises `ConfigError` when nothing is above 0 or a size is below.
    """
    total = sum(size for _, size in parts)
    if total <= 0 or min(size for _, size in parts) < 0:
        raise ConfigError(f"a bar of {list(parts)}: give sizes of 0 or more, not all 0")
    sheet, below, left = Drawing(100, 20, title, alt, caption), [], 0.0
    for index, (name, size) in enumerate(parts):
        wide, label = 100 * size / total, f"{name}\n{size:,.3g} {unit}"
        fits = text_width(label, 8) / sheet.scale < wide
        if size > 0:
            sheet.box(left, 0, wide, 9, label if fits else "", kind=index % 8, size=8)
            below += [] if fits else [(left + wide / 2, label)]
        left += wide
    return _labels_below(sheet, below).show()


def _labels_below(sheet: Drawing, labels: list[tuple[float, str]]) -> Drawing:
    """Names under the bar, moved apart and kept on the sheet, each with a line to its part."""
    if not labels:
        return sheet
    wide = max(text_width(label, 8) for _, label in labels) / sheet.scale + 1
    moved = spread([place for place, _ in labels], gap=wide)
    shift = max(0.0, wide / 2 - min(moved)) or min(0.0, 100 - wide / 2 - max(moved))
    for (place, label), middle in zip(labels, moved, strict=True):
        sheet.line(place, 9, middle + shift, 13)
        sheet.text(middle + shift, 16, label, size=8)
    return sheet


def _rate(value: float) -> str:
    """A rate for reading: four digits at most below 1,000, whole numbers above."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Rung:
    """One row of the ladder: what is switched on, what it brought, what was possible.

    `value`: measured rate, None while there is no measurement. `limit`: computed rate that
    nothing can beat, None where none is named. `chapter`: where the technique is built.
    """

    label: str
    value: float | None = None
    limit: float | None = None
    chapter: str = ""

    def words(self, unit: str) -> str:
        """The row as a sentence, for the alternative text."""
        where = f" (chapter {self.chapter})" if self.chapter else ""
        found = "not measured yet" if self.value is None else f"{_rate(self.value)} {unit}"
        limit = "" if self.limit is None else f", limit {_rate(self.limit)}"
        return f"{self.label}{where}: {found}{limit}"


def read_results(folder: str | Path, model: str | None = None) -> dict[str, dict[str, Any]]:
    """Measurements recorded as JSON in a folder, by their `name`; {} where there are none.

    A file holds a list of objects with at least name, median and provenance. `model` leaves
    those out whose config names another one.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("*.json")):
        parsed = json.loads(path.read_text(encoding="utf-8"))
        entries = parsed if isinstance(parsed, list) else [parsed]
        for entry in (entry for entry in entries if "median" in entry):
            if model in (None, entry.get("config", {}).get("model", model)):
                found[entry["name"]] = entry
    return found


def _rung_row(
    sheet: Drawing, rung: Rung, top: float, left: float, place: Callable[[float], float]
) -> None:
    """Draw one row that begins at `left`; `place` tells where a rate lies."""
    middle, missing = top + 2.75, "not measured yet"
    missing += f" (chapter {rung.chapter})" if rung.chapter else ""
    if rung.value is not None:
        end, value, missing = place(rung.value), _rate(rung.value), ""
        inside = text_width(value, 8) / sheet.scale + 1 < end - left
        sheet.box(left, top + 0.7, end - left, 4.1, value * inside, kind=0, size=8)
        sheet.text(end + 1, middle, value * (not inside), size=8, align="left")
    if rung.limit is None:
        sheet.text(left + 1, middle, missing, size=8, align="left")
    else:
        x, word = place(rung.limit), f"limit {_rate(rung.limit)}"
        sheet.line(x, top + 0.2, x, top + 5.3, dashed=True)
        word += f", {missing}" if missing else ""
        room = x + 0.8 + text_width(word, 8) / sheet.scale < 100
        aside, align = (0.8, "left") if room else (-0.8, "right")
        sheet.text(x + aside, middle, word, size=8, align=align)


def ladder(
    rungs: Sequence[Rung],
    *,
    title: str,
    caption: str = "",
    unit: str = "tokens/s",
    footer: str = "",
) -> Picture:
    """Horizontal bars of measured rates with their computed limits, on a logarithmic scale.

    Rows without a measurement say so. `footer` is the provenance line. Raises `ConfigError`
    for a ladder without rows or rates of 0 or less.
    """
    rates = [r for rung in rungs for r in (rung.value, rung.limit) if r is not None] or [1]
    if not rungs or min(rates) <= 0:
        raise ConfigError(f"a ladder of {len(rungs)} rows: give rows with rates above 0")
    low, high = floor(log10(min(rates))), floor(log10(max(rates))) + 1
    alt = "; ".join(rung.words(unit) for rung in rungs) + "."
    widest = max(text_width(rung.label, 9) for rung in rungs)
    left = widest / (WIDTH - 2 * MARGIN) * 100 + 1.5
    wide, bottom = (88 - left) / (high - low), 5.5 * len(rungs)

    def place(rate: float) -> float:
        return left + wide * (log10(rate) - low)

    sheet = Drawing(100, bottom + 10, title, alt, caption)
    sheet.line(left, bottom, 88, bottom).line(left, 0, left, bottom)
    for power in range(low, high + 1):
        x = place(10.0**power)
        sheet.line(x, bottom, x, bottom + 0.8)
        sheet.text(x, bottom + 2.3, f"{10.0**power:,.10g}", size=8)
    for row, rung in enumerate(rungs):
        sheet.text(left - 1.5, 5.5 * row + 2.75, rung.label, align="right")
        _rung_row(sheet, rung, 5.5 * row, left, place)
    sheet.text((left + 88) / 2, bottom + 5.5, unit, size=8)
    return sheet.text(0, bottom + 9, footer, size=7, align="left").show()


_BOXES = {  # x, y, width, height, what the chapter is about
    "a": (2, 4, 96, 5.5, "A  serving: the processes that one request passes through"),
    "02": (2, 15, 96, 6, "02  request · tokeniser · Engine.step() · detokeniser"),
    "10": (53, 26, 45, 40.5, ""),
    "03": (2, 28, 38, 6, "03  scheduler"),
    "06": (2, 34, 38, 5.5, "06  chunked prefill"),
    "04": (2, 52, 38, 6, "04  block pool"),
    "05": (2, 58, 38, 5.5, "05  prefix cache"),
    "07": (56, 28, 39, 6, "07  batch · attention · runner"),
    "09": (56, 34, 39, 5.5, "09  CUDA graphs, overlap"),
    "11": (56, 39.5, 39, 5.5, "11  layers · sampler · weights · LLM"),
    "08": (56, 53.5, 39, 7, "08  KV cache: how many blocks fit"),
    "01": (2, 70, 96, 5.5, "01  what a model is and what a card can do"),
    "b": (2, 78, 22.5, 5.5, "B  by hand in CUDA"),
    "c": (26.5, 78, 22.5, 5.5, "C  measuring"),
    "d": (51, 78, 22.5, 5.5, "D  past one machine"),
    "e": (75.5, 78, 22.5, 5.5, "E  Rosetta"),
}
_ARROWS = (
    (12, 0, 12, 4, "text"),
    (85, 4, 85, 0, ""),
    (12, 9.5, 12, 15, "prompt"),
    (85, 15, 85, 9.5, "pieces of text"),
    (12, 21, 12, 28, "requests"),
    (75, 28, 75, 21, "tokens"),
    (40, 32, 56, 32, "plan"),
    (12, 39.5, 12, 52, "how many\nblocks?"),
    (40, 54, 56, 43, "block\ntables"),
    (75, 45, 75, 53.5, "keys and values"),
    (56, 59, 40, 59, "so many\nblocks"),
)


def engine_map(lit: str = "") -> Picture:
    """The map of the engine with one chapter's box lit ("02", or "a" for an appendix).

    The dashed frame is chapter 10: what stands in it exists once on every card. Raises
    `ConfigError` for a chapter that isn't on the map.
    """
    lit = lit.lower()
    if lit and lit not in _BOXES:
        raise ConfigError(f"chapter {lit!r} isn't on the map; give one of {list(_BOXES)}")
    words = f"The box of chapter {lit.upper()} is lit. " if lit else ""
    alt = words + "; ".join(box[-1] for box in _BOXES.values() if box[-1])
    sheet = Drawing(100, 83.5, "The engine, a box for each chapter", alt)
    for name, (x, y, w, h, label) in _BOXES.items():
        kind = 7 if name in "abcde" else 0
        style = {"dashed": True, "kind": None} if name == "10" else {"kind": kind}
        sheet.box(x, y, w, h, label, lit=name == lit, **style)
    for x1, y1, x2, y2, word in _ARROWS:
        sheet.arrow(x1, y1, x2, y2, word)
    return sheet.text(75.5, 63.7, "10  the same on every card, one ledger", size=8).show()
