"""Whatever arrives and whenever it leaves: no block is lost, nobody waits for ever, and every
request says what it would have said alone.

Each property also has a `soak` variant that draws many more examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import (
    Loop,
    check_pieces,
    check_scheduler_empty,
    counting_scheduler,
    tiny_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.example import CountingRunner, OneAtATimeScheduler, checksum
from octavo.request import FinishReason, Plan, Request, RequestError, SamplingParams
from octavo.scheduler import Scheduler

MODEL_LEN = 40


# What arrives


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and when somebody ends it (None: never)."""

    step: int
    prompt: list[int]
    max_tokens: int | None
    stop_token_ids: list[int]
    eos: list[int]
    abort: int | None

    def request(self, name: str) -> Request:
        params = SamplingParams(
            max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids
        )
        return Request(name, list(self.prompt), params, frozenset(self.eos))

    @property
    def limit(self) -> int:
        """Prompt and output at most."""
        return min(MODEL_LEN, len(self.prompt) + (self.max_tokens or MODEL_LEN))


@dataclass(frozen=True)
class World:
    """A machine, what arrives at it, and the step that breaks (None: none does)."""

    num_blocks: int
    block_size: int
    seqs: int
    tokens: int
    arrivals: list[Arrival]
    failing_step: int | None

    def scheduler(self) -> Scheduler:
        seqs, tokens = self.seqs, self.tokens
        return counting_scheduler(
            self.num_blocks, self.block_size, seqs=seqs, tokens=tokens, length=MODEL_LEN
        )

    def fits(self, arrival: Arrival) -> bool:
        """Could this request ever be served? Counted here, not asked of the scheduler."""
        with_kv = arrival.limit - 1
        in_pool = with_kv <= self.num_blocks * self.block_size
        return len(arrival.prompt) < MODEL_LEN and in_pool and with_kv <= self.tokens


ids = st.integers(0, 99)
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.lists(ids, min_size=1, max_size=14) | st.just([3] * MODEL_LEN),
    max_tokens=st.integers(1, 12) | st.integers(1, 12) | st.none(),
    stop_token_ids=st.lists(ids, max_size=6),
    eos=st.lists(ids, max_size=6),
    abort=st.none() | st.integers(0, 25),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size, seqs = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return World(
        num_blocks=draw(st.integers(1, 60 // block_size)),
        block_size=block_size,
        seqs=seqs,
        tokens=draw(st.integers(max(seqs, 12), 3 * MODEL_LEN)),
        arrivals=draw(st.lists(arrivals, min_size=1, max_size=8)),
        failing_step=draw(st.none() | st.none() | st.integers(1, 20)),
    )


# What must come out


def alone(world: World, arrival: Arrival) -> list[int]:
    """The answer of a scheduler that serves one request at a time."""
    request = arrival.request("alone")
    request.eos_token_ids = frozenset([*arrival.eos, *arrival.stop_token_ids])
    request.max_total_tokens = arrival.limit
    scheduler = OneAtATimeScheduler(world.block_size)
    runner = CountingRunner(world.block_size, checksum)
    scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
    return request.output_token_ids


def check_ending(world: World, arrival: Arrival, request: Request) -> None:
    """It ended for a reason that is true, with the tokens it would have had alone."""
    expected, output = alone(world, arrival), request.output_token_ids
    assert request.is_finished
    assert output == expected[: len(output)]
    if request.finish_reason is FinishReason.ABORT:
        assert arrival.abort is not None
    elif request.finish_reason is FinishReason.ERROR:
        assert world.failing_step is not None
    else:
        assert output == expected
        ended = output[-1] in {*arrival.eos, *arrival.stop_token_ids}
        assert request.finish_reason == ("stop" if ended else "length")


class Watched(Loop):
    """A loop that checks the books after every move."""

    def __init__(self, world: World, depth: int) -> None:
        super().__init__(
            world.scheduler(), CountingRunner(world.block_size, checksum), depth
        )
        self.world = world
        self.requests: list[tuple[Arrival, Request]] = []
        self.num_steps = 0

    def admit(self, now: int) -> None:
        for index, arrival in enumerate(self.world.arrivals):
            if arrival.step != now:
                continue
            request = arrival.request(str(index))
            if self.world.fits(arrival):
                self.scheduler.add(request)
                self.requests.append((arrival, request))
            else:
                with pytest.raises(RequestError):
                    self.scheduler.add(request)

    def abort(self, now: int) -> None:
        for arrival, request in self.requests:
            if arrival.abort == now:
                self.scheduler.abort(request)
                self.check_books()

    def submit(self) -> Plan:
        plan = super().submit()
        self.num_steps += 1
        self.check_plan(plan)
        self.check_books()
        return plan

    def complete(self) -> Plan:
        if self.flying[0].step != self.world.failing_step:
            plan = super().complete()
        else:  # what was launched behind a broken step is lost too
            while self.flying:
                plan = self.flying.popleft()
                self.scheduler.fail(plan)
        self.check_books()
        return plan

    def check_plan(self, plan: Plan) -> None:
        size = self.world.block_size
        assert plan.num_tokens <= self.world.tokens
        rows = [e.row for e in plan.entries]
        assert len(set(rows)) == len(rows) and all(0 <= r < self.world.seqs for r in rows)
        for e in plan.entries:
            assert e.count > 0
            assert len(e.request.block_table) == -(-(e.start + e.count) // size)
            assert e.samples == (e.request.work_left == 1)  # after booking: its new token

    def check_books(self) -> None:
        scheduler, everyone = self.scheduler, [request for _, request in self.requests]
        scheduler.allocator.check_integrity(r.block_table for r in everyone)
        assert len(scheduler.running) <= self.world.seqs
        assert [r.arrival for r in scheduler.waiting] == sorted(
            r.arrival for r in scheduler.waiting
        )
        for entry in (e for plan in self.flying for e in plan.entries):
            if entry.epoch == entry.request.epoch:  # held until its last step is back
                assert entry.request.row == entry.row
        held = [r.row for r in everyone if r.row is not None]
        assert sorted([*held, *scheduler.queues.free_rows]) == list(range(self.world.seqs))
        for r in everyone:
            if not r.is_finished:
                assert 0 <= r.num_computed_tokens <= r.num_tokens + r.num_inflight_tokens
                assert 0 <= r.num_inflight_tokens <= self.depth

    def serve(self) -> None:
        """From the first arrival to the last step that comes back."""
        last = max(a.step for a in self.world.arrivals)
        now = 0
        while self.busy or now <= last:
            self.admit(now)
            self.abort(now)
            self.turn()
            now += 1
            assert self.num_steps <= self.bound(), "nobody gets on"
        self.check_everything_returned()

    def bound(self) -> int:
        """The oldest request gains a token in every step, or once a round trip when ahead."""
        return self.depth * sum(a.limit + 2 for a in self.world.arrivals) + 13

    def check_everything_returned(self) -> None:
        check_scheduler_empty(self.scheduler)
        for arrival, request in self.requests:
            assert request.num_inflight_tokens == 0
            check_ending(self.world, arrival, request)


def check_world(world: World, depth: int) -> None:
    Watched(world, depth).serve()


@pytest.mark.parametrize("depth", [1, 2, 3], ids=["plain", "ahead", "two ahead"])
@settings(max_examples=500)
@given(world=worlds())
def test_random_traffic_loses_no_block_and_changes_no_answer(
    world: World, depth: int
) -> None:
    check_world(world, depth)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [1, 2, 3], ids=["plain", "ahead", "two ahead"])
@settings(max_examples=20_000)
@given(world=worlds())
def test_random_traffic_for_minutes(world: World, depth: int) -> None:
    check_world(world, depth)


def test_the_random_traffic_reaches_what_it_is_meant_to_reach() -> None:
    """A property over traces in which nothing ever happens would prove nothing."""
    seen: set[str] = set()

    @settings(max_examples=150, derandomize=True, database=None)
    @given(world=worlds())
    def look(world: World) -> None:
        loop = Watched(world, depth=3)
        loop.serve()
        seen.update(f"{r.finish_reason}" for _, r in loop.requests)
        seen.update("preempted" for _, r in loop.requests if r.num_preemptions)
        seen.update("refused" for a in world.arrivals if not world.fits(a))

    look()
    assert seen == {"stop", "length", "abort", "error", "preempted", "refused"}


# The real engine around a tiny Llama, in float64


@dataclass(frozen=True)
class Machine:
    """Engine settings that must not show in an answer."""

    block_size: int
    num_kv_blocks: int
    max_num_seqs: int

    @property
    def options(self) -> dict[str, int]:
        return dict(vars(self))


machines = st.integers(1, 5).flatmap(
    lambda size: st.builds(
        Machine,
        block_size=st.just(size),
        num_kv_blocks=st.integers(-(-24 // size), -(-60 // size)),
        max_num_seqs=st.integers(1, 5),
    )
)
prompts = st.lists(
    st.lists(st.integers(0, 255), min_size=1, max_size=14), min_size=2, max_size=5
)
sampled = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 10),
)
greedy = st.builds(SamplingParams, temperature=st.just(0), max_tokens=st.integers(1, 10))


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, draw(greedy | sampled)) for prompt in draw(prompts)]


