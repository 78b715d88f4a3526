"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from octavo.presets import Hardware

__all__ = [
    "wait",
    "wall_seconds",
    "event_seconds",
    "recorded",
    "call_seconds",
    "Ceilings",
    "buffer_bytes",
    "measure_ceilings",
]


def wait() -> None:
    """Until the card, if one is in use, has nothing left to do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def wall_seconds(run: Callable[[], Any], repetitions: int) -> list[float]:
    """Seconds of single calls by the host's clock, each begun and ended on an idle card."""
    times = []
    for _ in range(repetitions):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return times


def event_seconds(run: Callable[[], Any], repetitions: int) -> list[float]:
    """Seconds of single calls by the card's clock, launched one behind the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def recorded(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as a CUDA graph; it must have run before and read nothing on the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@torch.inference_mode()
def call_seconds(
    run: Callable[[], Any],
    device: torch.device,
    repetitions: int = 20,
    graph: bool = False,
) -> list[float]:
    """Seconds of single calls after a warm-up; on a card by events, as a graph if asked."""
    for _ in range(2):
        run()
    if device.type != "cuda":
        return wall_seconds(run, repetitions)
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        return event_seconds(recorded(run) if graph else run, repetitions)


@dataclass(frozen=True)
class Ceilings:
    """What a device gives large plain operations."""

    copy: float
    """Bytes/s, read and written ones together."""
    read: float
    """Bytes/s of a sum, which writes nothing."""
    flops: float
    """FLOP/s of a square matrix product in `dtype`, or in float32 where a CPU is faster so."""
    dtype: str

    def hardware(self) -> Hardware:
        """As a card for chapter 01's roofline, which takes the copy rate for its bandwidth."""
        return Hardware(
            "as measured", 0, self.copy, self.flops, math.inf, self.dtype, "octavo bench"
        )

    def line(self) -> str:
        """For a person."""
        return (
            f"copy {self.copy / 1e9:,.0f} GB/s, read {self.read / 1e9:,.0f} GB/s, "
            f"matrix product {self.flops / 1e12:,.3g} TFLOP/s for {self.dtype}"
        )


def buffer_bytes(device: torch.device) -> int:
    """A size that no cache holds, and that fits beside whatever is there."""
    if device.type != "cuda":
        return 2**28
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    free, _ = torch.cuda.mem_get_info(device)
    return min(max(2**30, 16 * cache), free // 4) // 8 * 8


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, size: int | None = None, side: int = 0
) -> Ceilings:
    """Copy, read and matrix rates of `device`; `size` in bytes, `side` of the matrices."""
    copy, read = _memory_rates(device, size or buffer_bytes(device))
    side = side or (8192 if device.type == "cuda" else 1024)
    tried = {dtype}
    if device.type != "cuda" and dtype.itemsize == 2:
        tried.add(torch.float32)  # many CPUs have no instructions for 16 bits
    flops = max(_product_rate(device, each, side) for each in tried)
    return Ceilings(copy, read, flops, str(dtype).removeprefix("torch."))


def _product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of a product of two square matrices."""
    x, y = (torch.randn(side, side, device=device).to(dtype) for _ in "xy")
    return 2 * side**3 / _middle(lambda: x @ y, device)


def _memory_rates(device: torch.device, size: int) -> tuple[float, float]:
    """(copy, read) in bytes/s, with buffers of `size` bytes."""
    words = torch.ones(size // 8, dtype=torch.int64, device=device)
    there = torch.empty_like(words)
    copying = _middle(lambda: there.copy_(words), device)
    return 2 * size / copying, size / _middle(lambda: words.sum(), device)


def _middle(run: Callable[[], Tensor], device: torch.device) -> float:
    return median(call_seconds(run, device, 20 if device.type == "cuda" else 5))
