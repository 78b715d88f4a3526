"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from octavo.config import ModelConfig
from octavo.presets import Hardware
from octavo.request import ScheduledRequest
from octavo.roofline import Chunk, Work, step_work

__all__ = ["StepCost"]


class StepCost:
    """Seconds of a step by chapter 01's `step_work`; `overhead` (seconds) comes on top.

    Asks `step_work` for the factor of each count once, because work is linear in them.
    """

    def __init__(
        self,
        model: ModelConfig,
        hardware: Hardware,
        tensor_parallel_size: int = 1,
        overhead: float = 0.0,
    ) -> None:
        def work(start: int, count: int, samples: bool) -> Work:
            return step_work(model, [Chunk(start, count, samples)], tensor_parallel_size)

        one, cached, sampling = work(0, 1, False), work(1, 1, False), work(0, 1, True)
        self.hardware, self.overhead = hardware, overhead
        self._per_pair = cached.flops - one.flops
        self._per_token = one.flops - self._per_pair
        self._per_sample = sampling.flops - one.flops
        self._kv_bytes, self._link_bytes = one.kv_bytes, one.link_bytes
        self._weight_bytes = one.weight_bytes, sampling.weight_bytes

    def work(self, entries: Sequence[ScheduledRequest]) -> Work:
        """What `step_work` says about these entries of a plan."""
        if not entries:
            return Work()
        _, _, _, starts, counts, sampling, *_ = zip(*entries, strict=True)
        tokens, samples = sum(counts), sum(sampling)
        squares = sum(map(mul, counts, counts))
        pairs = sum(map(mul, counts, starts)) + (squares + tokens) // 2
        flops = self._per_token * tokens + self._per_pair * pairs
        return Work(
            flops + self._per_sample * samples,
            self._weight_bytes[samples > 0],
            self._kv_bytes * (tokens + sum(starts)),
            self._link_bytes * tokens,
        )

    def __call__(self, entries: Sequence[ScheduledRequest]) -> float:
        """Seconds that the step takes at least."""
        return self.work(entries).seconds(self.hardware) + self.overhead
