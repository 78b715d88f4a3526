"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from octavo.outputs import CompletionOutput, RequestDelta
from octavo.request import SamplingParams

__all__ = ["TokenCount", "ProgressBar"]


class TokenCount:
    """The tokens of several requests: how many there are, and how many there may be.

    `params` are the sampling parameters by request id.
    """

    def __init__(self, params: Mapping[str, SamplingParams]) -> None:
        self.params = params
        self.done = 0
        self.unfinished = sum(p.n for p in params.values())
        self._most = sum(p.n * (p.max_tokens or 0) for p in params.values())
        self._unlimited = sum(p.n for p in params.values() if p.max_tokens is None)

    @property
    def total(self) -> int | None:
        """What there is and what may still come; None while an answer without limit is open."""
        return None if self._unlimited else self._most

    def add(self, delta: RequestDelta) -> None:
        """Count what a step added to an answer."""
        self.done += len(delta.token_ids)
        if delta.finished is not None:
            self._close(self.params[delta.request_id], delta.finished)

    def _close(self, params: SamplingParams, answer: CompletionOutput) -> None:
        refused = answer.metrics is None
        ended = params.n if refused else 1
        self.unfinished -= ended
        self._most += len(answer.token_ids) - ended * (params.max_tokens or 0)
        self._unlimited -= ended * (params.max_tokens is None)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar on stderr, or nothing at all if `shown` is false.

    It shows a percentage, or with a `unit` the numbers themselves; `total` None is unknown.
    """

    def __init__(
        self, title: str, total: float | None, shown: bool, unit: str | None = None
    ) -> None:
        self._bar: Any = None
        self._due = 0.0
        if shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TaskProgressColumn,
                TimeRemainingColumn,
            )

            where = [TaskProgressColumn()] if unit is None else [MofNCompleteColumn(), unit]
            columns = "{task.description}", BarColumn(), *where, TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def set(self, done: float, total: float | None = None) -> None:
        """Move to `done` (of `total`, if that changed): ten times a second, and at the end."""
        if self._bar is None:
            return
        now = time.monotonic()
        if now < self._due and done != total:
            return
        self._due = now + 0.1
        self._bar.update(self._task, completed=done, total=total)
