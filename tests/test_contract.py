"""What may happen while a step is in flight, row by row, in the plain and the overlapped loop.

Both loops must give the tokens that the model says without any engine. First the contract's
table over the scheduler alone, one test a row and cache; then the same table on the real loop,
with either runner around a small model; then each row's finer points. Cases that users of
other engines reported are named by their number (B14, B23, ...).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import (
    ENGINES,
    Loop,
    RecordingRunner,
    check_all_returned,
    check_pieces,
    check_scheduler_empty,
    continuation,
    counting_engine,
    counting_scheduler,
    drain,
    request,
    serve,
)
from toy_engine import LOOPS, one_of_four, say, toy_engine

from octavo.block_pool import BlockPool
from octavo.config import OctavoError
from octavo.engine import Engine
from octavo.example import CountingRunner, CountingTokenizer, checksum, count_up
from octavo.prefix_cache import PREFIX_CACHES, make_prefix_cache
from octavo.request import Request, RequestError, RequestStatus, SamplingParams, StepResult
from octavo.scheduler import Scheduler

both_engines = pytest.mark.parametrize("kind", ENGINES)
both_depths = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


def loop_of(scheduler: Any, depth: int, next_token: Any = checksum) -> Loop:
    return Loop(
        scheduler, RecordingRunner(scheduler.allocator.block_size, next_token), depth
    )


def text_of(token_ids: list[int]) -> str:
    return CountingTokenizer().decode(token_ids)


# The table of the contract, row by row


class Pieces:
    """A policy that runs a prompt five tokens at a time."""

    def take(self, work_left: int, budget: int) -> int:
        return min(work_left, budget, 5)


def cached_loop(cache: str, depth: int, num_blocks: int = 64, **options: Any) -> Loop:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    allocator = make_prefix_cache(cache, BlockPool(num_blocks, 4))
    scheduler = Scheduler(allocator, **{**limits, **options})
    return loop_of(scheduler, depth)


def turn_until(loop: Loop, done: Callable[[], bool], most: int = 60) -> None:
    while loop.busy and not done():
        loop.turn()
        holders = [*loop.scheduler.running, *loop.scheduler._leaving]
        loop.scheduler.allocator.check_integrity([r.block_table for r in holders])
        most -= 1
        assert most, "somebody waits for ever"


def to_the_end(loop: Loop, *requests: Request) -> list[list[int]]:
    """Add them, serve them; their answers. Every block must be back then."""
    for r in requests:
        loop.scheduler.add(r)
    turn_until(loop, lambda: False)
    check_scheduler_empty(loop.scheduler)
    return [r.output_token_ids for r in requests]


def row_ending(cache: str, depth: int) -> list[list[int]]:
    loop, say = cached_loop(cache, depth), continuation([1, 2, 3], 4)
    rs = [
        request("eos", [1, 2, 3], max_tokens=9, eos=say[3:4]),
        request("stop id", [1, 2, 3], max_tokens=9, stop_token_ids=say[3:4]),
        request("length", [1, 2, 3], max_tokens=4),
    ]
    answers = to_the_end(loop, *rs)
    assert [r.finish_reason for r in rs] == ["stop", "stop", "length"]
    zombies = [len(loop.runner.entries_of(r.request_id)) - 4 for r in rs]
    assert zombies == [depth - 1, depth - 1, 0]  # a length is foreseen
    known = loop.scheduler.cache.match(request("m", [1, 2, 3, *say, 0, 0], max_tokens=1))
    assert len(known) == (cache != "none")  # position 7 was never published
    assert answers == [say] * 3
    return answers


def row_stop_string(cache: str, depth: int) -> list[list[int]]:
    loop, r = cached_loop(cache, depth), request("r", [1, 2, 3], max_tokens=20)
    loop.scheduler.add(r)
    turn_until(loop, lambda: r.num_output_tokens == 5)
    loop.scheduler.finish(r, 3, "text")
    turn_until(loop, lambda: False)
    check_scheduler_empty(loop.scheduler)
    assert len(loop.runner.entries_of("r")) == 5 + depth - 1
    assert r.output_token_ids == continuation([1, 2, 3], 3) and r.stop_reason == "text"
    return [r.output_token_ids]


def row_abort(cache: str, depth: int) -> list[list[int]]:
    loop = cached_loop(cache, depth, max_num_seqs=1)
    goes, heir = request("goes", [1] * 5), request("heir", [1] * 5, max_tokens=4)
    loop.scheduler.add(goes)
    loop.scheduler.add(heir)
    turn_until(loop, lambda: goes.num_output_tokens == 2)
    loop.scheduler.abort(goes)
    assert goes not in loop.scheduler.running and bool(goes.block_table) == (depth > 1)
    turn_until(loop, lambda: False)
    check_scheduler_empty(loop.scheduler)
    assert goes.output_token_ids == continuation([1] * 5, 2)
    assert heir.num_cached_tokens == (0 if cache == "none" else 4)
    assert heir.output_token_ids == continuation([1] * 5, 4)
    return [heir.output_token_ids]


def row_preemption(cache: str, depth: int) -> list[list[int]]:
    loop = cached_loop(cache, depth, num_blocks=6)
    rs = [request(str(i), [i] * 4, max_tokens=14) for i in range(3)]
    answers = to_the_end(loop, *rs)
    assert sum(r.num_preemptions for r in rs) > 0
    assert answers == [continuation([i] * 4, 14) for i in range(3)]
    return answers


def row_publication(cache: str, depth: int) -> list[list[int]]:
    """Second and third come in the step of the first and in the next; the fourth later."""
    loop = cached_loop(cache, depth)
    rs = [request(str(i), range(9), max_tokens=6) for i in range(4)]
    for r in rs[:2]:
        loop.scheduler.add(r)
    loop.submit()
    loop.scheduler.add(rs[2])
    if depth == 1:
        loop.complete()
    loop.turn()
    loop.turn()
    answers = to_the_end(loop, rs[3])
    hit = 0 if cache == "none" else 8
    hits = [r.num_cached_tokens for r in rs]
    assert hits == [0, 0, hit if depth == 1 else 0, hit]
    return [r.output_token_ids for r in rs[:3]] + answers


def row_deferral(cache: str, depth: int) -> list[list[int]]:
    loop = cached_loop(cache, depth, defer_shared_prefix=True)
    rs = [request(str(i), range(9), max_tokens=6) for i in range(4)]
    answers = to_the_end(loop, *rs)
    hit = 0 if cache == "none" else 8
    assert [r.num_cached_tokens for r in rs] == [0, hit, hit, hit]
    return answers


def row_chunk(cache: str, depth: int) -> list[list[int]]:
    loop, r = (
        cached_loop(cache, depth, policy=Pieces()),
        request("r", range(14), max_tokens=4),
    )
    answers = to_the_end(loop, r)
    entries = loop.runner.entries_of("r")
    assert [(e.count, e.samples) for e in entries[:4]] == [
        (5, False),
        (5, False),
        (4, True),
        (1, True),
    ]
    return answers


def row_empty_plan(cache: str, depth: int) -> list[list[int]]:
    loop, r = cached_loop(cache, depth), request("r", [5, 6], max_tokens=1)
    answers = to_the_end(loop, r)
    empty = [plan for plan in loop.runner.plans if not plan.entries]
    assert len(empty) == depth - 1  # its only token was on the way
    return answers


ROWS: dict[str, Callable[[str, int], list[list[int]]] | None] = {
    "EOS, stop id, length": row_ending,
    "stop string": row_stop_string,
    "abort": row_abort,
    "preemption": row_preemption,
    "rejected drafts": None,
    "prefix publication": row_publication,
    "prefix publication, deferred": row_deferral,
    "a chunk that isn't the last": row_chunk,
    "empty plan": row_empty_plan,
}


@pytest.mark.parametrize("cache", PREFIX_CACHES)
@pytest.mark.parametrize("row", ROWS)
@both_depths
def test_a_row_of_the_contract(cache: str, row: str, depth: int) -> None:
    """The row's own conditions, and the tokens of the plain loop without a cache."""
    if (scenario := ROWS[row]) is None:
        pytest.skip("no draft tokens in this engine yet, so none can be rejected")
    assert scenario(cache, depth) == scenario("none", 1)


