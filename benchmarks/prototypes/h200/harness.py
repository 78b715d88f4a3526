"""What tests and benchmarks of kernels share: pages in disorder, metadata, an exact answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from octavo.attention import dense_attention  # noqa: E402
from octavo.batch import AttentionMetadata  # noqa: E402

REAL = torch.cuda.is_available()
DEVICE = torch.device("cuda" if REAL else "cpu")


def mend_interpreter() -> None:
    """Triton 3.6's interpreter keeps bfloat16 as its bits and multiplies those: widen first."""
    if REAL:
        return
    import numpy as np
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def wide(handle):
        if handle.dtype.scalar is not interpreter.tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return plain(self, wide(a), wide(b), d, input_precision, max_num_imprecise_acc)

    if plain.__name__ != create_dot.__name__ or plain.__module__ != __name__:
        interpreter.InterpreterBuilder.create_dot = create_dot


@dataclass
class Pages:
    """A `PagedCache` of one layer."""

    k: Tensor
    v: Tensor

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """[blocks, block_size, num_kv_heads, head_dim] each."""
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
        begin, parts = 0, []
        for k, v, (n, _) in zip(self.k, self.v, self.lengths, strict=True):
            q = self.q[begin : begin + n]
            parts.append(dense_attention(q.double(), k.double(), v.double()))
            begin += n
        return torch.cat(parts)


def make_case(
    lengths: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device = DEVICE,
    poison: float = float("nan"),
) -> Case:
    """Random numbers, blocks in random order; what nobody wrote is `poison`.

    `lengths` are (n, m), decodes (n = 1) first. Keys before the step's own lie in the cache.
    """
    draw = torch.Generator().manual_seed(seed)
    blocks = [-(-m // block_size) for _, m in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=draw)[: sum(blocks)]
    reserved = sum(blocks) + 3
    shape = (reserved + 1, block_size, num_kv_heads, head_dim)
    cache = [torch.full(shape, poison, dtype=dtype) for _ in range(2)]
    table = torch.full((len(lengths), max(blocks)), reserved, dtype=torch.int32)
    slots, keys, values, begin = [], [], [], 0
    for row, ((n, m), count) in enumerate(zip(lengths, blocks, strict=True)):
        mine = order[begin : begin + count]
        begin += count
        table[row, :count] = mine
        places = torch.arange(m)
        slot = mine[places // block_size] * block_size + places % block_size
        k, v = (
            torch.randn(m, num_kv_heads, head_dim, generator=draw).to(dtype) for _ in "kv"
        )
        for store, new in zip(cache, (k, v), strict=True):
            store.flatten(0, 1)[slot[: m - n]] = new[: m - n]
        slots.append(slot[m - n :])
        keys.append(k.to(device))
        values.append(v.to(device))
    total = sum(n for n, _ in lengths)
    q = torch.randn(total, num_heads, head_dim, generator=draw).to(dtype)
    metadata = make_metadata(lengths, table.to(device), torch.cat(slots).to(device))
    return Case(
        lengths, q.to(device), keys, values, Pages(*(x.to(device) for x in cache)), metadata
    )


def make_metadata(
    lengths: Sequence[tuple[int, int]], table: Tensor, slots: Tensor
) -> AttentionMetadata:
    """`AttentionMetadata` of sequences with n of m tokens, decodes first."""
    counts, totals = zip(*lengths, strict=True)
    sums = [
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
        for x in (counts, totals)
    ]
    return AttentionMetadata(
        num_decodes=sum(n == 1 for n in counts),
        seqlens_q=counts,
        seqlens_k=totals,
        cu_seqlens_q=sums[0].to(table.device),
        cu_seqlens_k=sums[1].to(table.device),
        block_table=table,
        slot_mapping=slots,
    )


def error(out: Tensor, exact: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN if anything is."""
    return float((out.double() - exact.double()).norm() / exact.double().norm())


TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 1.5e-3,
    torch.bfloat16: 1e-2,
}
