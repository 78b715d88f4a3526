"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment, SegmentLines
from rich.text import Text

from octavo.jobs import Job
from octavo.outputs import RequestDelta
from octavo.progress import TokenCount

__all__ = ["Screen", "TypedScreen", "LineScreen", "JsonScreen", "PanelScreen"]


class Screen(Protocol):
    """Something that shows answers."""

    def start(self, jobs: Sequence[Job]) -> None: ...
    def show(self, delta: RequestDelta) -> None: ...
    def stop(self) -> None: ...


class TypedScreen:
    """One answer, typed out as it comes."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def start(self, jobs: Sequence[Job]) -> None:
        """Nothing to prepare."""

    def show(self, delta: RequestDelta) -> None:
        """Add the new text."""
        self.out.write(delta.text)
        self.out.flush()

    def stop(self) -> None:
        """End the line."""
        self.out.write("\n")


class LineScreen:
    """Several answers in a pipe: whole lines, each with its request's name."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.rest: dict[tuple[str, int], str] = {}

    def start(self, jobs: Sequence[Job]) -> None:
        """Nothing to prepare."""

    def show(self, delta: RequestDelta) -> None:
        """Print the lines that are complete."""
        key = delta.request_id, delta.index
        *lines, rest = (self.rest.get(key, "") + delta.text).split("\n")
        if delta.finished is not None and rest:
            lines, rest = [*lines, rest], ""
        self.rest[key] = rest
        for line in lines:
            self.out.write(f"[{delta.request_id}] {line}\n")
        self.out.flush()

    def stop(self) -> None:
        """Nothing is held back."""


class JsonScreen:
    """One JSON object a finished answer."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def start(self, jobs: Sequence[Job]) -> None:
        """Nothing to prepare."""

    def show(self, delta: RequestDelta) -> None:
        """Print an answer that is complete."""
        if (done := delta.finished) is None:
            return
        record = {
            "id": delta.request_id,
            "index": delta.index,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "output_tokens": len(done.token_ids),
            "error": done.error,
        }
        self.out.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.out.flush()

    def stop(self) -> None:
        """Nothing is held back."""


class PanelScreen:
    """Several answers on a terminal: their last lines as they grow, then a panel for each.

    What changes is always lower than the window and goes away in the end; a whole panel is
    printed once, when its answer and those before it are complete.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self.bar = Progress(*columns, TextColumn("tokens"), console=console)

    def start(self, jobs: Sequence[Job]) -> None:
        """Draw the empty panels."""
        self.titles = {job.name: job.title for job in jobs}
        self.texts = {(job.name, 0): "" for job in jobs}  # of what isn't printed yet
        self.complete: set[tuple[str, int]] = set()
        self.count = TokenCount({job.name: job.params for job in jobs})
        self.task = self.bar.add_task("", total=self.count.total)
        self._go_live()

    def show(self, delta: RequestDelta) -> None:
        """Add the new text; print the panels in front that are complete."""
        key = delta.request_id, delta.index
        self.texts[key] = self.texts.get(key, "") + delta.text
        self.count.add(delta)
        if delta.finished is not None:
            self.complete.add(key)
            if ready := list(itertools.takewhile(self.complete.__contains__, self.texts)):
                self.live.stop()
                self._print(ready)
                self._go_live()

    def stop(self) -> None:
        """Leave whole panels only. After an interrupt: what there is of each answer."""
        self.live.stop()
        self._print([key for key, text in self.texts.items() if text])

    def _go_live(self) -> None:
        console = self.console
        self.live = Live(self, console=console, refresh_per_second=8, transient=True)
        self.live.start(refresh=True)

    def _print(self, keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            self.console.print(self._panel(key, self.texts.pop(key)))

    def _panel(self, key: tuple[str, int], text: str) -> Panel:
        title = Text(f"[{key[0]}] {self.titles[key[0]]}")
        return Panel(Text(text), title=title, title_align="left")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts, height = dict(self.texts), max(options.size.height - 1, 1)
        room = height - 1  # without the bar
        keys = list(texts)
        if len(keys) > room // 3:
            keys = [key for key in keys if key not in self.complete][: room // 3]
        lines, area = [], options.size.width * height
        for key in keys:
            end = texts[key][max(0, len(texts[key]) // area - 1) * area :]
            top, *rest = console.render_lines(self._panel(key, end), options)
            lines += [top, *rest[1 - room // len(keys) :]]
        lines += self._bar_lines(console, options)
        yield SegmentLines(lines[-height:], new_lines=True)

    def _bar_lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        """The bar, moved to where the tokens are."""
        done, total = self.count.done, self.count.total
        label = f"{self.count.unfinished} unfinished"
        self.bar.update(self.task, description=label, completed=done, total=total)
        return console.render_lines(self.bar, options)
