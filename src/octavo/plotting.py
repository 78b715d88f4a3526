"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import base64
import html
import io
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from octavo.config import OctavoError
from octavo.provenance import Provenance
from octavo.provenance import computed as computed
from octavo.provenance import measured as measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = [
    "SIZE",
    "PALETTE",
    "quantile",
    "Series",
    "line",
    "Plot",
    "load",
    "record",
    "alt_text",
    "spread",
    "draw",
    "to_svg",
    "Picture",
    "show",
]


SIZE = (7.2, 4.3)  # inches
# Okabe and Ito's colours, without the yellow, which is too pale for a line
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def quantile(values: tuple[float, ...], share: float) -> float:
    """Quantile by linear interpolation between sorted values; `share` from 0 to 1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Series:
    """One line: `y[i]` holds the repetitions measured at `x[i]`; a ceiling is dashed."""

    label: str
    x: tuple[float, ...]
    y: tuple[tuple[float, ...], ...]
    ceiling: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not self.x or not all(self.y):
            raise ValueError(f"series {self.label!r}: give one or more values for each x")

    def medians(self) -> list[float]:
        """The middle value at each x."""
        return [quantile(values, 0.5) for values in self.y]

    def band(self) -> tuple[list[float], list[float]]:
        """The 10 % and the 90 % quantile at each x."""
        return [quantile(v, 0.1) for v in self.y], [quantile(v, 0.9) for v in self.y]


def line(label: str, x: list[float], y: list[float], ceiling: bool = False) -> Series:
    """A series with one value at each x, such as a computed curve or a ceiling."""
    return Series(label, tuple(x), tuple((value,) for value in y), ceiling)


@dataclass(frozen=True)
class Plot:
    """Everything that a figure shows; `redrawn` marks one that was read from a file."""

    title: str
    xlabel: str
    ylabel: str
    series: tuple[Series, ...]
    provenance: Provenance
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    redrawn: bool = field(default=False, compare=False)

    def footer(self) -> str:
        """The provenance line, which also says whether the numbers are a recording."""
        return self.provenance.line() + (
            " · redrawn from the recording" if self.redrawn else ""
        )

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON; makes the folder if needed."""
        data = asdict(self)
        del data["redrawn"]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: str | Path) -> Plot:
    """Read a plot that `Plot.save` wrote; raises `OctavoError` if there is none to read."""
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OctavoError(
            f"no recorded figure at {path} ({error}): measure it first"
        ) from error
    data["provenance"] = Provenance(**data["provenance"])
    data["series"] = tuple(_series(**given) for given in data["series"])
    return Plot(**data, redrawn=True)


def _series(label: str, x: list[float], y: list[list[float]], ceiling: bool) -> Series:
    """A series from parsed JSON, in which tuples have become lists."""
    return Series(label, tuple(x), tuple(map(tuple, y)), ceiling)


def record(plot: Plot, path: str | Path) -> Plot:
    """Save `plot` unless `path` holds the same figure; returns what the file holds."""
    try:
        recorded = replace(load(path), redrawn=False)
    except OctavoError:
        recorded = None
    if recorded and replace(recorded, provenance=plot.provenance) == plot:
        return recorded
    plot.save(path)
    return plot


def _plain(value: float) -> str:
    """A number for reading aloud: no exponent, about four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def alt_text(plot: Plot) -> str:
    """The figure in words: title, axes, and start and end of each line."""
    lines = []
    for series in plot.series:
        medians = series.medians()
        kind = "dashed ceiling" if series.ceiling else "line"
        points = ((series.x[0], medians[0]), (series.x[-1], medians[-1]))
        ends = " to ".join(f"{_plain(y)} at {_plain(x)}" for x, y in points)
        lines.append(f"{kind} {series.label}: {ends}")
    return f"{plot.title}. {plot.ylabel} against {plot.xlabel}. " + "; ".join(lines) + "."


def _new_figure() -> Figure:
    """An empty figure of the book's size; `OctavoError` if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OctavoError("figures need matplotlib: pip install 'octavo[plot]'") from error
    return Figure(figsize=SIZE, facecolor="white")


