"""Chapter 06, Chunked prefill.

Generated from chapters/06_chunked_prefill.md; edit there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.config import require_int
from octavo.roofline import Chunk, Scheduled

__all__ = ["ChunkedPrefill", "largest_chunk"]


@dataclass(frozen=True)
class ChunkedPrefill:
    """The `PrefillPolicy` that runs as much of a prompt as the step has room for.

    max_chunk: most tokens of one request in one step; None leaves the step's budget as the
    only limit. Raises `ConfigError` unless it is None or a whole number from 1.
    """

    max_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.max_chunk is not None:
            require_int("max_chunk", self.max_chunk, 1)

    def take(self, work_left: int, budget: int) -> int:
        """Tokens to run now: `work_left`, or what `budget` and `max_chunk` allow of it."""
        limit = budget if self.max_chunk is None else min(budget, self.max_chunk)
        return min(work_left, limit)


def largest_chunk(
    cost: Callable[[Sequence[Scheduled]], float],
    beside: Sequence[Scheduled],
    start: int,
    seconds: float,
    most: int,
) -> int:
    """Most tokens of a prompt, from position `start` on, for a step of at most `seconds`.

    `cost` gives the seconds of a step from its entries, and must not fall when tokens are
    added; `beside` are the other entries. From 0 (the step is too long without any) to `most`.
    """

    def step(count: int) -> float:
        return cost([*beside, Chunk(start, count)])

    return bisect_right(range(1, most + 1), seconds, key=step)
