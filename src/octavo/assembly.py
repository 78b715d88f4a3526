"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.attention import AttentionBackend
from octavo.backends import make_sampler
from octavo.batch import DeviceRows
from octavo.block_pool import BlockPool
from octavo.chunking import ChunkedPrefill
from octavo.config import ConfigError, EngineConfig, ModelConfig
from octavo.cuda_graphs import DecodeGraphs, ladder
from octavo.decode_inputs import RunningRows
from octavo.engine import Engine
from octavo.graph_runner import CUDAGraphRunner
from octavo.kv_cache import (
    KVCache,
    PoolSize,
    block_bytes,
    default_cpu_budget,
    fit_model_len,
    largest_plan,
    measure_peak,
    pool_for_budget,
    read_device_memory,
)
from octavo.model_runner import CausalModel, ModelRunner
from octavo.outputs import TextCodec
from octavo.overlap import OverlappedEngine
from octavo.plain_parts import WholePrompts
from octavo.prefix_cache import make_prefix_cache
from octavo.sampler import Sampler
from octavo.scheduler import Scheduler
from octavo.tokenizer import Tokenizer
from octavo.weights import load_generation_eos

__all__ = [
    "logger",
    "Limits",
    "Parts",
    "size_pool",
    "all_eos_token_ids",
    "build_scheduler",
    "build_engine",
]


logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class Limits:
    """The numbers that an `EngineConfig` leaves open, settled."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @classmethod
    def settle(
        cls, config: EngineConfig, model: ModelConfig, device: torch.device
    ) -> Limits:
        """Fill in defaults; ConfigError for a length beyond the model's positions."""
        length = config.max_model_len or model.max_position_embeddings
        if length > model.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={length}: the model knows positions up to "
                f"{model.max_position_embeddings}; give that or less"
            )
        budget = config.max_num_batched_tokens
        if not config.chunked_prefill and budget is not None and budget < length:
            warnings.warn(
                f"without chunked_prefill a whole prompt must fit into a step of "
                f"max_num_batched_tokens={budget}, so max_model_len is lowered from {length} "
                "to that",
                stacklevel=2,
            )
            length = budget
        most, tokens = (256, 8192) if device.type == "cuda" else (32, 2048)
        seqs = config.max_num_seqs or min(most, budget or most)
        at_least = seqs if config.chunked_prefill else max(length, seqs)
        return cls(seqs, budget or max(at_least, tokens), length)

    def with_model_len(self, length: int) -> Limits:
        """The same with a lower `max_model_len`."""
        return dataclasses.replace(self, max_model_len=length)


@dataclass(frozen=True)
class Parts:
    """A loaded model and where and how it runs."""

    model: CausalModel
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    block_size: int
    sampler: str = "torch"
    """The kind that `make_sampler` takes."""
    graphs: bool = False
    """Replay decode steps from CUDA graphs?"""
    overlap: bool = False
    """Plan a step while one runs?"""

    def runner(self, num_blocks: int, limits: Limits) -> ModelRunner:
        """An eager runner with a cache of its own, of `num_blocks` blocks."""
        rows = DeviceRows(*self._shape(num_blocks, limits))
        sampler, cache = self._sampler(limits.max_num_seqs), self._cache(num_blocks)
        return ModelRunner(self.model, sampler, cache, self.attention, rows)

    def graph_runner(self, num_blocks: int, limits: Limits) -> ModelRunner:
        """The same with every size of decode batch recorded; its padding has a row of its own."""
        graphs = self._graphs(num_blocks, limits, ladder(limits.max_num_seqs))
        own = (graphs.sampler, graphs.cache, graphs.attention, graphs.rows)
        return CUDAGraphRunner(self.model, *own, graphs)

    def graph_bytes(self, limits: Limits) -> int:
        """Device memory that all graphs will take, judged by the largest two."""
        sizes = ladder(limits.max_num_seqs)
        return self._graphs(0, limits, sizes[-2:]).expected_bytes(len(sizes))

    def _graphs(
        self, num_blocks: int, limits: Limits, sizes: Sequence[int]
    ) -> DecodeGraphs:
        rows = RunningRows(*self._shape(num_blocks, limits))
        sampler, cache = self._sampler(limits.max_num_seqs + 1), self._cache(num_blocks)
        graphs = DecodeGraphs(self.model, sampler, cache, self.attention, rows, sizes)
        graphs.capture()
        return graphs

    def _shape(self, num_blocks: int, limits: Limits) -> tuple[int, int, int, int, Any]:
        longest = limits.max_model_len
        return limits.max_num_seqs, longest, self.block_size, num_blocks, self.device

    def _sampler(self, num_rows: int) -> Sampler:
        return make_sampler(self.sampler, num_rows, self.config.vocab_size, self.device)

    def _cache(self, num_blocks: int) -> KVCache:
        return KVCache(self.config, num_blocks, self.block_size, self.dtype, self.device)


