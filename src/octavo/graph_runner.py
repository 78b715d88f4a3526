"""Chapter 09, CUDA graphs and overlapped scheduling.

Generated from chapters/09_cuda_graphs.md; edit there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionBackend, PagedCache
from octavo.batch import Batch
from octavo.cuda_graphs import DecodeGraphs
from octavo.decode_inputs import RunningRows
from octavo.model_runner import (
    CausalModel,
    LaunchedStep,
    ModelRunner,
    PendingStep,
    TokenSampler,
    mask_logits,
)
from octavo.request import Plan, Request

__all__ = ["logger", "decoding_rows", "CUDAGraphRunner"]


logger = logging.getLogger("octavo")


def decoding_rows(plan: Plan) -> tuple[int, ...]:
    """The rows of a plan in which everybody decodes; () for any other plan."""
    if not plan.entries or plan.entries[-1].count > 1:
        return ()
    _, _, rows, _, counts, samples, _, joins, _ = zip(*plan.entries, strict=True)
    return () if any(joins) or not all(samples) else rows


class CUDAGraphRunner(ModelRunner):
    """A `ModelRunner` that replays graphs for steps in which everybody decodes."""

    rows: RunningRows

    def __init__(
        self,
        model: CausalModel,
        sampler: TokenSampler,
        cache: PagedCache,
        attention: AttentionBackend,
        rows: RunningRows,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__(model, sampler, cache, attention, rows)
        self.graphs = graphs
        self._seated: tuple[int, ...] = ()
        self._seats: list[int] = []
        self._too_many: set[int] = set()

    def _logits(self, batch: Batch) -> Tensor:
        self.rows.place(batch)
        return super()._logits(batch)

    def close(self) -> None:
        """Give the graphs' memory back (B52); steps run eagerly from then on."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    @torch.inference_mode()
    def submit(self, plan: Plan) -> PendingStep:
        """See `ModelRunner.submit`."""
        rows = decoding_rows(plan)
        size = self._size_for(len(rows))
        if self.graphs is None or size is None:
            self._seated = ()
            return ModelRunner.submit(self, plan)
        self.stats.num_graph_steps += 1
        self.stats.num_padded_rows += size - len(rows)
        self.rows.apply(plan)
        if rows != self._seated:
            self._seat(plan, rows, size)
        self.graphs.forward(size)
        pick = partial(self._pick_seated, self.graphs, size)
        return LaunchedStep(plan, pick, self._landing, self._seats)

    def _size_for(self, count: int) -> int | None:
        if self.graphs is None or not count:
            return None
        size = self.graphs.size_for(count)
        if size is None and count not in self._too_many:
            self._too_many.add(count)
            logger.warning(
                "%d decodes: no CUDA graph holds them, so they run eagerly", count
            )
        return size

    def _seat(self, plan: Plan, rows: tuple[int, ...], size: int) -> None:
        """Say who sits where; longest first."""
        assert self.graphs is not None
        self._seated = ()
        starts = np.array([entry.start for entry in plan.entries])
        longest = np.argsort(-starts, kind="stable")
        seats = np.full(size, self.rows.padding_row)
        seats[: len(rows)] = np.array(rows)[longest]
        self.graphs.inputs.rows[:size] = self.rows.staging.upload(seats)[0]
        self._seats = np.argsort(longest).tolist()
        self._seated = rows

    def _pick_seated(
        self,
        graphs: DecodeGraphs,
        size: int,
        masked: Sequence[tuple[int, Request]],
    ) -> Tensor:
        if masked:
            assert graphs.logits is not None
            mask_logits(graphs.logits, [(self._seats[i], request) for i, request in masked])
        return graphs.sample(size)