# The table again, on the real loop: engine, runner, a model in float64


MakeEngine = Callable[..., Engine]


def all_back(engine: Any) -> None:
    """Nothing in flight, nobody left, every block free."""
    check_all_returned(engine)
    assert not engine.scheduler._leaving


def answers_of(
    engine: Any, prompts: list[list[int]], params: Any = None, **fields: Any
) -> list[Any]:
    """Serve them together; what became of each, in order. Then nothing may be left."""
    answers = serve(engine, prompts, params, **fields)
    all_back(engine)
    return answers


def real_ending(make: MakeEngine, overlapped: bool) -> None:
    prompt, reply = [1, 2, 3], say([1, 2, 3], 9)
    at = next(i for i in range(2, 9) if reply[i] not in reply[:i])
    engine = make(eos=[reply[at]])
    own = SamplingParams(
        temperature=0, ignore_eos=True, stop_token_ids=[reply[at]], max_tokens=9
    )
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        own,
        SamplingParams(temperature=0, max_tokens=at, ignore_eos=True),
    ]
    answers = answers_of(engine, [prompt] * 3, params)
    assert [a.finish_reason for a in answers] == ["stop", "stop", "length"]
    assert [a.token_ids for a in answers] == [reply[: at + 1]] * 2 + [reply[:at]]
    shares = [len(engine.runner.entries_of(str(i))) for i in range(3)]
    assert shares == [at + 1 + overlapped] * 2 + [at]  # a length is foreseen: no zombie


def real_stop_string(make: MakeEngine, overlapped: bool) -> None:
    engine, reply = make(), say([4, 5], 9)
    stop = text_of(reply[2:4]).strip()
    cut, other = answers_of(
        engine,
        [[4, 5], [6]],
        [
            SamplingParams(temperature=0, stop=stop),
            SamplingParams(temperature=0, max_tokens=9),
        ],
    )
    assert (cut.token_ids, cut.stop_reason) == (reply[:4], stop)
    assert other.token_ids == say([6], 9)
    assert len(engine.runner.entries_of("0")) == 4 + overlapped


