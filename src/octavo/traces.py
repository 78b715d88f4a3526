"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from octavo.config import OctavoError

__all__ = ["Arrival", "read_trace", "Lengths", "poisson_arrivals", "exponential_lengths"]


class Arrival(NamedTuple):
    """One request of a trace: when it comes, in seconds, and its lengths in tokens."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: str | Path) -> list[Arrival]:
    """Arrivals from JSON lines, sorted by time.

    A line: {"arrival": seconds, "prompt_tokens": 512, "output_tokens": 128}. Raises
    `OctavoError` that names the line which can't be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"can't read the trace {path}: {error}") from error
    numbered = [(n, text) for n, text in enumerate(lines, 1) if text.strip()]
    return sorted(_read_arrival(text, f"{path}, line {n}") for n, text in numbered)


_WANTED = (
    'give {"arrival": seconds from 0, "prompt_tokens": from 1, "output_tokens": from 1}'
)


def _read_arrival(text: str, place: str) -> Arrival:
    try:
        given = json.loads(text)
        names = ("arrival", "prompt_tokens", "output_tokens")
        seconds, prompt, output = (given[name] for name in names)
        valid = 0 <= seconds < math.inf and prompt >= 1 and output >= 1
        valid = valid and all(type(count) is int for count in (prompt, output))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OctavoError(f"{place}: {_WANTED} ({error!r})") from error
    if not valid:
        raise OctavoError(f"{place}: {_WANTED}")
    return Arrival(float(seconds), prompt, output)


Lengths = Callable[[random.Random], tuple[int, int]]


def poisson_arrivals(
    rate: float, count: int, lengths: tuple[int, int] | Lengths = (512, 128), seed: int = 0
) -> list[Arrival]:
    """`count` arrivals, `rate` a second on average.

    `lengths`: prompt and output tokens of all, or a function that draws them.
    """
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt, output = lengths(rng) if callable(lengths) else lengths
        arrivals.append(Arrival(now, prompt, output))
    return arrivals


def exponential_lengths(prompt: float, output: float, limit: int) -> Lengths:
    """Lengths with these means: many short, few long; together at most `limit` tokens."""

    def draw(rng: random.Random) -> tuple[int, int]:
        first = min(1 + int(rng.expovariate(1 / prompt)), limit - 1)
        return first, min(1 + int(rng.expovariate(1 / output)), limit - first)

    return draw
