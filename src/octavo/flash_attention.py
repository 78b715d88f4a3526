"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.attention import CachedAttend, PagedCache, store_kv
from octavo.batch import AttentionMetadata
from octavo.config import ConfigError
from octavo.kernels import triton_problem, write_kv

__all__ = [
    "PAGE",
    "KV",
    "FlashKernels",
    "PackageKernels",
    "TorchKernels",
    "find_kernels",
    "flash_problem",
    "FlashAttention",
]


PAGE = 256
_DTYPES = (torch.bfloat16, torch.float16)
KV = tuple[Tensor, Tensor]


class FlashKernels(Protocol):
    """FlashAttention's kernels, wherever they come from."""

    def decode(
        self, q: Tensor, pages: KV, step: AttentionMetadata, lengths: Tensor
    ) -> Tensor:
        """[num_decodes, num_heads, head_dim] for q of that shape, over pages."""
        ...

    def prefill(
        self, q: Tensor, kv: KV, step: AttentionMetadata, lengths: Tensor, paged: bool
    ) -> Tensor:
        """The shape of q [T, num_heads, head_dim], the whole step; rows of decodes mean nothing.

        Keys and values are pages, or the step's own [T, num_kv_heads, head_dim].
        """
        ...


class PackageKernels:
    """Those of the package `flash-attn`, version 2. Source: Dao, 2023."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def decode(
        self, q: Tensor, pages: KV, step: AttentionMetadata, lengths: Tensor
    ) -> Tensor:
        """See `FlashKernels.decode`."""
        out: Tensor = self.package.flash_attn_with_kvcache(
            q[:, None],
            *pages,
            cache_seqlens=lengths[: len(q)],
            block_table=step.block_table[: len(q)],
        )
        return out[:, 0]

    def prefill(
        self, q: Tensor, kv: KV, step: AttentionMetadata, lengths: Tensor, paged: bool
    ) -> Tensor:
        """See `FlashKernels.prefill`."""
        first = step.num_decodes
        out: Tensor = self.package.flash_attn_varlen_func(
            q,
            *kv,
            step.cu_seqlens_q[first:],
            (step.cu_seqlens_k if paged else step.cu_seqlens_q)[first:],
            max(step.seqlens_q[first:]),
            max(step.seqlens_k[first:]),
            causal=True,
            block_table=step.block_table[first:] if paged else None,
        )
        return out


class TorchKernels:
    """PyTorch's own copy, where `varlen_attn` takes a block table (torch 2.12 and later)."""

    def __init__(self, varlen_attn: Any) -> None:
        self.varlen_attn = varlen_attn

    def decode(
        self, q: Tensor, pages: KV, step: AttentionMetadata, lengths: Tensor
    ) -> Tensor:
        """See `FlashKernels.decode`."""
        count, table = len(q), step.block_table
        out: Tensor = self.varlen_attn(
            q,
            *pages,
            step.cu_seqlens_q[: count + 1],
            step.cu_seqlens_k[: count + 1],
            1,
            table.shape[1] * pages[0].shape[1],
            enable_gqa=True,
            seqused_k=lengths[:count],
            block_table=table[:count],
        )
        return out

    def prefill(
        self, q: Tensor, kv: KV, step: AttentionMetadata, lengths: Tensor, paged: bool
    ) -> Tensor:
        """See `FlashKernels.prefill`."""
        first = step.num_decodes
        through = dict(seqused_k=lengths[first:], block_table=step.block_table[first:])
        out: Tensor = self.varlen_attn(
            q,
            *kv,
            step.cu_seqlens_q[first:],
            (step.cu_seqlens_k if paged else step.cu_seqlens_q)[first:],
            max(step.seqlens_q[first:]),
            max(step.seqlens_k[first:]),
            window_size=(-1, 0),
            enable_gqa=True,
            **(through if paged else {}),
        )
        return out


@functools.cache
def find_kernels() -> FlashKernels | str:
    """The package's kernels, or PyTorch's own; else what stands in the way of both."""
    try:
        return PackageKernels(importlib.import_module("flash_attn"))
    except (ImportError, OSError) as cause:  # OSError: built for another PyTorch
        missing = f"the flash-attn package can't be loaded ({cause})"
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        varlen_attn = None
    if varlen_attn and "block_table" in inspect.signature(varlen_attn).parameters:
        return TorchKernels(varlen_attn)
    return f"{missing}, and only torch 2.12 and later has paged FlashAttention of its own"


def flash_problem(
    device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> str | None:
    """Why FlashAttention can't run with these; None if it can."""
    if block_size % PAGE:
        return f"it needs a block_size that is a multiple of {PAGE}, not {block_size}"
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"it needs a head_dim that is a multiple of 8, at most 256, not {head_dim}"
    if device.type != "cuda":
        return f"it needs a CUDA card, not {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a card of compute capability 8.0 or more"
    found = find_kernels()
    return found if isinstance(found, str) else None


class FlashAttention:
    """An `AttentionBackend` through FlashAttention-2, for blocks of a multiple of 256 tokens.

    bfloat16 and float16 on CUDA cards from compute capability 8.0. `bind` raises `ConfigError`
    where it can't run.
    """

    capturable = True

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> CachedAttend:
        """See `AttentionBackend.bind`."""
        k_cache, _ = cache.layer(0)
        _, block_size, _, head_dim = k_cache.shape
        if problem := flash_problem(k_cache.device, k_cache.dtype, block_size, head_dim):
            raise ConfigError(f"attention='flash': {problem}; or use attention='triton'")
        kernels = find_kernels()
        assert not isinstance(kernels, str)
        return _FlashStep(kernels, cache, metadata)


class _FlashStep:
    """One step of `FlashAttention`."""

    def __init__(
        self, kernels: FlashKernels, cache: PagedCache, metadata: AttentionMetadata
    ) -> None:
        self.kernels, self.cache, self.metadata = kernels, cache, metadata
        given, k_cache = metadata.lengths, cache.layer(0)[0]
        self.lengths = metadata.cu_seqlens_k.diff() if given is None else given
        first = metadata.num_decodes
        self.no_context = metadata.seqlens_q[first:] == metadata.seqlens_k[first:]
        problem = triton_problem(k_cache.device, k_cache.dtype)
        self.store = store_kv if problem else write_kv

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.store(k, v, *self.cache.layer(layer), self.metadata.slot_mapping)
        return self._attend(layer, q, (k, v) if self.no_context else None)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `CachedAttend.attend`."""
        return self._attend(layer, q, None)

    def _attend(self, layer: int, q: Tensor, own: KV | None) -> Tensor:
        pages, step, lengths = self.cache.layer(layer), self.metadata, self.lengths
        decodes = step.num_decodes
        if decodes == len(step.seqlens_q):
            return self.kernels.decode(q, pages, step, lengths)
        out = self.kernels.prefill(q, own or pages, step, lengths, paged=own is None)
        if decodes:
            out[:decodes] = self.kernels.decode(q[:decodes], pages, step, lengths)
        return out