def real_abort(make: MakeEngine, overlapped: bool) -> None:
    """The one row goes from who is aborted in flight to the next in line."""
    engine = make(max_num_seqs=1, num_blocks=8)
    greedy = SamplingParams(temperature=0, max_tokens=9)
    goes, heir = (engine.add_request(p, greedy) for p in ([1] * 5, [2] * 5))
    engine.step()
    engine.step()
    deltas = engine.abort(goes) and list(drain(engine))
    ended = {d.request_id: d.finished for d in deltas if d.finished}
    assert ended[goes].token_ids == say([1] * 5, 2 - overlapped)
    assert ended[heir].token_ids == say([2] * 5, 9)
    all_back(engine)


def real_preemption(make: MakeEngine, overlapped: bool) -> None:
    engine = make(num_blocks=6)
    answers = answers_of(engine, [[i] * 4 for i in range(3)], temperature=0, max_tokens=14)
    assert engine.stats.num_preemptions > 0
    assert [a.token_ids for a in answers] == [say([i] * 4, 14) for i in range(3)]


def real_mask(make: MakeEngine, overlapped: bool) -> None:
    """The forward of a step is launched before its mask is made, from ids that are all known."""
    engine, asked = make(), []
    greedy = SamplingParams(temperature=0, max_tokens=7)
    names = [engine.add_request(p, greedy) for p in ([1, 2], [3], [4] * 6)]
    masked, _, end = (engine._groups[name][0] for name in names)

    def mask(token_ids: Any) -> Any:
        engine.runner.events.append(("asked", len(token_ids)))
        asked.append(list(token_ids))
        return one_of_four(token_ids)

    masked.token_mask, end.token_mask = mask, one_of_four
    ended = {d.request_id: d.finished.token_ids for d in drain(engine) if d.finished}
    all_back(engine)
    expected = say([1, 2], 7, mask=one_of_four)
    assert ended[names[0]] == expected != say([1, 2], 7)
    assert [ended[n] for n in names[1:]] == [say([3], 7), say([4] * 6, 7, mask=one_of_four)]
    assert asked == [[1, 2, *expected[:i]] for i in range(7)]
    events = engine.runner.events
    for step in range(1, 7):  # the mask for step + 1 needs the token of step
        told = ("launched", step + 1), ("came back", step), ("asked", 2 + step)
        launched, known, made = (events.index(event) for event in told)
        assert launched < made and known < made and (launched < known) == overlapped


def real_publication(make: MakeEngine, overlapped: bool) -> None:
    """Second and third come in the step of the first and in the next; the fourth later."""
    engine = make(cache="hash")
    greedy = SamplingParams(temperature=0, max_tokens=6)
    cached = {}
    for wave in (2, 1, 1):
        for _ in range(wave):
            engine.add_request(list(range(9)), greedy)
        for delta in engine.step():
            assert not delta.finished
        if wave == 1:
            engine.step()
    for delta in drain(engine):
        if delta.finished:
            assert delta.finished.token_ids == say(range(9), 6)
            cached[delta.request_id] = delta.finished.metrics.num_cached_tokens
    all_back(engine)
    assert cached == {"0": 0, "1": 0, "2": 0 if overlapped else 8, "3": 8}


def real_deferral(make: MakeEngine, overlapped: bool) -> None:
    engine = make(cache="radix", defer_shared_prefix=True)
    answers = answers_of(engine, [list(range(9))] * 4, temperature=0, max_tokens=6)
    assert [a.metrics.num_cached_tokens for a in answers] == [0, 8, 8, 8]
    assert [a.token_ids for a in answers] == [say(range(9), 6)] * 4


def real_chunk(make: MakeEngine, overlapped: bool) -> None:
    engine = make(policy=Pieces())
    (answer,) = answers_of(engine, [list(range(14))], temperature=0, max_tokens=4)
    shares = [(e.count, e.samples) for e in engine.runner.entries_of("0")]
    assert shares[:4] == [(5, False), (5, False), (4, True), (1, True)]
    assert answer.token_ids == say(range(14), 4)


def real_empty_plan(make: MakeEngine, overlapped: bool) -> None:
    engine = make()
    engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=1))
    (delta,) = drain(engine)
    assert list(delta.token_ids) == say([5, 6], 1) and delta.finished
    assert engine.stats.num_steps == 1 + overlapped  # its only token was on the way
    assert len(engine.runner.plans) == 1  # and the runner isn't asked for an empty step
    all_back(engine)


REAL_ROWS: dict[str, Callable[[MakeEngine, bool], None] | None] = {
    "EOS, stop id, length": real_ending,
    "stop string": real_stop_string,
    "abort": real_abort,
    "preemption": real_preemption,
    "rejected drafts": None,
    "mask that depends on the last token": real_mask,
    "prefix publication": real_publication,
    "prefix publication, deferred": real_deferral,
    "a chunk that isn't the last": real_chunk,
    "empty plan": real_empty_plan,
}


@pytest.mark.parametrize("row", REAL_ROWS)
@pytest.mark.parametrize(("runner", "loop"), LOOPS)
def test_a_row_of_the_contract_on_the_real_loop(row: str, runner: str, loop: str) -> None:
    """Eager steps and graphs (recorded where there is a card), plain loop and overlapped."""
    if (scenario := REAL_ROWS[row]) is None:
        pytest.skip("no draft tokens in this engine yet, so none can be rejected")
    scenario(functools.partial(toy_engine, runner, loop), loop == "overlapped")


# EOS, stop id, length


ENDINGS: dict[str, tuple[dict[str, Any], list[int], str, int | None]] = {
    "eos": ({}, [0], "stop", None),
    "stop id": ({"stop_token_ids": [0]}, [], "stop", 0),
    "length": ({"max_tokens": 3}, [], "length", None),
}


