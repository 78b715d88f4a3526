"""The scheduler over the real caches: whatever is found, shared or waited for, answers stay.

The counting model reads every token back through the block tables, so a block that is found too
early, lost too early or given to two writers changes an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import Loop, continuation, request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_pool import BlockPool
from octavo.example import CountingRunner, checksum
from octavo.prefix_cache import PREFIX_CACHES, make_prefix_cache
from octavo.request import FinishReason, Request
from octavo.scheduler import BATCHINGS, ORDERS, Scheduler
from octavo.simulate import simulate
from octavo.traces import Arrival, poisson_arrivals, with_shared_prefixes

CACHES = ("plain", *PREFIX_CACHES)
MODEL_LEN = 40
every_cache = pytest.mark.parametrize("cache", CACHES)
finding_caches = pytest.mark.parametrize("cache", ["hash", "radix"])
both_depths = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


class Pieces:
    """A policy that runs a prompt in pieces of at most `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def take(self, work_left: int, budget: int) -> int:
        return min(work_left, budget, self.size)


def scheduler_over(
    cache: str, num_blocks: int = 64, block_size: int = 4, **options: Any
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 128}
    allocator = pool if cache == "plain" else make_prefix_cache(cache, pool)
    return Scheduler(allocator, **{**limits, **options})


def loop_over(cache: str, depth: int = 1, **options: Any) -> Loop:
    scheduler = scheduler_over(cache, **options)
    return Loop(scheduler, CountingRunner(scheduler.block_size, checksum), depth)


def check_books(scheduler: Scheduler) -> None:
    holders = [*scheduler.running, *scheduler._leaving]
    scheduler.allocator.check_integrity([r.block_table for r in holders])
    for r in scheduler.running:
        assert r.num_written_tokens <= r.num_computed_tokens
        assert r.num_written_tokens % scheduler.block_size == 0


def check_empty(scheduler: Scheduler) -> None:
    """Nobody holds anything, and a cleared cache leaves every block free."""
    scheduler.allocator.check_integrity([])
    assert sorted(scheduler.queues.free_rows) == list(range(scheduler.max_num_seqs))
    scheduler.cache.clear()
    pool = getattr(scheduler.allocator, "pool", scheduler.allocator)
    assert pool.num_free_blocks == scheduler.allocator.num_blocks


def group_of(n: int, prompt: list[int], **params: Any) -> list[Request]:
    """`n` answers to one prompt, the first of them leading."""
    group = [request(f"{prompt[0]}.{i}", prompt, **params) for i in range(n)]
    for follower in group[1:]:
        follower.leader = group[0]
    return group


def serve(loop: Loop, requests: list[Request]) -> list[Any]:
    """All at once, to the end; returns the plans."""
    plans, submit = [], loop.submit
    loop.submit = lambda: plans.append(submit()) or plans[-1]  # type: ignore[method-assign]
    for r in requests:
        loop.scheduler.add(r)
    while loop.busy:
        loop.turn()
        check_books(loop.scheduler)
        assert len(plans) < 2000
    return plans


# Anything may happen


@dataclass(frozen=True)
class Group:
    """Some answers to one prompt: when they are asked for, and when they are given up."""

    step: int
    shared: int
    """How many tokens its prompt has in common with the others'."""
    own: list[int]
    n: int
    max_tokens: int
    eos: list[int]
    salt: str | None
    priority: int
    abort: int | None

    def requests(self, name: str) -> list[Request]:
        prompt = [*range(self.shared), *self.own]
        group = group_of(self.n, prompt, max_tokens=self.max_tokens, eos=self.eos)
        for r in group:
            r.request_id = f"{name}.{r.request_id}"
            r.cache_salt, r.priority = self.salt, self.priority
        return group


@dataclass(frozen=True)
class World:
    cache: str
    num_blocks: int
    block_size: int
    depth: int
    chunk: int | None
    options: dict[str, Any]
    groups: list[Group] = field(default_factory=list)


ids = st.integers(0, 99)
groups = st.builds(
    Group,
    step=st.integers(0, 12),
    shared=st.integers(0, 12),
    own=st.lists(ids, min_size=1, max_size=6),
    n=st.sampled_from([1, 1, 2, 4]),
    max_tokens=st.integers(1, 12),
    eos=st.lists(ids, max_size=4),
    salt=st.sampled_from([None, None, "salt"]),
    priority=st.integers(0, 2),
    abort=st.none() | st.none() | st.integers(0, 25),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 5))
    options = {
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(MODEL_LEN, 2 * MODEL_LEN)),
        "max_model_len": MODEL_LEN,
        "order": draw(st.sampled_from(ORDERS)),
        "batching": draw(st.sampled_from(BATCHINGS)),
        "defer_shared_prefix": draw(st.booleans()),
    }
    return World(
        cache=draw(st.sampled_from(CACHES)),
        num_blocks=draw(st.integers(-(-30 // size), -(-60 // size))),
        block_size=size,
        depth=draw(st.integers(1, 3)),
        chunk=draw(st.none() | st.integers(1, 12)),
        options=options,
        groups=draw(st.lists(groups, min_size=1, max_size=7)),
    )


def check_world(world: World) -> list[Request]:
    policy = Pieces(world.chunk) if world.chunk else None
    options = {"policy": policy, "block_size": world.block_size, **world.options}
    loop = loop_over(world.cache, world.depth, num_blocks=world.num_blocks, **options)
    everybody: list[tuple[Group, Request]] = []
    now = 0
    while loop.busy or now <= 12:
        for index, group in enumerate(world.groups):
            if group.step == now:
                for r in group.requests(str(index)):
                    loop.scheduler.add(r)
                    everybody.append((group, r))
        for group, r in everybody:
            if group.abort == now + r.sample_index:
                loop.scheduler.abort(r)
        loop.turn()
        check_books(loop.scheduler)
        for plan in loop.flying:
            assert plan.num_tokens <= world.options["max_num_batched_tokens"]
        now += 1
        assert now < 3000, "nobody gets on"
    check_empty(loop.scheduler)
    for group, r in everybody:
        check_answer(group, r)
    return [r for _, r in everybody]


def check_answer(group: Group, r: Request) -> None:
    prompt = [*range(group.shared), *group.own]
    expected = continuation(prompt, group.max_tokens)
    stops = [at for at, token in enumerate(expected) if token in group.eos]
    expected = expected[: stops[0] + 1] if stops else expected
    output = r.output_token_ids
    assert r.is_finished and r.num_inflight_tokens == 0
    assert output == expected[: len(output)]
    assert r.finish_reason is FinishReason.ABORT or output == expected


@settings(max_examples=600)
@given(world=worlds())
def test_no_cache_policy_or_company_changes_an_answer(world: World) -> None:
    check_world(world)


@pytest.mark.soak
@settings(max_examples=30_000)
@given(world=worlds())
def test_no_cache_policy_or_company_changes_an_answer_for_minutes(world: World) -> None:
    check_world(world)


def test_the_random_worlds_reach_what_they_are_meant_to_reach() -> None:
    seen: dict[str, int] = {}

    @settings(max_examples=200, derandomize=True, database=None)
    @given(world=worlds())
    def look(world: World) -> None:
        for r in check_world(world):
            seen["preempted"] = seen.get("preempted", 0) + bool(r.num_preemptions)
            seen[world.cache] = seen.get(world.cache, 0) + bool(r.num_cached_tokens)

    look()
    assert all(seen[name] > 10 for name in ("preempted", "hash", "radix", "plain")), seen


# Who comes in


@every_cache
@both_depths
@settings(max_examples=60)
@given(data=st.data())
def test_prompts_in_pieces_come_in_for_good(
    cache: str, depth: int, data: st.DataObject
) -> None:
    """Answers of one token need no room beyond the prompt, so nothing is computed twice."""
    num_blocks = data.draw(st.integers(6, 15))
    loop = loop_over(
        cache,
        depth,
        num_blocks=num_blocks,
        policy=Pieces(data.draw(st.integers(1, 9))),
        batching=data.draw(st.sampled_from(BATCHINGS)),
        defer_shared_prefix=data.draw(st.booleans()),
        max_num_batched_tokens=data.draw(st.integers(8, 30)),
    )
    lengths = data.draw(st.lists(st.integers(1, 4 * num_blocks), min_size=2, max_size=9))
    same = data.draw(st.integers(1, 9))  # numbers this far apart have the same prompt
    crowd = [request(str(n), [n % same] * k, max_tokens=1) for n, k in enumerate(lengths)]
    plans = serve(loop, crowd)
    assert all(r.num_output_tokens == 1 and not r.num_preemptions for r in crowd)
    ran = sum(plan.num_tokens for plan in plans)
    assert ran == sum(lengths) - sum(r.num_cached_tokens or 0 for r in crowd)
    check_empty(loop.scheduler)


def test_a_prompt_waits_for_the_room_that_is_promised_to_another() -> None:
    for num_blocks, first_plan in ((10, ["a"]), (11, ["a"]), (12, ["a", "b"])):
        scheduler = scheduler_over("plain", num_blocks, policy=Pieces(4))
        for name in "ab":
            scheduler.add(request(name, [1] * 24, max_tokens=1))
        plan = scheduler.schedule()
        assert [e.request.request_id for e in plan.entries] == first_plan


# Hits


@finding_caches
@both_depths
@pytest.mark.parametrize("length", range(1, 14))
def test_b01_b02_a_prompt_sent_twice_runs_what_is_missing_and_at_least_one_token(
    cache: str, depth: int, length: int
) -> None:
    loop, prompt = loop_over(cache, depth), list(range(length))
    for hit in (0, (length - 1) // 4 * 4):
        (r,) = rs = [request("r", prompt, max_tokens=5)]
        first = serve(loop, rs)[0].entries[0]
        assert (first.start, first.count) == (hit, length - hit) and first.joins
        assert len(first.new_block_ids) == -(-length // 4)
        assert r.num_cached_tokens == hit
        assert r.output_token_ids == continuation(prompt, 5)


@finding_caches
@both_depths
def test_b40_a_resumed_request_finds_its_own_blocks_and_the_report_stays(
    cache: str, depth: int
) -> None:
    loop = loop_over(cache, depth, num_blocks=9)
    rs = [request(name, [i] * 4, max_tokens=20) for i, name in enumerate("abc")]
    plans = serve(loop, rs)
    resumed = [e for p in plans for e in p.entries if e.joins and e.epoch]
    assert resumed and any(e.start > 0 for e in resumed), "nobody found its own blocks"
    assert [r.num_cached_tokens for r in rs] == [0, 0, 0]
    for i, r in enumerate(rs):
        assert r.output_token_ids == continuation([i] * 4, 20)


@finding_caches
def test_b07_blocks_that_are_found_leave_the_free_budget(cache: str) -> None:
    """Five blocks: two cached, two held. A prompt that finds two needs two more: too many."""
    loop = loop_over(cache, num_blocks=5)
    serve(loop, [request("first", range(8), max_tokens=1)])
    holds, r = (
        request("holds", [50] * 4, max_tokens=3),
        request("r", range(16), max_tokens=1),
    )
    loop.scheduler.add(holds)
    loop.turn()
    loop.scheduler.add(r)
    plan = loop.submit()
    assert loop.scheduler.cache.num_free_blocks == 3
    assert len(loop.scheduler.cache.match(r)) == 2
    assert [e.request for e in plan.entries] == [holds]
    loop.run()
    assert r.num_cached_tokens == 8 and r.output_token_ids == continuation(range(16), 1)


@finding_caches
def test_only_the_same_salt_finds_a_prefix(cache: str) -> None:
    loop = loop_over(cache)
    found = []
    for salt in (None, "a", "b", "a", None):
        (r,) = rs = [request("r", range(9), max_tokens=2)]
        r.cache_salt = salt
        serve(loop, rs)
        found.append(r.num_cached_tokens)
    assert found == [0, 0, 0, 8, 8]


@finding_caches
def test_a_step_in_flight_publishes_nothing_beyond_the_end_of_an_answer(cache: str) -> None:
    """The zombie behind an end fills a block with a token that nobody knows."""
    prompt = [1, 2, 3]
    first = continuation(prompt, 1)[0]
    loop = loop_over(cache, depth=2)
    ended = request("ended", prompt, eos=[first], max_tokens=9)
    plans = serve(loop, [ended])
    zombie = plans[1].entries[0]
    assert (zombie.start, zombie.count) == (3, 1) and ended.num_output_tokens == 1
    again = serve(loop, [request("again", [*prompt, first, 7], max_tokens=3)])
    hit = again[0].entries[0].start
    assert hit == 4  # its own token is known; had it been unknown, nothing would be found
    cut = request("cut", [5, 6], max_tokens=9)
    loop.scheduler.add(cut)
    for _ in range(3):
        loop.submit()
    loop.complete()
    loop.scheduler.finish(cut, 0, "stop")
    loop.run()
    assert loop.scheduler.cache.match(request("m", [5, 6, 0, 0, 0], max_tokens=1)) == []
    check_empty(loop.scheduler)


# Waiting for a prefix


@every_cache
@both_depths
def test_followers_share_the_leaders_whole_blocks(cache: str, depth: int) -> None:
    loop = loop_over(cache, depth)
    group = group_of(4, list(range(10)), max_tokens=6)
    plans = serve(loop, group)
    joins = {e.request: e for p in plans for e in p.entries if e.joins}
    assert [joins[r].start for r in group] == [0, 8, 8, 8]
    assert {joins[r].new_block_ids[:2] for r in group} == {
        joins[group[0]].new_block_ids[:2]
    }
    assert [r.num_cached_tokens for r in group] == [0, 8, 8, 8]
    assert all(r.output_token_ids == continuation(range(10), 6) for r in group)
    check_empty(loop.scheduler)


@every_cache
@both_depths
@pytest.mark.parametrize("num_blocks", range(4, 14))
def test_b36_followers_end_in_any_pool(cache: str, depth: int, num_blocks: int) -> None:
    loop = loop_over(cache, depth, num_blocks=num_blocks)
    group = group_of(4, list(range(9)), max_tokens=8)
    serve(loop, group)
    assert all(r.output_token_ids == continuation(range(9), 8) for r in group)
    check_empty(loop.scheduler)


@every_cache
@both_depths
@pytest.mark.parametrize("gone", range(8))
def test_b36_a_leader_that_goes_leaves_no_follower_waiting(
    cache: str, depth: int, gone: int
) -> None:
    loop = loop_over(cache, depth, policy=Pieces(3))
    group = group_of(3, list(range(11)), max_tokens=5)
    for r in group:
        loop.scheduler.add(r)
    for now in range(40):
        if now == gone:
            loop.scheduler.abort(group[0])
        loop.turn()
        check_books(loop.scheduler)
    assert not loop.busy
    assert all(r.output_token_ids == continuation(range(11), 5) for r in group[1:])


@finding_caches
@both_depths
@pytest.mark.parametrize("chunk", [None, 4, 6])
def test_deferring_computes_a_common_beginning_once(
    cache: str, depth: int, chunk: int | None
) -> None:
    def tokens(defer: bool) -> int:
        policy = Pieces(chunk) if chunk else None
        loop = loop_over(cache, depth, policy=policy, defer_shared_prefix=defer)
        rs = [request(str(i), [*range(16), 90 + i], max_tokens=3) for i in range(6)]
        total = sum(plan.num_tokens for plan in serve(loop, rs))
        assert all(
            r.output_token_ids == continuation([*range(16), 90 + i], 3)
            for i, r in enumerate(rs)
        )
        return total

    assert tokens(True) == 16 + 6 * (1 + 2)
    assert tokens(False) > tokens(True)


@finding_caches
def test_deferring_waits_for_nobody_else(cache: str) -> None:
    """Other salt, other text, a beginning shorter than a block: no reason to wait."""
    scheduler = scheduler_over(cache, defer_shared_prefix=True)
    first = request("first", range(9), max_tokens=2)
    salted = request("salted", range(9), max_tokens=2)
    salted.cache_salt = "x"
    others = [request("other", range(1, 10)), request("short", range(4), max_tokens=2)]
    same = request("same", [*range(4), 50, 51], max_tokens=2)
    for r in (first, salted, *others, same):
        scheduler.add(r)
    assert [e.request for e in scheduler.schedule().entries] == [first, salted, *others]
    assert list(scheduler.waiting) == [same]


# Whose turn it is


def test_priority_decides_who_comes_in_and_who_is_thrown_out() -> None:
    loop = loop_over("none", num_blocks=6, order="priority")
    low, high = (
        request("low", [1] * 4, max_tokens=16),
        request("high", [2] * 4, max_tokens=16),
    )
    low.priority = 5
    serve(loop, [low, high])
    assert low.num_preemptions and not high.num_preemptions
    for i, r in ((1, low), (2, high)):
        assert r.output_token_ids == continuation([i] * 4, 16)


@every_cache
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("chunk", [None, 16])
def test_b34_nobody_starves_behind_a_stream_of_long_prompts(
    cache: str, batching: str, chunk: int | None
) -> None:
    policy = Pieces(chunk) if chunk else None
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "batching": batching}
    loop = loop_over(cache, num_blocks=40, policy=policy, **options)
    stream = request("stream", [7, 8], max_tokens=12)
    late = request("late", [9] * 50, max_tokens=4)
    long = [request(str(n), [n] * 50, max_tokens=4) for n in range(60)]
    for now in range(300):
        if now < len(long):
            loop.scheduler.add(long[now])
        if now == 10:
            loop.scheduler.add(stream)
            loop.scheduler.add(late)
        loop.turn()
        if stream.is_finished and late.is_finished:
            break
    before = [r for r in long if r.is_finished and r.arrival > late.arrival]
    assert len(before) <= 4 + 12, "they waited for too many that came later"


# The simulator with real caches


def test_the_simulator_counts_what_the_caches_find() -> None:
    trace = with_shared_prefixes(poisson_arrivals(5, 60, (40, 20)), 3, 64)

    def cost(entries: Any) -> float:
        return 0.01 + 0.001 * sum(e.count for e in entries)

    rates = {}
    for cache in CACHES:
        scheduler = scheduler_over(cache, num_blocks=400, max_model_len=256)
        done = simulate(scheduler, trace, cost)
        assert all(len(one.token_times) == 20 for one in done.served)
        rates[cache] = done.hit_rate
    assert rates["plain"] == rates["none"] == 0
    assert rates["hash"] == rates["radix"] and 0.5 < rates["hash"] < 64 / 104


def test_the_simulator_goes_by_priority() -> None:
    trace = [Arrival(0, 4, 4, priority=p) for p in (2, 1, 0)]
    scheduler = scheduler_over("none", max_num_seqs=1, order="priority")
    done = simulate(scheduler, trace, lambda entries: 1.0)
    assert [one.token_times[-1] for one in done.served] == [12, 8, 4]
