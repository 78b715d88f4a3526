"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.attention import packed_heads
from octavo.batch import AttentionMetadata
from octavo.kernels import LOG2E, Tuning, _jit, _nothing, _padded, _queries, _scan_keys, tl

__all__ = ["query_tiles", "prefill_attention"]


@_jit
def _prefill_kernel(
    out, q, k_cache, v_cache, block_table, cu_seqlens_q, cu_seqlens_k, tiles,
    scale, q_stride, out_stride, table_stride, token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """One program a query head and tile of QUERY_TILE queries of one sequence."""
    head = tl.program_id(0)
    sequence = tl.load(tiles + 2 * tl.program_id(1))
    tile = tl.load(tiles + 2 * tl.program_id(1) + 1)
    begin = tl.load(cu_seqlens_q + sequence)
    count = tl.load(cu_seqlens_q + sequence + 1) - begin
    length = tl.load(cu_seqlens_k + sequence + 1) - tl.load(cu_seqlens_k + sequence)
    rows = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, PAD_DIM)
    wanted = (rows < count)[:, None] & (dim < HEAD_DIM)[None, :]
    tokens = (begin + rows).to(tl.int64)
    queries = _queries(q + head * HEAD_DIM, tokens, dim, wanted, scale, q_stride)
    context = length - count  # keys before this step's own
    positions = context + rows
    top, total, acc = _nothing(QUERY_TILE, PAD_DIM)
    k_base = k_cache + (head // GROUP) * HEAD_DIM
    v_base = v_cache + (head // GROUP) * HEAD_DIM
    table = block_table + sequence.to(tl.int64) * table_stride
    free = (context + tile * QUERY_TILE + 1) // KEY_TILE * KEY_TILE  # all queries see these
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_base, v_base, table, 0, free, positions, token_stride,
        BLOCK_SIZE, KEY_TILE, HEAD_DIM, PAD_DIM, False, BLOCK_SIZE % KEY_TILE == 0,
    )  # fmt: skip
    end = tl.minimum(length, context + (tile + 1) * QUERY_TILE)
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_base, v_base, table, free, end, positions, token_stride,
        BLOCK_SIZE, KEY_TILE, HEAD_DIM, PAD_DIM, True, BLOCK_SIZE % KEY_TILE == 0,
    )  # fmt: skip
    acc = (acc / total[:, None]).to(out.dtype.element_ty)
    here = head * HEAD_DIM + tokens[:, None] * out_stride + dim[None, :]
    tl.store(out + here, acc, mask=wanted)


def query_tiles(
    seqlens_q: Sequence[int], seqlens_k: Sequence[int], first: int, tile: int
) -> np.ndarray:
    """int32 [tiles, 2]: (sequence, tile) of all queries of sequences `first` and on.

    Those with most keys come first: a long one started last would run alone at the end.
    """
    counts = np.asarray(seqlens_q[first:], np.int64)
    lengths = np.asarray(seqlens_k[first:], np.int64)
    each = -(-counts // tile)
    sequence = np.repeat(np.arange(len(counts)), each)
    which = np.arange(len(sequence)) - np.repeat(np.cumsum(each) - each, each)
    keys = (lengths - counts)[sequence] + np.minimum((which + 1) * tile, counts[sequence])
    order = np.argsort(-keys, kind="stable")
    return np.stack([sequence + first, which], 1)[order].astype(np.int32)


def prefill_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    tiles: Tensor,
    tuning: Tuning,
) -> None:
    """Causal attention of the sequences in `tiles` (`query_tiles`), keys read from the cache.

    out, q [T, num_heads, head_dim]; a sequence's queries are the last of its keys, so chunks
    and prefix hits need nothing special.
    """
    q, (block_size, num_kv_heads, head_dim) = packed_heads(q), k_cache.shape[1:]
    num_heads, table = q.shape[1], metadata.block_table
    _prefill_kernel[(num_heads, len(tiles))](
        out, q, k_cache, v_cache, table, metadata.cu_seqlens_q, metadata.cu_seqlens_k, tiles,
        head_dim**-0.5 * LOG2E,
        q.stride(0), out.stride(0), table.stride(0), num_kv_heads * head_dim,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, PAD_DIM=_padded(head_dim),
        BLOCK_SIZE=block_size, QUERY_TILE=tuning.query_tile, KEY_TILE=tuning.key_tile,
        num_warps=tuning.prefill_warps, num_stages=tuning.prefill_stages,
    )  # fmt: skip
