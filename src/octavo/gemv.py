"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.fused import _let_next_start, _power_of_2, _silu, _wait_for_inputs
from octavo.kernels import _jit, launch_options, tl

__all__ = ["GemvShape", "gemv_shape", "gemv"]


@_jit
def _weights(
    at, to_up, start, column, in_rows, K: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Columns from `start` on of some rows, and of up's. No cache need keep what is read once."""
    inside = in_rows & (start + column < K)[None, :]
    gate = tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")
    up = gate
    if GATED:
        up = tl.load(
            at + to_up + start, mask=inside, other=0.0, eviction_policy="evict_first"
        )
    return gate, up


@_jit
def _gemv_kernel(
    out, x, weight, norm_weight, eps, N, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, AHEAD: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a vector and ROWS outputs, PART columns at a time."""
    _let_next_start(PDL)
    vector = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PART)
    in_rows = (rows < N)[:, None]
    at = weight + rows.to(tl.int64)[:, None] * K + column[None, :]
    to_up = tl.cast(N, tl.int64) * K  # the gate's rows come first
    gate, up = _weights(at, to_up, 0, column, in_rows, K, GATED)
    later, later_up = gate, up
    if AHEAD == 2:
        later, later_up = _weights(at, to_up, PART, column, in_rows, K, GATED)
    _wait_for_inputs(PDL)
    sums = tl.zeros([ROWS, PART], tl.float32)
    up_sums, squares = sums, tl.zeros([PART], tl.float32)
    for start in tl.static_range(0, K, PART):
        last, last_up = gate, up
        if start + AHEAD * PART < K:  # decided when it is compiled
            next = start + AHEAD * PART
            last, last_up = _weights(at, to_up, next, column, in_rows, K, GATED)
        in_k = start + column < K
        place = x + vector * x_stride + start + column
        values = tl.load(place, mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            gain = tl.load(norm_weight + start + column, mask=in_k, other=0.0)
            values *= gain.to(tl.float32)
        sums += gate.to(tl.float32) * values[None, :]
        if GATED:
            up_sums += up.to(tl.float32) * values[None, :]
        if AHEAD == 2:
            gate, up, later, later_up = later, later_up, last, last_up
        else:
            gate, up = last, last_up
    result, ups = tl.sum(sums, 1), tl.sum(up_sums, 1)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result, ups = result * inverse, ups * inverse
    if GATED:
        result = _silu(result) * ups
    to = out + vector * out_stride + rows
    if ADD:
        result += tl.load(to, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(to, result.to(out.dtype.element_ty), mask=rows < N)


class GemvShape(NamedTuple):
    """How a matrix is shared out among programs."""

    rows: int
    """Outputs of a program."""
    columns: int
    """Taken at a time."""
    warps: int
    ahead: int
    """Times `columns` that are asked for in advance: 1 or 2."""


def gemv_shape(outputs: int, columns: int, gated: bool) -> GemvShape:
    """What measured best, or nearly, on an H200 for models of 0.6 and 8 billion parameters."""
    plenty = outputs >= 2**14
    if columns <= 1024:
        return GemvShape(2 if gated else 4, 512, 1, 1 if plenty else 2)
    return GemvShape(4, 1024, 2 if plenty else 4, 1 if plenty or gated else 2)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    shape: GemvShape | None = None,
) -> Tensor:
    """x @ weight.T for a few rows: x [M, K], weight [N, K] contiguous; returns [M, N].

    norm: weight [K] and epsilon of an RMSNorm of x in front. gated: weight holds gate and up,
    and silu(gate) * up [M, N / 2] comes back. add_to [M, N]: added to in place, and returned.
    out: where to write. x, add_to and out have contiguous rows.
    """
    outputs, columns = weight.shape[0] // 2 if gated else weight.shape[0], x.shape[1]
    if (to := out if add_to is None else add_to) is None:
        to = x.new_empty(len(x), outputs)
    rows, part, warps, ahead = shape or gemv_shape(outputs, columns, gated)
    _gemv_kernel[(len(x), -(-outputs // rows))](
        to, x, weight, *(norm or (None, 0.0)), outputs, x.stride(0), to.stride(0),
        K=columns, ROWS=rows, PART=min(part, _power_of_2(columns)), AHEAD=ahead,
        NORM=norm is not None, GATED=gated, ADD=add_to is not None, num_warps=warps,
        maxnreg=128, **launch_options(x.device),  # 16 warps of 128 registers share a processor
    )  # fmt: skip
    return to