@both_engines
@pytest.mark.parametrize("how", ENDINGS)
def test_an_ending_drops_the_token_that_was_in_flight(kind: str, how: str) -> None:
    params, eos, reason, stop_reason = ENDINGS[how]
    engine = counting_engine(kind, next_token=count_up, eos_token_ids=eos)
    goes_on = SamplingParams(ignore_eos=True)
    ended, other = serve(engine, ["97", "1"], [SamplingParams(**params), goes_on])
    check_all_returned(engine)
    assert (ended.token_ids, ended.finish_reason) == ([98, 99, 0], reason)
    assert ended.stop_reason == stop_reason
    assert other.token_ids == continuation([1], 127, count_up)  # up to the model's length
    zombies = len(engine.runner.entries_of("0")) - 3
    assert zombies == (kind == "overlapped" and how != "length")  # a length is foreseen


@both_engines
def test_a_stop_string_cuts_ids_and_text_though_more_tokens_are_on_the_way(
    kind: str,
) -> None:
    engine = counting_engine(kind, next_token=count_up)
    cut, other = serve(engine, ["1", "50"], [SamplingParams(stop="4 5"), SamplingParams()])
    check_all_returned(engine)
    assert (cut.text, cut.token_ids) == ("2 3 ", [2, 3, 4, 5])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "4 5")
    assert len(engine.runner.entries_of("0")) == 4 + (kind == "overlapped")
    assert other.token_ids == continuation([50], 127, count_up)


@both_engines
def test_a_stop_string_in_the_last_allowed_token_is_a_stop(kind: str) -> None:
    engine = counting_engine(kind, next_token=count_up)
    (answer,) = serve(engine, ["1"], stop="4", max_tokens=3)
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", "4", "2 3 ")


# Abort


def test_an_abort_between_plain_steps_gives_everything_back_at_once() -> None:
    scheduler = counting_scheduler()
    loop, r = loop_of(scheduler, 1), request("a", [1, 2, 3])
    scheduler.add(r)
    loop.turn()
    scheduler.abort(r)
    check_scheduler_empty(scheduler)
    assert not scheduler.has_unfinished and r.finish_reason == "abort"


def test_an_abort_in_flight_gives_back_only_after_the_last_submitted_step() -> None:
    scheduler = counting_scheduler(seqs=1)
    loop, r, heir = loop_of(scheduler, 2), request("a", [1] * 5), request("b", [2])
    scheduler.add(r)
    scheduler.add(heir)
    loop.submit()
    loop.submit()
    scheduler.abort(r)
    assert r not in scheduler.running and r.is_finished  # it leaves the queues at once ...
    held = list(r.block_table)
    for step in (1, 2):
        assert r.row is not None and r.block_table == held and len(held) == 2
        assert not scheduler.schedule().entries  # ... but nobody may have its row yet
        assert loop.complete().step == step
    assert r.row is None and not r.block_table and r.num_output_tokens == 0
    scheduler.allocator.check_integrity([])
    assert [e.request for e in scheduler.schedule().entries] == [heir]


@both_depths
@pytest.mark.parametrize("step", range(12))
def test_who_comes_and_goes_at_a_step_never_changes_the_others(
    depth: int, step: int
) -> None:
    """Rows and blocks change hands while steps are in flight (tight pool, two rows)."""
    scheduler = counting_scheduler(num_blocks=7, seqs=2)
    loop = loop_of(scheduler, depth)
    stays, goes, comes = (
        request(name, [n] * 5, max_tokens=9)
        for n, name in enumerate(("stays", "goes", "comes"))
    )
    for r in (stays, goes):
        scheduler.add(r)
    for now in range(40):
        if now == step:
            scheduler.abort(goes)
            scheduler.add(comes)
        loop.turn()
    assert not loop.busy
    check_scheduler_empty(scheduler)
    assert stays.output_token_ids == continuation([0] * 5, 9)
    assert comes.output_token_ids == continuation([2] * 5, 9)
    assert goes.output_token_ids == continuation([1] * 5, 9)[: goes.num_output_tokens]


@both_engines
def test_an_abort_is_told_once_and_may_be_repeated(kind: str) -> None:
    engine = counting_engine(kind)
    name = engine.add_request("1 2 3")
    for _ in range(4):
        engine.step()
    assert engine.abort(name) and not engine.abort(name) and not engine.abort("nobody")
    deltas = [d for _ in range(4) for d in engine.step()]
    assert [d.finished.finish_reason for d in deltas if d.finished] == ["abort"]
    assert (
        deltas[-1].finished.token_ids == continuation([1, 2, 3], 4)[: 4 - (kind != "plain")]
    )
    check_all_returned(engine)


@both_depths
def test_aborting_a_request_twice_frees_its_blocks_once(depth: int) -> None:
    scheduler = counting_scheduler()
    loop, waiting, running = loop_of(scheduler, depth), request("w", [1]), request("r", [2])
    scheduler.add(running)
    loop.turn()
    scheduler.add(waiting)
    for r in (waiting, running, waiting, running):
        scheduler.abort(r)
    loop.run()
    scheduler.abort(running)
    check_scheduler_empty(scheduler)


# Preemption


