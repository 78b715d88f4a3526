"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import _INTERPRETED, _jit, tl, triton

__all__ = ["random_noise"]


_ASSEMBLY = tl and tl.constexpr(not _INTERPRETED)


@_jit
def _mix(x):
    """`sampler.mix` of uint32 numbers."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@_jit
def _log2(x):
    """The card's own logarithm, one instruction; the interpreter knows no assembly."""
    if _ASSEMBLY:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        result = tl.log2(x)
    return result


@_jit
def _noise(keys, position, token_ids):
    """(bits uint32, Gumbel noise float32) of token ids in a row whose two keys lie at `keys`."""
    place = position.to(tl.uint32)
    first = _mix(tl.load(keys).to(tl.uint32, bitcast=True) + place * 0x9E3779B9)
    second = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    second = _mix(second ^ _mix(place + 0x85EBCA6B))
    bits = _mix(_mix(token_ids.to(tl.uint32) * 0x9E3779B1 + first) ^ second)
    u = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2**-31
    u = tl.minimum(u, 0.999999940395355)  # 1 - 2**-24
    series = u * (
        1 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667))))
    )
    waiting = tl.where(u < 0.03125, series, -0.6931472 * _log2(1.0 - u))
    return bits, -0.6931472 * _log2(waiting)


@_jit
def _noise_kernel(bits_out, noise_out, keys, positions, count, PAD: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0)
    ids = tl.arange(0, PAD)
    bits, noise = _noise(keys + 2 * row, tl.load(positions + row), ids)
    here = row * count + ids
    tl.store(bits_out + here, bits.to(tl.int32, bitcast=True), mask=ids < count)
    tl.store(noise_out + here, noise, mask=ids < count)


def random_noise(keys: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(bits int32, Gumbel noise float32), each [N, count], of tokens 0 to count - 1.

    keys int32 [N, 2], positions int64 [N]. What the kernels draw, to be compared with
    `random_bits` and `gumbel_noise`.
    """
    bits = torch.empty(len(keys), count, dtype=torch.int32, device=keys.device)
    noise = torch.empty(bits.shape, device=keys.device)
    pad = triton.next_power_of_2(count)
    _noise_kernel[(len(keys),)](bits, noise, keys.contiguous(), positions, count, PAD=pad)
    return bits, noise
