"""Prompts in chunks: whatever the budget, the cap, the cache and the pool, answers stay the same,
nobody who talks is held up, and two half-computed prompts never wait for each other.

Cases that users of other engines reported are named by their number (B05, B26, B28, B34).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import Loop, RecordingRunner, continuation, request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_pool import BlockPool
from octavo.chunking import ChunkedPrefill, largest_chunk
from octavo.config import ConfigError
from octavo.prefix_cache import PREFIX_CACHES, make_prefix_cache
from octavo.request import Plan, Request, RequestError, SamplingParams, StepResult
from octavo.roofline import Chunk, Scheduled
from octavo.scheduler import BATCHINGS, Scheduler

LONGEST = 40
both_depths = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
all_caches = pytest.mark.parametrize("name", PREFIX_CACHES)


def scheduler_of(
    allocator: Any,
    *,
    seqs: int = 4,
    tokens: int = 16,
    length: int = 64,
    cap: int | None = None,
    **options: Any,
) -> Scheduler:
    """A scheduler that cuts prompts; `allocator` may be a number of blocks of four tokens."""
    if isinstance(allocator, int):
        allocator = BlockPool(allocator, 4)
    return Scheduler(
        allocator,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        policy=ChunkedPrefill(cap),
        **options,
    )


def serve(
    scheduler: Scheduler, arrivals: Sequence[tuple[int, Request]], depth: int = 1
) -> list[Plan]:
    """Serve (turn, request) pairs; every plan that was carried out."""
    runner = RecordingRunner(scheduler.block_size)
    loop, coming = Loop(scheduler, runner, depth), list(arrivals)
    for turn in range(4000):
        while coming and coming[0][0] <= turn:
            scheduler.add(coming.pop(0)[1])
        if not coming and not loop.busy:
            return runner.plans
        loop.turn()
    raise AssertionError("unfinished after 4,000 turns: somebody waits for ever")


def counts_of(plans: Sequence[Plan], r: Request) -> list[int]:
    return [e.count for plan in plans for e in plan.entries if e.request is r]


# The policy by itself


def test_a_chunk_is_as_much_as_work_budget_and_cap_allow() -> None:
    for work in range(1, 20):
        for budget in range(0, 20):
            assert ChunkedPrefill().take(work, budget) == min(work, budget)
            for cap in range(1, 20):
                assert ChunkedPrefill(cap).take(work, budget) == min(work, budget, cap)


@pytest.mark.parametrize("cap", [0, -3, 1.0, True, "8"])
def test_a_cap_that_makes_no_sense_is_refused(cap: Any) -> None:
    with pytest.raises(ConfigError, match="max_chunk"):
        ChunkedPrefill(cap)


@given(
    price=st.floats(0.01, 3),
    fixed=st.floats(0, 5),
    limit=st.floats(0, 50),
    start=st.integers(0, 9),
)
def test_the_largest_chunk_is_the_last_that_keeps_the_limit(
    price: float, fixed: float, limit: float, start: int
) -> None:
    beside = [Chunk(3, 1)] * 2

    def cost(entries: Sequence[Scheduled]) -> float:
        *others, last = entries
        assert others == beside and last.start == start
        return fixed + price * last.count * (1 + start)

    by_hand = [n for n in range(1, 65) if cost([*beside, Chunk(start, n)]) <= limit]
    assert largest_chunk(cost, beside, start, limit, most=64) == max(by_hand, default=0)


# Whatever arrives


@dataclass(frozen=True)
class Case:
    """A machine, how it serves, and what arrives: (turn, prompt, max_tokens, n)."""

    num_blocks: int
    block_size: int
    seqs: int
    tokens: int
    cap: int | None
    cache: str
    depth: int
    options: dict[str, Any]
    arrivals: list[tuple[int, list[int], int, int]] = field(default_factory=list)

    def requests(self) -> list[tuple[int, Request]]:
        """All of them, in order of their turns; `n` answers to one prompt have a leader."""
        made = []
        for i, (turn, prompt, max_tokens, n) in enumerate(sorted(self.arrivals)):
            leader = None
            for index in range(n):
                params = SamplingParams(max_tokens=max_tokens)
                r = Request(f"{i}.{index}", list(prompt), params, leader=leader)
                leader = leader or r
                made.append((turn, r))
        return made


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Some begin alike, so that caches find something."""
    alike = draw(st.integers(0, 24))
    own = draw(st.lists(st.integers(0, 99), min_size=0 if alike else 1, max_size=12))
    return [i * 7 % 100 for i in range(alike)] + own


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size, seqs = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    needed = -(-LONGEST // block_size)
    return Case(
        num_blocks=draw(st.integers(needed, 3 * needed)),
        block_size=block_size,
        seqs=seqs,
        tokens=draw(st.integers(seqs, 24)),
        cap=draw(st.none() | st.integers(1, 12)),
        cache=draw(st.sampled_from(PREFIX_CACHES)),
        depth=draw(st.integers(1, 2)),
        options={
            "batching": draw(st.sampled_from(BATCHINGS)),
            "defer_shared_prefix": draw(st.booleans()),
        },
        arrivals=draw(
            st.lists(
                st.tuples(
                    st.integers(0, 12), prompts(), st.integers(1, 4), st.integers(1, 3)
                ),
                min_size=1,
                max_size=6,
            )
        ),
    )


def check(case: Case) -> None:
    """Same answers as without any engine, shares that tile, budgets that hold, books that agree."""
    cache = make_prefix_cache(case.cache, BlockPool(case.num_blocks, case.block_size))
    scheduler = scheduler_of(
        cache,
        seqs=case.seqs,
        tokens=case.tokens,
        length=LONGEST,
        cap=case.cap,
        **case.options,
    )
    load = case.requests()
    plans = serve(scheduler, load, case.depth)
    check_shares(plans, case.tokens, case.cap)
    for _, r in load:
        limit = min(r.sampling_params.max_tokens or 0, LONGEST - r.num_prompt_tokens)
        assert r.output_token_ids == continuation(r.token_ids[: r.num_prompt_tokens], limit)
    cache.check_integrity([])
    assert cache.num_free_blocks == cache.num_blocks


def check_shares(plans: Sequence[Plan], tokens: int, cap: int | None) -> None:
    place: dict[tuple[Request, int], int] = {}
    for plan in plans:
        assert plan.num_tokens <= tokens
        for e in plan.entries:
            assert 1 <= e.count <= (cap or tokens)
            assert e.joins == ((e.request, e.epoch) not in place)
            assert e.start == place.get((e.request, e.epoch), e.start)
            place[e.request, e.epoch] = end = e.start + e.count
            assert e.samples or end < e.request.num_tokens


@settings(max_examples=150, deadline=None)
@given(cases())
def test_chunks_never_change_an_answer(case: Case) -> None:
    check(case)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None)
