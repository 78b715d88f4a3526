"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.request import Request

__all__ = ["mix", "row_keys", "random_bits", "gumbel_noise", "Sampler"]


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned 32-bit number."""
    return value - 2**32 if value >= 2**31 else value


def mix(x: Tensor) -> Tensor:
    """Scramble int32 numbers, one to one, in place; returns x.

    The constants are Chris Wellons' "lowbias32", found by search for least bias.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def row_keys(seed: int, sample_index: int) -> tuple[int, int]:
    """Two int32 keys for one answer, from its seed (0 to 2**64 - 1) and its index among n."""
    text = seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    first, second = (
        int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:])
    )
    return first, second


def random_bits(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits as int32 [N, M], a pure function of its arguments.

    keys int32 [N, 2]; positions [N], those of the tokens to be sampled; token_ids int32
    [N, M] or [1, M].
    """
    place = positions.to(torch.int32)
    first = mix(keys[:, 0] + place * _signed(0x9E3779B9))
    second = mix(keys[:, 1] ^ mix(place + _signed(0x85EBCA6B)))
    bits = mix(token_ids * _signed(0x9E3779B1) + first[:, None])
    bits ^= second[:, None]
    return mix(bits)


def gumbel_noise(bits: Tensor) -> Tensor:
    """float32 Gumbel noise from random int32 bits (31 of them are used); always finite."""
    uniform = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2**-31
    uniform.clamp_(max=1 - 2**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


_GREEDY, _FREE, _FILTERED = range(3)


class Sampler:
    """Temperature, top-k and top-p with counter-based noise: a `TokenSampler` in PyTorch."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu"
    ):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.temperature = torch.ones(max_num_seqs, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_p = torch.ones(max_num_seqs, device=device)
        self.keys = torch.zeros(max_num_seqs, 2, dtype=torch.int32, device=device)
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)[None]
        self._kinds = np.zeros(max_num_seqs, np.int8)
        self._widths = np.zeros(max_num_seqs, np.int64)  # top_k on the host; 0: none

    def assign(self, row: int, request: Request) -> None:
        """The row samples for this request from now on."""
        params = request.sampling_params
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.temperature[row] = params.temperature or 1.0
        self.top_k[row] = top_k or self.vocab_size
        self.top_p[row] = params.top_p
        keys = row_keys(request.seed, request.sample_index)
        self.keys[row] = torch.tensor(keys, dtype=torch.int32)
        filtered = top_k > 0 or params.top_p < 1
        self._kinds[row] = _GREEDY if params.is_greedy else _FILTERED if filtered else _FREE
        self._widths[row] = top_k

    def __call__(self, logits: Tensor, rows: Sequence[int], positions: Tensor) -> Tensor:
        """int64 [N] tokens from logits [N, V >= vocab_size] (B63: entries beyond are padding)."""
        logits = logits[:, : self.vocab_size]
        wide = (
            logits.float() if logits.is_cpu and logits.dtype == torch.bfloat16 else logits
        )
        token_ids = wide.argmax(dim=-1)  # PyTorch's argmax of bfloat16 is slow on a CPU
        host_rows = np.asarray(rows)
        for kind, pick in ((_FREE, self._pick_freely), (_FILTERED, self._pick_filtered)):
            members = np.flatnonzero(self._kinds[host_rows] == kind)
            for part in np.array_split(members, self._num_parts(len(members))):
                if len(part):
                    index = torch.from_numpy(part).to(self.device)
                    row = torch.from_numpy(host_rows[part]).to(self.device)
                    scaled = self._scale(logits[index], row)
                    width = int(self._widths[host_rows[part]].max())
                    token_ids[index] = pick(scaled, row, positions[index], width)
        return token_ids

    def _num_parts(self, count: int) -> int:
        per_part = count if self.device.type == "cuda" else max(1, 2**17 // self.vocab_size)
        return max(1, -(-count // max(1, per_part)))

    def _scale(self, logits: Tensor, rows: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        wide = wide - wide.amax(dim=-1, keepdim=True)
        return wide / self.temperature[rows, None].to(wide.dtype)

    def _pick_freely(
        self, scaled: Tensor, rows: Tensor, positions: Tensor, width: int
    ) -> Tensor:
        """Over the whole vocabulary."""
        noise = gumbel_noise(random_bits(self.keys[rows], positions, self._token_ids))
        return (scaled + noise).argmax(dim=-1)

    def _pick_filtered(
        self, scaled: Tensor, rows: Tensor, positions: Tensor, width: int
    ) -> Tensor:
        """Among what top-k (at most `width`) and top-p leave."""
        values, ids = self._candidates(scaled, rows, min(self.vocab_size, max(1024, width)))
        noise = gumbel_noise(random_bits(self.keys[rows], positions, ids.to(torch.int32)))
        winners = (values + noise).argmax(dim=-1, keepdim=True)
        return ids.gather(1, winners)[:, 0]

    def _candidates(
        self, scaled: Tensor, rows: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Values [N, M], -inf where filtered out, and their token ids int64 [N, M]."""
        top_k, top_p = self.top_k[rows, None], self.top_p[rows, None].to(scaled.dtype)
        values, ids = scaled.topk(width, dim=-1)
        in_k = torch.arange(width, device=self.device) < top_k
        values = values.masked_fill(~in_k, float("-inf"))
        unlimited = torch.where(top_k > width, scaled, float("-inf"))
        total = torch.maximum(unlimited.logsumexp(-1), values.logsumexp(-1))[:, None]
        probs = (values - total).exp()
        before = probs.cumsum(dim=-1) - probs
        enough = (top_k <= width) | (before[:, -1:] >= top_p)
        if width < self.vocab_size and not bool(enough.all()):
            return self._candidates(scaled, rows, self.vocab_size)
        keep = before < top_p
        keep[:, 0] = True
        return values.masked_fill(~keep, float("-inf")), ids
