"""Both samplers draw what the definition says, from the same noise, whoever else is there.

The oracle counts in float64. A token counts as right if it stays even when top-p is a little
wider, and if nothing that stays when it is a little narrower has a better score by more than
rounding. Without a card the kernels run in Triton's interpreter, on tiny vocabularies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

REAL = torch.cuda.is_available()
if not REAL:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from octavo import fused_sampler  # noqa: E402
from octavo import sampler as plain_sampler  # noqa: E402
from octavo.config import ConfigError  # noqa: E402
from octavo.fused_sampler import FusedSampler, Tiling  # noqa: E402
from octavo.kernels import triton_problem  # noqa: E402
from octavo.noise_kernels import random_noise  # noqa: E402
from octavo.request import Request, SamplingParams  # noqa: E402
from octavo.sampler import Sampler, gumbel_noise, random_bits, row_keys  # noqa: E402

DEVICE = torch.device("cuda" if REAL else "cpu")
PROBLEM = triton_problem(DEVICE, torch.float32)
needs_triton = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
card = [pytest.mark.gpu, pytest.mark.skipif(not REAL, reason="needs a CUDA card")]
on_card = pytest.mark.parametrize("place", [pytest.param("card", marks=card)])
everywhere = pytest.mark.parametrize("place", ["here", pytest.param("card", marks=card)])

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEAR = 1e-4  # of scores, whose noise the card's own logarithm makes; and of top-p

MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"temperature": 3.0, "top_p": 0.98},
    {"temperature": 5.0, "top_k": 40},
    {"top_k": 1},
    {"top_p": 1e-8},
    {"top_k": 10**9, "top_p": 1.0},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 1e300},
    {"temperature": 1e-300, "top_k": 3},
]
CUTS = {"one part": (50, Tiling(64, 8, 4)), "four parts": (203, Tiling(64, 8, 2))}
REAL_CUTS = {"Qwen3": (151_936, Tiling()), "GPT-2": (50_257, Tiling())}


def logits_like(kind: str, count: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """[count, vocab + 5]; the last five are padding, and better than any token."""
    draw = torch.Generator().manual_seed(vocab)
    x = 3 * torch.randn(count, vocab + 5, generator=draw)
    if kind == "ties":
        x = x.round()
    elif kind == "steep":  # a text's
        ranks = torch.stack(
            [torch.randperm(vocab + 5, generator=draw) for _ in range(count)]
        )
        x = -1.5 * (ranks + 1).log()
    x[:, vocab:] = 100
    return x.to(dtype).to(DEVICE)


def requests(kinds: Sequence[dict[str, Any]]) -> list[tuple[int, Request]]:
    made = [Request("r", [0], SamplingParams(**p), seed=i) for i, p in enumerate(kinds)]
    return list(enumerate(made))


def make(
    kind: type[Sampler], kinds: Sequence[dict[str, Any]], vocab: int, *more: Any
) -> Sampler:
    """A sampler whose row i has the parameters kinds[i] and the seed i."""
    made = kind(len(kinds), vocab, DEVICE, *more)
    made.assign(requests(kinds))
    return made


def stays(x: Tensor, heat: float, top_k: int, top_p: float) -> Tensor:
    """bool [V]: few are more likely, and those have little of the probability (float64)."""
    values, which = x.unique(return_inverse=True)  # ascending
    counts = which.bincount(minlength=len(values))
    above = counts.sum() - counts.cumsum(0)
    stay = (above < top_k) if top_k > 0 else torch.ones_like(values, dtype=torch.bool)
    weights = ((values - values[-1]) / heat).exp() * counts * stay
    more = weights.flip(0).cumsum(0).flip(0) - weights
    stay &= (more < top_p * weights.sum()) | (top_p >= 1)
    stay[-1] = True
    return stay[which]


def check_token(token: int, x: Tensor, params: SamplingParams, seed: int, at: int) -> None:
    """The rule at the top of this file, for one row's logits [V]."""
    x, vocab = x.double().cpu(), len(x)
    assert 0 <= token < vocab
    if params.temperature < torch.finfo(torch.float32).tiny:
        assert token == x.argmax()
        return
    keys = torch.tensor([row_keys(seed, 0)], dtype=torch.int32)
    ids = torch.arange(vocab, dtype=torch.int32)[None]
    noise = gumbel_noise(random_bits(keys, torch.tensor([at]), ids))[0].double()
    scores = (x - x.max()) / params.temperature + noise
    wide, narrow = (
        stays(x, params.temperature, params.top_k, p)
        for p in (params.top_p * (1 + NEAR), params.top_p * (1 - NEAR))
    )
    assert wide[token] or params.top_p == 1
    allowed = narrow if params.top_p < 1 else wide
    assert scores[token] >= scores[allowed].max() - NEAR


