"""The real loop around a toy: a model of two attention layers in float64, either runner, either
engine. What it should say is computed without cache, batch or engine."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from helpers import ENGINES

from octavo.attention import Attend, AttentionBackend, PagedCache, TorchAttention
from octavo.attention import dense_attention as dense
from octavo.batch import AttentionMetadata, DeviceRows
from octavo.block_pool import BlockPool
from octavo.config import tiny_config
from octavo.cuda_graphs import DecodeGraphs, ladder
from octavo.decode_inputs import RunningRows
from octavo.engine import Engine
from octavo.example import CountingTokenizer
from octavo.graph_runner import CUDAGraphRunner
from octavo.kv_cache import KVCache
from octavo.model_runner import ModelRunner, PendingStep
from octavo.prefix_cache import make_prefix_cache
from octavo.request import Plan, Request
from octavo.scheduler import Scheduler

VOCAB, HEADS, KV_HEADS, DIM, LAYERS = CountingTokenizer.vocab_size, 4, 2, 16, 2
CONFIG = tiny_config(
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    vocab_size=VOCAB,
)
RUNNERS = ("eager", "graphs")
LOOPS = tuple(itertools.product(RUNNERS, ENGINES))


class ToyModel:
    """A `CausalModel`: embedding, two attention layers with residuals, head."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            numbers = torch.randn(*shape, generator=draw, dtype=torch.float64)
            return numbers.to(dtype).to(device)

        self.dtype, self.device = dtype, torch.device(device)
        self.embed, self.place = normal(VOCAB, HEADS * DIM), normal(512, HEADS * DIM)
        self.mix = normal(LAYERS, HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM) / 4
        self.head = normal(HEADS * DIM, VOCAB)

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed[input_ids] + self.place[positions]
        for layer in range(LAYERS):
            heads = (x @ self.mix[layer]).view(len(x), -1, DIM)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            x = x + attend(layer, q, k, v).flatten(1)
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.matmul(hidden, self.head, out=out)


class ToySampler:
    """A `TokenSampler` that reads nothing on the host: noise from the seed and the position."""

    capturable = True

    def __init__(self, num_rows: int, device: torch.device | str = "cpu") -> None:
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.heat = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self.ids = torch.arange(VOCAB, device=device)

    def assign(self, joining: Sequence[tuple[int, Request]]) -> None:
        for row, request in joining:
            self.seeds[row] = request.seed % 2**31 + 7919 * request.sample_index
            self.heat[row] = request.sampling_params.temperature

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        keys = self.seeds[rows, None] * 31 + positions[:, None]
        noise = torch.sin((keys * 1009 + self.ids * 7907) % 65_537 * 1.7)
        return (logits + 9 * self.heat[rows, None] * noise).argmax(-1)


class HostAttention(TorchAttention):
    """`TorchAttention` that asks the device for a graph's lengths, as no real graph could."""

    capturable = True

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> Attend:
        assert metadata.lengths is not None
        lengths = tuple(metadata.lengths.tolist())
        sums = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        known = dataclasses.replace(metadata, seqlens_k=lengths, cu_seqlens_k=sums)
        return super().bind(cache, known)


def say(
    prompt: Sequence[int],
    count: int,
    temperature: float = 0,
    seed: int = 0,
    mask: Callable[[Sequence[int]], Any] | None = None,
    index: int = 0,
) -> list[int]:
    """What the toy says after `prompt`: every token from the whole text, nothing cached."""
    ids, sampler = list(prompt), ToySampler(1)
    sampler.seeds[0], sampler.heat[0] = seed % 2**31 + 7919 * index, temperature
    model, row = ToyModel(), torch.tensor([0])
    for _ in range(count):
        hidden = model(
            torch.tensor(ids), torch.arange(len(ids)), lambda _, q, k, v: dense(q, k, v)
        )
        logits = model.compute_logits(hidden[-1:])
        if mask is not None:
            logits[0, ~torch.as_tensor(mask(ids))] = float("-inf")
        ids.append(int(sampler(logits, row, torch.tensor([len(ids)]))))
    return ids[len(prompt) :]


class Watched:
    """A runner that keeps what it was given, and a list of what happened when."""

    def __init__(self, runner: ModelRunner, events: list[tuple[str, int]]) -> None:
        self.inner, self.events = runner, events
        self.plans: list[Plan] = []
        self.failures: dict[int, BaseException] = {}  # by step: raised by submit ...
        self.losses: dict[int, BaseException] = {}  # ... and by result

    def submit(self, plan: Plan) -> Any:
        self.plans.append(plan)
        if (failure := self.failures.pop(plan.step, None)) is not None:
            raise failure
        pending = self.inner.submit(plan)
        self.events.append(("launched", plan.step))
        return WatchedStep(pending, plan.step, self)

    def execute(self, plan: Plan) -> Any:
        return self.submit(plan).result()

    def entries_of(self, request_id: str) -> list[Any]:
        return [
            e for p in self.plans for e in p.entries if e.request.request_id == request_id
        ]


class WatchedStep:
    """The step of a `Watched` runner."""

    def __init__(self, step: PendingStep, number: int, runner: Watched) -> None:
        self.step, self.number, self.runner = step, number, runner
        self.needs_mask = step.needs_mask

    def sample(self) -> None:
        self.step.sample()

    def result(self) -> Any:
        result = self.step.result()
        self.runner.events.append(("came back", self.number))
        if (loss := self.runner.losses.pop(self.number, None)) is not None:
            raise loss
        return result


def toy_runner(
    kind: str,
    scheduler: Scheduler,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    attention: AttentionBackend | None = None,
    sizes: Sequence[int] | None = None,
) -> ModelRunner:
    """A runner for this scheduler; "graphs" are captured where there is a card."""
    pool, seqs = scheduler.allocator, scheduler.max_num_seqs
    model, cache = (
        ToyModel(dtype, device),
        KVCache(CONFIG, pool.num_blocks, pool.block_size, dtype, device),
    )
    limits = seqs, scheduler.max_model_len, pool.block_size, pool.num_blocks, device
    if kind == "eager":
        parts = ToySampler(seqs, device), cache, attention or TorchAttention()
        return ModelRunner(model, *parts, DeviceRows(*limits))
    parts = ToySampler(seqs + 1, device), cache, attention or HostAttention()
    rows = RunningRows(*limits)
    graphs = DecodeGraphs(model, *parts, rows, sizes or ladder(seqs))
    graphs.capture()
    return CUDAGraphRunner(model, *parts, rows, graphs)


def toy_engine(
    runner: str = "eager",
    loop: str = "plain",
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    cache: str = "none",
    eos: Sequence[int] = (),
    parts: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """`options` are the scheduler's, `parts` those of `toy_runner`; `engine.runner` is watched."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 64}
    allocator = make_prefix_cache(cache, BlockPool(num_blocks, block_size))
    scheduler = Scheduler(allocator, **{**limits, **options})
    watched = Watched(toy_runner(runner, scheduler, **(parts or {})), [])
    return ENGINES[loop](
        scheduler, watched, CountingTokenizer(), vocab_size=VOCAB, eos_token_ids=eos, seed=0
    )


def one_of_four(token_ids: Sequence[int]) -> np.ndarray:
    """A `TokenMask`: only four tokens may come next, and which depends on the last."""
    allowed = np.zeros(VOCAB, np.bool_)
    allowed[[(7 * token_ids[-1] + 25 * i + 3) % VOCAB for i in range(4)]] = True
    return allowed
