"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import html
from math import hypot

from octavo.config import ConfigError
from octavo.plotting import PALETTE, SIZE, Picture

__all__ = ["WIDTH", "COLOURS", "MARGIN", "tint", "text_width", "Drawing"]


WIDTH = SIZE[0] * 72  # points; every figure of the book is equally wide
COLOURS = (*PALETTE, "#8C8C8C")  # kinds 0 to 7
MARGIN, _TITLE = 8.0, 24.0  # points
_LETTER = 0.62  # width of a letter over its size, generously
_ANCHORS = {"left": "start", "center": "middle", "right": "end"}
_FONT = "DejaVu Sans, Verdana, sans-serif"


def tint(kind: int | None, strength: float = 0.3) -> str:
    """Fill for a palette colour 0..7, mixed with white; None is white.

    Raises `ConfigError` for another kind.
    """
    if kind is None:
        return "#FFFFFF"
    if not 0 <= kind < len(COLOURS):
        raise ConfigError(f"kind={kind!r}: give a colour from 0 to {len(COLOURS) - 1}")
    parts = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02X}" for part in parts)


def text_width(text: str, size: float) -> float:
    """About how wide the longest line of `text` is, in points, at a size in points."""
    return _LETTER * size * max(map(len, text.split("\n")))


def _tag(name: str, inside: str = "", /, **attributes: object) -> str:
    """One SVG element; numbers get two decimals, underscores become hyphens."""
    words = []
    for key, value in attributes.items():
        if isinstance(value, float | int):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        words.append(f'{key.replace("_", "-")}="{html.escape(str(value))}"')
    return f"<{' '.join([name, *words])}" + (f">{inside}</{name}>" if inside else "/>")


def _lines(x: float, y: float, text: str, size: float, /, **style: object) -> str:
    """Lines of text around a point (in points), white behind the letters."""
    rows = text.split("\n")
    top = y + 0.35 * size - 0.6 * size * (len(rows) - 1)
    halo: dict[str, object] = {
        "stroke": "#FFFFFF",
        "stroke_width": 2.5,
        "paint_order": "stroke",
    }
    style = {"font_size": size} | halo | style
    return "".join(
        _tag("text", html.escape(row, quote=False), x=x, y=top + 1.2 * size * i, **style)
        for i, row in enumerate(rows)
        if row
    )


