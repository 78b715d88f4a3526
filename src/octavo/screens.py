"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from octavo.jobs import Job
from octavo.outputs import RequestDelta

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
    """Several answers on a terminal: a panel each, and a bar for all of them."""

    def __init__(self, console: Console) -> None:
        self.live = Live(console=console, refresh_per_second=8, vertical_overflow="visible")
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self.bar = Progress(*columns, console=console)

    def start(self, jobs: Sequence[Job]) -> None:
        """Draw the empty panels."""
        self.titles = {job.name: job.title for job in jobs}
        self.texts = {(job.name, 0): Text() for job in jobs}
        self.task = self.bar.add_task("answers", total=sum(job.params.n for job in jobs))
        self.live.start()

    def show(self, delta: RequestDelta) -> None:
        """Add the new text to its panel."""
        text = self.texts.setdefault((delta.request_id, delta.index), Text())
        text.append(delta.text)
        if delta.finished is not None:
            self.bar.advance(self.task)
        self.live.update(self._render())

    def _render(self) -> RenderableType:
        panels = [
            Panel(text, title=Text(f"[{name}] {self.titles[name]}"), title_align="left")
            for (name, _), text in self.texts.items()
        ]
        return Group(*panels, self.bar)

    def stop(self) -> None:
        """Leave the panels as they are, without the bar."""
        self.bar.update(self.task, visible=False)
        self.live.stop()
