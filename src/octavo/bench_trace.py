"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from octavo.bench_ceilings import wait

__all__ = ["Event", "trace_steps", "kernels_by_step", "step_gaps", "usable_trace"]


_STEP = "octavo bench: step"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = Mapping[str, Any]


def trace_steps(
    step: Callable[[], Any], count: int, file: Path | None = None
) -> list[Event]:
    """The profiler's events of `count` calls of `step`; the trace stays in `file` if given."""
    sides = [ProfilerActivity.CPU]
    sides += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=sides) as traced:
        for _ in range(count):
            with record_function(_STEP):
                step()
        wait()
    with tempfile.TemporaryDirectory() as scratch:
        path = file or Path(scratch) / "trace.json"
        traced.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def kernels_by_step(events: Iterable[Event]) -> list[list[tuple[float, float]]]:
    """(start, end) in µs of each step's kernels, by the step whose host call launched them."""
    events = list(events)
    begins = sorted(
        e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"] == _STEP
    )
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    steps: list[list[tuple[float, float]]] = [[] for _ in begins]
    for e in events:
        at = (
            launched.get(e["args"].get("correlation")) if e.get("cat") == "kernel" else None
        )
        if at is not None and (index := bisect.bisect_right(begins, at) - 1) >= 0:
            steps[index].append((e["ts"], e["ts"] + e["dur"]))
    return steps


def step_gaps(events: Iterable[Event]) -> list[float]:
    """Milliseconds in which the card waited between two steps; 0 where they touch."""
    spans = [
        (min(a for a, _ in step), max(b for _, b in step))
        for step in kernels_by_step(events)
        if step
    ]
    return [max(0.0, start - end) / 1e3 for (_, end), (start, _) in pairwise(spans)]


def usable_trace(device: torch.device) -> bool:
    """Is there a card's timeline to look at?"""
    return device.type == "cuda" and torch.profiler.kineto_available()
