"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.batch import AttentionMetadata

__all__ = [
    "dense_attention",
    "Attend",
    "PagedCache",
    "CachedAttend",
    "AttentionBackend",
    "store_kv",
    "packed_heads",
    "PrefillSpan",
    "prefill_spans",
    "TorchAttention",
    "attend_span",
]


_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence: the reference for every backend.

    q [n, num_heads, head_dim] are the last n of the m tokens in k, v [m, num_kv_heads, head_dim];
    returns [n, num_heads, head_dim]. Computes in the dtype it is given: use float64.
    """
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


class Attend(Protocol):
    """One step's attention, as the layers of a model call it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [T, num_kv_heads, head_dim] in the layer's cache and attend with
        q [T, num_heads, head_dim] over each sequence's cached tokens; returns the shape of q."""
        ...


class PagedCache(Protocol):
    """Keys and values by layer (chapter 08 allocates them)."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """k and v, each [num_blocks + 1, block_size, num_kv_heads, head_dim]."""
        ...


@runtime_checkable
class CachedAttend(Attend, Protocol):
    """An `Attend` for callers that write keys and values themselves."""

    cache: PagedCache
    metadata: AttentionMetadata

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention over what the layer's cache holds, the step's own tokens included."""
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over a paged cache."""

    capturable: bool
    """May a step be recorded in a CUDA graph? If so, a step of decodes whose metadata has
    `lengths` reads nothing else of its lengths and makes the host wait for nothing."""

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> Attend:
        """Prepare one step; what all layers share is computed here, once."""
        ...


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k, v [T, num_kv_heads, head_dim] to `slots` int64 [T] of a layer's paged cache."""
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def packed_heads(x: Tensor) -> Tensor:
    """x [T, heads, head_dim] with each token's heads in one piece, copied only if they aren't."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.size(-1) else x.contiguous()


class _Bucket(NamedTuple):
    """Decodes of similar length."""

    members: Tensor
    """int64 [B]: their places in the batch."""
    blocks: Tensor
    """int64 [B * W]: their block tables, one after the other."""
    mask: Tensor
    """bool [B, 1, 1, W * block_size]: which keys exist."""


def _bucketed(block_counts: Iterable[int]) -> list[list[int]]:
    """Indices grouped by the power of two that holds their count."""
    buckets: dict[int, list[int]] = {}
    for index, count in enumerate(block_counts):
        buckets.setdefault((count - 1).bit_length(), []).append(index)
    return list(buckets.values())


class PrefillSpan(NamedTuple):
    """One sequence with more than one token in this step."""

    tokens: slice
    length: int
    """Keys to attend to."""
    blocks: Tensor | None
    """int64 block ids, when there is context in the cache."""
    mask: Tensor | None
    """bool [tokens, length]; None: plain causal."""

    def context(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> list[Tensor]:
        """Keys and values [length, num_kv_heads, head_dim]: the step's own, or from the cache."""
        if self.blocks is None:
            return [k[self.tokens], v[self.tokens]]
        return [
            cache.index_select(0, self.blocks).flatten(0, 1)[: self.length]
            for cache in (k_cache, v_cache)
        ]


def prefill_spans(metadata: AttentionMetadata, block_size: int) -> Iterator[PrefillSpan]:
    """The sequences of a batch that have more than one token in this step."""
    begin, device = metadata.num_decodes, metadata.slot_mapping.device
    for index in range(metadata.num_decodes, len(metadata.seqlens_q)):
        count, length = metadata.seqlens_q[index], metadata.seqlens_k[index]
        tokens, begin = slice(begin, begin + count), begin + count
        blocks = mask = None
        if length > count:
            width = -(-length // block_size)
            blocks = metadata.block_table[index, :width].long()
            ones = torch.ones(count, length, dtype=torch.bool, device=device)
            mask = ones.tril(length - count)
        yield PrefillSpan(tokens, length, blocks, mask)


class TorchAttention:
    """The plain `AttentionBackend`: PyTorch only, any device, dtype, block and head size."""

    capturable = False  # buckets and masks are made on the host, from the step's lengths

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> Attend:
        """See `AttentionBackend.bind`."""
        return _TorchStep(cache, metadata)


class _TorchStep:
    """One step of `TorchAttention`."""

    def __init__(self, cache: PagedCache, metadata: AttentionMetadata) -> None:
        self.cache, self.metadata = cache, metadata
        self.slots = metadata.slot_mapping
        self.block_size = cache.layer(0)[0].shape[1]
        self.begun = self._begun(metadata)
        self.decodes = self._decodes(metadata)
        self.prefills = list(prefill_spans(metadata, self.block_size))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.cache.layer(layer)
        self._store(k, v, k_cache, v_cache)
        out = torch.empty_like(q)
        with sdpa_kernel(_KERNELS):
            for bucket in self.decodes:
                out[bucket.members] = _decode(q[bucket.members], k_cache, v_cache, bucket)
            for part in self.prefills:
                keys, values = part.context(k, v, k_cache, v_cache)
                out[part.tokens] = attend_span(q[part.tokens], keys, values, part.mask)
        return out

    def _store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Write the step's keys and values; what a block's last owner left behind goes first."""
        if self.begun is not None:  # a masked NaN would still be a NaN: 0 * NaN
            k_cache.index_fill_(0, self.begun, 0)
            v_cache.index_fill_(0, self.begun, 0)
        store_kv(k, v, k_cache, v_cache, self.slots)

    def _begun(self, metadata: AttentionMetadata) -> Tensor | None:
        """int64 ids of the blocks that this step begins and leaves half-full; None: no block."""
        size, places = self.block_size, []
        spans = zip(metadata.seqlens_q, metadata.seqlens_k, strict=True)
        for index, (count, length) in enumerate(spans):
            last = (length - 1) // size
            if length % size and last * size >= length - count:
                places.append((index, last))
        if not places:
            return None
        sequences, columns = torch.tensor(places, device=self.slots.device).T
        return metadata.block_table[sequences, columns].long()

    def _decodes(self, metadata: AttentionMetadata) -> list[_Bucket]:
        lengths = metadata.seqlens_k[: metadata.num_decodes]
        counts = [-(-length // self.block_size) for length in lengths]
        return [
            self._bucket(metadata, indices, lengths, max(counts[i] for i in indices))
            for indices in _bucketed(counts)
        ]

    def _bucket(
        self,
        metadata: AttentionMetadata,
        indices: list[int],
        lengths: tuple[int, ...],
        width: int,
    ) -> _Bucket:
        """The decodes at `indices` as one rectangle, `width` blocks wide."""
        device, size = self.slots.device, self.block_size
        members = torch.tensor(indices, device=device)
        ends = torch.tensor([lengths[i] for i in indices], device=device)[:, None]
        table = metadata.block_table[members, :width]
        held = torch.arange(width, device=device) * size < ends
        blocks = torch.where(held, table, table[:, :1])  # nobody else's block is read
        mask = torch.arange(width * size, device=device) < ends
        return _Bucket(members, blocks.flatten().long(), mask[:, None, None])


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: _Bucket) -> Tensor:
    """q [B, num_heads, head_dim]; the group of heads of one key head plays the queries."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    k, v = (
        cache.index_select(0, bucket.blocks)
        .view(batch, -1, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    queries = q.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bucket.mask)
    return out.reshape(batch, num_heads, head_dim)


def attend_span(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [n, num_heads, head_dim] over k, v [m, num_kv_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out[0].transpose(0, 1)
