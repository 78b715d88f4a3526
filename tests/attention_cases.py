"""Steps with random keys on scattered pages, and what attention must give for them in float64.

Pages lie in disorder, and what nobody wrote is NaN. Without a card Triton's kernels run in its
interpreter, which has to be asked before anything imports triton.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

REAL = torch.cuda.is_available()
if not REAL:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from octavo.attention import AttentionBackend, dense_attention  # noqa: E402
from octavo.batch import AttentionMetadata  # noqa: E402

DEVICE = torch.device("cuda" if REAL else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {torch.float64: 1e-12, FP32: 2e-6, FP16: 1.5e-3, BF16: 1e-2}
DECODES = [(1, m) for m in (1, 2, 16, 17, 40)]
MIXED = [*DECODES[::2], (17, 17), (20, 37), (3, 30)]
REAL_DECODES = [(1, m) for m in (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4097)]
REAL_PREFILLS = [(2, 2), (16, 16), (17, 17), (3, 300), (257, 257), (500, 1100), (129, 257)]
REAL_MIXED = [*REAL_DECODES, *REAL_PREFILLS]


@dataclass
class Pages:
    """A `PagedCache` of one layer."""

    k: Tensor
    v: Tensor

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v


@dataclass
class Case:
    """A step: sequences of n new tokens out of m, their keys and values, and where they go."""

    lengths: Sequence[tuple[int, int]]
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    cache: Pages
    metadata: AttentionMetadata

    def packed(self, parts: list[Tensor]) -> Tensor:
        """The step's own tokens, [T, heads, head_dim]."""
        return torch.cat(
            [x[m - n :] for x, (n, m) in zip(parts, self.lengths, strict=True)]
        )

    def expected(self) -> Tensor:
        """float64 [T, num_heads, head_dim], one sequence after the other."""
        queries = self.q.double().split([n for n, _ in self.lengths])
        parts = zip(queries, self.k, self.v, strict=True)
        return torch.cat([dense_attention(q, k.double(), v.double()) for q, k, v in parts])


def make_case(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> Case:
    """Random numbers; `lengths` are (n, m), decodes first. Earlier keys lie in the cache."""
    draw, (num_heads, num_kv_heads) = torch.Generator().manual_seed(0), heads
    counts = [-(-m // block_size) for _, m in lengths]
    reserved = sum(counts) + 3
    tables = torch.randperm(reserved, generator=draw)[: sum(counts)].split(counts)
    shape = (reserved + 1, block_size, num_kv_heads, head_dim)
    cache = [torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"]
    table = torch.full((len(lengths), max(counts)), reserved, dtype=torch.int32)
    own, kv = [], ([], [])
    for row, ((n, m), blocks) in enumerate(zip(lengths, tables, strict=True)):
        table[row, : len(blocks)] = blocks
        places = torch.arange(m)
        slots = blocks[places // block_size] * block_size + places % block_size
        for store, parts in zip(cache, kv, strict=True):
            new = torch.randn(m, num_kv_heads, head_dim, generator=draw).to(dtype)
            store.flatten(0, 1)[slots[: m - n]] = new[: m - n]
            parts.append(new.to(DEVICE))
        own.append(slots[m - n :])
    total = sum(n for n, _ in lengths)
    q = torch.randn(total, num_heads, head_dim, generator=draw).to(dtype)
    pages = Pages(*(x.to(DEVICE) for x in cache))
    metadata = make_metadata(lengths, table, torch.cat(own))
    return Case(lengths, q.to(DEVICE), *kv, pages, metadata)


def make_metadata(
    lengths: Sequence[tuple[int, int]], table: Tensor, slots: Tensor
) -> AttentionMetadata:
    counts, totals = zip(*lengths, strict=True)
    sums = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (counts, totals))
    tensors = (x.to(DEVICE) for x in (*sums, table, slots))
    return AttentionMetadata(sum(n == 1 for n in counts), counts, totals, *tensors)


def run(backend: AttentionBackend, case: Case) -> Tensor:
    attend = backend.bind(case.cache, case.metadata)
    return attend(0, case.q, case.packed(case.k), case.packed(case.v))


def assert_exact(backend: AttentionBackend, case: Case) -> None:
    """Relative error in the Euclidean norm; a NaN anywhere fails too."""
    exact = case.expected()
    error = (run(backend, case).double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[case.q.dtype]
