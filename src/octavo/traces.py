"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import OctavoError

__all__ = [
    "Arrival",
    "read_trace",
    "Lengths",
    "poisson_arrivals",
    "exponential_lengths",
    "with_shared_prefixes",
]


class Arrival(NamedTuple):
    """One request of a trace: when it comes, in seconds, and its lengths in tokens."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    parts: Sequence[int] = ()
    """What its first tokens are, `part_size` for each number; the others are its own."""
    part_size: int = 1
    priority: int = 0

    def prompt(self, own: int) -> list[int]:
        """Token ids: equal parts give equal ids; `own` stands for what is only in this prompt."""
        parts, size = self.parts, self.part_size
        ids = list(parts) if size == 1 else [part for part in parts for _ in range(size)]
        return ids[: self.prompt_tokens] + [own] * (self.prompt_tokens - len(ids))


def read_trace(path: str | Path, tokens_per_hash: int = 16) -> list[Arrival]:
    """Arrivals from JSON lines, sorted by time.

    A line: {"arrival": seconds, "prompt_tokens": 512, "output_tokens": 128}. In place of the
    count it may give "token_ids"; beside it "prompt_hashes", one for each `tokens_per_hash`
    tokens of the prompt's beginning, where equal hashes mean equal content; and a "priority".
    Raises `OctavoError` that names the line which can't be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"can't read the trace {path}: {error}") from error
    numbers: dict[Any, int] = {}
    arrivals = [
        _read_arrival(text, f"{path}, line {n}", tokens_per_hash, numbers)
        for n, text in enumerate(lines, 1)
        if text.strip()
    ]
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


_WANTED = (
    'give {"arrival": seconds from 0, "prompt_tokens": from 1, "output_tokens": from 1}, '
    'with "token_ids" or "prompt_hashes" where the content is known'
)


def _read_arrival(
    text: str, place: str, tokens_per_hash: int, numbers: dict[Any, int]
) -> Arrival:
    try:
        given = json.loads(text)
        hashes, ids = given.get("prompt_hashes", []), given.get("token_ids", [])
        named = [numbers.setdefault(json.dumps(one), len(numbers)) for one in hashes]
        arrival = Arrival(
            float(given["arrival"]),
            given.get("prompt_tokens", len(ids)),
            given["output_tokens"],
            tuple(ids or named),
            1 if ids else tokens_per_hash,
            given.get("priority", 0),
        )
        valid = _is_valid(arrival) and (not ids or arrival.prompt_tokens == len(ids))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OctavoError(f"{place}: {_WANTED} ({error!r})") from error
    if not valid:
        raise OctavoError(f"{place}: {_WANTED}")
    return arrival


def _is_valid(arrival: Arrival) -> bool:
    seconds, prompt, output, parts, size, priority = arrival
    whole = all(type(n) is int for n in (prompt, output, priority, *parts))
    sane = whole and prompt >= 1 and output >= 1 and min(parts, default=0) >= 0
    return sane and 0 <= seconds < math.inf and (len(parts) - 1) * size < prompt


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


def with_shared_prefixes(
    arrivals: Iterable[Arrival], count: int, tokens: int, seed: int = 0
) -> list[Arrival]:
    """Put one of `count` beginnings of `tokens` tokens in front of each prompt.

    The k-th most frequent is 1/k as frequent as the first.
    """
    rng, weights = random.Random(seed), [1 / k for k in range(1, count + 1)]
    return [
        arrival._replace(
            prompt_tokens=arrival.prompt_tokens + tokens,
            parts=tuple(rng.choices(range(count), weights)),
            part_size=tokens,
        )
        for arrival in arrivals
    ]
