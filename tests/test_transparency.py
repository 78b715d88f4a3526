"""No switch changes the text. Whatever policy, cache, chunk, block and pool size: greedy tokens in
float64 are those of the plain engine, one request at a time, nothing cached, nothing cut.

`pytest -m soak` draws thousands of combinations instead of some dozens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.outputs import CompletionOutput
from octavo.request import SamplingParams

LENGTH = 96
HEADS = [tuple((7 * i + 3 * h) % 250 for i in range(40)) for h in range(3)]


@functools.cache
def plain(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], ...]:
    """What each sample of one prompt says alone, in the plainest engine."""
    engine = tiny_engine(
        max_model_len=LENGTH,
        max_num_seqs=1,
        max_num_batched_tokens=LENGTH,
        chunked_prefill=False,
        prefix_cache="none",
    )
    return tuple(answers(engine, [prompt], [params])[0])


def answers(
    engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[list[int]]]:
    """The token ids of every sample of every prompt, served together."""
    names = [f"r{i}" for i in range(len(prompts))]
    done: dict[tuple[str, int], CompletionOutput] = {}
    for delta in engine.stream([list(p) for p in prompts], list(params), names):
        if delta.finished:
            done[delta.request_id, delta.index] = delta.finished
    assert all(d.error is None for d in done.values())
    samples = [range(param.n) for param in params]
    return [
        [done[n, i].token_ids for i in one] for n, one in zip(names, samples, strict=True)
    ]


@dataclass(frozen=True)
class Case:
    """What is asked for, and of which engine."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    options: dict[str, Any]
    waves: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Prompts with common beginnings, cut where borders are, in an engine drawn at random."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    near = [n for k in range(0, 41, block_size) for n in (k - 1, k, k + 1) if 0 <= n <= 40]
    prompts, params = [], []
    for _ in range(draw(st.integers(1, 6))):
        head = draw(st.sampled_from(HEADS))[: draw(st.sampled_from(near))]
        tail = draw(st.lists(st.integers(0, 255), min_size=not head, max_size=12))
        prompts.append((*head, *tail))
        n, most = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.integers(1, 14))
        params.append(SamplingParams(temperature=0, max_tokens=most, n=n, ignore_eos=True))
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True))
    fewest = -(-longest // block_size)
    seqs = draw(st.integers(1, 6))
    chunked = draw(st.booleans())
    budget = draw(st.integers(seqs, 64)) if chunked else LENGTH
    options = {
        "block_size": block_size,
        "max_model_len": longest + 1,
        "num_kv_blocks": draw(st.integers(fewest + 1, 3 * fewest + 2)),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "chunked_prefill": chunked,
        "max_chunk_tokens": draw(st.none() | st.integers(1, 20)),
        "prefix_cache": draw(st.sampled_from(["none", "hash", "radix"])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "batching": draw(st.sampled_from(["decode-first", "prefill-first"])),
        "defer_shared_prefix": draw(st.booleans()),
        "overlap": draw(st.booleans()),
    }
    return Case(tuple(prompts), tuple(params), options, draw(st.integers(1, 3)))


def check(case: Case) -> None:
    """All waves of the same prompts say what the plain engine says, and no block is lost."""
    engine = tiny_engine(**case.options)
    expected = [list(plain(*pair)) for pair in zip(case.prompts, case.params, strict=True)]
    for _ in range(case.waves):
        assert answers(engine, case.prompts, case.params) == expected
        engine.scheduler.cache.check_integrity(block_tables=[])
    assert engine.scheduler.cache.num_free_blocks == case.options["num_kv_blocks"]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_switch_changes_a_token(case: Case) -> None:
    check(case)


@pytest.mark.soak
@settings(max_examples=4000, deadline=None)
@given(cases())
def test_no_switch_changes_a_token_soak(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_hit_of_any_length_changes_nothing(cache: str, block_size: int) -> None:
    """B01, B09, B10, B17, B18: prompts around every block border, sent cold and then warm."""
    engine = tiny_engine(
        block_size=block_size, max_model_len=LENGTH, num_kv_blocks=512, prefix_cache=cache
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    lengths = sorted({k * block_size + d for k in (1, 2) for d in (-1, 0, 1)} - {0})
    for length in lengths:
        prompt = tuple((length + 11 * i) % 250 for i in range(length))
        cold, warm, longer = (
            answers(engine, [p], [params])[0]
            for p in (prompt, prompt, (*prompt, 77, *range(9)))
        )
        assert cold == warm == list(plain(prompt, params))
        assert longer == list(plain((*prompt, 77, *range(9)), params))
    hits = engine.stats.num_cached_tokens
    assert (hits == 0) == (cache == "none"), hits


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_second_request_says_how_much_it_found(cache: str) -> None:
    """The hit is capped so that one token is left to compute (B01), and is reported."""
    engine = tiny_engine(block_size=4, max_model_len=LENGTH, prefix_cache=cache)
    params = SamplingParams(temperature=0, max_tokens=2)
    for length, expected in ((11, 8), (12, 8), (13, 12)):
        prompt = [(length + 5 * i) % 250 for i in range(length)]
        found = []
        for name in ("cold", "warm"):
            deltas = list(engine.stream([prompt], params, [f"{name}{length}"]))
            found.append(deltas[-1].finished.metrics.num_cached_tokens)
        assert found == [0, expected]


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    """n = 4 of a prompt of 40 tokens in blocks of 4: one computes it, three take 9 blocks each."""
    for cache in ("none", "hash", "radix"):
        engine = tiny_engine(block_size=4, max_model_len=LENGTH, prefix_cache=cache)
        params = SamplingParams(temperature=0, max_tokens=6, n=4, ignore_eos=True)
        prompt = HEADS[0]
        assert answers(engine, [prompt], [params])[0] == list(plain(prompt, params))
        computed = engine.stats.num_computed_tokens
        assert computed == 40 + 3 * 4 + 4 * 5, (cache, computed)


def test_tenants_with_different_salts_share_nothing() -> None:
    """The same prompt under another salt is computed anew; under the same one it is found."""
    engine = tiny_engine(block_size=4, max_model_len=LENGTH)
    params, prompt = SamplingParams(temperature=0, max_tokens=2), list(HEADS[1])
    found = []
    for name, salt in enumerate((None, "a", "b", "a", None)):
        stream = engine.stream([prompt], params, [str(name)], cache_salt=salt)
        found.append(list(stream)[-1].finished.metrics.num_cached_tokens)
    assert found == [0, 0, 0, 36, 36]


def test_every_switch_by_itself() -> None:
    """Each value of each switch, everything else at its default."""
    switches: dict[str, Sequence[Any]] = {
        "prefix_cache": ("none", "hash", "radix"),
        "chunked_prefill": (True, False),
        "max_chunk_tokens": (1, 7, None),
        "scheduling_policy": ("fcfs", "priority"),
        "batching": ("decode-first", "prefill-first"),
        "defer_shared_prefix": (True, False),
        "overlap": (True, False),
        "block_size": (1, 3, 16),
        "num_kv_blocks": (17, 200),
    }
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [HEADS[0], (*HEADS[0][:30], 9), (5,), HEADS[2][:17]]
    expected = [list(plain(p, params)) for p in prompts]
    for name, value in itertools.chain(
        *([(n, v) for v in vs] for n, vs in switches.items())
    ):
        engine = tiny_engine(
            **{"block_size": 4, "max_model_len": LENGTH // 2 + 16, name: value}
        )
        assert answers(engine, prompts, [params] * 4) == expected, (name, value)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("cache", ["none", "hash", "radix"])
def test_b50_copies_of_one_long_prompt_are_all_answered(cache: str, overlap: bool) -> None:
    """Thirteen at once, in chunks, in a pool that holds some of them, two tokens each."""
    prompt = [7 * i % 250 for i in range(400)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    shape = {"max_model_len": 402, "max_num_batched_tokens": 150, "num_kv_blocks": 130}
    alone = tiny_engine(**{**shape, "max_num_seqs": 1, "prefix_cache": "none"})
    expected = answers(alone, [prompt], [params])[0]
    for defer in (False, True):
        options = {"prefix_cache": cache, "overlap": overlap, "defer_shared_prefix": defer}
        engine = tiny_engine(**shape, **options, max_num_seqs=16)
        assert answers(engine, [prompt] * 13, [params] * 13) == [expected] * 13
        engine.scheduler.cache.check_integrity(block_tables=[])
