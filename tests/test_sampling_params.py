"""Every field of `SamplingParams` has an effect, and the random numbers are what they should be.

B38: one test a public field that fails if the field is ignored. Whole answers come from the
tiny Llama in float64; distributions are counted through the `Sampler` and compared with
softmax computed from scratch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import NumberTokenizer, drain, tiny_engine
from torch import Tensor

from octavo.engine import CompletionOutput, Engine
from octavo.request import Request, SamplingParams
from octavo.sampler import Sampler

PROMPT = [5, 6, 7]
CROWD = [[8] * 20, [9], list(range(100, 130))]
GREEDY = {"temperature": 0, "max_tokens": 20}
WARM = {"temperature": 1.5, "max_tokens": 20, "seed": 7}


def complete(engine: Engine, prompts: Sequence[Any], params: Any) -> list[CompletionOutput]:
    """All answers, by prompt and index."""
    done = [d for d in engine.stream(prompts, params) if d.finished]
    return [d.finished for d in sorted(done, key=lambda d: (int(d.request_id), d.index))]


def answer(engine: Engine | None = None, **params: Any) -> CompletionOutput:
    """One answer to the prompt, on a fresh engine unless one is given."""
    return complete(engine or tiny_engine(), [PROMPT], SamplingParams(**params))[0]


@functools.cache
def greedy_ids() -> list[int]:
    return answer(**GREEDY).token_ids


def after_the_repeats(count: int) -> int:
    """The greedy answer's `count`-th token that it hadn't said before, and hence ends at."""
    return list(dict.fromkeys(greedy_ids()))[count]


def up_to(token_id: int) -> list[int]:
    return greedy_ids()[: greedy_ids().index(token_id) + 1]


# One test a field (B38)


def test_b38_n() -> None:
    group = complete(tiny_engine(), [PROMPT], SamplingParams(n=3, **WARM))
    assert [a.index for a in group] == [0, 1, 2]


def test_b38_temperature() -> None:
    """B53: 0 takes the best everywhere; hot says something else, cold is as good as greedy."""
    assert answer(**GREEDY).token_ids == answer(**{**WARM, "temperature": 1e-6}).token_ids
    assert answer(**WARM).token_ids != greedy_ids()
    assert answer(**{**WARM, "temperature": 0.5}).token_ids != answer(**WARM).token_ids


def test_b38_top_k() -> None:
    assert answer(**WARM, top_k=1).token_ids == greedy_ids()
    assert answer(**WARM, top_k=2).token_ids not in (greedy_ids(), answer(**WARM).token_ids)


def test_b38_top_p() -> None:
    assert answer(**WARM, top_p=1e-6).token_ids == greedy_ids()
    assert answer(**WARM, top_p=0.3).token_ids not in (
        greedy_ids(),
        answer(**WARM).token_ids,
    )


def test_b38_max_tokens() -> None:
    for count in (1, 9):
        short = answer(temperature=0, max_tokens=count)
        assert (short.token_ids, short.finish_reason) == (greedy_ids()[:count], "length")
    whole = answer(temperature=0, max_tokens=None)  # up to the model's length
    assert len(whole.token_ids) == 128 - len(PROMPT)
    default = complete(tiny_engine(max_model_len=400), [PROMPT], None)[0]
    assert len(default.token_ids) == SamplingParams().max_tokens == 256


def test_b38_stop() -> None:
    token = after_the_repeats(3)
    for stop in (f"{token} ", ["never", f"{token} "]):
        cut = answer(**GREEDY, stop=stop)
        assert (cut.token_ids, cut.finish_reason) == (up_to(token), "stop")
        assert cut.stop_reason == f"{token} "
        assert cut.text == NumberTokenizer().decode(up_to(token)[:-1])


def test_b38_stop_token_ids() -> None:
    token = after_the_repeats(4)
    cut = answer(**GREEDY, stop_token_ids=[token])
    assert (cut.token_ids, cut.stop_reason) == (up_to(token), token)
    assert cut.text == NumberTokenizer().decode(up_to(token)[:-1])


def test_b38_ignore_eos() -> None:
    token = after_the_repeats(4)
    engine = tiny_engine(eos_token_ids=[token])
    assert answer(engine, **GREEDY).token_ids == up_to(token)
    assert answer(engine, **GREEDY, ignore_eos=True).token_ids == greedy_ids()


def test_b38_seed() -> None:
    first, again, other = (answer(**{**WARM, "seed": s}).token_ids for s in (1, 1, 2))
    assert first == again != other
    ends = [answer(**{**WARM, "seed": s}).token_ids for s in (0, 2**63, 2**64 - 1)]
    assert len(set(map(tuple, ends))) == 3


def test_b38_include_stop_str_in_output() -> None:
    token = after_the_repeats(3)
    cut = answer(**GREEDY, stop=f"{token} ", include_stop_str_in_output=True)
    assert cut.text == NumberTokenizer().decode(up_to(token))
    cut = answer(**GREEDY, stop_token_ids=[token], include_stop_str_in_output=True)
    assert cut.text == NumberTokenizer().decode(up_to(token))


def test_b38_skip_special_tokens() -> None:
    engine = tiny_engine(NumberTokenizer(special_ids=[after_the_repeats(2)]))
    words = answer(engine, **GREEDY).text.split()
    assert words == [str(i) for i in greedy_ids() if i != after_the_repeats(2)]
    shown = answer(engine, **GREEDY, skip_special_tokens=False)
    assert shown.text == NumberTokenizer().decode(greedy_ids())


def test_b38_no_field_is_without_a_test() -> None:
    tested = {name.removeprefix("test_b38_") for name in globals() if "test_b38" in name}
    assert tested >= {f.name for f in dataclasses.fields(SamplingParams)}


def test_parameters_may_differ_from_prompt_to_prompt() -> None:
    params = [
        SamplingParams(**GREEDY),
        SamplingParams(**WARM),
        SamplingParams(max_tokens=1),
    ]
    first, second, third = complete(tiny_engine(), [PROMPT] * 3, params)
    assert first.token_ids == greedy_ids() and second.token_ids == answer(**WARM).token_ids
    assert len(third.token_ids) == 1


# Seeds (B53, B56, B57, B58)


def test_a_seeded_answer_depends_on_neither_company_row_pool_nor_preemption() -> None:
    expected = answer(**WARM).token_ids
    seeded, free = SamplingParams(**WARM), SamplingParams(temperature=1.5, max_tokens=20)
    machines: list[dict[str, Any]] = [
        {},
        {"max_num_seqs": 2},
        {"block_size": 4, "num_kv_blocks": 32},
        {"block_size": 4, "num_kv_blocks": 13, "max_model_len": 50},
    ]
    preemptions = 0
    for place in (0, 3):  # the row moves with the place
        prompts, params = CROWD[:place] + [PROMPT] + CROWD[place:], [free] * 4
        params[place] = seeded
        for machine in machines:
            engine = tiny_engine(seed=None, **machine)
            got = complete(engine, prompts, params)[place]
            assert got.token_ids == expected
            preemptions += got.metrics.num_preemptions
    assert preemptions > 0, "it was never thrown out: half of the promise is untested"


def test_b56_a_seeded_request_beside_an_unseeded_one_is_the_same_every_time() -> None:
    engine = tiny_engine(seed=None)
    pair = [SamplingParams(**WARM), SamplingParams(temperature=1.5, max_tokens=20)]
    runs = [complete(engine, [PROMPT, PROMPT], pair) for _ in range(4)]
    assert {tuple(a.token_ids) for a, _ in runs} == {tuple(answer(**WARM).token_ids)}
    assert len({tuple(b.token_ids) for _, b in runs}) == 4


@pytest.mark.parametrize("seed", [None, 3])
def test_b57_several_answers_differ_and_a_seed_brings_the_set_back(
    seed: int | None,
) -> None:
    params = SamplingParams(n=8, temperature=1.2, max_tokens=20, seed=seed)
    engine = tiny_engine(seed=None)
    first, second = (
        [tuple(a.token_ids) for a in complete(engine, [PROMPT], params)] for _ in range(2)
    )
    assert len(set(first)) == 8
    assert (first == second) == (seed is not None)


def test_the_first_of_several_answers_is_the_only_one_of_a_single_request() -> None:
    group = complete(tiny_engine(), [PROMPT], SamplingParams(n=3, **WARM))
    assert group[0].token_ids == answer(**WARM).token_ids


def test_b58_without_any_seed_engines_differ_and_the_engines_seed_repeats_them() -> None:
    params = {"temperature": 1.5, "max_tokens": 20}
    free = [tuple(answer(tiny_engine(seed=None), **params).token_ids) for _ in range(3)]
    assert len(set(free)) == 3
    one, same, other = (answer(tiny_engine(seed=s), **params).token_ids for s in (1, 1, 2))
    assert one == same != other


def test_greedy_ignores_the_seed() -> None:
    assert [answer(**GREEDY, seed=s).token_ids for s in (1, 2)] == [greedy_ids()] * 2


def test_b53_greedy_and_sampled_rows_share_a_batch() -> None:
    mixed = [SamplingParams(**GREEDY), SamplingParams(**WARM), SamplingParams(**GREEDY)]
    first, second, third = complete(tiny_engine(), [PROMPT] * 3, mixed)
    assert first.token_ids == third.token_ids == greedy_ids()
    assert second.token_ids == answer(**WARM).token_ids


# The distribution of sampled tokens


def expected_distribution(
    logits: np.ndarray, t: float, top_k: int, top_p: float
) -> np.ndarray:
    """What a filter leaves, written down from its definition: one token after the other."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[:top_k] if top_k > 0 else order
    weights = {i: float(np.exp((logits[i] - logits.max()) / t)) for i in order}
    total, mass, kept = sum(weights.values()), 0.0, []
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    probs = np.zeros(len(logits))
    probs[kept] = [weights[i] / mass for i in kept]
    return probs


