"""Attention through the `flash-attn` package (chapter 07); its pages are multiples of 256 tokens."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from octavo.attention import Attend, PagedCache, store_kv
from octavo.batch import AttentionMetadata
from octavo.config import ConfigError

__all__ = ["FlashAttentionBackend"]

_PAGE = 256
_SUPPORTED = (torch.bfloat16, torch.float16)


def _load() -> Any:
    """The package; ConfigError with the way out where it is missing or doesn't load."""
    try:
        return importlib.import_module("flash_attn")
    except (ImportError, OSError) as cause:  # OSError: built for another torch
        raise ConfigError(
            f"attention='flash' needs the flash-attn package ({cause}): "
            "pip install 'octavo[flash]', or use attention='triton'"
        ) from cause


class FlashAttentionBackend:
    """An `AttentionBackend` over FlashAttention-2. Source: Dao, 2023."""

    def __init__(self) -> None:
        self.package = _load()

    def check(self, k_cache: Tensor) -> None:
        """ConfigError for a cache that the package can't read."""
        block_size = k_cache.shape[1]
        if block_size % _PAGE:
            raise ConfigError(
                f"attention='flash' needs block_size to be a multiple of {_PAGE}, not "
                f"{block_size}; give block_size={_PAGE}, or use attention='triton'"
            )
        if k_cache.dtype not in _SUPPORTED:
            raise ConfigError(
                f"attention='flash' computes in bfloat16 or float16, not {k_cache.dtype}; "
                "use attention='triton' or 'torch'"
            )

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> Attend:
        """See `AttentionBackend.bind`."""
        self.check(cache.layer(0)[0])
        return _FlashStep(self.package, cache, metadata)


class _FlashStep:
    """One step: decodes through the split-KV kernel, the rest as one ragged batch."""

    def __init__(
        self, package: Any, cache: PagedCache, metadata: AttentionMetadata
    ) -> None:
        self.package, self.cache, self.metadata = package, cache, metadata
        self.decodes = metadata.num_decodes
        lengths = getattr(metadata, "lengths", None)
        self.lengths = metadata.cu_seqlens_k.diff() if lengths is None else lengths
        # Sums may begin anywhere for the package's queries, which are sliced, but not its keys.
        self.cu_q = metadata.cu_seqlens_q[self.decodes :] - self.decodes
        self.cu_k = (
            metadata.cu_seqlens_k[self.decodes :] - metadata.cu_seqlens_k[self.decodes]
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches = self.cache.layer(layer)
        store_kv(k, v, *caches, self.metadata.slot_mapping)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if count := self.decodes:
            out[:count] = self._decode(q[:count], *caches)
        if count < len(self.metadata.seqlens_q):
            out[count:] = self._prefill(q[count:], *caches)
        return out

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [S, num_heads, head_dim], one token a sequence."""
        seen: Tensor = self.package.flash_attn_with_kvcache(
            q[:, None],
            k_cache,
            v_cache,
            cache_seqlens=self.lengths[: self.decodes],
            block_table=self.metadata.block_table[: self.decodes],
            causal=True,
        )
        return seen[:, 0]

    def _prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [T, num_heads, head_dim] of the sequences behind the decodes."""
        seqlens_q = self.metadata.seqlens_q[self.decodes :]
        seqlens_k = self.metadata.seqlens_k[self.decodes :]
        seen: Tensor = self.package.flash_attn_varlen_func(
            q.contiguous(),
            k_cache,
            v_cache,
            self.cu_q,
            self.cu_k,
            max(seqlens_q),
            max(seqlens_k),
            causal=True,
            block_table=self.metadata.block_table[self.decodes :],
        )
        return seen