class Drawing:
    """A blank figure in your own units: x to the right, y down, origin at the top left.

    Each method adds something and returns the drawing. `alt` says in words what the
    figure shows. Raises `ConfigError` for what lies outside width x height.
    """

    def __init__(
        self, width: float, height: float, title: str, alt: str, caption: str = ""
    ) -> None:
        if width <= 0 or height <= 0:
            raise ConfigError(f"a drawing of {width} x {height}: give sizes above 0")
        self.width, self.height = width, height
        self.title, self.alt, self.caption = title, alt, caption
        self.scale = (WIDTH - 2 * MARGIN) / width
        self._parts: list[str] = []

    def _place(self, x: float, y: float) -> tuple[float, float]:
        """A position in points; `ConfigError` if it lies outside."""
        slack = 1e-6 * (self.width + self.height)
        if not (-slack <= x <= self.width + slack and -slack <= y <= self.height + slack):
            raise ConfigError(
                f"({x}, {y}) lies outside the drawing of {self.width} x {self.height}"
            )
        return MARGIN + self.scale * x, _TITLE + self.scale * y

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        *,
        kind: int | None = None,
        lit: bool = False,
        dashed: bool = False,
        size: float = 9,
    ) -> Drawing:
        """A rectangle from (x, y), `w` wide and `h` high, with text in its middle.

        `kind`: colour 0..7, None is white. `lit`: a strong edge and fill. `size`: points.
        """
        (left, top), (right, bottom) = self._place(x, y), self._place(x + w, y + h)
        fill = tint(4, 0.6) if lit and kind is None else tint(kind, 0.65 if lit else 0.3)
        edge = COLOURS[1] if lit else "#555555" if kind is None else COLOURS[kind]
        style: dict[str, object] = {"fill": "none" if dashed and not lit else fill}
        style |= {"stroke": edge, "stroke_width": 2.2 if lit else 1}
        style |= {"stroke_dasharray": "4 3"} if dashed else {}
        self._parts.append(
            _tag(
                "rect",
                x=left,
                y=top,
                width=right - left,
                height=bottom - top,
                rx=2,
                **style,
            )
        )
        if text:
            fits = min(1.0, (right - left - 2) / text_width(text, size))
            middle, size = ((left + right) / 2, (top + bottom) / 2), max(5.0, size * fits)
            style = {"stroke": "none", "font_weight": "bold" if lit else "normal"}
            self._parts.append(_lines(*middle, text, size, text_anchor="middle", **style))
        return self

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 9,
        align: str = "center",
        bold: bool = False,
    ) -> Drawing:
        """Lines of text around (x, y); `align` is left, center or right of the point."""
        if align not in _ANCHORS:
            raise ConfigError(f"align={align!r}: give one of {', '.join(_ANCHORS)}")
        style = {"text_anchor": _ANCHORS[align]} | ({"font_weight": "bold"} if bold else {})
        self._parts.append(_lines(*self._place(x, y), text, size, **style))
        return self

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False
    ) -> Drawing:
        """A thin grey line between two points."""
        (left, top), (right, bottom) = self._place(x1, y1), self._place(x2, y2)
        style: dict[str, object] = {"stroke": "#555555", "stroke_width": 0.8}
        style |= {"stroke_dasharray": "3 3"} if dashed else {}
        self._parts.append(_tag("line", x1=left, y1=top, x2=right, y2=bottom, **style))
        return self

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        text: str = "",
        *,
        size: float = 8,
    ) -> Drawing:
        """An arrow from (x1, y1) to (x2, y2) with a word beside its middle."""
        (ax, ay), (bx, by) = self._place(x1, y1), self._place(x2, y2)
        length = hypot(bx - ax, by - ay) or 1.0
        ux, uy = (bx - ax) / length, (by - ay) / length
        foot_x, foot_y = bx - 6 * ux, by - 6 * uy
        corners = (
            bx,
            by,
            foot_x - 3 * uy,
            foot_y + 3 * ux,
            foot_x + 3 * uy,
            foot_y - 3 * ux,
        )
        points = " ".join(f"{corner:.2f}" for corner in corners)
        shaft = {"stroke": "#333333", "stroke_width": 1.2}
        self._parts.append(_tag("line", x1=ax, y1=ay, x2=foot_x, y2=foot_y, **shaft))
        self._parts.append(_tag("polygon", points=points, fill="#333333"))
        if text:
            lift = 0.6 * size * (text.count("\n") + 1) + 2
            lift, aside, anchor = _beside(ux, uy, lift)
            x, y = (ax + bx) / 2 + aside, (ay + by) / 2 - lift
            self._parts.append(_lines(x, y, text, size, text_anchor=anchor))
        return self

    def show(self) -> Picture:
        """The finished figure: SVG with a title, its alternative text and its caption."""
        tall = _TITLE + self.scale * self.height + MARGIN
        head = _lines(MARGIN, _TITLE / 2, self.title, 11, text_anchor="start")
        inside = "".join(
            [
                _tag("title", html.escape(self.title, quote=False)),
                _tag("rect", width=WIDTH, height=tall, fill="#FFFFFF"),
                head,
                *self._parts,
            ]
        )
        svg = _tag(
            "svg",
            inside,
            xmlns="http://www.w3.org/2000/svg",
            width=f"{WIDTH / 72:.4g}in",
            height=f"{tall / 72:.4g}in",
            viewBox=f"0 0 {WIDTH:.2f} {tall:.2f}",
            font_family=_FONT,
        )
        return Picture(svg.encode(), f"{self.title}. {self.alt}", self.caption)


def _beside(ux: float, uy: float, lift: float) -> tuple[float, float, str]:
    """How far up and aside of an arrow's middle its word stands, and its text anchor."""
    if abs(uy) < 0.3:
        return lift, 0.0, "middle"
    if abs(ux) < 0.3:
        return 0.0, 5.0, "start"
    return (lift / 2, 5.0, "start") if ux * uy > 0 else (lift / 2, -5.0, "end")
