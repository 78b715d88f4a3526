"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention import packed_heads
from octavo.kernels import (
    LOG2E,
    Tuning,
    _jit,
    _nothing,
    _padded,
    _queries,
    _scan_keys,
    gdc_launch_dependents,
    gdc_wait,
    launch_options,
    num_splits,
    tl,
)

__all__ = ["Scratch", "decode_attention"]


@_jit
def _share(
    length, split, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr
):
    """(first key, last key + 1) of a split, and how many splits have work."""
    tiles = tl.cdiv(length, TILE)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_TILES)
    first = split * each * TILE
    return (
        first,
        tl.minimum(first + each * TILE, length),
        tl.maximum(tl.cdiv(tiles, each), 1),
    )


@_jit
def _merge(
    out, partial, partial_lse, used,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr,
    MERGE_ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add up `used` partial results, each weighed by its part of the softmax's sum.

    AT_ONCE of them are asked for together. Each holds a row for each of GROUP query heads,
    filled up to MERGE_ROWS, a power of two.
    """
    row, dim = tl.arange(0, MERGE_ROWS), tl.arange(0, PAD_DIM)
    in_group, in_head = row < GROUP, dim < HEAD_DIM
    top, total, acc = _nothing(MERGE_ROWS, PAD_DIM)
    for start in range(0, used, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        place = split[:, None] * GROUP + row[None, :]
        there = (split < used)[:, None] & in_group[None, :]
        # .cg: past the multiprocessor's own cache, which may not know other programs' writes.
        lse = tl.load(
            partial_lse + place, mask=there, other=float("-inf"), cache_modifier=".cg"
        )
        lse = tl.where(in_group[None, :], lse, 0.0)  # padding: -inf minus -inf would be NaN
        values = tl.load(
            partial + place[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=there[:, :, None] & in_head[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(lse, 0))
        shrink, weight = tl.exp2(top - higher), tl.exp2(lse - higher[None, :])
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 0)
        top = higher
    acc = (acc / total[:, None]).to(out.dtype.element_ty)
    wanted = in_group[:, None] & in_head[None, :]
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=wanted)


@_jit
def _finish_split(
    out, partial, partial_lse, arrived, top, total, acc, place, split, used,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr,
    MERGE_ROWS: tl.constexpr, AT_ONCE: tl.constexpr, MERGE_HERE: tl.constexpr,
):  # fmt: skip
    """Write the answer, or a part of it; the last program to arrive adds the parts up.

    `place` numbers the pair of sequence and KV head; `arrived` is all zero before and after.
    """
    rows = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    wanted = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    here = rows[:, None] * HEAD_DIM + dim[None, :]
    # A padding row of a graph has length 0, and no sum to divide by.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1 or (MERGE_HERE and used == 1):
        tl.store(out + here, acc.to(out.dtype.element_ty), mask=wanted)
    else:
        partial += place * SPLITS * GROUP * HEAD_DIM
        partial_lse += place * SPLITS * GROUP
        tl.store(partial + split * GROUP * HEAD_DIM + here, acc, mask=wanted)
        lse = top + tl.log2(total)
        tl.store(partial_lse + split * GROUP + rows, lse, mask=rows < GROUP)
        if MERGE_HERE:
            tl.debug_barrier()  # all of this program's writes come before its arrival
            before = tl.atomic_add(arrived + place, 1, sem="acq_rel")
            if before == used - 1:
                tl.debug_barrier()
                _merge(out, partial, partial_lse, used,
                       GROUP, HEAD_DIM, PAD_DIM, MERGE_ROWS, AT_ONCE)  # fmt: skip
                tl.store(arrived + place, 0)


@_jit
def _decode_kernel(
    out, q, k_cache, v_cache, block_table, lengths, partial, partial_lse, arrived,
    scale, q_stride, out_stride, table_stride, token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr,
    MERGE_ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MERGE_HERE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a KV head, sequence and split."""
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)  # written before the embedding lookup
    first, end, used = _share(length, split, TILE, SPLITS, MIN_TILES)
    if split >= used:
        return
    k_base, v_base = k_cache + head * HEAD_DIM, v_cache + head * HEAD_DIM
    table = block_table + sequence.to(tl.int64) * table_stride
    if PDL:
        gdc_wait()  # for q, and the keys of this step's tokens
        gdc_launch_dependents()
    rows = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    wanted = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    mine = head * GROUP * HEAD_DIM
    queries = _queries(
        q + sequence.to(tl.int64) * q_stride + mine, rows, dim, wanted, scale, HEAD_DIM
    )
    top, total, acc = _nothing(PAD_GROUP, PAD_DIM)
    positions = tl.zeros([PAD_GROUP], tl.int32) + (length - 1)
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_base, v_base, table, first, end, positions, token_stride,
        BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM, MASKED=True, WITHIN=False,
    )  # fmt: skip
    _finish_split(
        out + sequence.to(tl.int64) * out_stride + mine, partial, partial_lse, arrived,
        top, total, acc, sequence * tl.num_programs(0) + head, split, used,
        SPLITS, GROUP, HEAD_DIM, PAD_GROUP, PAD_DIM, MERGE_ROWS, AT_ONCE, MERGE_HERE,
    )  # fmt: skip


