"""Small operations in few kernels (chapter 11); the plain version of each is in `octavo.layers`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kernels import (
    LOG2E,
    TritonAttention,
    _finish_split,
    _scan_keys,
    _share,
    _TritonStep,
    num_splits,
)
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention import PagedCache
from octavo.batch import AttentionMetadata

__all__ = [
    "dependent_launch",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "Rotary",
    "rotate_store",
    "FusedAttention",
    "gemv",
    "FusedModel",
]


def dependent_launch(device: torch.device) -> bool:
    """May a kernel start before the one in front of it has ended (from compute capability 9)?

    It waits by itself (`gdc_wait`) before it touches what the other wrote. At batch 1 a step
    is a chain of short kernels, and this hides the start of each. Every kernel here waits
    first and lets the next one start only then. So what two kernels back or more wrote (lengths
    and block tables, by the step's first kernel) may be read before the wait.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _pdl(x: Tensor) -> dict[str, Any]:
    """Launch options; the interpreter knows none of them."""
    return (
        {"PDL": True, "launch_pdl": True} if dependent_launch(x.device) else {"PDL": False}
    )


# --- norm and SwiGLU -------------------------------------------------------------------------


@triton.jit
def _norm_kernel(
    out, total, x, residual, weight, eps, x_stride, residual_stride,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token: sum with the residual, mean of squares, scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind = out.dtype.element_ty
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        rounded = (values + more.to(tl.float32)).to(kind)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    # The rounding in between is what checkpoints were trained with (see `layers.rms_norm`).
    normed = (values * inverse).to(kind).to(tl.float32) * scale
    tl.store(out + row * WIDTH + column, normed.to(kind), mask=inside)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    added = x if residual is None else residual
    _norm_kernel[(x.numel() // width,)](
        out, total, x, added, weight, eps, x.stride(0), added.stride(0),
        WIDTH=width, PAD=triton.next_power_of_2(width), ADD=residual is not None,
        num_warps=4 if width >= 1024 else 1, **_pdl(x),
    )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm` of x [T, hidden] in one kernel."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`layers.add_rms_norm` of [T, hidden] in one kernel: (normed, sum)."""
    return _norm(x, residual, weight, eps)


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(
    out, gate_up, stride, WIDTH: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr
):
    """A program a token and PART columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0)
    product = _silu(gate) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 * inner], gate first: [T, inner]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(tokens, triton.cdiv(width, 1024))](
        out,
        gate_up,
        gate_up.stride(0),
        WIDTH=width,
        PART=1024,
        num_warps=4,
        **_pdl(gate_up),
    )
    return out


# --- QK-norm, RoPE and the KV store ----------------------------------------------------------


class Rotary(NamedTuple):
    """What turns a projected head into one that may meet the cache."""

    positions: Tensor
    """int64 [T]"""
    table: Tensor
    """[positions, 2, head_dim]: (cos, cos) and (-sin, sin), `RotaryEmbedding.table`."""
    q_weight: Tensor | None
    """[head_dim] of the query norm; None: no norm (Llama)."""
    k_weight: Tensor | None
    eps: float


@triton.jit
def _rotate_store_kernel(
    q_out, qkv, k_cache, v_cache, slots, positions, table, q_weight, k_weight, eps, stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAD_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAD_HALF: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token: all of its query, key and value heads as one tile.

    A head is taken as its two halves, because RoPE turns number i of one with i of the other.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, PAD_HEADS)
    dim = tl.arange(0, PAD_HALF)
    is_q, is_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (dim < HALF)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    mine = qkv + token * stride + head[:, None] * HEAD_DIM + dim[None, :]
    one = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(mine + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / HEAD_DIM + eps)
        inverse = tl.where(is_v, 1.0, inverse)[:, None]
        in_half = dim < HALF
        q1 = tl.load(q_weight + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        q2 = tl.load(q_weight + HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k1 = tl.load(k_weight + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k2 = tl.load(k_weight + HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        one *= inverse * tl.where(is_q[:, None], q1, tl.where(is_k[:, None], k1, 1.0))
        two *= inverse * tl.where(is_q[:, None], q2, tl.where(is_k[:, None], k2, 1.0))
    turn = table + tl.load(positions + token) * (2 * HEAD_DIM) + dim
    cos = tl.load(turn, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(turn + HEAD_DIM + HALF, mask=dim < HALF, other=0.0).to(tl.float32)[
        None, :
    ]
    cos, sin = tl.where(is_v[:, None], 1.0, cos), tl.where(is_v[:, None], 0.0, sin)
    first, second = one * cos - two * sin, two * cos + one * sin
    kind = q_out.dtype.element_ty
    first, second = first.to(kind), second.to(kind)
    to_q = q_out + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dim[None, :]
    slot = tl.load(slots + token) * (KV_HEADS * HEAD_DIM)
    to_k = k_cache + slot + (head - HEADS)[:, None] * HEAD_DIM + dim[None, :]
    to_v = v_cache + slot + (head - HEADS - KV_HEADS)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to_q, first, mask=inside & is_q[:, None])
    tl.store(to_q + HALF, second, mask=inside & is_q[:, None])
    tl.store(to_k, first, mask=inside & is_k[:, None])
    tl.store(to_k + HALF, second, mask=inside & is_k[:, None])
    tl.store(to_v, first, mask=inside & is_v[:, None])
    tl.store(to_v + HALF, second, mask=inside & is_v[:, None])


def rotate_store(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    rotary: Rotary,
    num_heads: int,
) -> Tensor:
    """Normalise and rotate q and k of qkv [T, (heads + 2 kv_heads) * head_dim], store k and v.

    Returns q [T, num_heads, head_dim].
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    q = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    heads = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    half = max(2, triton.next_power_of_2(head_dim // 2))
    _rotate_store_kernel[(len(qkv),)](
        q, qkv, k_cache, v_cache, slots, rotary.positions, rotary.table,
        rotary.q_weight, rotary.k_weight, rotary.eps, qkv.stride(0),
        HEADS=num_heads, KV_HEADS=num_kv_heads, PAD_HEADS=heads, HEAD_DIM=head_dim,
        PAD_HALF=half, NORM=rotary.q_weight is not None,
        num_warps=max(1, min(8, heads * half // 512)), **_pdl(qkv),
    )  # fmt: skip
    return q


# --- the same inside decode attention --------------------------------------------------------


@triton.jit
def _load_turned(
    base, rows, count, turn, weight, eps,
    HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads `rows` (below `count`) at `base`, normalised and rotated: float32 [rows, PAD_DIM].

    Each number is loaded beside its partner in the other half, so nothing has to change lanes.
    """
    dim = tl.arange(0, PAD_DIM)
    partner = (dim + HEAD_DIM // 2) % HEAD_DIM
    in_head = dim < HEAD_DIM
    wanted = (rows < count)[:, None] & in_head[None, :]
    mine = base + rows[:, None] * HEAD_DIM
    x = tl.load(mine + dim[None, :], mask=wanted, other=0.0).to(tl.float32)
    other = tl.load(mine + partner[None, :], mask=wanted, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x *= (
            inverse * tl.load(weight + dim, mask=in_head, other=0.0).to(tl.float32)[None, :]
        )
        other *= (
            inverse
            * tl.load(weight + partner, mask=in_head, other=0.0).to(tl.float32)[None, :]
        )
    cos = tl.load(turn + dim, mask=in_head, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(turn + HEAD_DIM + dim, mask=in_head, other=0.0).to(tl.float32)[None, :]
    return x * cos + other * sin


@triton.jit
def _turning_decode_kernel(
    out, qkv, k_cache, v_cache, block_table, lengths, slots, table, q_weight, k_weight,
    partial, partial_lse, arrived, scale, eps, qkv_stride, out_stride, table_stride, token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_GROUP: tl.constexpr, PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode attention that turns q and k itself, and stores k and v on the way.

    The newest key never takes the way through memory, so no program reads what another writes.
    """
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KV_HEADS = tl.num_programs(0)
    # Written two kernels ago or earlier: no need to wait for these (see `dependent_launch`).
    length = tl.load(lengths + sequence)
    first, end, used = _share(length, split, TILE, SPLITS, MIN_TILES)
    if split >= used:
        return
    rows = tl.arange(0, PAD_GROUP)
    dim = tl.arange(0, PAD_DIM)
    in_head = dim < HEAD_DIM
    mine = qkv + sequence.to(tl.int64) * qkv_stride
    turn = table + (length - 1).to(tl.int64) * (2 * HEAD_DIM)
    slot = tl.load(slots + sequence) * token_stride + head * HEAD_DIM
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q = _load_turned(
        mine + head * GROUP * HEAD_DIM,
        rows,
        GROUP,
        turn,
        q_weight,
        eps,
        HEAD_DIM,
        PAD_DIM,
        NORM,
    )
    kind = qkv.dtype.element_ty
    queries = (q * (scale * LOG2E)).to(kind)
    # The newest key opens the softmax of the split that ends the sequence, and only there.
    last = (end == length).to(tl.int32)
    one = tl.arange(0, 1)
    at_k = mine + (KV_HEADS * GROUP + head) * HEAD_DIM
    k = _load_turned(at_k, one, last, turn, k_weight, eps, HEAD_DIM, PAD_DIM, NORM).to(kind)
    v = tl.load(at_k + KV_HEADS * HEAD_DIM + dim, mask=in_head & (last > 0), other=0.0)
    score = tl.sum(queries.to(tl.float32) * k.to(tl.float32), 1)
    top = tl.where(last > 0, score, float("-inf"))
    total = tl.zeros([PAD_GROUP], tl.float32) + last
    acc = tl.zeros([PAD_GROUP, PAD_DIM], tl.float32) + v.to(tl.float32)[None, :]
    to_cache = (one < last)[:, None] & in_head[None, :]
    tl.store(k_cache + slot + one[:, None] + dim[None, :], k, mask=to_cache)
    tl.store(v_cache + slot + dim, v, mask=in_head & (last > 0))
    positions = tl.zeros([PAD_GROUP], tl.int32) + (length - 1)
    top, total, acc = _scan_keys(
        queries, top, total, acc, k_cache + head * HEAD_DIM, v_cache + head * HEAD_DIM,
        block_table + sequence.to(tl.int64) * table_stride, first,
        tl.minimum(end, length - 1), positions, token_stride, BLOCK_SIZE, TILE, HEAD_DIM, PAD_DIM, True,
    )  # fmt: skip
    _finish_split(
        out + sequence.to(tl.int64) * out_stride + head * GROUP * HEAD_DIM, partial,
        partial_lse, arrived, top, total, acc, sequence * KV_HEADS + head, split, used,
        SPLITS, GROUP, HEAD_DIM, PAD_GROUP, PAD_DIM, True,
    )  # fmt: skip


class FusedAttention(TritonAttention):
    """`TritonAttention` whose steps also take projections that are neither normed nor rotated."""

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> FusedStep:
        """See `AttentionBackend.bind`."""
        return FusedStep(self, cache, metadata)


class FusedStep(_TritonStep):
    """One step of `FusedAttention`."""

    def turn_and_attend(
        self, layer: int, qkv: Tensor, rotary: Rotary, num_heads: int
    ) -> Tensor:
        """qkv [T, (num_heads + 2 num_kv_heads) * head_dim] as projected; [T, num_heads, head_dim]."""
        k_cache, v_cache = self.cache.layer(layer)
        slots = self.metadata.slot_mapping
        if self.tiles is not None:
            q = rotate_store(qkv, k_cache, v_cache, slots, rotary, num_heads)
            return self.attend(q, k_cache, v_cache)
        return self._decode(qkv, k_cache, v_cache, rotary, num_heads)

    def _decode(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, rotary: Rotary, num_heads: int
    ) -> Tensor:
        """Decodes only: one kernel."""
        block_size, num_kv_heads, head_dim = k_cache.shape[1:]
        tokens, tuning, group = len(qkv), self.tuning, num_heads // num_kv_heads
        splits = num_splits(tokens, num_kv_heads, tuning)
        if splits > 1:
            most = max(tuning.programs, tokens * num_kv_heads * splits)
            self.scratch.reserve(most, group, head_dim)
        out = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        table = self.metadata.block_table
        _turning_decode_kernel[(num_kv_heads, tokens, splits)](
            out, qkv, k_cache, v_cache, table, self.lengths, self.metadata.slot_mapping,
            rotary.table, rotary.q_weight, rotary.k_weight,
            self.scratch.partial, self.scratch.lse, self.scratch.arrived,
            head_dim**-0.5, rotary.eps, qkv.stride(0), out.stride(0), table.stride(0),
            num_kv_heads * head_dim,
            GROUP=group, HEAD_DIM=head_dim, PAD_GROUP=max(16, triton.next_power_of_2(group)),
            PAD_DIM=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
            TILE=tuning.tile, SPLITS=splits, MIN_TILES=max(1, tuning.min_keys // tuning.tile),
            NORM=rotary.q_weight is not None,
            num_warps=tuning.warps, num_stages=tuning.stages, **_pdl(qkv),
        )  # fmt: skip
        return out


# --- matrix times vector -----------------------------------------------------------------------


@triton.jit
def _gemv_kernel(
    out, x, weight, norm_weight, residual, eps, N,
    K: tl.constexpr, M: tl.constexpr, PAD_M: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program computes ROWS outputs of each of M vectors: it reads ROWS rows of the matrix.

    The weights are what takes time, and they depend on nothing: the first of them are asked
    for before this kernel waits for the one that makes x.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PART)
    m = tl.arange(0, PAD_M)
    at = weight + rows.to(tl.int64)[:, None] * K + column[None, :]
    in_rows = (rows < N)[:, None]
    w = tl.load(
        at, mask=in_rows & (column < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    u = w
    if GATED:
        u = tl.load(
            at + N.to(tl.int64) * K,
            mask=in_rows & (column < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([PAD_M, ROWS, PART], tl.float32)
    second = tl.zeros([PAD_M, ROWS, PART], tl.float32)
    squares = tl.zeros([PAD_M, PART], tl.float32)
    for start in tl.static_range(0, K, PART):
        if start > 0:
            inside = in_rows & (start + column < K)[None, :]
            w = tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            if GATED:
                u = tl.load(
                    at + N.to(tl.int64) * K + start,
                    mask=inside,
                    other=0.0,
                    eviction_policy="evict_first",
                )
        in_x = (m < M)[:, None] & (start + column < K)[None, :]
        values = tl.load(
            x + m[:, None] * K + start + column[None, :], mask=in_x, other=0.0
        ).to(tl.float32)
        if NORM:
            squares += values * values
            gain = tl.load(norm_weight + start + column, mask=start + column < K, other=0.0)
            values *= gain.to(tl.float32)[None, :]
        acc += w.to(tl.float32)[None, :, :] * values[:, None, :]
        if GATED:
            second += u.to(tl.float32)[None, :, :] * values[:, None, :]
    result = tl.sum(acc, 2)
    if NORM:  # 1 / rms is a factor of the whole row: it can wait until the end
        inverse = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        result *= inverse
    if GATED:
        other = tl.sum(second, 2)
        if NORM:
            other *= inverse
        result = _silu(result) * other
    wanted = (m < M)[:, None] & (rows < N)[None, :]
    place = m[:, None].to(tl.int64) * N + rows[None, :]
    if ADD:
        result += tl.load(residual + place, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted)


class GemvShape(NamedTuple):
    """Outputs and columns a program takes at a time, and its warps."""

    rows: int = 4
    part: int = 1024
    warps: int = 4


def gemv_shape(outputs: int, columns: int, gated: bool) -> GemvShape:
    """What measured best on an H200.

    Short rows go to single warps, which add up without waiting for one another; long ones are
    shared by four, so that the few programs of a small matrix ask for enough bytes at once.
    """
    if columns > 1024 and outputs < 2**14:
        return GemvShape(4, 1024, 4)
    return GemvShape(2 if gated else 4, 512, 1)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    add_to: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    shape: GemvShape | None = None,
) -> Tensor:
    """F.linear(x, weight) for x [M, K] with M up to 4; weight [N, K], no bias.

    norm: (weight [K], eps) of an RMSNorm of x in front. gated: weight holds gate and up, and
    silu(gate) * up [M, N / 2] comes back. add_to [M, N]: add to it in place and return it.
    """
    vectors, columns = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = out if add_to is None else add_to
    if out is None:
        out = torch.empty(vectors, outputs, dtype=x.dtype, device=x.device)
    rows, part, warps = shape or gemv_shape(outputs, columns, gated)
    gain, eps = norm or (None, 0.0)
    _gemv_kernel[(triton.cdiv(outputs, rows),)](
        out, x.contiguous(), weight, gain, add_to, eps, outputs,
        K=columns, M=vectors, PAD_M=triton.next_power_of_2(vectors), ROWS=rows,
        PART=min(part, triton.next_power_of_2(columns)), NORM=gain is not None,
        GATED=gated, ADD=add_to is not None, num_warps=warps, **_pdl(x),
    )  # fmt: skip
    return out


# --- a model that uses them --------------------------------------------------------------------


class FusedModel:
    """A Llama or Qwen3 with the same weights and fewer kernels: a `CausalModel`.

    `attend` must come from `FusedAttention`. Up to `gemv_rows` tokens go through `gemv`.
    """

    def __init__(self, plain: Any, gemv_rows: int = 3) -> None:
        self.plain = plain
        self.config = plain.config
        self.gemv_rows = 0 if self._has_bias() else gemv_rows
        self._pieces: list[LayerPieces] | None = None

    def _has_bias(self) -> bool:
        return bool(self.config.attention_bias or self.config.mlp_bias)

    @property
    def layers(self) -> list[LayerPieces]:
        """What each layer needs, without walking through modules in every step."""
        if self._pieces is None:
            self._pieces = [LayerPieces.of(layer) for layer in self.plain.model.layers]
        return self._pieces

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: FusedStep) -> Tensor:
        """See `CausalModel`: [T, hidden] after the final norm."""
        stream = F.embedding(input_ids, self.plain.model.embed_tokens.weight)
        few = len(stream) <= self.gemv_rows
        rotary = self._rotary(positions, stream)
        for index, layer in enumerate(self.layers):
            turned = rotary._replace(q_weight=layer.q_norm, k_weight=layer.k_norm)
            stream = (layer.few if few else layer.many)(stream, index, turned, attend)
        norm = self.plain.model.norm
        return rms_norm(stream, norm.weight, norm.eps)

    def _rotary(self, positions: Tensor, stream: Tensor) -> Rotary:
        table = self.plain.model.rotary
        table.reserve(table.max_position, stream.dtype, stream.device)
        return Rotary(positions, table.table, None, None, self.config.rms_norm_eps)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `CausalModel`; written to `out` [N, vocab_size] if it is given."""
        plain = self.plain
        head = plain.model.embed_tokens if plain.lm_head is None else plain.lm_head
        if len(hidden) <= self.gemv_rows:
            return gemv(hidden, head.weight, out=out)
        return torch.matmul(hidden, head.weight.T, out=out)


class LayerPieces(NamedTuple):
    """The tensors of one layer, and its forward pass for few and for many tokens."""

    num_heads: int
    eps: float
    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    norm2: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: Any) -> LayerPieces:
        """From a `LlamaLayer` or one of its heirs."""
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = (getattr(attention, n, None) for n in ("q_norm", "k_norm"))
        return cls(
            attention.num_heads,
            layer.input_layernorm.eps,
            layer.input_layernorm.weight,
            attention.qkv_proj.weight,
            attention.qkv_proj.bias,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            attention.o_proj.weight,
            attention.o_proj.bias,
            layer.post_attention_layernorm.weight,
            mlp.gate_up_proj.weight,
            mlp.gate_up_proj.bias,
            mlp.down_proj.weight,
            mlp.down_proj.bias,
        )

    def many(self, stream: Tensor, index: int, rotary: Rotary, attend: FusedStep) -> Tensor:
        """stream [T, hidden] is added to in place: cuBLAS adds while it writes (`addmm_`)."""
        x = rms_norm(stream, self.norm1, self.eps)
        qkv = F.linear(x, self.qkv, self.qkv_bias)
        seen = attend.turn_and_attend(index, qkv, rotary, self.num_heads)
        _add_product(stream, seen.flatten(1), self.o, self.o_bias)
        x = rms_norm(stream, self.norm2, self.eps)
        inner = silu_mul(F.linear(x, self.gate_up, self.gate_up_bias))
        _add_product(stream, inner, self.down, self.down_bias)
        return stream

    def few(self, stream: Tensor, index: int, rotary: Rotary, attend: FusedStep) -> Tensor:
        """Five kernels: norms, SwiGLU and the residual are inside the products."""
        qkv = gemv(stream, self.qkv, norm=(self.norm1, self.eps))
        seen = attend.turn_and_attend(index, qkv, rotary, self.num_heads)
        gemv(seen.flatten(1), self.o, add_to=stream)
        inner = gemv(stream, self.gate_up, norm=(self.norm2, self.eps), gated=True)
        return gemv(inner, self.down, add_to=stream)


def _add_product(stream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """stream += x @ weight.T + bias"""
    stream.addmm_(x, weight.T)
    if bias is not None:
        stream.add_(bias)