def tight(depth: int, **params: Any) -> tuple[Loop, list[Any]]:
    """Three requests in a pool that holds about one and a half of them."""
    scheduler = counting_scheduler(num_blocks=6)
    requests = [
        request(n, [i] * 4, **{"max_tokens": 14, **params}) for i, n in enumerate("abc")
    ]
    for r in requests:
        scheduler.add(r)
    return loop_of(scheduler, depth), requests


@pytest.mark.parametrize("depth", [2, 3], ids=["overlapped", "two ahead"])
def test_a_token_in_flight_at_a_preemption_is_kept_and_the_recomputation_waits_for_it(
    depth: int,
) -> None:
    loop, requests = tight(depth)
    seen = 0
    while loop.busy:
        plan = loop.submit() if loop.scheduler.has_unfinished else None
        for victim in plan.preempted if plan else ():
            seen += victim.num_inflight_tokens
            assert victim.num_computed_tokens == 0
        if plan:
            joining = [e for e in plan.entries if e.joins]
            assert all(list(e.new_token_ids) == e.request.token_ids for e in joining)
        while loop.flying and (
            len(loop.flying) == depth or not loop.scheduler.has_unfinished
        ):
            known = {r: r.num_tokens for r in requests}
            entries = loop.complete().entries
            assert all(
                e.request.num_tokens == known[e.request] + e.samples for e in entries
            )
    assert seen > 0, "no preemption met a token in flight: the test shows nothing"
    for i, r in enumerate(requests):
        assert r.output_token_ids == continuation([i] * 4, 14)


def test_a_recomputation_waits_until_every_id_is_known_though_there_is_room() -> None:
    """Three plans in flight: "short" makes room while a token of the victim is on its way."""
    scheduler = counting_scheduler(num_blocks=5, block_size=2)
    loop = loop_of(scheduler, 3)
    oldest, short, victim = (
        request("oldest", [1], max_tokens=6),
        request("short", [2] * 6, max_tokens=1),
        request("victim", [3], max_tokens=3),
    )
    for r in (oldest, short, victim):
        scheduler.add(r)
    plans = [loop.submit() for _ in range(3)]
    assert list(plans[2].preempted) == [victim] and victim.num_inflight_tokens == 2
    loop.complete()
    assert short.is_finished and scheduler.allocator.num_free_blocks == 3
    assert [e.request for e in loop.submit().entries] == [oldest]
    loop.complete()
    back = next(e for e in loop.submit().entries if e.request is victim)
    assert list(back.new_token_ids) == [3, *continuation([3], 2)]
    loop.run()
    assert victim.output_token_ids == continuation([3], 3)


@both_depths
def test_b26_what_comes_back_recomputes_prompt_and_answer_and_says_the_same(
    depth: int,
) -> None:
    loop, requests = tight(depth)
    loop.run()
    assert sum(r.num_preemptions for r in requests) > 0
    for i, r in enumerate(requests):
        assert r.output_token_ids == continuation([i] * 4, 14)
        joins = [e for e in loop.runner.entries_of(r.request_id) if e.joins]
        assert len(joins) == r.num_preemptions + 1
        for e in joins:  # all of it in one go, and sampled from only then
            assert (e.start, e.count, e.samples) == (0, len(e.new_token_ids), True)
        assert all(e.count > 4 for e in joins[1:])


@both_engines
def test_b27_limits_and_stop_strings_survive_a_preemption(kind: str) -> None:
    engine = counting_engine(kind, num_blocks=6)
    prompts = [[0] * 4, [1] * 4, [2] * 4]
    expected = [continuation(p, 14) for p in prompts]
    stop = text_of(expected[2][9:11]).strip()  # two tokens, long after it was thrown out
    params = [SamplingParams(max_tokens=14), SamplingParams(max_tokens=14)]
    answers = serve(engine, prompts, [*params, SamplingParams(max_tokens=14, stop=stop)])
    check_all_returned(engine)
    assert answers[2].metrics.num_preemptions > 0
    assert [a.token_ids for a in answers] == [expected[0], expected[1], expected[2][:11]]
    assert [a.finish_reason for a in answers] == ["length", "length", "stop"]


@both_engines
def test_b40_the_cached_tokens_reported_are_those_of_the_first_admission(kind: str) -> None:
    engine = counting_engine(kind, num_blocks=6)
    names = [engine.add_request([i] * 4, SamplingParams(max_tokens=14)) for i in range(3)]
    requests = [engine._groups[name][0] for name in names]
    assert [r.num_cached_tokens for r in requests] == [None] * 3
    engine.step()
    requests[2].num_cached_tokens = 3  # as if a prefix cache had known three of them
    done = [d for d in drain(engine) if d.finished]
    cached = {d.request_id: d.finished.metrics.num_cached_tokens for d in done}
    assert requests[2].num_preemptions > 0
    assert [cached[name] for name in names] == [0, 0, 3]


@both_depths
def test_b23_what_could_never_grow_to_its_end_is_refused_and_what_just_fits_runs(
    depth: int,
) -> None:
    scheduler = counting_scheduler(num_blocks=3)
    with pytest.raises(RequestError, match="need 4 KV blocks .* the pool has 3: .* lower"):
        scheduler.add(request("never", [1] * 5, max_tokens=9))
    fits = request("fits", [1] * 5, max_tokens=8)  # 12 tokens with KV: 3 blocks of 4
    scheduler.add(fits)
    loop_of(scheduler, depth).run()
    assert fits.num_output_tokens == 8 and fits.num_preemptions == 0
    check_scheduler_empty(scheduler)