def llama_answers(
    batch: Sequence[tuple[list[int], SamplingParams]], **options: Any
) -> list[list[int]]:
    """The answers' ids in order; checks the books after every step."""
    engine = tiny_engine(max_model_len=25, **options)
    prompts, params = zip(*batch, strict=True)
    answers: dict[str, list[int]] = {}
    deltas = []
    for delta in watch(engine, engine.stream(list(prompts), list(params))):
        deltas.append(delta)
        if delta.finished is not None:
            answers[delta.request_id] = delta.finished.token_ids
            check_pieces(deltas, delta.request_id, delta.finished)
    check_scheduler_empty(engine.scheduler)
    return [answers[str(i)] for i in range(len(batch))]


def watch(engine: Any, stream: Iterator[Any]) -> Iterator[Any]:
    for delta in stream:
        scheduler = engine.scheduler
        scheduler.allocator.check_integrity(r.block_table for r in scheduler.running)
        yield delta


def check_llama(batch: list[tuple[list[int], SamplingParams]], machine: Machine) -> None:
    ample = llama_answers(batch, num_kv_blocks=64)
    assert llama_answers(batch, **machine.options) == ample
    assert [llama_answers([one], num_kv_blocks=64)[0] for one in batch] == ample


@settings(max_examples=80)
@given(batch=batches(), machine=machines)
def test_llama_answers_depend_on_neither_pool_nor_company(
    batch: list[tuple[list[int], SamplingParams]], machine: Machine
) -> None:
    check_llama(batch, machine)


@pytest.mark.soak
@settings(max_examples=3_000)
@given(batch=batches(), machine=machines)
def test_llama_answers_for_minutes(
    batch: list[tuple[list[int], SamplingParams]], machine: Machine
) -> None:
    check_llama(batch, machine)


def test_the_small_pools_do_preempt() -> None:
    """The smallest machine above has a pool in which requests throw each other out."""
    engine = tiny_engine(max_model_len=25, block_size=4, num_kv_blocks=6, max_num_seqs=4)
    prompts = [[1, 2, 3], [4] * 8, [5, 6], [7] * 12]
    list(engine.stream(prompts, SamplingParams(max_tokens=10, temperature=0)))
    assert engine.stats.num_preemptions > 0