@given(cases())
def test_chunks_never_change_an_answer_many_draws(case: Case) -> None:
    check(case)


# Who moves


@both_depths
@pytest.mark.parametrize("cap", [None, 1, 3, 4, 8])
@pytest.mark.parametrize("num_blocks", range(7, 14))
def test_two_half_admitted_prompts_never_wait_for_each_other(
    num_blocks: int, cap: int | None, depth: int
) -> None:
    """Each fits the pool alone (26 tokens with keys, 7 blocks), both don't (up to 12)."""
    a, b = (request(name, [ord(name)] * 24, max_tokens=3) for name in "ab")
    plans = serve(scheduler_of(num_blocks, seqs=2, cap=cap), [(0, a), (0, b)], depth)
    took_part = [a in [e.request for e in plan.entries] for plan in plans if plan.entries]
    last = max(i for i, moved in enumerate(took_part) if moved)
    assert all(took_part[:last]) and a.num_preemptions == 0  # the older moves in every step
    for r, seed in ((a, "a"), (b, "b")):
        assert r.output_token_ids == continuation([ord(seed)] * 24, 3)


@all_caches
@both_depths
def test_many_half_admitted_prompts_all_end(name: str, depth: int) -> None:
    cache = make_prefix_cache(name, BlockPool(12, 4))
    scheduler = scheduler_of(cache, seqs=6, tokens=12, cap=2)
    load = [(0, request(str(n), [n] * 30, max_tokens=3)) for n in range(8)]
    serve(scheduler, load, depth)
    for n, (_, r) in enumerate(load):
        assert r.output_token_ids == continuation([n] * 30, 3)
    cache.check_integrity([])


def test_b34_a_stream_moves_in_every_step_also_behind_an_older_prompt() -> None:
    for cap in (None, 5):
        old = request("old", [1] * 60, max_tokens=2)
        stream = request("stream", [2], max_tokens=30)
        load = [(0, old), (1, stream)]
        load += [(n, request(str(n), [n] * 50, max_tokens=2)) for n in range(3, 9)]
        scheduler = scheduler_of(200, seqs=6, tokens=8, cap=cap)
        plans = serve(scheduler, load)
        took_part = [stream in [e.request for e in plan.entries] for plan in plans]
        began = took_part.index(True)
        assert all(took_part[began : began + 30])


def test_a_prompt_moves_though_streams_take_all_but_one_token() -> None:
    load = [(0, request(str(n), [n], max_tokens=60)) for n in range(3)]
    load.append((1, crawler := request("crawler", [7] * 20, max_tokens=1)))
    plans = serve(scheduler_of(64, tokens=4), load)
    assert counts_of(plans, crawler) == [1] * 20