@both_depths
@pytest.mark.parametrize(("length", "needs_block"), [(3, False), (4, True)])
def test_b24_a_full_block_needs_a_new_one_and_an_open_one_does_not(
    depth: int, length: int, needs_block: bool
) -> None:
    """Two blocks of 4 in all, both in use: 3 tokens may become 4, but 4 can't become 5."""
    scheduler = counting_scheduler(num_blocks=2)
    loop = loop_of(scheduler, depth)
    first, second = (request(n, [i] * length, max_tokens=3) for i, n in enumerate("ab"))
    scheduler.add(first)
    scheduler.add(second)
    loop.submit()
    assert scheduler.allocator.num_free_blocks == 0
    if depth == 1:
        loop.complete()
    plan = loop.submit()
    assert list(plan.preempted) == ([second] if needs_block else [])
    assert [e.new_block_ids != () for e in plan.entries] == [needs_block] * len(
        plan.entries
    )
    loop.run()
    assert first.output_token_ids == continuation([0] * length, 3)
    assert second.output_token_ids == continuation([1] * length, 3)


@both_depths
def test_b14_a_long_answer_with_blocks_of_one_token_frees_each_once(depth: int) -> None:
    scheduler = counting_scheduler(num_blocks=202, block_size=1, length=256)
    r = request("a", [1, 2, 3], max_tokens=200)
    scheduler.add(r)
    most = 0
    loop = loop_of(scheduler, depth)
    while loop.busy:
        loop.turn()
        scheduler.allocator.check_integrity([r.block_table])
        most = max(most, len(r.block_table))
    assert (
        r.num_computed_tokens == 202
    )  # the last token sampled never gets a key or a value
    assert scheduler.max_used_blocks == 202 and most <= 202
    check_scheduler_empty(scheduler)


# Empty plans and steps that break


def test_an_empty_plan_is_fine_while_a_step_is_in_flight() -> None:
    scheduler = counting_scheduler()
    loop, r = loop_of(scheduler, 2), request("a", [1], max_tokens=1)
    scheduler.add(r)
    loop.submit()
    assert not loop.submit().entries  # its only token is on the way
    loop.run()
    assert r.finish_reason == "length" and not scheduler.schedule().entries


def test_an_empty_plan_that_nothing_can_end_is_a_clear_error() -> None:
    class SoonNothing:
        def take(self, work_left: int, budget: int) -> int:
            return 0 if scheduler.waiting else work_left  # generous until somebody waits

    scheduler = counting_scheduler(policy=SoonNothing())
    scheduler.add(request("a", [1, 1]))
    with pytest.raises(
        OctavoError, match="nothing can run: 1 waiting, 0 running, 64 of 64"
    ):
        scheduler.schedule()


@both_engines
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_breaks_ends_its_requests_with_a_reason_and_the_others_go_on(
    kind: str,
    error: BaseException,
) -> None:
    engine = counting_engine(kind, seqs=2)
    engine.runner.failures[3] = error
    names = [engine.add_request([i, i], SamplingParams(max_tokens=5)) for i in range(4)]
    with pytest.raises(type(error)):
        for _ in range(3 + (kind == "overlapped")):
            engine.step()
    leaving = [r.block_table for r in engine.scheduler._leaving]
    engine.scheduler.allocator.check_integrity(leaving)
    assert len(leaving) == (0 if kind == "plain" else 2)  # step 4 holds them still
    finished = {d.request_id: d.finished for d in drain(engine) if d.finished}
    for name in names[:2]:
        assert finished[name].finish_reason == "error"
        assert (
            f"step of this request failed: {type(error).__name__}" in finished[name].error
        )
        assert len(finished[name].token_ids) == 2  # what it had is not taken away
    for i in (2, 3):
        assert finished[names[i]].token_ids == continuation([i, i], 5)
    check_all_returned(engine)


def test_a_broken_step_gives_back_only_after_the_step_behind_it() -> None:
    scheduler = counting_scheduler()
    loop, r, other = (
        loop_of(scheduler, 2),
        request("a", [1]),
        request("b", [2], max_tokens=3),
    )
    scheduler.add(r)
    first = loop.submit()
    scheduler.add(other)
    second = loop.submit()  # holds both
    assert scheduler.fail(first) == [r] and r.finish_reason == "error"
    assert r.row is not None and r.block_table
    scheduler.allocator.check_integrity([r.block_table, other.block_table])
    result = StepResult([[9] for _ in second.entries])
    assert [r for r, _ in scheduler.update(second, result)] == [other]
    assert r.row is None and not r.block_table and r.num_output_tokens == 0
    scheduler.allocator.check_integrity([other.block_table])


@both_engines
def test_the_streams_of_a_broken_step_are_told_and_the_engine_serves_on(kind: str) -> None:
    engine = counting_engine(kind)
    engine.runner.failures[2] = KeyboardInterrupt()
    first, second = engine.stream(["1"]), engine.stream(["2"])
    next(first)
    with pytest.raises(KeyboardInterrupt):
        next(second)
    (last,) = list(first)
    assert (
        last.finished.finish_reason == "error"
        and "KeyboardInterrupt" in last.finished.error
    )
    (again,) = serve(engine, ["3"], max_tokens=4)
    assert again.token_ids == continuation([3], 4)
    check_all_returned(engine)