def draw(
    logits: Tensor, count: int, first: int = 0, seed: int = 1, **params: Any
) -> Tensor:
    """`count` tokens of one row at the positions from `first` on."""
    sampler, places = Sampler(2, len(logits)), torch.arange(first, first + count)
    sampler.assign([(1, Request("r", [0], SamplingParams(**params), seed=seed))])
    return sampler(logits.expand(count, -1), torch.ones_like(places), places)


def check_counts(counts: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square within five standard deviations; nothing at all where the probability is 0.

    Cells with an expected count below 5 are taken together.
    """
    expected = probs * counts.sum()
    assert not counts[probs == 0].any()
    rare = (expected < 5) & (probs > 0)
    counts = np.append(counts[~rare & (probs > 0)], counts[rare].sum())
    expected = np.append(expected[~rare & (probs > 0)], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    free = len(counts) - 1
    score = ((counts - expected) ** 2 / expected).sum()
    assert score <= free + 5 * (2 * free) ** 0.5 + 1e-9


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_k": 7, "temperature": 3.0},
    {"top_p": 0.6},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.999},
    {"top_k": 1},
    {"top_k": 60},
    {"top_k": -1, "top_p": 1.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_softmax_says(params: Any, dtype: torch.dtype) -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, 60)
    tokens = draw(torch.tensor(logits, dtype=dtype), 40_000, **params)
    counts = np.bincount(tokens.numpy(), minlength=60)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **params}
    check_counts(counts, expected_distribution(logits, *full.values()))


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.97}, {"top_k": 1300}, {"top_k": 1300, "top_p": 0.9}], ids=str
)
def test_filters_hold_where_the_head_of_a_large_vocabulary_is_not_enough(
    params: Any,
) -> None:
    """A flat distribution over 1500 tokens: top-p needs more than the first thousand."""
    logits = np.random.default_rng(1).normal(0, 0.3, 1500)
    tokens = draw(torch.tensor(logits), 12_000, **params)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **params}
    check_counts(
        np.bincount(tokens.numpy(), minlength=1500),
        expected_distribution(logits, *full.values()),
    )


def test_b54_the_token_that_crosses_p_stays() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    assert set(draw(logits, 500, top_p=0.6).tolist()) == {2, 3}
    assert set(draw(logits, 500, top_p=0.72).tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 1e-8},
        {"top_p": 1e-300},
        {"top_k": 1},
        {"temperature": 1e-30},
        {"temperature": 1e-300},
        {"temperature": 1e-300, "top_p": 0.5, "top_k": 3},
    ],
    ids=str,
)
def test_b55_the_best_token_always_stays(params: Any) -> None:
    for vocab in (4, 3000):
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
        assert set(draw(logits, 50, **params).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 10**9])
def test_b55_a_k_of_zero_or_beyond_the_vocabulary_is_off(top_k: int) -> None:
    logits = torch.zeros(4)
    assert torch.equal(draw(logits, 300, top_k=top_k), draw(logits, 300))
    assert set(draw(logits, 300, top_k=top_k).tolist()) == {0, 1, 2, 3}


def test_b63_rows_that_pad_the_vocabulary_are_never_sampled() -> None:
    sampler = Sampler(3, 5)
    kinds = enumerate([{"temperature": 0}, {}, {"top_p": 0.99}])
    sampler.assign([(i, Request("r", [0], SamplingParams(**p), seed=i)) for i, p in kinds])
    logits, places = torch.zeros(300, 8), torch.arange(300)
    logits[:, 5:] = 100
    tokens = sampler(logits, places % 3, places)
    assert int(tokens.max()) < 5


def test_a_token_that_a_mask_forbids_is_never_drawn() -> None:
    logits = torch.tensor([0.0, float("-inf"), 1.0, float("-inf")])
    for params in ({}, {"top_p": 0.9999}, {"top_k": 3}):
        assert set(draw(logits, 2000, **params).tolist()) <= {0, 2}


# Independence


VOCAB = 8
FLAT = torch.linspace(-1, 2, VOCAB, dtype=torch.float64)
PAIR = np.outer(FLAT.softmax(-1), FLAT.softmax(-1)).ravel()


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Two streams of draws say nothing about each other."""
    check_counts(np.bincount((first * VOCAB + second).numpy(), minlength=VOCAB**2), PAIR)


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 1024])
def test_draws_at_different_positions_are_independent(lag: int) -> None:
    tokens = draw(FLAT, 60_000)
    check_pairs(tokens[:-lag], tokens[lag:])


