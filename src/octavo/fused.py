"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import (
    _jit,
    gdc_launch_dependents,
    gdc_wait,
    launch_options,
    tl,
    triton_problem,
)

__all__ = [
    "fused_problem",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "Rotary",
    "HeadNorms",
    "rotate_store",
]


def fused_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused kernels can't run on `device` in `dtype`; None if they can."""
    return triton_problem(device, dtype)


@_jit
def _let_next_start(PDL: tl.constexpr):
    """The kernel behind may be set up once all programs of this one have come here."""
    if PDL:
        gdc_launch_dependents()


@_jit
def _wait_for_inputs(PDL: tl.constexpr):
    """What other kernels of this step wrote may be read from here on, and not before."""
    if PDL:
        gdc_wait()


@_jit
def _norm_kernel(
    out, total, x, residual, weight, eps, x_stride, residual_stride,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token: sum with the residual, mean of squares, scale."""
    _let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    _wait_for_inputs(PDL)
    kind = out.dtype.element_ty
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        added = (values + more.to(tl.float32)).to(kind)
        tl.store(total + row * WIDTH + column, added, mask=inside)
        values = added.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    normed = (values * inverse).to(kind).to(tl.float32) * scale
    tl.store(out + row * WIDTH + column, normed.to(kind), mask=inside)


def _power_of_2(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out, added = torch.empty_like(x), x if residual is None else residual
    total = x if residual is None else torch.empty_like(x)
    tokens, width = x.shape
    _norm_kernel[(tokens,)](
        out, total, x, added, weight, eps, x.stride(0), added.stride(0),
        WIDTH=width, PAD=_power_of_2(width), ADD=residual is not None,
        num_warps=max(1, min(8, width // 256)), **launch_options(x.device),
    )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm` of x [T, width], width contiguous, in one kernel."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`layers.add_rms_norm` of two [T, width] in one kernel: (normed, sum)."""
    return _norm(x, residual, weight, eps)


@_jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@_jit
def _silu_mul_kernel(
    out, gate_up, stride, WIDTH: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a token and PART columns."""
    _let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < WIDTH
    _wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0)
    product = _silu(gate) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 * inner], gate first: [T, inner]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    part = min(1024, _power_of_2(width))
    _silu_mul_kernel[(tokens, -(-width // part))](
        out, gate_up, gate_up.stride(0), WIDTH=width, PART=part, num_warps=4,
        **launch_options(out.device),
    )  # fmt: skip
    return out


class Rotary(NamedTuple):
    """The angles of a step."""

    positions: Tensor
    """int64 [T]"""
    table: Tensor
    """[positions, 2, head_dim]: (cos, cos) and (-sin, sin), see `RotaryEmbedding.table`."""


class HeadNorms(NamedTuple):
    """A layer's norms of query and key heads (Qwen3)."""

    q: Tensor
    """[head_dim]"""
    k: Tensor
    """[head_dim]"""
    eps: float


@_jit
def _gain(q_weight, k_weight, dim, inside, is_q, is_k):
    """float32 [heads, len(dim)]: what each number of each head is multiplied with."""
    q = tl.load(q_weight + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    k = tl.load(k_weight + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], q, tl.where(is_k[:, None], k, 1.0))


@_jit
def _rotate_store_kernel(
    q_out, qkv, k_cache, v_cache, slots, positions, table, q_weight, k_weight, eps, stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAD_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAD_HALF: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token: all of its heads, each as two halves."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, PAD_HEADS), tl.arange(0, PAD_HALF)
    is_q, is_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    in_half = dim < HALF
    slot = tl.load(slots + token) * (KV_HEADS * HEAD_DIM)
    turn = table + tl.load(positions + token) * (2 * HEAD_DIM) + dim
    cos = tl.load(turn, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(turn + HEAD_DIM + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos, sin = tl.where(is_v[:, None], 1.0, cos), tl.where(is_v[:, None], 0.0, sin)
    if NORM:
        gain1 = _gain(q_weight, k_weight, dim, in_half, is_q, is_k)
        gain2 = _gain(q_weight + HALF, k_weight + HALF, dim, in_half, is_q, is_k)
    _wait_for_inputs(PDL)
    _let_next_start(PDL)  # not earlier: attention would only wait, in the products' way
    here = head[:, None] * HEAD_DIM + dim[None, :]
    inside = (is_q | is_k | is_v)[:, None] & in_half[None, :]
    one = tl.load(qkv + token * stride + here, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(qkv + token * stride + HALF + here, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / HEAD_DIM + eps)
        inverse = tl.where(is_v, 1.0, inverse)[:, None]
        one, two = one * inverse * gain1, two * inverse * gain2
    kind = q_out.dtype.element_ty
    first, second = (one * cos - two * sin).to(kind), (two * cos + one * sin).to(kind)
    to_q = q_out + token * (HEADS * HEAD_DIM) + here
    to_k = k_cache + slot - HEADS * HEAD_DIM + here
    to_v = v_cache + slot - (HEADS + KV_HEADS) * HEAD_DIM + here
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
    norms: HeadNorms | None,
) -> Tensor:
    """Norm and rotation of q and k, and `store_kv`, in one kernel.

    qkv [T, (heads + 2 kv_heads) * head_dim], as projected; caches [blocks, block_size,
    kv_heads, head_dim]; slots int64 [T]. Returns q [T, heads, head_dim].
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    heads = _power_of_2(num_heads + 2 * num_kv_heads)
    half = max(2, _power_of_2(head_dim // 2))
    _rotate_store_kernel[(len(qkv),)](
        q, qkv, k_cache, v_cache, slots, *rotary, *(norms or (None, None, 0.0)),
        qkv.stride(0), HEADS=num_heads, KV_HEADS=num_kv_heads, PAD_HEADS=heads,
        HEAD_DIM=head_dim, PAD_HALF=half, NORM=norms is not None,
        num_warps=max(1, min(8, heads * half // 512)), **launch_options(qkv.device),
    )  # fmt: skip
    return q