# Streams


@both_engines
def test_streams_that_take_turns_lose_nothing(kind: str) -> None:
    engine = counting_engine(kind, num_blocks=8)
    prompts = [[1] * 3, [2] * 6, [3], [4] * 2]
    params = SamplingParams(max_tokens=9)
    streams = [
        engine.stream(prompts[:2], params),
        *(engine.stream([p], params) for p in prompts[2:]),
    ]
    finished: dict[str, Any] = {}
    pieces: dict[str, str] = {}
    active: list[Iterator[Any]] = list(streams)
    while active:
        for stream in list(active):
            if (delta := next(stream, None)) is None:
                active.remove(stream)
                continue
            pieces[delta.request_id] = pieces.get(delta.request_id, "") + delta.text
            if delta.finished:
                finished[delta.request_id] = delta.finished
    expected = [continuation(p, 9) for p in prompts]
    assert sorted(f.token_ids for f in finished.values()) == sorted(expected)
    assert pieces == {name: f.text for name, f in finished.items()}
    check_all_returned(engine)


@both_engines
def test_a_stream_swallows_nothing_of_a_request_that_was_added_by_hand(kind: str) -> None:
    engine = counting_engine(kind)
    name = engine.add_request([7, 7], SamplingParams(max_tokens=6))
    list(engine.stream([[1]], SamplingParams(max_tokens=3)))
    deltas = list(drain(engine))
    assert {d.request_id for d in deltas} == {name}
    assert [i for d in deltas for i in d.token_ids] == continuation([7, 7], 6)


@both_engines
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"ignore_eos": True}], ids=str)
def test_b79_a_reader_who_leaves_takes_the_generation_along(kind: str, params: Any) -> None:
    engine = counting_engine(kind, eos_token_ids=[1], seqs=2)
    stream = engine.stream([[1, 2], [3]], SamplingParams(**params))
    for _ in range(3):
        next(stream)
    stream.close()
    assert not engine.has_unfinished and not engine.scheduler.waiting
    assert not engine.scheduler.running
    steps_before = len(engine.runner.plans)
    check_all_returned(engine)
    late = sum(len(p.entries) for p in engine.runner.plans[steps_before:])
    assert late <= (2 if kind == "overlapped" else 0)  # only what was in flight


@both_engines
def test_b66_an_abort_tells_the_text_that_was_held_back(kind: str) -> None:
    """ "4 " may begin the stop string, so it waits; then the answer ends."""
    engine = counting_engine(kind, next_token=count_up)
    name = engine.add_request([1], SamplingParams(stop="4 99"))
    deltas: list[Any] = []
    while not deltas or list(deltas[-1].token_ids) != [4]:
        deltas += engine.step()
    engine.abort(name)
    deltas += drain(engine)
    assert deltas[-1].finished.text == "2 3 4 "
    check_pieces(deltas, name, deltas[-1].finished)


@both_engines
def test_b66_a_step_that_breaks_tells_the_text_that_was_held_back(kind: str) -> None:
    engine = counting_engine(kind, next_token=count_up)
    engine.runner.failures[4] = MemoryError()
    name = engine.add_request([1], SamplingParams(stop="4 99"))
    deltas = [d for _ in range(3 + (kind == "overlapped")) for d in engine.step()]
    with pytest.raises(MemoryError):
        engine.step()
    deltas += drain(engine)
    assert deltas[-1].finished.text == "2 3 4 "
    check_pieces(deltas, name, deltas[-1].finished)


class OddTokenizer(CountingTokenizer):
    """Can't decode one of its own tokens, once."""

    def __init__(self, odd: int, error: BaseException) -> None:
        self.odd, self.error = odd, error

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        if self.odd in token_ids:
            self.odd = -1
            raise self.error
        return super().decode(token_ids)


@both_engines
@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("max_tokens", [2, 6])
def test_a_decoder_that_fails_takes_nothing_from_the_others(
    kind: str, error: BaseException, max_tokens: int
) -> None:
    engine = counting_engine(kind, next_token=count_up)
    engine.codec = OddTokenizer(13, error)
    failing = engine.add_request([10], SamplingParams(max_tokens=6))
    engine.step()
    other = engine.add_request([50], SamplingParams(max_tokens=max_tokens))
    deltas, steps = [], 0
    while engine.has_unfinished:
        try:
            deltas += engine.step()
        except type(error):
            pass
        steps += 1
        assert steps < 20, "somebody waits for ever"
    finished = {d.request_id: d.finished for d in deltas if d.finished}
    assert finished[failing].error and type(error).__name__ in finished[failing].error
    assert finished[other].token_ids == continuation([50], max_tokens, count_up)
    assert finished[other].text == text_of(finished[other].token_ids)
    check_all_returned(engine)


# Endings that users reported, n > 1, and prompts at the border


@both_engines
def test_b75_an_eos_in_the_last_allowed_token_is_a_stop(kind: str) -> None:
    engine = counting_engine(kind, next_token=count_up, eos_token_ids=[5])
    (answer,) = serve(engine, ["3"], max_tokens=2)
    assert (answer.token_ids, answer.finish_reason, answer.text) == ([4, 5], "stop", "4 ")


