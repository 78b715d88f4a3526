"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.config import ConfigError, ModelConfig
from octavo.presets import Hardware
from octavo.request import SamplingParams
from octavo.roofline import Chunk, step_work

__all__ = [
    "Span",
    "Workload",
    "draw_workload",
    "Defaults",
    "CARD",
    "CPU",
    "decode_steps",
    "Cost",
    "prefill_seconds",
    "least_cost",
]


class Span(NamedTuple):
    """Least and largest of something drawn, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> Span:
        """From "100:1024", or "64" for always 64; `ConfigError` naming the option `name`."""
        low, _, high = text.partition(":")
        try:
            span = cls(int(low), int(high or low))
        except ValueError:
            raise ConfigError(f"{name} {text}: give MIN:MAX, such as 100:1024") from None
        if not 1 <= span.low <= span.high:
            raise ConfigError(f"{name} {text}: give MIN:MAX with 1 <= MIN <= MAX")
        return span


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each is answered with."""

    prompts: Sequence[list[int]]
    output_lens: Sequence[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def params(self, temperature: float) -> list[SamplingParams]:
        """Answers of exactly these lengths."""
        return [
            SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n)
            for n in self.output_lens
        ]

    def with_one_token(self) -> Workload:
        """The same prompts, answered with a token each: prefill and little else."""
        return Workload(self.prompts, [1] * len(self.prompts))


def draw_workload(
    count: int, input_len: Span, output_len: Span, seed: int, vocab_size: int
) -> Workload:
    """Random lengths and ids, in the order in which nano-vLLM's bench.py draws them."""
    draw, top = random.Random(seed), min(10_000, vocab_size - 1)
    prompts = [
        [draw.randint(0, top) for _ in range(draw.randint(*input_len))]
        for _ in range(count)
    ]
    return Workload(prompts, [draw.randint(*output_len) for _ in range(count)])


class Defaults(NamedTuple):
    """What is measured when nothing else is asked for."""

    model: str
    requests: int
    lens: Span
    """Of prompts and of answers."""
    batches: tuple[int, ...]
    """Decode batches to watch."""
    context: int
    """Tokens around which they are watched."""
    steps: int
    """Decode steps of a repetition."""
    tokens: int
    """Answer of the request that is alone."""


CARD = Defaults("qwen3-0.6b-shape", 256, Span(100, 1024), (256, 64, 8), 1024, 32, 256)
CPU = Defaults("smollm2-135m-shape", 4, Span(16, 32), (4, 1), 64, 8, 16)


def decode_steps(workload: Workload, seats: int) -> Iterator[list[Chunk]]:
    """The decode steps if prompts cost no step: each request's first token is its prefill's."""
    waiting = deque(zip(map(len, workload.prompts), workload.output_lens, strict=True))
    running: list[tuple[int, int]] = []  # (tokens cached, context at which it ends)
    while waiting or running:
        while waiting and len(running) < seats:
            prompt, outputs = waiting.popleft()
            running.append((prompt, prompt + outputs - 1))
        running = [(start, end) for start, end in running if start < end]
        if running:
            yield [Chunk(start, 1) for start, _ in running]
        running = [(start + 1, end) for start, end in running]


class Cost(NamedTuple):
    """A workload under the roofline."""

    prefill: float
    """Seconds; decode too."""
    decode: float
    steps: int
    """Decode steps."""
    kv_bytes: float
    """Keys and values that they read and write."""

    @property
    def seconds(self) -> float:
        """The least time of the whole workload."""
        return self.prefill + self.decode


def prefill_seconds(workload: Workload, model: ModelConfig, hardware: Hardware) -> float:
    """Least time of all prompts, their first tokens included, as if they were one step."""
    chunks = [Chunk(0, len(prompt)) for prompt in workload.prompts]
    return step_work(model, chunks).seconds(hardware)


def least_cost(
    workload: Workload, model: ModelConfig, hardware: Hardware, seats: int
) -> Cost:
    """What the workload costs at least with `seats` requests at a time."""
    works = [step_work(model, step) for step in decode_steps(workload, seats)]
    return Cost(
        prefill_seconds(workload, model, hardware),
        sum(work.seconds(hardware) for work in works),
        len(works),
        sum(work.kv_bytes for work in works),
    )
