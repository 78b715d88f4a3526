"""Sampling in two kernels (chapter 11), with the random numbers of `octavo.sampler`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.request import Request, SamplingParams
from octavo.sampler import _FILTERED, _FREE, _GREEDY, Sampler

__all__ = ["sample", "random_noise", "FusedSampler"]


@triton.jit
def _mix(x):
    """`sampler.mix` of uint32 numbers (whose shifts fill with zeros)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


FAST = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no assembly


@triton.jit
def _log2(x):
    """One instruction; Triton's own is exact to the last bit, which costs more than the hash."""
    if FAST:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.log2(x)
    return result


@triton.jit
def _noise(key0, key1, place, token_ids):
    """Gumbel noise of tokens [M] in one row: (bits uint32, float32), as the sampler's.

    -log1p(-u) where u is tiny, which is where the large noise comes from, is a series: there
    log(1 - u) would be rounded to 0, its logarithm be infinite, and a random token win now and
    then. Elsewhere the card's own log2, one instruction, is near enough.
    """
    first = _mix(key0 + place * 0x9E3779B9)
    second = _mix(key1 ^ _mix(place + 0x85EBCA6B))
    bits = _mix(_mix(token_ids * 0x9E3779B1 + first) ^ second)
    u = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2**-31
    u = tl.minimum(u, 0.999999940395355)  # 1 - 2**-24
    series = u * (
        1 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667))))
    )
    waiting = tl.where(u < 0.03125, series, -0.6931472 * _log2(1.0 - u))
    return bits, -0.6931472 * _log2(waiting)


@triton.jit
def _noise_kernel(bits_out, noise_out, keys, positions, M, PAD: tl.constexpr):
    """What the tests compare: one program a row."""
    row = tl.program_id(0)
    ids = tl.arange(0, PAD)
    key0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    bits, noise = _noise(
        key0, key1, tl.load(positions + row).to(tl.uint32), ids.to(tl.uint32)
    )
    tl.store(bits_out + row * M + ids, bits.to(tl.int32, bitcast=True), mask=ids < M)
    tl.store(noise_out + row * M + ids, noise, mask=ids < M)


def random_noise(keys: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(bits int32, Gumbel noise float32) of tokens 0 to count - 1, each [N, count]."""
    shape, device = (len(keys), count), keys.device
    bits = torch.empty(shape, dtype=torch.int32, device=device)
    noise = torch.empty(shape, device=device)
    _noise_kernel[(len(keys),)](
        bits, noise, keys, positions, count, PAD=triton.next_power_of_2(count)
    )
    return bits, noise


@triton.jit
def _best_kernel(
    best, best_id, logits, rows, positions, temperature, keys, stride, vocab,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The best of PART tokens of one row: (score, id). A temperature of 0 is greedy."""
    n, part = tl.program_id(1), tl.program_id(0)
    row = tl.load(rows + n)
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab  # what lies behind the vocabulary is padding of the head's matrix
    scores = tl.load(
        logits + n.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")
    ).to(tl.float32)
    heat = tl.load(temperature + row)
    if heat > 0:
        key0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        place = tl.load(positions + n).to(tl.uint32)
        _, noise = _noise(key0, key1, place, ids.to(tl.uint32))
        scores = scores / heat + noise
    score, index = tl.max(scores, 0, return_indices=True)
    tl.store(best + n * PARTS + part, score)
    tl.store(best_id + n * PARTS + part, part * PART + index)


@triton.jit
def _pick_kernel(
    out, best, best_id, rows, positions, next_ids, next_stride,
    PARTS: tl.constexpr, PAD: tl.constexpr, FEED: tl.constexpr,
):  # fmt: skip
    """The best of the best; put where the next step reads it."""
    n = tl.program_id(0)
    part = tl.arange(0, PAD)
    scores = tl.load(best + n * PARTS + part, mask=part < PARTS, other=float("-inf"))
    _, winner = tl.max(scores, 0, return_indices=True)
    token = tl.load(best_id + n * PARTS + winner)
    tl.store(out + n, token.to(tl.int64))
    if FEED:
        place = tl.load(rows + n) * next_stride + tl.load(positions + n)
        tl.store(next_ids + place, token)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    keys: Tensor,
    vocab_size: int,
    next_ids: Tensor | None = None,
) -> Tensor:
    """int64 [N] tokens from logits [N, V >= vocab_size]: Gumbel-max over the whole vocabulary.

    rows, positions int64 [N]: the row of each and the position of the token to be sampled;
    temperature float32 [R] (0: greedy), keys int32 [R, 2]. next_ids int32 [R, L]: the tokens
    are written there too, at their positions.
    """
    count, part = len(logits), 4096
    parts = triton.cdiv(vocab_size, part)
    device = logits.device
    best = torch.empty(count, parts, device=device)
    best_id = torch.empty(count, parts, dtype=torch.int32, device=device)
    out = torch.empty(count, dtype=torch.int64, device=device)
    _best_kernel[(parts, count)](
        best, best_id, logits, rows, positions, temperature, keys, logits.stride(0), vocab_size,
        PART=part, PARTS=parts, num_warps=8,
    )  # fmt: skip
    _pick_kernel[(count,)](
        out, best, best_id, rows, positions, next_ids,
        0 if next_ids is None else next_ids.stride(0),
        PARTS=parts, PAD=triton.next_power_of_2(parts), FEED=next_ids is not None, num_warps=1,
    )  # fmt: skip
    return out


class FusedSampler(Sampler):
    """`Sampler` whose greedy and unfiltered rows take two kernels, whatever the mixture."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(max_num_seqs, vocab_size, device)
        self.heat = torch.zeros(max_num_seqs, device=device)

    def assign(self, row: int, request: Request) -> None:
        """See `Sampler.assign`."""
        super().assign(row, request)
        params = request.sampling_params
        self.heat[row] = 0.0 if params.is_greedy else params.temperature

    def has_filtered(self, rows: Sequence[int]) -> bool:
        """Does any of these rows need top-k or top-p?"""
        return bool(len(self.filtered(rows)))

    def filtered(self, rows: Sequence[int]) -> np.ndarray:
        """int64: which of these rows need top-k or top-p."""
        return np.flatnonzero(self._kinds[np.asarray(rows, np.int64)] == _FILTERED)

    def note(self, row: int, params: SamplingParams) -> None:
        """The host's half of `assign`, for a row without filters."""
        self._kinds[row] = _GREEDY if params.is_greedy else _FREE
        self._widths[row] = 0

    def assign_many(self, joining: Sequence[tuple[int, Request]], staging: Any) -> None:
        """`assign` for all requests that join a step, in one upload (`graphs.assign_many`)."""
        from graphs import assign_many

        assign_many(self, joining, staging)

    def free_sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        next_ids: Tensor | None = None,
    ) -> Tensor:
        """All rows as if none were filtered; nothing is read on the host."""
        return sample(
            logits, rows, positions, self.heat, self.keys, self.vocab_size, next_ids
        )

    def __call__(self, logits: Tensor, rows: Sequence[int], positions: Tensor) -> Tensor:
        """See `Sampler.__call__`."""
        host_rows = np.asarray(rows)
        row = torch.from_numpy(host_rows.astype(np.int64)).to(
            self.device, non_blocking=True
        )
        token_ids = self.free_sample(logits, row, positions)
        filtered = np.flatnonzero(self._kinds[host_rows] == _FILTERED)
        if len(filtered):
            index = torch.from_numpy(filtered).to(self.device)
            token_ids[index] = super().__call__(
                logits[index], host_rows[filtered], positions[index]
            )
        return token_ids