@pytest.mark.parametrize("seed", [0, 2, 2**32 + 1, 2**64 - 1])
def test_neighbouring_seeds_are_independent(seed: int) -> None:
    check_pairs(draw(FLAT, 60_000, seed=seed), draw(FLAT, 60_000, seed=1))


def test_answers_of_one_prompt_are_independent() -> None:
    sampler, places = Sampler(2, VOCAB), torch.arange(60_000)
    pair = [Request("r", [0], SamplingParams(), seed=5, sample_index=i) for i in (0, 1)]
    sampler.assign(list(enumerate(pair)))
    logits = FLAT.expand(60_000, -1)
    first, second = (sampler(logits, torch.full_like(places, r), places) for r in (0, 1))
    check_pairs(first, second)


def test_one_position_over_many_seeds_follows_softmax() -> None:
    """What users see first: the first token of many requests."""
    count = 20_000
    sampler, rows = Sampler(count, VOCAB), torch.arange(count)
    sampler.assign([(i, Request("r", [0], SamplingParams(), seed=i)) for i in range(count)])
    tokens = sampler(FLAT.expand(count, -1), rows, torch.full_like(rows, 3))
    check_counts(np.bincount(tokens.numpy(), minlength=VOCAB), FLAT.softmax(-1).numpy())


