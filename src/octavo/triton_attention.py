"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention import CachedAttend, PagedCache
from octavo.batch import AttentionMetadata, Staging
from octavo.config import ConfigError
from octavo.decode_kernels import Scratch, decode_attention
from octavo.kernels import Tuning, default_tuning, triton_problem, write_kv
from octavo.prefill_kernels import prefill_attention, query_tiles

__all__ = ["TritonAttention"]


class TritonAttention:
    """An `AttentionBackend` of own kernels, for any block size.

    float32, bfloat16 and float16 on CUDA cards from compute capability 8.0. `bind` raises
    `ConfigError` where the kernels can't run.
    """

    capturable = True

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning
        self._scratch: dict[torch.device, Scratch] = {}
        self._staging: dict[torch.device, Staging] = {}

    def scratch(self, device: torch.device) -> Scratch:
        """The one scratch of a device; steps on a stream use it one after the other."""
        if device not in self._scratch:
            self._scratch[device] = Scratch(device)
        return self._scratch[device]

    def staging(self, device: torch.device) -> Staging:
        """Where the lists of tiles leave for a device."""
        if device not in self._staging:
            self._staging[device] = Staging(device, 2**12)
        return self._staging[device]

    def tuning_for(self, k_cache: Tensor, metadata: AttentionMetadata) -> Tuning:
        """The tuning given, or the default here; ConfigError if there is no kernel."""
        if problem := triton_problem(k_cache.device, k_cache.dtype):
            raise ConfigError(f"attention='triton': {problem}; attention='torch' runs")
        num_kv_heads, head_dim = k_cache.shape[2:]
        decodes, prompts = metadata.num_decodes, metadata.seqlens_q[metadata.num_decodes :]
        new_tokens = sum(prompts) / max(1, len(prompts))
        return self.tuning or default_tuning(
            k_cache.dtype, head_dim, decodes * num_kv_heads, new_tokens
        )

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> CachedAttend:
        """See `AttentionBackend.bind`."""
        return _TritonStep(self, cache, metadata)


class _TritonStep:
    """One step of `TritonAttention`. Without prefills it reads no length on the host."""

    def __init__(
        self, backend: TritonAttention, cache: PagedCache, metadata: AttentionMetadata
    ) -> None:
        self.cache, self.metadata = cache, metadata
        self.tuning = backend.tuning_for(cache.layer(0)[0], metadata)
        self.scratch = backend.scratch(metadata.slot_mapping.device)
        given = metadata.lengths
        self.lengths = metadata.cu_seqlens_k.diff() if given is None else given
        self.tiles = self._tiles(metadata, backend.staging(metadata.slot_mapping.device))

    def _tiles(self, metadata: AttentionMetadata, staging: Staging) -> Tensor | None:
        """`query_tiles` on the device; None where all are decodes."""
        lengths = metadata.seqlens_q, metadata.seqlens_k
        if metadata.num_decodes == len(metadata.seqlens_q):
            return None
        tiles = query_tiles(*lengths, metadata.num_decodes, self.tuning.query_tile)
        return staging.upload(tiles.ravel())[0].int().view(-1, 2)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        write_kv(k, v, *self.cache.layer(layer), self.metadata.slot_mapping)
        return self.attend(layer, q)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `CachedAttend.attend`."""
        caches, meta, tuning = self.cache.layer(layer), self.metadata, self.tuning
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes := meta.num_decodes:
            decode_attention(
                out[:decodes], q[:decodes], *caches, meta.block_table, self.lengths,
                self.scratch, tuning,
            )  # fmt: skip
        if self.tiles is not None:
            prefill_attention(out, q, *caches, meta, self.tiles, tuning)
        return out