@both_engines
def test_b77_every_eos_id_ends_and_ignore_eos_covers_all_but_not_the_users_own(
    kind: str,
) -> None:
    engine = counting_engine(kind, next_token=count_up, eos_token_ids=[5, 25, 45])
    ends = serve(engine, ["3", "23", "43"])
    assert [a.token_ids[-1] for a in ends] == [5, 25, 45]
    on = serve(engine, ["3", "23", "43"], ignore_eos=True, max_tokens=4)
    assert [len(a.token_ids) for a in on] == [4, 4, 4]
    (own,) = serve(engine, ["3"], ignore_eos=True, stop_token_ids=[5])
    assert (own.token_ids, own.finish_reason, own.stop_reason) == ([4, 5], "stop", 5)


@both_engines
def test_b36_several_answers_of_one_prompt_queue_where_the_pool_is_nearly_full(
    kind: str,
) -> None:
    engine = counting_engine(kind, num_blocks=5)
    name = engine.add_request(
        [9] * 7, SamplingParams(max_tokens=12)
    )  # holds 2, then 5 of 5
    engine.step()
    group = engine.add_request([1] * 6, SamplingParams(max_tokens=8, n=4))
    finished: dict[tuple[str, int], Any] = {}
    for delta in drain(engine):
        if delta.finished:
            finished[delta.request_id, delta.index] = delta.finished.token_ids
        running = engine.scheduler.running
        leaving = engine.scheduler._leaving
        engine.scheduler.allocator.check_integrity(r.block_table for r in running + leaving)
    assert finished[name, 0] == continuation([9] * 7, 12)
    assert [finished[group, i] for i in range(4)] == [continuation([1] * 6, 8)] * 4
    check_all_returned(engine)


def test_b36_several_answers_are_refused_together_or_not_at_all() -> None:
    engine = counting_engine(num_blocks=5)
    with pytest.raises(RequestError, match="KV blocks"):
        engine.add_request([1] * 6, SamplingParams(max_tokens=60, n=4))
    assert not engine.has_unfinished and not engine.scheduler.waiting
    check_all_returned(engine)


@both_engines
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_b30_a_prompt_at_the_models_length_is_refused_and_the_next_one_works(
    kind: str, excess: int
) -> None:
    engine = counting_engine(kind, length=16)
    long, normal = serve(engine, [[1] * (16 + excess), [2, 3]], max_tokens=5)
    assert normal.token_ids == continuation([2, 3], 5)
    if excess < 0:
        assert (long.token_ids, long.finish_reason) == (continuation([1] * 15, 1), "length")
    else:
        assert long.finish_reason == "error" and "shorten it to 15 or fewer" in long.error
    check_all_returned(engine)


@both_engines
@pytest.mark.parametrize("empty", ["", [], [""]], ids=repr)
def test_b78_an_empty_prompt_is_refused_and_the_others_are_served(
    kind: str, empty: Any
) -> None:
    engine = counting_engine(kind)
    refused, served = serve(engine, [empty, "4"], max_tokens=3)
    assert refused.finish_reason == "error" and refused.error
    assert served.token_ids == continuation([4], 3)
    check_all_returned(engine)


@both_depths
def test_b28_what_exceeds_the_budget_of_a_step_is_refused_with_all_numbers(
    depth: int,
) -> None:
    scheduler = counting_scheduler(tokens=20)
    with pytest.raises(
        RequestError, match="reach 21 tokens.* max_num_batched_tokens is 20.*"
    ):
        scheduler.add(request("over", [1] * 12, max_tokens=10))
    just = request("just", [1] * 12, max_tokens=9)
    scheduler.add(just)
    loop_of(scheduler, depth).run()
    assert just.output_token_ids == continuation([1] * 12, 9)


def test_two_prompts_that_together_exceed_the_pool_do_not_wait_for_each_other() -> None:
    """Each takes most of the pool; both grow. One must give way, and both end."""
    scheduler = counting_scheduler(num_blocks=5)
    rs = [request(n, [i] * 9, max_tokens=12) for i, n in enumerate("ab")]
    for r in rs:
        scheduler.add(r)
    loop_of(scheduler, 2).run()
    assert [r.output_token_ids for r in rs] == [continuation([i] * 9, 12) for i in (0, 1)]


def test_the_plain_engine_is_three_verbs_and_counts_them() -> None:
    engine = counting_engine()
    assert isinstance(engine, Engine) and isinstance(engine.runner, CountingRunner)
    serve(engine, [[1, 2, 3], [4]], max_tokens=4)
    stats = engine.stats
    assert (stats.num_steps, stats.num_output_tokens) == (4, 8)
    assert stats.num_computed_tokens == 3 + 1 + 3 * 2
    assert engine.scheduler.max_used_blocks == 3  # 6 of 4 and 4 of 4 tokens have a key


@both_depths
def test_who_was_thrown_out_waits_before_those_who_never_ran(depth: int) -> None:
    loop, requests = tight(depth)
    late = request("late", [9], max_tokens=5)
    loop.scheduler.add(late)
    queues = []
    while loop.busy:
        loop.turn()
        queues.append([r.request_id for r in loop.scheduler.waiting])
    assert ["c", "late"] in queues and ["late", "c"] not in queues


def test_a_preempted_request_says_so_while_it_waits() -> None:
    loop, requests = tight(depth=1)
    seen = set()
    while loop.busy:
        loop.turn()
        seen |= {r.status for r in requests if r in loop.scheduler.waiting}
    assert RequestStatus.PREEMPTED in seen
