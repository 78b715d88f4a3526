"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.config import OctavoError
from octavo.plotting import Plot, Provenance, line
from octavo.request import (
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    SchedulerLike,
    StepResult,
)
from octavo.traces import Arrival

__all__ = [
    "Served",
    "Step",
    "Simulator",
    "Simulation",
    "simulate",
    "latency_plot",
    "occupancy_plot",
]


@dataclass(slots=True)
class Served:
    """What became of an arrival; `token_times[i]` is the second at which token i came out."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Tokens of its prompt that a cache had when it came in."""
    refused: str | None = None
    """Why the scheduler didn't take it, if it didn't."""


class Step(NamedTuple):
    """A step as the clock saw it; times in seconds."""

    start: float
    seconds: float
    num_seqs: int
    """Requests that took part."""
    num_tokens: int
    """Tokens that ran through the model."""
    num_waiting: int


_TOKEN = (0,)  # what the simulated model says; one tuple for all
_OWN = 1 << 30  # ids from here on are in one prompt only; they still fit into 32 bits


@lru_cache(maxsize=65536)
def _answer_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)


class Simulator:
    """Runs a scheduler on a virtual clock; use `simulate`."""

    def __init__(
        self, scheduler: SchedulerLike, cost: Callable[[Sequence[ScheduledRequest]], float]
    ) -> None:
        self.scheduler, self.cost = scheduler, cost
        self.now = 0.0
        self.served: list[Served] = []
        self.steps: list[Step] = []
        self._live: dict[Request, Served] = {}

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Serve all arrivals, which must come in order of time."""
        coming = iter(arrivals)
        upcoming = next(coming, None)
        while upcoming is not None or self.scheduler.has_unfinished:
            if upcoming is not None and not self.scheduler.has_unfinished:
                self.now = max(self.now, upcoming.seconds)
            while upcoming is not None and upcoming.seconds <= self.now:
                self._arrive(upcoming)
                upcoming = next(coming, None)
            if self.scheduler.has_unfinished:
                self._step()

    def _arrive(self, arrival: Arrival) -> None:
        served, number = Served(arrival), len(self.served)
        self.served.append(served)
        prompt, answer = arrival.prompt(_OWN + number), _answer_of(arrival.output_tokens)
        request = Request(str(number), prompt, answer, priority=arrival.priority)
        try:
            self.scheduler.add(request)
        except RequestError as error:
            served.refused = str(error)
        else:
            self._live[request] = served

    def _step(self) -> None:
        """Schedule, wait for what it costs, update."""
        plan, live = self.scheduler.schedule(), self._live
        entries = plan.entries
        seconds = self.cost(entries) if entries else 0.0
        waiting = len(live) - len(entries)
        self.steps.append(Step(self.now, seconds, len(entries), plan.num_tokens, waiting))
        self.now = now = self.now + seconds
        for request in plan.preempted:
            live[request].num_preemptions += 1
        result = StepResult([_TOKEN if entry[5] else () for entry in entries])  # `samples`
        for request, _ in self.scheduler.update(plan, result):
            live[request].token_times.append(now)
            if request.finish_reason is not None:
                live.pop(request).num_cached_tokens = request.num_cached_tokens or 0


@dataclass(frozen=True)
class Simulation:
    """What a simulated run did; latencies in seconds."""

    served: Sequence[Served]
    steps: Sequence[Step]

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the last step."""
        if not self.steps:
            return 0.0
        last, began = self.steps[-1], self.served[0].arrival.seconds
        return last.start + last.seconds - began

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came out, of all answers."""
        return sum(len(one.token_times) for one in self.served)

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """Requests in a step, averaged over the time in which steps ran."""
        busy = sum(step.seconds for step in self.steps)
        places = sum(step.seconds * step.num_seqs for step in self.steps)
        return places / busy if busy else 0.0

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks."""
        return sum(one.num_preemptions for one in self.served)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of answered requests that a cache had."""
        answered = [one for one in self.served if one.token_times]
        prompts = sum(one.arrival.prompt_tokens for one in answered)
        return sum(one.num_cached_tokens for one in answered) / prompts if prompts else 0.0

    @property
    def num_refused(self) -> int:
        """Requests that the scheduler didn't take."""
        return sum(one.refused is not None for one in self.served)

    def times_to_first_token(self) -> npt.NDArray[np.float64]:
        """One value for each answer, in order of arrival."""
        answered = [one for one in self.served if one.token_times]
        return np.array([one.token_times[0] - one.arrival.seconds for one in answered])

    def inter_token_latencies(self) -> npt.NDArray[np.float64]:
        """One value for each token but the first of each answer."""
        gaps = [np.diff(one.token_times) for one in self.served]
        return np.concatenate(gaps or [np.empty(0)])

    def summary(self) -> dict[str, float]:
        """Throughput, occupancy, hit rate, counts, and p50, p95, p99 of both latencies (NaN if empty)."""
        named = {
            "output tokens/s": self.throughput,
            "occupancy": self.occupancy,
            "hit rate": self.hit_rate,
            "preemptions": self.num_preemptions,
            "refused": self.num_refused,
        }
        latencies = {
            "TTFT": self.times_to_first_token(),
            "ITL": self.inter_token_latencies(),
        }
        for name, values in latencies.items():
            for p in (50, 95, 99):
                value = float(np.percentile(values, p)) if values.size else math.nan
                named[f"{name} p{p}"] = value
        return named


