"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from octavo.attention import AttentionBackend, TorchAttention
from octavo.batch import DeviceRows
from octavo.block_pool import BlockPool
from octavo.chunking import ChunkedPrefill
from octavo.config import ConfigError, EngineConfig, ModelConfig
from octavo.engine import Engine
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
from octavo.layers import LayerOps, TorchOps
from octavo.model_runner import CausalModel, ModelRunner
from octavo.native import NativeError, can_compile
from octavo.native_attention import NativeAttention
from octavo.native_layers import NativeOps, multiplies_bfloat16
from octavo.prefix_cache import make_prefix_cache
from octavo.sampler import Sampler
from octavo.scheduler import Scheduler, WholePrompts
from octavo.tokenizer import Tokenizer
from octavo.weights import load_generation_eos

__all__ = [
    "logger",
    "choose_device",
    "choose_dtype",
    "Limits",
    "choose_attention",
    "choose_layer_ops",
    "Parts",
    "size_pool",
    "all_eos_token_ids",
    "build_scheduler",
    "build_engine",
]


logger = logging.getLogger("octavo")


def choose_device(name: str) -> torch.device:
    """The device for `EngineConfig.device`; ConfigError if it isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use "
            "device='cpu', or install a CUDA build of torch"
        )
    return device


def choose_dtype(
    name: str, checkpoint: str, device: torch.device, *, native: bool = True
) -> torch.dtype:
    """The dtype for `EngineConfig.dtype` given the checkpoint's own; `native`: may C be used?"""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        narrow = checkpoint == "bfloat16" and (
            multiplies_bfloat16() or (native and can_compile())
        )
        return torch.bfloat16 if narrow else torch.float32
    if checkpoint == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        logger.warning(
            "this card has no bfloat16 (it needs compute capability 8.0): float16"
        )
        return torch.float16
    return getattr(torch, checkpoint)


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


def _native_or(
    plain: Any, native: Callable[[], Any], asked: str, device: torch.device
) -> Any:
    """`native()` if it is asked for, or if "auto" finds that it can be had; else `plain`."""
    if asked == "torch":
        return plain
    try:
        if device.type != "cpu":
            raise NativeError(f"the C code runs on a CPU, not on {device}")
        return native()
    except NativeError as reason:
        if asked == "native":
            raise
        if device.type == "cpu":
            logger.info("plain PyTorch on the CPU: %s", str(reason))  # no frames kept alive
        return plain


def choose_attention(
    name: str, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend for `EngineConfig.attention`; an `OctavoError` if it can't be had here."""
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_or_torch(name, dtype, device)
    build = partial(NativeAttention, dtype, model.head_dim)
    return cast(AttentionBackend, _native_or(TorchAttention(), build, name, device))


def _triton_or_torch(
    name: str, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    from octavo.kernels import TritonAttention, triton_problem  # loads Triton

    problem = triton_problem(device, dtype)
    if problem is None:
        return TritonAttention()
    if name == "triton":
        raise ConfigError(f"attention='triton': {problem}")
    logger.info("attention by PyTorch: %s", problem)
    return TorchAttention()


def choose_layer_ops(name: str, dtype: torch.dtype, device: torch.device) -> LayerOps:
    """The arithmetic for `EngineConfig.layer_ops`; NativeError if it can't be had here."""
    return cast(LayerOps, _native_or(TorchOps(), partial(NativeOps, dtype), name, device))


@dataclass(frozen=True)
class Parts:
    """A loaded model and where and how it runs."""

    model: CausalModel
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    block_size: int

    def runner(self, num_blocks: int, limits: Limits) -> ModelRunner:
        """A runner with a cache of its own, of `num_blocks` blocks."""
        seqs, length = limits.max_num_seqs, limits.max_model_len
        cache = KVCache(self.config, num_blocks, self.block_size, self.dtype, self.device)
        rows = DeviceRows(seqs, length, self.block_size, num_blocks, self.device)
        sampler = Sampler(seqs, self.config.vocab_size, self.device)
        return ModelRunner(self.model, sampler, cache, self.attention, rows)


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
    config: EngineConfig, parts: Parts, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> Engine:
    """Wire scheduler, pool, cache, runner and tokeniser together."""
    limits = Limits.settle(config, parts.config, parts.device)
    pool = size_pool(config, parts, limits)
    asked_for = config.max_model_len is not None
    length = fit_model_len(pool, limits.max_model_len, asked_for=asked_for)
    limits = limits.with_model_len(length)
    blocks = BlockPool(pool.num_blocks, pool.block_size)
    return Engine(
        build_scheduler(config, blocks, limits),
        parts.runner(pool.num_blocks, limits),
        tokenizer,
        vocab_size=parts.config.vocab_size,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
    )
