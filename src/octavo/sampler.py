"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.batch import Staging
from octavo.request import Request, SamplingParams

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
    """Temperature, top-k and top-p with counter-based noise: a `TokenSampler` in PyTorch.

    A token stays if fewer than `top_k` are more likely and if, of the probability that is then
    left, those that are more likely have less than `top_p`. Ties with the last that stays stay
    too, so nothing hangs on the order in which a sort puts equals.
    """

    capturable = False  # it looks at rows on the host

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.settings = torch.zeros(max_num_seqs, 5, dtype=torch.int32, device=device)
        self.temperature, self.top_p = self.settings[:, :2].view(torch.float32).unbind(1)
        self.top_k, self.keys = self.settings[:, 2], self.settings[:, 3:]
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)[None]
        self._staging = Staging(self.device)
        self._kinds = np.full(max_num_seqs, _GREEDY)

    def _top_k(self, params: SamplingParams) -> int:
        """The whole vocabulary where there is no limit."""
        return params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size

    def assign(self, joining: Sequence[tuple[int, Request]]) -> None:
        """Each row of (row, request) samples for that request from now on: one upload."""
        rows = np.array([row for row, _ in joining], np.int64)
        given = [request.sampling_params for _, request in joining]
        shares = [(_temperature(params), params.top_p) for params in given]
        heat, top_p = np.array(shares, np.float32).reshape(-1, 2).T
        top_k = np.array([self._top_k(params) for params in given], np.int64)
        filtered = (top_k < self.vocab_size) | (top_p < 1)
        self._kinds[rows] = np.where(
            heat == 0, _GREEDY, np.where(filtered, _FILTERED, _FREE)
        )
        keys = np.array([row_keys(r.seed, r.sample_index) for _, r in joining], np.int64)
        floats = np.stack([heat, top_p]).view(np.int32)
        columns = np.stack([*floats, top_k, *keys.reshape(-1, 2).T], axis=1)
        row, settings = self._staging.upload(rows, columns.ravel())
        self.settings[row] = settings.view(-1, 5).to(torch.int32)

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """int64 [N] tokens from logits [N, V >= vocab_size] (B63: entries beyond are padding).

        rows, positions int64 [N] on the device: whose settings hold, and where the tokens will be.
        """
        logits = logits[:, : self.vocab_size]
        wide = (
            logits.float() if logits.is_cpu and logits.dtype == torch.bfloat16 else logits
        )
        token_ids = wide.argmax(dim=-1)  # PyTorch's argmax of bfloat16 is slow on a CPU
        kinds = self._kinds[rows.numpy(force=True)]
        for kind, pick in ((_FREE, self._pick_freely), (_FILTERED, self._pick_filtered)):
            members = np.flatnonzero(kinds == kind)
            for part in np.array_split(members, self._num_parts(len(members))):
                if len(part):
                    index = torch.from_numpy(part).to(self.device)
                    scaled = self._scale(logits[index], rows[index])
                    token_ids[index] = pick(scaled, rows[index], positions[index])
        return token_ids

    def _num_parts(self, count: int) -> int:
        per_part = count if self.device.type == "cuda" else max(1, 2**17 // self.vocab_size)
        return max(1, -(-count // max(1, per_part)))

    def _scale(self, logits: Tensor, rows: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        wide = wide - wide.amax(dim=-1, keepdim=True)
        return wide / self.temperature[rows, None].to(wide.dtype)

    def _pick_freely(self, scaled: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Over the whole vocabulary."""
        noise = gumbel_noise(random_bits(self.keys[rows], positions, self._token_ids))
        return (scaled + noise).argmax(dim=-1)

    def _pick_filtered(self, scaled: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Among what top-k and top-p leave."""
        top_k = self.top_k[rows]
        most = int(top_k.where(top_k < self.vocab_size, 0).max())
        width = min(self.vocab_size, max(1024, most + 1))
        values, ids = self._candidates(scaled, rows, width)
        noise = gumbel_noise(random_bits(self.keys[rows], positions, ids.to(torch.int32)))
        winners = (values + noise).argmax(dim=-1, keepdim=True)
        return ids.gather(1, winners)[:, 0]

    def _candidates(
        self, scaled: Tensor, rows: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Values [N, M], -inf where filtered out, and their token ids int64 [N, M]."""
        values, ids = scaled.topk(width, dim=-1)
        least = self._least(scaled, values, rows)
        missing = (values[:, -1:] >= least) & (values[:, -1:] > float("-inf"))
        if width < self.vocab_size and bool(missing.any()):
            return self._candidates(scaled, rows, self.vocab_size)
        return values.masked_fill(values < least, float("-inf")), ids

    def _least(self, scaled: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        """[N, 1]: the least value that stays, given each row's best in order, [N, M]."""
        top_k, top_p = self.top_k[rows, None], self.top_p[rows, None]
        last = values.gather(1, top_k.clamp(max=values.shape[1]).long() - 1)
        last = last.where(top_k < self.vocab_size, float("-inf"))
        total = scaled.where(scaled >= last, float("-inf")).logsumexp(-1, keepdim=True)
        probs = (values - total).exp()
        before = probs.cumsum(dim=-1) - probs
        stay = (values >= last) & ((before < top_p) | (top_p >= 1))
        return values.gather(1, stay.sum(-1, keepdim=True).clamp(min=1) - 1)


_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def _temperature(params: SamplingParams) -> float:
    heat = params.temperature
    return min(heat, _MOST) if heat >= _LEAST else 0.0