def simulate(
    scheduler: SchedulerLike,
    arrivals: Iterable[Arrival],
    cost: Callable[[Sequence[ScheduledRequest]], float],
) -> Simulation:
    """Let `scheduler` serve `arrivals` (in order of time) on a clock that `cost` drives.

    `cost` gives the seconds of a step from the entries of its plan, as `StepCost` does.
    Allocator, limits and policies are the scheduler's own: what runs here is what serves.
    """
    simulator = Simulator(scheduler, cost)
    simulator.run(arrivals)
    return Simulation(simulator.served, simulator.steps)


def latency_plot(
    runs: Mapping[str, Simulation], provenance: Provenance, *, title: str, caption: str = ""
) -> Plot:
    """Milliseconds that one inter-token latency in x exceeds, for x from 2 to 1,000."""
    one_in = [2.0, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000]
    series = []
    for name, run in runs.items():
        gaps = np.percentile(run.inter_token_latencies(), [100 - 100 / n for n in one_in])
        series.append(line(name, one_in, (1000 * gaps).tolist()))
    return Plot(
        title=title,
        xlabel="one gap in so many is longer",
        ylabel="inter-token latency (ms)",
        series=tuple(series),
        provenance=provenance,
        caption=caption,
        log_x=True,
        log_y=True,
    )


def occupancy_plot(
    run: Simulation,
    provenance: Provenance,
    *,
    title: str,
    caption: str = "",
    bins: int = 60,
) -> Plot:
    """Requests that run and that wait over time (s), averaged over `bins` equal spans."""
    if not run.steps:
        raise OctavoError("no step was run, so there is nothing to plot")
    starts = np.array([step.start for step in run.steps])
    weights = np.array([step.seconds for step in run.steps])
    edges = np.linspace(starts[0], starts[-1] + weights[-1], bins + 1)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    time, _ = np.histogram(starts, edges, weights=weights)
    series = []
    for name in ("num_seqs", "num_waiting"):
        values = weights * np.array([getattr(step, name) for step in run.steps])
        total, _ = np.histogram(starts, edges, weights=values)
        mean = total / np.where(time > 0, time, 1)
        label = "running" if name == "num_seqs" else "waiting"
        series.append(line(label, middles, mean.tolist()))
    return Plot(title, "seconds", "requests", tuple(series), provenance, caption)