@_jit
def _merge_kernel(
    out, partial, partial_lse, lengths, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr,
    MERGE_ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """The other way to merge: a second launch, one program a KV head and sequence."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    _, _, used = _share(tl.load(lengths + sequence), 0, TILE, SPLITS, MIN_TILES)
    place = sequence * tl.num_programs(0) + head
    _merge(
        out + sequence.to(tl.int64) * out_stride + head * GROUP * HEAD_DIM,
        partial + place * SPLITS * GROUP * HEAD_DIM, partial_lse + place * SPLITS * GROUP,
        used, GROUP, HEAD_DIM, PAD_DIM, MERGE_ROWS, AT_ONCE,
    )  # fmt: skip


class Scratch:
    """Where splits leave their parts of the answer.

    `arrived` int32 is all zero between launches: whoever merges sets its place back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partial = torch.empty(0, device=device)
        self.lse = torch.empty(0, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, programs: int, group: int, head_dim: int) -> None:
        """Room for `programs` parts. Asked for the most there may be, it never moves again."""
        if self.partial.numel() < (need := programs * group * head_dim):
            self.partial = torch.empty(need, device=self.device)
        if self.lse.numel() < (need := programs * group):
            self.lse = torch.empty(need, device=self.device)
        if self.arrived.numel() < programs:
            self.arrived = torch.zeros(programs, dtype=torch.int32, device=self.device)


def decode_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scratch: Scratch,
    tuning: Tuning,
) -> None:
    """One query a sequence over its cached keys, its own included.

    out, q [S, num_heads, head_dim]; caches [blocks, block_size, num_kv_heads, head_dim];
    block_table int32 [S, W]; lengths int32 [S], read on the device only.
    """
    q, (block_size, num_kv_heads, head_dim) = packed_heads(q), k_cache.shape[1:]
    sequences, group = len(q), q.shape[1] // num_kv_heads
    splits = num_splits(sequences, num_kv_heads, tuning)
    if splits > 1:
        most = max(tuning.programs, sequences * num_kv_heads * splits)
        scratch.reserve(most, group, head_dim)
    merge_rows = 1 << (group - 1).bit_length()  # no matrix unit merges: no need for 16
    shape = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAD_DIM": _padded(head_dim),
        "MERGE_ROWS": merge_rows,
        "AT_ONCE": max(1, 16 // merge_rows),  # what the registers of 32 threads hold
        "TILE": tuning.tile,
        "SPLITS": splits,
        "MIN_TILES": max(1, tuning.min_keys // tuning.tile),
    }
    _decode_kernel[(num_kv_heads, sequences, splits)](
        out, q, k_cache, v_cache, block_table, lengths,
        scratch.partial, scratch.lse, scratch.arrived, head_dim**-0.5 * LOG2E,
        q.stride(0), out.stride(0), block_table.stride(0), num_kv_heads * head_dim,
        **shape, PAD_GROUP=_padded(group), BLOCK_SIZE=block_size, MERGE_HERE=tuning.merge_here,
        num_warps=tuning.warps, num_stages=tuning.stages, **launch_options(out.device),
    )  # fmt: skip
    if splits > 1 and not tuning.merge_here:
        _merge_kernel[(num_kv_heads, sequences)](
            out, scratch.partial, scratch.lse, lengths, out.stride(0), **shape, num_warps=1
        )
