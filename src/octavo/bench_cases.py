"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionBackend, CachedAttend
from octavo.batch import AttentionMetadata
from octavo.config import ModelConfig
from octavo.request import Request, SamplingParams
from octavo.roofline import attention_pairs

__all__ = [
    "Case",
    "Bench",
    "Pages",
    "paged_metadata",
    "attention_case",
    "store_case",
    "norm_case",
    "swiglu_case",
    "products",
    "gemv_case",
    "sampler_case",
]


class Case(NamedTuple):
    """Something to be timed: the same operation on several pieces of data."""

    name: str
    backend: str
    """Who computes it."""
    calls: Sequence[Callable[[], Any]]
    amount: float
    """Bytes or floating-point operations of a single call."""
    ceiling: str
    """Which of `Ceilings` it is held against: "read", "copy" or "flops"."""
    graph: bool
    """May it be recorded in a CUDA graph?"""


@dataclass(frozen=True)
class Bench:
    """What the kernels are measured for, and on how much data."""

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    footprint: int
    """Bytes that the calls of a case touch together, if few enough do: more than a cache."""

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    def copies(self, num_bytes: float, most: int = 160) -> int:
        """How many pieces of data of this size are needed."""
        return max(1, min(most, round(self.footprint / num_bytes)))

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self.device).to(self.dtype)


class Pages:
    """A `PagedCache` of several layers, full of random numbers."""

    def __init__(self, bench: Bench, layers: int, blocks: int, block_size: int) -> None:
        heads, dim = bench.model.num_kv_heads, bench.model.head_dim
        shape = (layers, 2, blocks + 1, block_size, heads, dim)
        data = torch.empty(shape, dtype=bench.dtype, device=bench.device).normal_()
        self.layers = [(keys, values) for keys, values in data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """k and v, each [blocks + 1, block_size, num_kv_heads, head_dim]."""
        return self.layers[index]


def paged_metadata(
    count: int, new: int, length: int, block_size: int, device: torch.device
) -> AttentionMetadata:
    """`count` sequences of `length` tokens, the last `new` of which are this step's."""
    per_row = -(-length // block_size)
    order = torch.randperm(count * per_row, generator=torch.Generator().manual_seed(0))
    table = order.to(torch.int32).view(count, per_row)
    places = torch.arange(length - new, length)
    slots = table[:, places // block_size].long() * block_size + places % block_size
    ends = np.arange(count + 1, dtype=np.int32)
    starts_q, starts_k = torch.from_numpy(ends * new), torch.from_numpy(ends * length)
    return AttentionMetadata(
        num_decodes=count if new == 1 else 0,
        seqlens_q=(new,) * count,
        seqlens_k=(length,) * count,
        cu_seqlens_q=starts_q.to(device),
        cu_seqlens_k=starts_k.to(device),
        block_table=table.to(device),
        slot_mapping=slots.flatten().to(device),
        lengths=torch.full((count,), length, dtype=torch.int32, device=device),
    )


def attention_case(
    bench: Bench,
    name: str,
    backend: AttentionBackend,
    shape: tuple[int, int, int],
    block: int,
) -> Case:
    """Decode (new = 1) or prefill of `shape`: (sequences, new tokens, length)."""
    count, new, length = shape
    model = bench.model
    num_bytes = count * length * 2 * model.kv_size * bench.width
    layers = bench.copies(num_bytes)
    pages = Pages(bench, layers, count * -(-length // block), block)
    step = backend.bind(pages, paged_metadata(count, new, length, block, bench.device))
    q = bench.random(count * new, model.num_heads, model.head_dim)
    if isinstance(step, CachedAttend):
        calls: list[Any] = [partial(step.attend, i, q) for i in range(layers)]
    else:
        k, v = (bench.random(len(q), model.num_kv_heads, model.head_dim) for _ in "kv")
        calls = [partial(step, i, q, k, v) for i in range(layers)]
    flops = count * 4.0 * model.q_size * attention_pairs(length - new, new)
    kind, graph = "decode" if new == 1 else "prefill", backend.capturable
    amount, ceiling = (num_bytes, "read") if new == 1 else (flops, "flops")
    title = f"{kind}_attention/{count}x{length}"
    return Case(title, name, calls, amount, ceiling, graph and new == 1)


def store_case(bench: Bench, name: str, write: Callable[..., Any], tokens: int) -> Case:
    """Keys and values of a step go to their slots: each is read and written once."""
    model, block = bench.model, 16
    num_bytes = 4 * tokens * model.kv_size * bench.width
    layers, blocks = bench.copies(num_bytes), -(-tokens // block)
    pages = Pages(bench, layers, blocks, block)
    slots = torch.randperm(blocks * block, device=bench.device)[:tokens]
    k, v = (bench.random(tokens, model.num_kv_heads, model.head_dim) for _ in "kv")
    calls = [partial(write, k, v, *pages.layer(i), slots) for i in range(layers)]
    return Case(f"store/{tokens}", name, calls, num_bytes, "copy", True)


_EPS = 1e-6


def norm_case(bench: Bench, name: str, norm: Callable[..., Any], tokens: int) -> Case:
    """RMSNorm with its residual: two inputs are read, two results written."""
    width = bench.model.hidden_size
    num_bytes = 4 * tokens * width * bench.width
    weight = bench.random(width)
    pairs = bench.random(bench.copies(num_bytes), 2, tokens, width)
    calls = [partial(norm, x, residual, weight, _EPS) for x, residual in pairs]
    return Case(f"norm/{tokens}", name, calls, num_bytes, "copy", True)


def swiglu_case(bench: Bench, name: str, swiglu: Callable[..., Any], tokens: int) -> Case:
    """Gate and up are read, their product is written."""
    width = bench.model.intermediate_size
    num_bytes = 3 * tokens * width * bench.width
    inputs = bench.random(bench.copies(num_bytes), tokens, 2 * width)
    calls = [partial(swiglu, x) for x in inputs]
    return Case(f"swiglu/{tokens}", name, calls, num_bytes, "copy", True)


def products(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every matrix of a layer, and of the head."""
    return {
        "qkv": (model.qkv_size, model.hidden_size),
        "o": (model.hidden_size, model.q_size),
        "gate_up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
        "head": (model.vocab_size, model.hidden_size),
    }


def gemv_case(bench: Bench, name: str, linear: Callable[..., Any], product: str) -> Case:
    """A product with a single token."""
    rows, columns = products(bench.model)[product]
    num_bytes = rows * columns * bench.width
    weights = bench.random(bench.copies(num_bytes, most=28), rows, columns)
    x = bench.random(1, columns)
    calls = [partial(linear, x, weight) for weight in weights]
    return Case(f"gemv/{product}", name, calls, num_bytes, "read", True)


def sampler_case(bench: Bench, name: str, make: Any, batch: int, top_p: float) -> Case:
    """Temperature 0.6 over the whole vocabulary, with or without a nucleus."""
    vocab, device = bench.model.vocab_size, bench.device
    params = SamplingParams(temperature=0.6, top_p=top_p)
    sampler = make(batch, vocab, device)
    sampler.assign([(row, Request("bench", [0], params, seed=row)) for row in range(batch)])
    num_bytes = batch * vocab * bench.width
    rows, positions = (torch.arange(batch, device=device) for _ in "rp")
    logits = bench.random(bench.copies(num_bytes, most=28), batch, vocab)
    calls = [partial(sampler, x, rows, positions) for x in logits]
    title = f"sampler/{batch}" + ("" if top_p == 1 else "/top-p")
    return Case(title, name, calls, num_bytes, "read", sampler.capturable)