# Neighbours (B62)


def watch_logits(engine: Engine) -> list[dict[int, Tensor]]:
    """Every step's logits by row, as the sampler gets them."""
    runner: Any = engine.runner
    sampler, seen = runner.sampler, []

    class Watching:
        assign, capturable = sampler.assign, sampler.capturable

        def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
            seen.append(dict(zip(rows.tolist(), logits.clone(), strict=True)))
            return sampler(logits, rows, positions)

    runner.sampler = Watching()
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b62_the_content_of_neighbours_does_not_matter_bit_for_bit(dtype: str) -> None:
    """Equal shapes, other neighbours: the logits of our row are the same bits."""

    def logits_beside(neighbours: list[list[int]], warm: int) -> list[Tensor]:
        engine = tiny_engine(dtype=dtype)
        steps = watch_logits(engine)
        name = engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=12))
        for prompt in neighbours:
            params = SamplingParams(temperature=warm, seed=warm, max_tokens=12)
            engine.add_request(prompt, params)
        engine.step()
        row = next(r.row for r in engine.scheduler.running if r.request_id == name)
        list(drain(engine))
        return [step[row] for step in steps]

    first = logits_beside([[1] * 9, [2] * 17, [3]], warm=0)
    second = logits_beside([[40] * 9, list(range(17)), [200]], warm=3)
    assert len(first) == len(second) == 12
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
