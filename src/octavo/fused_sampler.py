"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.config import ConfigError
from octavo.filter_kernels import _choose, _chunk, _least_logit, _load_logits
from octavo.kernels import _jit, tl, triton, triton_problem
from octavo.noise_kernels import _noise
from octavo.sampler import Sampler

__all__ = ["Tiling", "fused_sample", "FusedSampler"]


@_jit
def _row_settings(settings, vocab):
    """(temperature, top_k, top_p, is anything filtered?); a temperature of 0 is greedy."""
    heat = tl.load(settings).to(tl.float32, bitcast=True)
    top_p = tl.load(settings + 1).to(tl.float32, bitcast=True)
    top_k = tl.load(settings + 2)
    return heat, top_k, top_p, (heat > 0) & ((top_k < vocab) | (top_p < 1))


@_jit
def _part_kernel(
    peaks, shares, winners, tops, logits, rows, positions, settings, stride, vocab,
    PART: tl.constexpr, PARTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program PART tokens of a row."""
    part, n = tl.program_id(0), tl.program_id(1)
    settings += tl.load(rows + n) * 5
    heat, top_k, top_p, filtered = _row_settings(settings, vocab)
    ids = part * PART + tl.arange(0, PART)
    x = _load_logits(logits + n.to(tl.int64) * stride, ids, vocab)
    peak, place = tl.max(x, 0), n * PARTS + part
    tl.store(peaks + place, peak)
    behind = x - tl.maximum(peak, -3.4028234e38)
    if filtered:
        tl.store(shares + place, tl.sum(tl.exp(behind / heat), 0))
        segments: tl.constexpr = PART // SEGMENT
        largest = tl.max(tl.reshape(x, (segments, SEGMENT)), 1)
        tl.store(tops + place * segments + tl.arange(0, segments), largest)
    else:
        if heat > 0:
            _, noise = _noise(settings + 3, tl.load(positions + n), ids)
            behind = behind / heat + noise
        score, index = tl.max(behind, 0, return_indices=True)
        tl.store(shares + place, score)
        tl.store(winners + place, part * PART + index)


@_jit
def _draw(pivot, row, keys, position, CHUNK: tl.constexpr, SEGMENT: tl.constexpr):
    """The token with the best score among those that reach the pivot."""
    logits, chosen, largest, vocab, peak, heat = row
    count = _choose(chosen, largest, pivot)
    best, token = peak - float("inf"), count * 0
    for start in range(0, count, CHUNK):
        ids, x = _chunk(row, start, count, CHUNK, SEGMENT)
        _, noise = _noise(keys, position, ids)
        scores = tl.where(x >= pivot, (x - peak) / heat + noise, float("-inf"))
        # Not as one flat tile: Triton 3.6 gives wrong indices behind a reshape of a wide load.
        best_of, columns = tl.max(scores, 1, return_indices=True)
        score, place = tl.max(best_of, 0, return_indices=True)
        column = tl.sum(tl.where(tl.arange(0, CHUNK) == place, columns, 0), 0)
        winner = tl.load(chosen + start + place) * SEGMENT + column
        token = tl.where(score > best, winner, token)
        best = tl.maximum(score, best)
    return token


@_jit
def _pick_kernel(
    out, peaks, shares, winners, tops, chosen, logits, rows, positions, settings, stride, vocab,
    PARTS: tl.constexpr, PAD_PARTS: tl.constexpr, TOPS: tl.constexpr, PAD_TOPS: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    n = tl.program_id(0)
    settings += tl.load(rows + n) * 5
    heat, top_k, top_p, filtered = _row_settings(settings, vocab)
    heat = tl.where(heat > 0, heat, 1.0)
    part = tl.arange(0, PAD_PARTS)
    here, inside = n * PARTS + part, part < PARTS
    peak_of = tl.load(peaks + here, mask=inside, other=float("-inf"))
    share = tl.load(shares + here, mask=inside, other=0.0)
    peak = tl.maximum(tl.max(peak_of, 0), -3.4028234e38)
    behind = (peak_of - peak) / heat
    if filtered:
        top = tl.arange(0, PAD_TOPS)
        largest = tl.load(tops + n * TOPS + top, mask=top < TOPS, other=float("-inf"))
        mine = logits + n.to(tl.int64) * stride
        row = (mine, chosen + n * PAD_TOPS, largest, vocab, peak, heat)
        total = tl.sum(share * tl.exp(behind), 0)
        pivot = _least_logit(top_k, top_p, total, row, CHUNK, SEGMENT, SHIFT)
        token = _draw(pivot, row, settings + 3, tl.load(positions + n), CHUNK, SEGMENT)
    else:
        _, winner = tl.max(share + behind, 0, return_indices=True)
        token = tl.load(winners + n * PARTS + winner)
    tl.store(out + n, token.to(tl.int64))


_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@dataclass(frozen=True)
class Tiling:
    """How a vocabulary is cut; all of them powers of two."""

    part: int = 4096
    """Tokens a program of the first kernel."""
    segment: int = 128
    """Tokens whose largest logit is written down."""
    chunk: int = 32
    """Segments that the second kernel loads at a time."""
    warps: int = 8


def fused_sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    settings: Tensor,
    vocab_size: int,
    tiling: Tiling,
) -> Tensor:
    """int64 [N] tokens from logits [N, V >= vocab_size], float32, bfloat16 or float16.

    rows, positions int64 [N]; settings int32 [R, 5], a `Sampler`'s. Nothing is read on the host.
    """
    count, device = len(logits), logits.device
    parts = triton.cdiv(vocab_size, tiling.part)
    tops = parts * (tiling.part // tiling.segment)
    pad = triton.next_power_of_2(tops)
    peaks, shares = (torch.empty(count, parts, device=device) for _ in range(2))
    winners = torch.empty(count, parts, dtype=torch.int32, device=device)
    largest = torch.empty(count, tops, device=device)
    chosen = torch.empty(count, pad, dtype=torch.int32, device=device)
    out = torch.empty(count, dtype=torch.int64, device=device)
    given = logits, rows, positions, settings, logits.stride(0), vocab_size
    cut = {"PARTS": parts, "SEGMENT": tiling.segment, "num_warps": tiling.warps}
    _part_kernel[(parts, count)](
        peaks, shares, winners, largest, *given, PART=tiling.part, **cut
    )
    _pick_kernel[(count,)](
        out, peaks, shares, winners, largest, chosen, *given,
        PAD_PARTS=triton.next_power_of_2(parts), TOPS=tops, PAD_TOPS=pad,
        CHUNK=tiling.chunk, SHIFT=_SHIFTS[logits.dtype], **cut,
    )  # fmt: skip
    return out


class FusedSampler(Sampler):
    """`Sampler` in two kernels, whatever the mixture of rows.

    ConfigError where the kernels can't run, and for logits in float64.
    """

    capturable = True

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        tiling: Tiling | None = None,
    ) -> None:
        super().__init__(max_num_seqs, vocab_size, device)
        if problem := triton_problem(self.device, torch.float32):
            raise ConfigError(f"sampler='fused': {problem}; sampler='torch' runs")
        self.tiling = tiling or Tiling()

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """See `Sampler.__call__`."""
        if problem := triton_problem(self.device, logits.dtype):
            raise ConfigError(f"sampler='fused': {problem}; sampler='torch' runs")
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        return fused_sample(
            logits, rows, positions, self.settings, self.vocab_size, self.tiling
        )
