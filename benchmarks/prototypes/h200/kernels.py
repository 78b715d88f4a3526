"""Attention on the paged cache in Triton: store, prefill, decode (chapter 07).

Plain versions: `octavo.attention.store_kv`, `TorchAttention`, and `dense_attention` for numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention import Attend, PagedCache
from octavo.batch import AttentionMetadata
from octavo.config import ConfigError

__all__ = [
    "store_kv",
    "Tuning",
    "default_tuning",
    "num_splits",
    "Scratch",
    "decode_attention",
    "query_tiles",
    "prefill_attention",
    "TritonAttention",
]

LOG2E = tl.constexpr(1.4426950408889634)


# --- store ---------------------------------------------------------------------------------


@triton.jit
def _store_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """One program a token: a row of WIDTH = num_kv_heads * head_dim numbers to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    keys = tl.load(k + token * k_stride + column, mask=inside)
    values = tl.load(v + token * v_stride + column, mask=inside)
    tl.store(k_cache + slot * WIDTH + column, keys, mask=inside)
    tl.store(v_cache + slot * WIDTH + column, values, mask=inside)


def _packed_heads(x: Tensor) -> Tensor:
    """x [T, heads, head_dim] with its heads side by side; tokens may be any distance apart.

    q, k and v are views of one matrix product's result, so this copies nothing as a rule.
    """
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k, v [T, num_kv_heads, head_dim] to `slots` int64 [T] of a layer's paged cache."""
    k, v = _packed_heads(k), _packed_heads(v)
    width = k.shape[1] * k.shape[2]
    _store_kernel[(len(k),)](
        k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0),
        WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=4 if width >= 512 else 1,
    )  # fmt: skip


# --- the loop that prefill and decode share -------------------------------------------------


@triton.jit
def _scan_keys(
    q, top, total, acc, k_base, v_base, table, first, end, positions, token_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys first..end-1, TILE at a time, read through the block table.

    q [M, PAD_DIM] is scaled by log2(e) / sqrt(head_dim) already; top, total [M] and acc
    [M, PAD_DIM] are the running maximum, sum and weighted values, float32. MASKED: leave out
    keys behind `end` and behind each row's own position [M]. Source: Milakov and Gimelshein, 2018.
    """
    step = tl.arange(0, TILE)
    dim = tl.arange(0, PAD_DIM)
    in_head = dim < HEAD_DIM
    for start in range(first, end, TILE):
        keys = start + step
        exists = keys < end
        if BLOCK_SIZE % TILE == 0:  # the tile lies in one block: one number is looked up
            page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slots = page * BLOCK_SIZE + start % BLOCK_SIZE + step
        else:  # several blocks, or block borders inside the tile
            pages = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
            slots = pages * BLOCK_SIZE + keys % BLOCK_SIZE
        offsets = slots[:, None] * token_stride + dim[None, :]
        # What lies behind the end belongs to nobody, or was a former owner's NaN: never read.
        if MASKED:
            wanted = exists[:, None] & in_head[None, :]
            k = tl.load(k_base + offsets, mask=wanted, other=0.0)
            v = tl.load(v_base + offsets, mask=wanted, other=0.0)
        elif HEAD_DIM == PAD_DIM:
            k = tl.load(k_base + offsets)
            v = tl.load(v_base + offsets)
        else:
            k = tl.load(k_base + offsets, mask=in_head[None, :], other=0.0)
            v = tl.load(v_base + offsets, mask=in_head[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = exists[None, :] & (keys[None, :] <= positions[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # exp2 is one instruction and exp is two: hence the log2(e) inside q.
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


# --- decode ---------------------------------------------------------------------------------


@triton.jit
def _merge(out, partial, partial_lse, used, rows, dim, wanted, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr):  # fmt: skip
    """Add up `used` partial results, each weighed by its share of the softmax's sum."""
    top = tl.full([PAD_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PAD_GROUP], tl.float32)
    acc = tl.zeros([PAD_GROUP, PAD_DIM], tl.float32)
    inside = rows < GROUP
    # Unrolled, so that all loads are under way at once: one after the other they would take
    # longer than the attention itself. .cg: from L2, where the other programs' writes are.
    for split in tl.static_range(SPLITS):
        here = split < used
        lse = tl.load(
            partial_lse + split * GROUP + rows,
            mask=inside & here,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        part = partial + split * GROUP * HEAD_DIM + rows[:, None] * HEAD_DIM + dim[None, :]
        values = tl.load(part, mask=wanted & here, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, lse)
        safe = tl.where(
            higher == float("-inf"), 0.0, higher
        )  # rows of padding have no keys
        shrink, weight = tl.exp2(top - safe), tl.exp2(lse - safe)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + values * weight[:, None]
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + rows[:, None] * HEAD_DIM + dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=wanted,
    )


@triton.jit
def _finish_split(
    out, partial, partial_lse, arrived, top, total, acc, place, split, used,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr, MERGE_HERE: tl.constexpr,
):  # fmt: skip
    """Write the answer, or a share of it; the last program to arrive adds the shares up.

    `place` numbers the pair of sequence and KV head; `arrived` is all zero before and after.
    """
    rows = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    wanted = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1 or (MERGE_HERE and used == 1):
        tl.store(
            out + rows[:, None] * HEAD_DIM + dim[None, :],
            acc.to(out.dtype.element_ty),
            mask=wanted,
        )
    else:
        partial += place * SPLITS * GROUP * HEAD_DIM
        partial_lse += place * SPLITS * GROUP
        mine = partial + split * GROUP * HEAD_DIM
        tl.store(mine + rows[:, None] * HEAD_DIM + dim[None, :], acc, mask=wanted)
        lse = top + tl.log2(total)
        tl.store(partial_lse + split * GROUP + rows, lse, mask=rows < GROUP)
        if MERGE_HERE:
            tl.debug_barrier()  # all of this program's writes come before its arrival
            before = tl.atomic_add(arrived + place, 1, sem="acq_rel")
            if before == used - 1:
                tl.debug_barrier()
                _merge(out, partial, partial_lse, used, rows, dim, wanted, SPLITS, GROUP, HEAD_DIM, PAD_GROUP, PAD_DIM)  # fmt: skip
                tl.store(arrived + place, 0)


@triton.jit
def _share(
    length, split, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr
):
    """(first key, last key + 1) of a split, and how many splits a sequence keeps busy.

    The launch says how many splits there may be; the length, which only the device knows when
    a graph is replayed, says how many are worth it.
    """
    tiles = tl.cdiv(length, TILE)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_TILES)
    first = split * each * TILE
    return (
        first,
        tl.minimum(first + each * TILE, length),
        tl.maximum(tl.cdiv(tiles, each), 1),
    )