def test_a_cap_lets_short_prompts_pass_a_long_one() -> None:
    def first_share(cap: int | None) -> int:
        long, short = request("long", [3] * 60, max_tokens=2), request("short", [4] * 5)
        plans = serve(scheduler_of(99, cap=cap), [(0, long), (1, short)])
        return next(
            i for i, p in enumerate(plans) if short in [e.request for e in p.entries]
        )

    assert (first_share(None), first_share(8)) == (3, 1)


# Other machinery


@both_depths
def test_b28_a_prompt_longer_than_the_budget_runs_in_chunks_or_is_refused(
    depth: int,
) -> None:
    r = request("long by one", [1] * 17, max_tokens=1)
    assert counts_of(serve(scheduler_of(16), [(0, r)], depth), r) == [16, 1]
    assert r.output_token_ids == continuation([1] * 17, 1)
    limits = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    with pytest.raises(RequestError, match="chunked prefill"):
        Scheduler(BlockPool(16, 4), **limits).add(request("r", [1] * 17, max_tokens=1))


def test_b26_a_request_that_has_output_is_recomputed_in_chunks_without_sampling() -> None:
    older, talks = (request(n, [ord(n[0])] * 6, max_tokens=8) for n in ("older", "talks"))
    plans = serve(scheduler_of(6, tokens=6), [(0, older), (0, talks)])
    mine = [e for plan in plans for e in plan.entries if e.request is talks]
    again = next(i for i, e in enumerate(mine) if i and e.joins)
    pieces = [(e.start, e.count, e.samples) for e in mine[again : again + 2]]
    assert pieces == [(0, 6, False), (6, 5, True)]
    assert talks.output_token_ids == continuation([ord("t")] * 6, 8)


@pytest.mark.parametrize("name", PREFIX_CACHES[1:])
def test_b05_a_chunk_is_found_only_when_its_step_has_come_back(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(32, 4))
    scheduler, r = scheduler_of(cache, seqs=1, tokens=3), request("a", range(20))
    loop = Loop(scheduler, RecordingRunner(4))
    scheduler.add(r)
    for done in range(0, 18, 3):  # chunks of three are shorter than a block
        loop.submit()
        assert len(cache.match(request("probe", [*range(20), 1]))) == done // 4
        loop.complete()


@both_depths
def test_followers_wait_for_the_leaders_last_chunk_and_recompute_the_tail(
    depth: int,
) -> None:
    leader = request("0", range(40), max_tokens=4)
    followers = [request(str(n), range(40), max_tokens=4) for n in (1, 2, 3)]
    for follower in followers:
        follower.leader = leader
    plans = serve(
        scheduler_of(64, tokens=14), [(0, r) for r in [leader, *followers]], depth
    )
    joins = [e for plan in plans for e in plan.entries if e.joins]
    assert [(e.start, e.count) for e in joins[1:]] == [(36, 4)] * 3
    assert counts_of(plans, leader)[:3] == [14, 14, 12]
    expected = continuation(range(40), 4)  # type: ignore[arg-type]
    assert all(r.output_token_ids == expected for r in [leader, *followers])


@all_caches
def test_a_hundred_thousand_tokens(name: str) -> None:
    """With the cache, in blocks of 16, twice: the second time only the last block runs."""
    cache = make_prefix_cache(name, BlockPool(7000, 16))
    prompt = [n * n % 97 for n in range(100_000)]
    for hit in (0, 0 if name == "none" else 99_984):
        r = Request("book", list(prompt), SamplingParams(max_tokens=2))
        scheduler = scheduler_of(cache, tokens=2048, length=131_072)
        scheduler.add(r)
        counts = []
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            counts += [e.count for e in plan.entries]
            ids = [[5] if e.samples else [] for e in plan.entries]
            scheduler.update(plan, StepResult(ids))
        assert sum(counts) == 100_000 - hit + 1 and max(counts) <= 2048
        assert r.num_cached_tokens == hit and r.output_token_ids == [5, 5]
    cache.check_integrity([])


def test_the_policy_is_asked_only_where_there_is_more_than_one_token_of_work() -> None:
    asked: list[tuple[int, int]] = []

    class Curious(ChunkedPrefill):
        def take(self, work_left: int, budget: int) -> int:
            asked.append((work_left, budget))
            return super().take(work_left, budget)

    scheduler = scheduler_of(32, tokens=8)
    scheduler.policy = Curious()
    r = request("r", [1] * 20, max_tokens=5)
    serve(scheduler, [(0, r)])
    assert all(work > 1 for work, _ in asked)
    assert asked[-3:] == [(20, 8), (12, 8), (4, 8)]