def check_tokens(
    tokens: Tensor, logits: Tensor, rows: Tensor, at: Tensor, vocab: int
) -> None:
    for n, (token, row, place) in enumerate(
        zip(tokens.tolist(), rows.tolist(), at.tolist(), strict=True)
    ):
        params = SamplingParams(**MIXTURE[row])
        check_token(token, logits[n, :vocab], params, row, place)


# The noise


@needs_triton
@everywhere
def test_the_random_bits_are_the_plain_samplers(place: str) -> None:
    keys = torch.tensor([row_keys(s, 1) for s in (0, 7, 2**63)], dtype=torch.int32)
    spots, count = torch.tensor([1, 4097, 2**20]), 5000
    bits, noise = random_noise(keys.to(DEVICE), spots.to(DEVICE), count)
    plain = random_bits(keys, spots, torch.arange(count, dtype=torch.int32)[None])
    assert torch.equal(bits.cpu(), plain)
    gap = (noise.cpu() - gumbel_noise(plain.clone())).abs().max()
    assert gap < 2e-5


@needs_triton
@everywhere
def test_noise_stays_finite_at_both_ends(place: str) -> None:
    """Among many draws the smallest and the largest uniform numbers turn up."""
    keys = torch.tensor([row_keys(s, 0) for s in range(16)], dtype=torch.int32).to(DEVICE)
    spots = torch.arange(16).to(DEVICE)
    bits, noise = random_noise(keys, spots, 2**16 if REAL else 2**13)
    assert noise.isfinite().all() and noise.max() < 23 and noise.min() > -3.2
    order = (bits & 0x7FFFFFFF).flatten().argsort()
    assert (noise.flatten()[order].diff() <= 2e-5).all()  # more uniform, less noise


# The same tokens as the definition's


@pytest.mark.parametrize("kind", ["normal", "ties", "steep"])
@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=str)
def test_the_plain_sampler_is_right(dtype: torch.dtype, vocab: int, kind: str) -> None:
    logits = logits_like(kind, len(MIXTURE), vocab, dtype)
    rows = torch.arange(len(MIXTURE), device=DEVICE)
    tokens = make(Sampler, MIXTURE, vocab)(logits, rows, 100 * rows)
    check_tokens(tokens, logits, rows, 100 * rows, vocab)


def check_fused(kind: str, dtype: torch.dtype, vocab: int, cut: Tiling) -> None:
    logits = logits_like(kind, len(MIXTURE), vocab, dtype)
    rows = torch.arange(len(MIXTURE), device=DEVICE).flip(0)
    at = 1000 * rows + 7
    tokens = make(FusedSampler, MIXTURE, vocab, cut)(logits, rows, at)
    check_tokens(tokens, logits, rows, at, vocab)
    differ = int((tokens != make(Sampler, MIXTURE, vocab)(logits, rows, at)).sum())
    print(f"{differ} of {len(rows)} tokens differ from the plain sampler's")
    assert differ <= (1 if REAL else 0)  # near-ties: `check_tokens` says so


@needs_triton
@pytest.mark.parametrize(
    ("cut", "dtype", "kind"),
    [
        ("one part", FP32, "normal"),
        ("one part", BF16, "steep"),
        ("four parts", BF16, "ties"),
        ("four parts", FP16, "normal"),
    ],
    ids=str,
)
def test_the_fused_sampler_is_right(cut: str, dtype: torch.dtype, kind: str) -> None:
    check_fused(kind, dtype, *CUTS[cut])