def spread(places: list[float], gap: float) -> list[float]:
    """Move places apart until all are `gap` away from each other, as little as possible.

    Places that collide share their shift (least squares, pool adjacent violators).
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    pools: list[list[float]] = []
    for rank, index in enumerate(order):
        pools.append([places[index] - rank * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    starts = [fmean(pool) for pool in pools for _ in pool]
    moved = [0.0] * len(places)
    for rank, index in enumerate(order):
        moved[index] = starts[rank] + rank * gap
    return moved


def _draw_series(axes: Axes, series: Series, color: str) -> None:
    """The median as a line with its band, or a thin dashed line for a ceiling."""
    style = {"linestyle": "--", "linewidth": 1.2} if series.ceiling else {"linewidth": 2.0}
    axes.plot(series.x, series.medians(), color=color, **style)
    if any(len(values) > 1 for values in series.y):
        axes.fill_between(series.x, *series.band(), color=color, alpha=0.2, linewidth=0)


def _label_lines(axes: Axes, plot: Plot, colors: list[str]) -> None:
    """Write each series' name beside its last point, in its colour."""
    axes.autoscale_view()
    to_axes = axes.transAxes.inverted()
    ends = []
    for series in plot.series:
        point = axes.transData.transform((series.x[-1], series.medians()[-1]))
        ends.append(to_axes.transform(point))
    heights = spread([float(end[1]) for end in ends], gap=0.055)
    for series, color, end, height in zip(plot.series, colors, ends, heights, strict=True):
        label = axes.text(end[0] + 0.015, height, series.label, color=color, va="center")
        label.set(fontsize=9, transform=axes.transAxes)


def _steps(values: list[float]) -> tuple[float, ...]:
    """What to multiply powers of ten by for the numbers on a logarithmic axis."""
    span = max(values) / min(values)
    if span < 6:
        return (1, 1.5, 2, 3, 5, 7)
    return (1, 2, 5) if span < 150 else (1,)


def _set_axes(axes: Axes, plot: Plot) -> None:
    """Title, labels, scales and a light grid; numbers are written out, not as powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(plot.title, loc="left")
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel)
    axes.set(xscale="log" if plot.log_x else "linear")
    axes.set(yscale="log" if plot.log_y else "linear")
    if plot.log_x:
        steps = _steps([x for series in plot.series for x in series.x])
        axes.xaxis.set_major_locator(LogLocator(subs=steps))
    if plot.log_y:
        steps = _steps([y for series in plot.series for y in series.medians()])
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw(plot: Plot) -> Figure:
    """Draw a plot as a matplotlib figure; ceilings are dashed and black."""
    figure = _new_figure()
    axes = figure.add_axes((0.125, 0.17, 0.665, 0.73))
    free = iter(PALETTE * (len(plot.series) // len(PALETTE) + 1))
    colors = ["#000000" if series.ceiling else next(free) for series in plot.series]
    _set_axes(axes, plot)
    for series, color in zip(plot.series, colors, strict=True):
        _draw_series(axes, series, color)
    _label_lines(axes, plot, colors)
    figure.text(0.01, 0.015, plot.footer(), fontsize=7, color="#555555")
    return figure


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG, the same bytes for the same figure (no date, fixed ids)."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "octavo"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Picture:
    """A drawn figure for a notebook or page: SVG with alternative text and caption."""

    svg: bytes
    alt: str
    caption: str = ""

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg).decode()
        image = (
            f'<img alt="{html.escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'
        )
        caption = (
            f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        )
        return f"<figure>{image}{caption}</figure>"

    def save(self, path: str | Path) -> None:
        """Write the SVG; makes the folder if needed."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(self.svg)


def show(plot: Plot) -> Picture:
    """Draw `plot` with its alternative text and caption, ready for a notebook's output."""
    return Picture(to_svg(draw(plot)), alt_text(plot), plot.caption)
