"""PyTorch in the place of chapter 11's kernels, so that the runner's logic is tested in seconds.

The kernels have tests of their own; in Triton's interpreter a whole engine takes minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from fused_sampler import FusedSampler
from torch import Tensor

from octavo.attention import Attend, PagedCache, TorchAttention
from octavo.sampler import Sampler


class PlainModel:
    """`GraphModel` around a plain model."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.plain(input_ids, positions, attend)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self.plain.compute_logits(hidden)
        return logits if out is None else out.copy_(logits)


class ReadingAttention(TorchAttention):
    """`TorchAttention` that reads a graph's lengths on the host, as no graph could."""

    def bind(self, cache: PagedCache, metadata: Any) -> Attend:
        if (given := getattr(metadata, "lengths", None)) is not None:
            lengths = tuple(given.tolist())
            sums = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            metadata = dataclasses.replace(metadata, seqlens_k=lengths, cu_seqlens_k=sums)
        return super().bind(cache, metadata)


class PlainFreeSampler(FusedSampler):
    """`FusedSampler` without its kernels."""

    def free_sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        next_ids: Tensor | None = None,
    ) -> Tensor:
        self.temperature.copy_(torch.where(self.heat > 0, self.heat, 1.0))
        tokens = Sampler.__call__(self, logits, rows.tolist(), positions)
        if next_ids is not None:
            next_ids[rows, positions] = tokens.to(torch.int32)
        return tokens