@on_card
@pytest.mark.parametrize("kind", ["normal", "ties", "steep"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("cut", [*CUTS, *REAL_CUTS])
def test_the_fused_sampler_is_right_on_a_card(
    cut: str, dtype: torch.dtype, kind: str, place: str
) -> None:
    check_fused(kind, dtype, *(CUTS | REAL_CUTS)[cut])


@on_card
@pytest.mark.parametrize("params", MIXTURE, ids=str)
def test_the_fused_sampler_draws_as_often_as_softmax_says(params: Any, place: str) -> None:
    vocab, count = 60, 40_000
    x = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    sampler, at = make(FusedSampler, [params], vocab), torch.arange(count, device=DEVICE)
    logits = x.to(DEVICE).expand(count, -1).contiguous()
    tokens = sampler(logits, torch.zeros_like(at), at)
    given = SamplingParams(**params)
    heat = max(given.temperature, 1e-300)
    stay = stays(x.double(), heat, given.top_k, given.top_p)
    probs = (((x - x.max()).double() / heat).exp() * stay).numpy()
    expected = count * probs / probs.sum()
    counts = np.bincount(tokens.cpu().numpy(), minlength=vocab)
    assert not counts[expected == 0].any()
    often = expected >= 5
    score = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert score <= often.sum() - 1 + 5 * (2 * often.sum()) ** 0.5


SAMPLERS = [Sampler, pytest.param(FusedSampler, marks=needs_triton)]
both = pytest.mark.parametrize("kind", SAMPLERS)


def tokens_of(
    kind: type[Sampler], x: Tensor, draws: int, params: dict[str, Any]
) -> list[int]:
    """Tokens drawn from logits [V] at `draws` positions; in 16 bits, which are searched faster."""
    cut = [] if REAL or kind is Sampler else [Tiling(64, 8, 2)]
    made, at = make(kind, [params], len(x), *cut), torch.arange(draws, device=DEVICE)
    logits = x.to(DEVICE, BF16).expand(draws, -1).contiguous()
    return made(logits, torch.zeros_like(at), at).tolist()


@everywhere
@both
@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-8}, {"top_k": 2, "top_p": 0.3}], ids=str
)
def test_ties_with_the_last_that_stays_stay(
    kind: type[Sampler], params: Any, place: str
) -> None:
    x = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, -1.0])
    assert set(tokens_of(kind, x, 12, params)) == {1, 3, 4}


@everywhere
@both
def test_top_p_counts_within_what_top_k_leaves(kind: type[Sampler], place: str) -> None:
    x = torch.tensor([0.3, 0.25, 0.2, *[0.005] * 50]).log()
    assert set(tokens_of(kind, x, 16, {"top_k": 3, "top_p": 0.7})) == {0, 1}


def test_ties_may_reach_beyond_the_first_candidates() -> None:
    """The plain sampler looks at 1,024 first; here more than that are equal."""
    x = torch.zeros(3000)
    x[5], x[2000:] = 1.0, -1.0
    for params in ({"top_k": 7}, {"top_p": 0.01}, {"top_k": 1024}, {"top_k": 1999}):
        tokens = tokens_of(Sampler, x, 3000, params)
        assert max(tokens) in range(1900, 2000)
    assert set(tokens_of(Sampler, x, 100, {"top_k": 1})) == {5}