@triton.jit
def _decode_kernel(
    out, q, k_cache, v_cache, block_table, lengths, partial, partial_lse, arrived,
    scale, q_stride, out_stride, table_stride, token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    MERGE_HERE: tl.constexpr,
):  # fmt: skip
    """One program a KV head, sequence and split.

    All query heads of the group share the keys that are read, which is what GQA is for. KV
    heads run fastest over the grid: neighbours read neighbouring bytes at the same time.
    """
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first, end, used = _share(length, split, TILE, SPLITS, MIN_TILES)
    if split >= used:
        return
    rows = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    wanted = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head_offset = head * GROUP * HEAD_DIM
    mine = q + sequence.to(tl.int64) * q_stride + head_offset
    queries = tl.load(
        mine + rows[:, None] * HEAD_DIM + dim[None, :], mask=wanted, other=0.0
    )
    queries = (queries.to(tl.float32) * (scale * LOG2E)).to(q.dtype.element_ty)
    top = tl.full([PAD_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PAD_GROUP], tl.float32)
    acc = tl.zeros([PAD_GROUP, PAD_DIM], tl.float32)
    positions = tl.zeros([PAD_GROUP], tl.int32) + (length - 1)
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_cache + head * HEAD_DIM, v_cache + head * HEAD_DIM,
        block_table + sequence.to(tl.int64) * table_stride, first, end, positions, token_stride,
        BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM, True,
    )  # fmt: skip
    _finish_split(
        out + sequence.to(tl.int64) * out_stride + head_offset, partial, partial_lse, arrived,
        top, total, acc, sequence * tl.num_programs(0) + head, split, used,
        SPLITS, GROUP, HEAD_DIM, PAD_GROUP, PAD_DIM, MERGE_HERE,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    out, partial, partial_lse, lengths, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """The other way to merge: a second launch, one program a KV head and sequence."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    _, _, used = _share(tl.load(lengths + sequence), 0, TILE, SPLITS, MIN_TILES)
    rows = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    wanted = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    place = sequence * tl.num_programs(0) + head
    _merge(
        out + sequence.to(tl.int64) * out_stride + head * GROUP * HEAD_DIM,
        partial + place * SPLITS * GROUP * HEAD_DIM, partial_lse + place * SPLITS * GROUP,
        used, rows, dim, wanted, SPLITS, GROUP, HEAD_DIM, PAD_GROUP, PAD_DIM,
    )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """Shapes of the kernels' work; the defaults are what measured best on an H200."""

    tile: int = 64
    """Keys a decode program takes at a time."""
    warps: int = 4
    stages: int = 4
    """Tiles under way at once: bytes in flight are what bandwidth is made of."""
    splits: int | None = None
    """Parts of a decode's keys; None: as many as keep the card busy."""
    min_keys: int = 64
    """A split has at least so many."""
    merge_here: bool = True
    """The last program to arrive merges; False: a second kernel does."""
    programs: int = 512
    """Decode programs that keep the card busy."""
    query_tile: int = 128
    key_tile: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 3


def default_tuning(dtype: torch.dtype, head_dim: int) -> Tuning:
    """What fits into shared memory: float32 and wide heads leave room for fewer tiles."""
    row = triton.next_power_of_2(head_dim) * dtype.itemsize
    if (
        dtype == torch.float32
    ):  # no matrix unit multiplies float32 exactly: all in registers
        rows = 32 if row <= 512 else 16
        return Tuning(tile=16, query_tile=rows, key_tile=16, prefill_stages=2)
    if row <= 256:
        return Tuning()
    return Tuning(tile=32, query_tile=64, key_tile=32, prefill_stages=2)


def num_splits(num_sequences: int, num_kv_heads: int, tuning: Tuning) -> int:
    """A power of two that makes about `tuning.programs` of them, at most 32."""
    if tuning.splits is not None:
        return tuning.splits
    most = max(1, min(32, tuning.programs // (num_sequences * num_kv_heads)))
    return 1 << (most.bit_length() - 1)


class Scratch:
    """Where splits leave their shares; made once, so that graphs may keep its addresses.

    `arrived` int32 is all zero between launches: whoever merges sets its place back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partial = torch.empty(0, device=device)
        self.lse = torch.empty(0, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, programs: int, group: int, head_dim: int) -> None:
        """Room for `programs` shares. Asked for the most there may be, it never moves again."""
        if self.partial.numel() < (need := programs * group * head_dim):
            self.partial = torch.empty(need, device=self.device)
            self.lse = torch.empty(programs * group, device=self.device)
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
    q = _packed_heads(q)
    sequences, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    splits = num_splits(sequences, num_kv_heads, tuning)
    if splits > 1:
        most = max(tuning.programs, sequences * num_kv_heads * splits)
        scratch.reserve(most, group, head_dim)
    shape = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAD_GROUP": max(16, triton.next_power_of_2(group)),  # the matrix unit's least
        "PAD_DIM": max(16, triton.next_power_of_2(head_dim)),
        "TILE": tuning.tile,
        "SPLITS": splits,
        "MIN_TILES": max(1, tuning.min_keys // tuning.tile),
    }
    _decode_kernel[(num_kv_heads, sequences, splits)](
        out, q, k_cache, v_cache, block_table, lengths,
        scratch.partial, scratch.lse, scratch.arrived, head_dim**-0.5,
        q.stride(0), out.stride(0), block_table.stride(0), num_kv_heads * head_dim,
        **shape, BLOCK_SIZE=block_size, MERGE_HERE=tuning.merge_here,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if splits > 1 and not tuning.merge_here:
        _merge_kernel[(num_kv_heads, sequences)](
            out, scratch.partial, scratch.lse, lengths, out.stride(0), **shape, num_warps=1
        )


# --- prefill --------------------------------------------------------------------------------


@triton.jit
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
    tokens = (begin + rows).to(tl.int64)[:, None]
    columns = head * HEAD_DIM + dim[None, :]
    queries = tl.load(q + tokens * q_stride + columns, mask=wanted, other=0.0)
    queries = (queries.to(tl.float32) * (scale * LOG2E)).to(q.dtype.element_ty)
    context = (
        length - count
    )  # keys before this step's own: queries are the last of the keys
    positions = context + rows
    top = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    acc = tl.zeros([QUERY_TILE, PAD_DIM], tl.float32)
    k_base = k_cache + (head // GROUP) * HEAD_DIM
    v_base = v_cache + (head // GROUP) * HEAD_DIM
    table = block_table + sequence.to(tl.int64) * table_stride
    # Whole tiles of keys that all queries see need no mask; only the diagonal does.
    free = (context + tile * QUERY_TILE + 1) // KEY_TILE * KEY_TILE
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_base, v_base, table, 0, free, positions, token_stride,
        BLOCK_SIZE, KEY_TILE, HEAD_DIM, PAD_DIM, False,
    )  # fmt: skip
    end = tl.minimum(length, context + (tile + 1) * QUERY_TILE)
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_base, v_base, table, free, end, positions, token_stride,
        BLOCK_SIZE, KEY_TILE, HEAD_DIM, PAD_DIM, True,
    )  # fmt: skip
    acc = acc / total[:, None]
    tl.store(out + tokens * out_stride + columns, acc.to(out.dtype.element_ty), mask=wanted)


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
    q = _packed_heads(q)
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    _prefill_kernel[(num_heads, len(tiles))](
        out, q, k_cache, v_cache, metadata.block_table,
        metadata.cu_seqlens_q, metadata.cu_seqlens_k, tiles, head_dim**-0.5,
        q.stride(0), out.stride(0), metadata.block_table.stride(0), num_kv_heads * head_dim,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        PAD_DIM=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
        QUERY_TILE=tuning.query_tile, KEY_TILE=tuning.key_tile,
        num_warps=tuning.prefill_warps, num_stages=tuning.prefill_stages,
    )  # fmt: skip


# --- the backend ----------------------------------------------------------------------------


class TritonAttention:
    """An `AttentionBackend` of own kernels: any block size, float32, bfloat16, float16."""

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning
        self._scratch: dict[torch.device, Scratch] = {}

    def scratch(self, device: torch.device) -> Scratch:
        """The one scratch of a device; steps on a stream use it one after the other."""
        return self._scratch.setdefault(device, Scratch(device))

    def tuned_for(self, k_cache: Tensor) -> Tuning:
        """Given tuning, or the default; ConfigError for a dtype that has no kernel."""
        if k_cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"attention='triton' has no kernel for {k_cache.dtype}; use float32, "
                "bfloat16 or float16, or attention='torch'"
            )
        return self.tuning or default_tuning(k_cache.dtype, k_cache.shape[-1])

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> Attend:
        """See `AttentionBackend.bind`."""
        return _TritonStep(self, cache, metadata)


class _TritonStep:
    """One step of `TritonAttention`. Without prefills it reads no length on the host."""

    def __init__(
        self, backend: TritonAttention, cache: PagedCache, metadata: AttentionMetadata
    ) -> None:
        self.cache, self.metadata = cache, metadata
        self.tuning = backend.tuned_for(cache.layer(0)[0])
        self.scratch = backend.scratch(metadata.slot_mapping.device)
        # A graph's metadata has its lengths at a fixed address; else they are differences.
        lengths = getattr(metadata, "lengths", None)
        self.lengths = metadata.cu_seqlens_k.diff() if lengths is None else lengths
        self.tiles = None
        if metadata.num_decodes < len(metadata.seqlens_q):
            tiles = query_tiles(
                metadata.seqlens_q,
                metadata.seqlens_k,
                metadata.num_decodes,
                self.tuning.query_tile,
            )
            device = metadata.slot_mapping.device
            self.tiles = torch.from_numpy(tiles).to(device, non_blocking=True)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.cache.layer(layer)
        store_kv(k, v, k_cache, v_cache, self.metadata.slot_mapping)
        return self.attend(q, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention over what is in the cache already."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes := self.metadata.num_decodes:
            decode_attention(
                out[:decodes], q[:decodes], k_cache, v_cache, self.metadata.block_table,
                self.lengths, self.scratch, self.tuning,
            )  # fmt: skip
        if self.tiles is not None:
            prefill_attention(
                out, q, k_cache, v_cache, self.metadata, self.tiles, self.tuning
            )
        return out
