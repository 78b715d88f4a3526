"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, cast

from octavo.bench_ceilings import wait
from octavo.bench_workload import Workload
from octavo.config import OctavoError
from octavo.engine import Engine
from octavo.request import SamplingParams
from octavo.scheduler import Scheduler

__all__ = [
    "Served",
    "serve",
    "WARM_STEPS",
    "Room",
    "plan_room",
    "SteadyBatch",
    "Watched",
    "watch",
    "alone_ms",
]


class Served(NamedTuple):
    """What one run of a workload took."""

    seconds: float
    """From the first request handed in to the last token on the host."""
    first_token: float
    """Seconds to the first token of any request."""
    num_cached_tokens: int
    num_preemptions: int


def serve(engine: Engine, workload: Workload, temperature: float, salt: str) -> Served:
    """Run a workload, all requests at once; `salt` keeps it from finding earlier prefixes.

    Raises `OctavoError` when other than the wanted number of tokens came out.
    """
    params, before = workload.params(temperature), engine.stats
    cached, preempted = before.num_cached_tokens, before.num_preemptions
    wait()
    begin, first, count = time.perf_counter(), 0.0, 0
    for delta in engine.stream(workload.prompts, params, cache_salt=salt):
        first = first or time.perf_counter() - begin
        count += len(delta.token_ids)
        if delta.finished is not None and delta.finished.error is not None:
            raise OctavoError(f"a request of the benchmark failed: {delta.finished.error}")
    seconds = time.perf_counter() - begin
    if count != workload.num_output_tokens:
        raise OctavoError(f"{count} tokens came out, not {workload.num_output_tokens}")
    after = engine.stats
    cached = after.num_cached_tokens - cached
    return Served(seconds, first, cached, after.num_preemptions - preempted)


WARM_STEPS = 4


class Room(NamedTuple):
    """Lengths with which a batch is around `context` while it is watched."""

    prompt: int
    outputs: int


def plan_room(batch: int, context: int, steps: int, budget: int, spare: int = 0) -> Room:
    """For `steps` steps to watch, `spare` after them, and prompts at `budget` tokens a step."""
    filling = -(-batch * context // budget)  # steps in which the first ones decode already
    prompt = max(1, context - (filling + steps) // 2 - WARM_STEPS)
    return Room(prompt, filling + WARM_STEPS + steps + spare + 8)


class SteadyBatch(AbstractContextManager["SteadyBatch"]):
    """A batch of requests that all decode; `watch` measures `steps` of them around `context`.

    `spare` more can follow. Raises `OctavoError` when the engine has no room for it.
    """

    def __init__(
        self,
        engine: Engine,
        batch: int,
        context: int,
        steps: int,
        temperature: float = 0.6,
        spare: int = 0,
    ) -> None:
        self.engine, self.batch = engine, batch
        self.scheduler = cast(Scheduler, engine.scheduler)
        budget = self.scheduler.max_num_batched_tokens
        self.room = plan_room(batch, context, steps, budget, spare)
        self._check_room()
        self.params = SamplingParams(
            temperature=temperature, ignore_eos=True, max_tokens=self.room.outputs
        )
        self.names: list[str] = []
        self.num_tokens = 0
        """Output tokens of all requests so far."""

    def _check_room(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.allocator
        longest = sum(self.room)
        blocks = self.batch * -(-longest // pool.block_size)
        for need, there, what in (
            (self.batch, scheduler.max_num_seqs, "max_num_seqs"),
            (longest, scheduler.max_model_len, "max_model_len"),
            (blocks, pool.num_blocks, "num_kv_blocks"),
        ):
            if need > there:
                raise OctavoError(
                    f"{self.batch} requests of {longest} tokens need {what}={need}; this "
                    f"engine has {there}"
                )

    def __enter__(self) -> SteadyBatch:
        top, now = self.engine.vocab_size, self.engine.stats.num_steps
        for i in range(self.batch):
            prompt = [(7 + i) % top] * self.room.prompt
            salt = f"steady {now} {i}"  # no two of them have a prefix in common
            self.names.append(self.engine.add_request(prompt, self.params, cache_salt=salt))
        begun: set[str] = set()
        while len(begun) < self.batch:
            begun |= self.step()
        for _ in range(WARM_STEPS):
            self.step()
        return self

    def step(self) -> set[str]:
        """One step; the ids of the requests that got a token."""
        deltas = [delta for delta in self.engine.step() if delta.token_ids]
        self.num_tokens += sum(len(delta.token_ids) for delta in deltas)
        return {delta.request_id for delta in deltas}

    def __exit__(self, *exc_info: object) -> None:
        for name in self.names:
            self.engine.abort(name)
        while self.engine.has_unfinished:
            self.engine.step()
        wait()


@dataclass(frozen=True)
class Watched:
    """Steps of a steady batch, one repetition after the other."""

    intervals: list[list[float]]
    """Seconds from one step's tokens to the next's, by repetition."""
    mean_context: float
    """Tokens that were cached for each request, on average over the steps."""

    @property
    def ms_per_step(self) -> list[float]:
        """The mean of each repetition."""
        return [fmean(times) * 1e3 for times in self.intervals]

    @property
    def all_ms(self) -> list[float]:
        """Every interval."""
        return [seconds * 1e3 for times in self.intervals for seconds in times]


def watch(steady: SteadyBatch, repetitions: int, steps: int) -> Watched:
    """Watch `repetitions` times `steps` steps; OctavoError if a request dropped out."""
    before, intervals = steady.num_tokens, []
    for _ in range(repetitions):
        stamps = [time.perf_counter()]
        for _ in range(steps):
            steady.step()
            stamps.append(time.perf_counter())
        intervals.append([b - a for a, b in pairwise(stamps)])
    total = repetitions * steps
    if (came := steady.num_tokens - before) != total * steady.batch:
        raise OctavoError(f"{came} tokens in {total} steps of {steady.batch} requests")
    mean = steady.room.prompt + before / steady.batch - 1 + (total - 1) / 2
    return Watched(intervals, mean)


def alone_ms(served: Sequence[Served], tokens: int) -> list[float]:
    """Milliseconds a token of runs with one request, its prompt's time included."""
    return [run.seconds / tokens * 1e3 for run in served]