def size_pool(config: EngineConfig, parts: Parts, limits: Limits) -> PoolSize:
    """How many KV blocks, by the first of: `num_kv_blocks`, `kv_cache_memory`, what is left."""
    dtype = str(parts.dtype).removeprefix("torch.")
    bytes_per_block = block_bytes(parts.config, parts.block_size, dtype)
    if config.num_kv_blocks is not None:
        return PoolSize(config.num_kv_blocks, parts.block_size, bytes_per_block)
    budget = config.kv_cache_memory
    if budget is None:
        on_gpu = parts.device.type == "cuda"
        budget = _gpu_budget(config, parts, limits) if on_gpu else default_cpu_budget()
        per_row = -(-limits.max_model_len // parts.block_size)
        budget = min(budget, (limits.max_num_seqs * per_row + 1) * bytes_per_block)
    return pool_for_budget(budget, parts.block_size, bytes_per_block)


def _gpu_budget(config: EngineConfig, parts: Parts, limits: Limits) -> int:
    plan = largest_plan(*dataclasses.astuple(limits))
    peak = measure_peak(parts.runner(0, limits), plan, parts.device)
    peak += parts.graph_bytes(limits) if parts.graphs else 0
    return read_device_memory(parts.device, peak).budget(config.gpu_memory_utilization)


def all_eos_token_ids(
    directory: Path, config: ModelConfig, tokenizer: Tokenizer
) -> list[int]:
    """The union of what generation config, config and tokeniser say, without repeats."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return list(
        dict.fromkeys((*load_generation_eos(directory), *config.eos_token_ids, *own))
    )


def build_scheduler(config: EngineConfig, pool: BlockPool, limits: Limits) -> Scheduler:
    """The scheduler with the policies and the prefix cache that the config names."""
    if config.prefix_cache != "none":  # B22: shorter common beginnings are never found
        size = pool.block_size
        logger.info("prefix cache: common beginnings count in blocks of %d tokens", size)
    whole = WholePrompts()
    return Scheduler(
        make_prefix_cache(config.prefix_cache, pool),
        **dataclasses.asdict(limits),
        policy=ChunkedPrefill(config.max_chunk_tokens) if config.chunked_prefill else whole,
        order=config.scheduling_policy,
        batching=config.batching,
        defer_shared_prefix=config.defer_shared_prefix,
    )


def build_engine(
    config: EngineConfig, parts: Parts, codec: TextCodec, eos_token_ids: Sequence[int]
) -> Engine:
    """Wire scheduler, pool, cache, runner and tokeniser together."""
    limits = Limits.settle(config, parts.config, parts.device)
    pool = size_pool(config, parts, limits)
    asked_for = config.max_model_len is not None
    length = fit_model_len(pool, limits.max_model_len, asked_for=asked_for)
    limits = limits.with_model_len(length)
    blocks = BlockPool(pool.num_blocks, pool.block_size)
    make_runner = parts.graph_runner if parts.graphs else parts.runner
    made = OverlappedEngine if parts.overlap else Engine
    return made(
        build_scheduler(config, blocks, limits),
        make_runner(pool.num_blocks, limits),
        codec,
        vocab_size=parts.config.vocab_size,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
    )
