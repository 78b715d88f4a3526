"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.attention import Attend, AttentionBackend, PagedCache
from octavo.batch import Batch, DeviceRows, build_batch
from octavo.request import Plan, Request, StepResult

__all__ = ["CausalModel", "TokenSampler", "ModelRunner"]


class CausalModel(Protocol):
    """A model over a packed batch."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] for int [T] ids at int64 [T] positions."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] to [N, vocab_size]."""
        ...


class TokenSampler(Protocol):
    """Picks tokens; each row has sampling parameters of its own."""

    def assign(self, row: int, request: Request) -> None:
        """The row belongs to this request from now on."""
        ...

    def __call__(self, logits: Tensor, rows: Sequence[int], positions: Tensor) -> Tensor:
        """int64 [N] tokens from logits [N, vocab_size] for N rows; `positions` [N] are those
        of the tokens to be sampled, from which each row's random numbers follow."""
        ...


class ModelRunner:
    """Carries out plans: a `Runner` on a device."""

    def __init__(
        self,
        model: CausalModel,
        sampler: TokenSampler,
        cache: PagedCache,
        attention: AttentionBackend,
        rows: DeviceRows,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.cache = cache
        self.attention = attention
        self.rows = rows

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Run a step; returns each entry's sampled ids once they have reached the host."""
        self.rows.apply(plan)
        for entry in plan.entries:
            if entry.joins:
                self.sampler.assign(entry.row, entry.request)
        sampled = iter(self._forward(build_batch(plan, self.rows)).tolist())
        return StepResult([[next(sampled)] if e.samples else [] for e in plan.entries])

    def _forward(self, batch: Batch) -> Tensor:
        """int64 [N]: the tokens sampled, which are written to their rows too."""
        attend = self.attention.bind(self.cache, batch.attention)
        hidden = self.model(batch.input_ids, batch.positions, attend)
        if not len(batch.sample_indices):
            return batch.sample_indices
        positions = batch.positions[batch.sample_indices]
        logits = self.model.compute_logits(hidden[batch.sample_indices])
        token_ids = self.sampler(logits, batch.host_rows, positions + 1)
        self.rows.write_sampled(batch.sample_rows, positions, token_ids)
        return token_ids
