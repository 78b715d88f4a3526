"""Chapter 08, How many blocks.

Generated from chapters/08_kv_sizing.md; edit there.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.config import DTYPE_BYTES, ConfigError, ModelConfig
from octavo.model_runner import ModelRunner
from octavo.request import Plan, Request, SamplingParams, ScheduledRequest

__all__ = [
    "block_bytes",
    "KVCache",
    "PoolSize",
    "pool_for_budget",
    "fit_model_len",
    "default_cpu_budget",
    "container_limit",
    "largest_plan",
    "measure_peak",
    "DeviceMemory",
    "read_device_memory",
]


def block_bytes(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one KV block over all layers."""
    return model.kv_bytes_per_token(DTYPE_BYTES[dtype]) * block_size


class KVCache:
    """Keys and values of all layers: a `PagedCache` of `num_blocks` blocks and a reserved one."""

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        heads, dim = model.num_kv_heads, model.head_dim
        shape = (model.num_layers, 2, num_blocks + 1, block_size, heads, dim)
        self.num_blocks = num_blocks
        self._data = _zeros(shape, dtype, torch.device(device))
        self._layers = [(keys, values) for keys, values in self._data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """k and v of a layer, each [num_blocks + 1, block_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        """Size of the allocation."""
        return self._data.numel() * self._data.element_size()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


@dataclass(frozen=True)
class PoolSize:
    """How many blocks, and what follows from it."""

    num_blocks: int
    block_size: int
    bytes_per_block: int

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_blocks * self.block_size


def pool_for_budget(budget: int, block_size: int, bytes_per_block: int) -> PoolSize:
    """As many blocks as `budget` bytes hold, one of them set aside for padding.

    Raises ConfigError with the arithmetic if that leaves none.
    """
    num_blocks = budget // bytes_per_block - 1
    if num_blocks < 1:
        raise ConfigError(
            f"a KV budget of {_mib(budget)} holds no block: one of {block_size} tokens takes "
            f"{_mib(bytes_per_block)} and a second is reserved for padding; raise "
            "kv_cache_memory or lower block_size"
        )
    return PoolSize(num_blocks, block_size, bytes_per_block)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def fit_model_len(pool: PoolSize, wanted: int, *, asked_for: bool) -> int:
    """The `max_model_len` that the pool can serve: `wanted`, or less with a warning.

    Raises ConfigError if `asked_for` and it doesn't fit. The last token of an answer needs
    no place in the cache, hence the one token more than the pool holds.
    """
    largest = pool.num_tokens + 1
    if wanted <= largest:
        return wanted
    needed = -(-(wanted - 1) // pool.block_size)
    sums = (
        f"one request of max_model_len={wanted} tokens needs {needed} KV blocks "
        f"({_mib(needed * pool.bytes_per_block)}) and the pool has {pool.num_blocks} "
        f"({_mib(pool.num_blocks * pool.bytes_per_block)}); the longest that fits is {largest}"
    )
    if asked_for:
        raise ConfigError(f"{sums}. Lower max_model_len or give the KV cache more memory")
    warnings.warn(f"{sums}: max_model_len is lowered to that", stacklevel=2)
    return largest


def default_cpu_budget() -> int:
    """Bytes for the KV cache on a CPU: a quarter of the memory (1 GiB if that is unknown).

    The memory is the machine's, or a container's limit (cgroup v2) where that is lower.
    """
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        memory = 2**32
    return min(memory, container_limit() or memory) // 4


def container_limit(file: str | Path = "/sys/fs/cgroup/memory.max") -> int | None:
    """The control group's memory limit in bytes; None without one."""
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def largest_plan(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Plan:
    """As many rows and tokens as a step may have: every row runs, the budget is used up.

    Its block tables name no block, so that all its keys land in the reserved one.
    """
    share, rest = divmod(max_num_batched_tokens, max_num_seqs)
    counts = [min(share + (row < rest), max_model_len - 1) for row in range(max_num_seqs)]
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
    entries = (  # request, epoch, row, start, count, samples, no blocks, joins, token ids
        ScheduledRequest(
            Request("warm-up", [0], sampling),
            0,
            row,
            0,
            count,
            True,
            (),
            True,
            (0,) * count,
        )
        for row, count in enumerate(counts)
        if count
    )
    return Plan(0, tuple(sorted(entries, key=lambda entry: entry.count > 1)))


def measure_peak(runner: ModelRunner, plan: Plan, device: torch.device) -> int:
    """Bytes a step takes on a CUDA device beyond what was allocated before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(plan)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class DeviceMemory:
    """What is where on a card, in bytes."""

    total: int
    used_by_others: int
    weights: int
    peak_activation: int

    def budget(self, utilization: float) -> int:
        """Bytes left for the KV cache when `utilization` of the total may be used.

        Raises ConfigError with the sum if nothing is left.
        """
        left = int(self.total * utilization)
        left -= self.used_by_others + self.weights + self.peak_activation
        if left <= 0:
            raise ConfigError(
                f"no memory is left for the KV cache: {utilization:.0%} of {_mib(self.total)}"
                f" - {_mib(self.used_by_others)} used by others - {_mib(self.weights)} weights"
                f" - {_mib(self.peak_activation)} peak of a step = {_mib(left)}. Raise "
                "gpu_memory_utilization, free the card, lower max_num_batched_tokens, or set "
                "num_kv_blocks by hand"
            )
        return left


def read_device_memory(device: torch.device, peak_activation: int) -> DeviceMemory:
    """Ask a CUDA device; `peak_activation` comes from `measure_peak`."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    weights = torch.cuda.memory_allocated(device)
    return DeviceMemory(total, max(0, others), weights, peak_activation)