@everywhere
@both
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.99}, {"top_k": 9, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("heat", [1.0, 1e300])
def test_what_a_mask_forbids_is_never_drawn(
    kind: type[Sampler], params: Any, heat: float, place: str
) -> None:
    x = torch.full((40,), float("-inf"))
    x[[7, 33]] = torch.tensor([1.0, 1.5])
    assert set(tokens_of(kind, x, 5, {"temperature": heat, **params})) <= {7, 33}


BROKEN = {
    "no number": [float("nan")] * 20,
    "a few": [float("nan"), 1.0, float("nan"), 2.0] * 5,
    "nothing": [float("-inf")] * 20,
    "everything": [float("inf")] * 20,
}


@everywhere
@both
@pytest.mark.parametrize("name", BROKEN)
def test_broken_logits_give_an_id_of_the_vocabulary(
    kind: type[Sampler], name: str, place: str
) -> None:
    logits = torch.tensor([*BROKEN[name], 100.0, 100.0], dtype=BF16, device=DEVICE)
    kinds = [
        {"temperature": 0},
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": 4, "top_p": 0.5},
    ]
    rows = torch.arange(len(kinds), device=DEVICE)
    tokens = make(kind, kinds, 20)(logits.repeat(len(kinds), 1), rows, rows)
    assert set(tokens.tolist()) <= set(range(20))


@everywhere
@both
def test_an_overflown_logit_is_the_best(kind: type[Sampler], place: str) -> None:
    x = torch.zeros(20)
    x[11] = float("inf")
    for params in ({"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}):
        assert tokens_of(kind, x, 2, params) == [11, 11]


# Rows


@everywhere
@both
def test_b62_neither_the_batch_nor_its_content_changes_a_row(
    kind: type[Sampler], place: str
) -> None:
    """Bit for bit: alone, among others, and among others that are broken."""
    vocab, cut = (151_936, Tiling()) if REAL else (203, Tiling(64, 8, 2))
    more = [cut] * (kind is FusedSampler)
    kinds = MIXTURE[1:5]
    sampler, rows = make(kind, kinds, vocab, *more), torch.arange(len(kinds), device=DEVICE)
    logits, at = logits_like("normal", len(kinds), vocab, BF16), 50 * rows
    together = sampler(logits, rows, at)
    for i, row in enumerate(rows.split(1)):
        assert torch.equal(
            sampler(logits[i : i + 1], row, at[i : i + 1]), together[i : i + 1]
        )
    logits[1::2] = float("nan")
    assert torch.equal(sampler(logits, rows, at)[::2], together[::2])


def test_all_that_join_arrive_in_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, upload = [], plain_sampler.Staging.upload

    def counted(self: Any, *arrays: np.ndarray) -> Any:
        uploads.append(arrays)
        return upload(self, *arrays)

    monkeypatch.setattr(plain_sampler.Staging, "upload", counted)
    whole, single = (Sampler(len(MIXTURE), 203, DEVICE) for _ in range(2))
    whole.assign(requests(MIXTURE))
    assert len(uploads) == 1
    for pair in requests(MIXTURE):
        single.assign([pair])
    assert torch.equal(whole.settings, single.settings)
    assert torch.equal(whole.temperature[:2].cpu(), torch.tensor([0, 0.6]))
    assert whole.temperature.isfinite().all() and whole.top_k.min() >= 1


def test_a_row_that_nobody_has_is_greedy() -> None:
    """A graph's padding has a row too, and nothing may go wrong in it."""
    x, row = (
        torch.tensor([[0.0, 3.0, 1.0]], device=DEVICE),
        torch.tensor([0], device=DEVICE),
    )
    for kind in (Sampler, *([FusedSampler] if PROBLEM is None else [])):
        assert kind(1, 3, DEVICE)(x, row, row).tolist() == [1]


# What can't be had


@needs_triton
def test_the_fused_sampler_refuses_float64() -> None:
    row = torch.tensor([0], device=DEVICE)
    x = torch.zeros(1, 8, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ConfigError, match="float64.*sampler='torch'"):
        FusedSampler(1, 8, DEVICE)(x, row, row)


def test_without_triton_the_error_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_sampler, "triton_problem", lambda *_: "no Triton here")
    with pytest.raises(
        ConfigError, match="sampler='fused': no Triton here; sampler='torch'"
    ):
        FusedSampler(1, 8)


# In a graph


@on_card
def test_a_recorded_call_samples_what_lies_there_now(place: str) -> None:
    """Logits, rows, positions and settings may all have changed since."""
    vocab, count = 151_936, len(MIXTURE)
    sampler, rows = make(FusedSampler, MIXTURE, vocab), torch.arange(count, device=DEVICE)
    logits, at = logits_like("steep", count, vocab, BF16), rows.clone()
    sampler(logits, rows, at)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler(logits, rows, at)
    for step in range(1, 4):
        logits.copy_(logits.roll(step, 0))
        rows.copy_(rows.roll(step))
        at.add_(step)
        sampler.assign(requests(MIXTURE[step:] + MIXTURE[:step]))
        graph.replay()
        assert torch.equal(tokens, sampler(logits, rows, at))
