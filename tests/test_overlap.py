"""The overlapped loop: what happens in which order, what breaks, and that nobody sees a difference.

`test_contract.py` has the table of the contract; here is what holds for all of it at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_all_returned, drain, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import LOOPS, RUNNERS, one_of_four, say, toy_engine

from octavo.chunking import ChunkedPrefill
from octavo.engine import Engine
from octavo.request import SamplingParams

both_runners = pytest.mark.parametrize("runner", RUNNERS)
all_loops = pytest.mark.parametrize(("runner", "loop"), LOOPS)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def kv_in_use(engine: Any) -> list[list[int]]:
    """Block tables of everybody who holds blocks."""
    scheduler = engine.scheduler
    return [r.block_table for r in (*scheduler.running, *scheduler._leaving)]


# Order


@both_runners
def test_the_next_step_is_launched_before_anybody_waits_for_this_one(runner: str) -> None:
    engine = toy_engine(runner, "overlapped")
    serve(engine, [[1, 2], [3]], GREEDY)
    events = engine.runner.events
    for step in range(1, 8):
        assert events.index(("launched", step + 1)) < events.index(("came back", step))
        assert events.index(("came back", step)) < events.index(("came back", step + 1))
    assert len([e for e in events if e[0] == "launched"]) == 8  # no step too many


def test_a_step_returns_without_waiting_while_it_is_the_only_one() -> None:
    engine = toy_engine("eager", "overlapped")
    engine.add_request([1, 2], GREEDY)
    assert engine.step() == [] and engine.runner.events == [("launched", 1)]
    assert [list(d.token_ids) for d in engine.step()] == [say([1, 2], 1)]


def test_an_idle_engine_launches_nothing_and_serves_on() -> None:
    engine = toy_engine("graphs", "overlapped")
    for prompt in ([1, 2], [3, 4, 5]):
        (answer,) = serve(engine, [prompt], GREEDY)
        assert answer.token_ids == say(prompt, 8)
        launched = len(engine.runner.plans)
        assert not engine.has_unfinished
        assert [engine.step() for _ in range(3)] == [[], [], []]
        assert len(engine.runner.plans) == launched
        check_all_returned(engine)


def test_a_zombie_is_taken_in_by_whoever_comes_next() -> None:
    """After the last answer has ended by a stop id, a step is still in flight."""
    stop = say([1, 2], 4)[3]
    engine = toy_engine("graphs", "overlapped", max_num_seqs=1, num_blocks=4)
    ends = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop])
    (answer,) = serve(engine, [[1, 2]], ends)
    assert answer.finish_reason == "stop" and not engine.has_unfinished
    assert kv_in_use(engine)  # its row and its blocks belong to the step in flight
    (heir,) = serve(engine, [[3, 4, 5]], GREEDY)
    assert heir.token_ids == say([3, 4, 5], 8)
    check_all_returned(engine)


# What breaks


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["failures", "losses"])
@pytest.mark.parametrize("step", range(1, 7))
@all_loops
def test_a_step_that_breaks_takes_its_own_requests_and_nobody_else(
    runner: str, loop: str, step: int, where: str, error: BaseException
) -> None:
    """Broken in the launch or in the wait: the tokens before it are told, the next are right."""
    engine = toy_engine(runner, loop, max_num_seqs=2, num_blocks=10)
    getattr(engine.runner, where)[step] = error
    prompts = [[1, 2, 3], [4] * 5, [6, 7], [8] * 4]
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    deltas: list[Any] = []
    with pytest.raises(type(error)):
        while True:
            deltas += engine.step()
            engine.scheduler.allocator.check_integrity(kv_in_use(engine))
    deltas += drain(engine)
    ended = {d.request_id: d.finished for d in deltas if d.finished}
    for name, prompt in zip(names[:2], prompts[:2], strict=True):
        assert (
            ended[name].finish_reason == "error"
            and type(error).__name__ in ended[name].error
        )
        assert ended[name].token_ids == say(prompt, step - 1)
    for name, prompt in zip(names[2:], prompts[2:], strict=True):
        assert ended[name].token_ids == say(prompt, 8)
    check_all_returned(engine)
    (again,) = serve(engine, [[9, 9]], GREEDY)
    assert again.token_ids == say([9, 9], 8)


@both_runners
def test_a_launch_that_fails_is_told_in_the_same_step(runner: str) -> None:
    """After what is in flight has been taken in, whose tokens come with the next delivery."""
    engine = toy_engine(runner, "overlapped")
    engine.runner.failures = {1: MemoryError("first"), 4: MemoryError("fourth")}
    engine.add_request([1, 2], GREEDY)
    with pytest.raises(MemoryError, match="first"):
        engine.step()
    engine.add_request([3, 4], GREEDY)
    deltas = [d for _ in range(2) for d in engine.step()]  # steps 2 and 3
    with pytest.raises(MemoryError, match="fourth"):
        engine.step()
    assert ("came back", 3) in engine.runner.events
    deltas += engine.step()
    last = deltas[-1].finished
    assert last.token_ids == say([3, 4], 2) and "fourth" in last.error
    check_all_returned(engine)


@both_runners
def test_a_mask_is_made_before_the_text(runner: str) -> None:
    """Sampling that was held back is launched as soon as it can be, not a detokeniser later."""
    engine, order = toy_engine(runner, "overlapped"), []
    decode = engine.codec.decode

    def noting(token_ids: Any, skip_special_tokens: bool = True) -> str:
        order.append("text")
        return decode(token_ids, skip_special_tokens)

    def mask(token_ids: Any) -> Any:
        order.append("mask")
        return one_of_four(token_ids)

    name = engine.add_request([1, 2], GREEDY)
    engine.codec.decode = noting
    engine._groups[name][0].token_mask = mask
    for _ in range(4):
        order.clear()
        engine.step()
        assert order[0] == "mask" and order.count("mask") == 1


@all_loops
def test_a_mask_that_breaks_ends_its_step_only(runner: str, loop: str) -> None:
    engine = toy_engine(runner, loop, max_num_seqs=2, num_blocks=10)
    names = [engine.add_request(p, GREEDY) for p in ([1, 2], [3], [4, 5])]

    def fails(token_ids: Any) -> Any:
        if len(token_ids) == 5:
            raise ValueError("no such state")
        return one_of_four(token_ids)

    engine._groups[names[0]][0].token_mask = fails
    deltas: list[Any] = []
    with pytest.raises(ValueError, match="no such state"):
        while True:
            deltas += engine.step()
    deltas += drain(engine)
    ended = {d.request_id: d.finished for d in deltas if d.finished}
    assert (
        "no such state" in ended[names[0]].error
        and "no such state" in ended[names[1]].error
    )
    assert ended[names[0]].token_ids == say([1, 2], 3, mask=one_of_four)
    assert ended[names[2]].token_ids == say([4, 5], 8)
    check_all_returned(engine)


@both_runners
@pytest.mark.parametrize("prompt", [[4, 5, 6], [7] * 5, [20, 30]], ids=str)
def test_a_lost_step_leaves_the_one_that_waits_for_its_mask_in_order(
    runner: str, prompt: list[int]
) -> None:
    """Step n is lost while n + 1 is launched but not sampled: n + 2 mustn't overtake it."""
    engine = toy_engine(runner, "overlapped", max_num_seqs=4)
    names = [engine.add_request(p, GREEDY) for p in ([1, 2], [3])]
    engine.runner.losses[3] = KeyboardInterrupt()
    deltas = [d for _ in range(3) for d in engine.step()]
    late = engine.add_request(prompt, GREEDY)  # joins in step 4, which holds all three
    engine._groups[late][0].token_mask = one_of_four
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    deltas += drain(engine)
    ended = {d.request_id: d.finished for d in deltas if d.finished}
    assert [ended[name].finish_reason for name in names] == ["error", "error"]
    assert ended[late].token_ids == say(prompt, 8, mask=one_of_four)
    check_all_returned(engine)


# Nobody sees a difference


@all_loops
def test_b14_one_token_a_block_and_a_long_answer(runner: str, loop: str) -> None:
    options = {"num_blocks": 202, "block_size": 1, "max_model_len": 256}
    options["max_num_batched_tokens"] = 256
    engine = toy_engine(runner, loop, **options)
    (answer,) = serve(engine, [[1, 2, 3]], temperature=0, max_tokens=200)
    assert len(answer.token_ids) == 200 and engine.scheduler.max_used_blocks == 202
    assert answer.token_ids[:20] == say([1, 2, 3], 20)
    check_all_returned(engine)


@st.composite
def traffic(draw: st.DrawFn) -> dict[str, Any]:
    """Who comes and who is aborted at which step, in an engine drawn at random."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    arrivals = []
    for i in range(draw(st.integers(1, 7))):
        prompt = draw(st.sampled_from([(5,) * 9, (1, 2, 3, 4, 5), (7, 8), (9,)]))
        most, heat = draw(st.integers(1, 9)), draw(st.sampled_from([0, 0.5]))
        params = SamplingParams(temperature=heat, max_tokens=most, seed=i, ignore_eos=True)
        leaves = draw(st.none() | st.integers(0, 14))
        masked = draw(st.integers(0, 9)) == 0
        arrivals.append((draw(st.integers(0, 9)), prompt, params, leaves, masked))
    longest = max(len(p) + s.max_tokens - 1 for _, p, s, _, _ in arrivals)
    fewest = -(-longest // block_size)
    chunk = draw(st.none() | st.integers(1, 6))
    options = {
        "block_size": block_size,
        "num_blocks": draw(st.integers(fewest, 2 * fewest + 2)),
        "max_num_seqs": draw(st.integers(1, 4)),
        "cache": draw(st.sampled_from(["none", "hash", "radix"])),
        "policy": chunk and ChunkedPrefill(chunk),
        "batching": draw(st.sampled_from(["decode-first", "prefill-first"])),
    }
    return {"arrivals": arrivals, "options": options}


def run_traffic(engine: Engine, arrivals: list[Any]) -> None:
    """Everybody gets what they would get alone, or the beginning of it if they are aborted."""
    coming, live, ended = sorted(arrivals, key=lambda a: a[0]), {}, {}
    for step in range(400):
        while coming and coming[0][0] <= step:
            _, prompt, params, leaves, masked = coming.pop(0)
            name = engine.add_request(prompt, params)
            live[name] = prompt, params, leaves, masked
            if masked:
                engine._groups[name][0].token_mask = one_of_four
        for name, (_, _, leaves, _) in live.items():
            if leaves == step:
                engine.abort(name)
        for delta in engine.step():
            if delta.finished:
                ended[delta.request_id] = delta.finished
        engine.scheduler.allocator.check_integrity(kv_in_use(engine))
        if not coming and not engine.has_unfinished:
            break
    assert ended.keys() == live.keys()
    for name, (prompt, params, _, masked) in live.items():
        count, found = params.max_tokens, ended[name].token_ids
        heat, mask = params.temperature, one_of_four if masked else None
        expected = say(prompt, count, heat, params.seed or 0, mask)
        assert found == expected[: len(found)], name
        assert len(found) == count or ended[name].finish_reason == "abort"
    check_all_returned(engine)


@settings(max_examples=60, deadline=None)
@given(traffic(), st.sampled_from(LOOPS))
def test_who_comes_and_goes_never_changes_the_others(
    case: dict[str, Any], kind: tuple[str, str]
) -> None:
    """Rows and blocks change hands while steps that read them are in flight."""
    run_traffic(toy_engine(*kind, **case["options"]), case["arrivals"])


@pytest.mark.soak
@settings(max_examples=4000, deadline=None)
@given(traffic(), st.sampled_from(LOOPS))
def test_who_comes_and_goes_never_changes_the_others_soak(
    case: dict[str, Any], kind: tuple[str, str]
) -> None:
    run_traffic(toy_engine(*kind, **case["options"]), case["arrivals"])


@pytest.mark.parametrize("step", range(12))
@all_loops
def test_one_leaves_and_one_comes_at_a_step(runner: str, loop: str, step: int) -> None:
    arrivals = [
        (0, (0,) * 5, GREEDY, None, False),
        (0, (1,) * 5, GREEDY, step, False),
        (step, (2,) * 5, GREEDY, None, False),
    ]
    run_traffic(toy_engine(runner, loop, max_num_seqs=2, num_blocks=7), arrivals)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("num_requests", [1, 5, 30])
def test_on_a_card_graphs_and_overlap_give_the_tokens_of_the_plain_loop(
    num_requests: int, block_size: int
) -> None:
    """B14 too: pages of one token. Ends by stop ids come while the next step is in flight."""
    from octavo.triton_attention import TritonAttention

    blocks = num_requests * -(-200 // block_size) * 2 // 3 + -(-200 // block_size)
    parts = {"dtype": torch.float32, "device": "cuda", "attention": TritonAttention()}
    options = {
        "parts": parts,
        "max_model_len": 256,
        "max_num_seqs": 24,
        "block_size": block_size,
        "num_blocks": blocks,
        "max_num_batched_tokens": 256,
        "cache": "hash",
    }
    prompts = [
        [(i * 7 + j) % 100 for j in range(1 + 5 * (i % 9))] for i in range(num_requests)
    ]
    params = [
        SamplingParams(
            temperature=0.4 * (i % 2), max_tokens=90 + i, seed=i, stop_token_ids=[5]
        )
        for i in range(num_requests)
    ]
    told = {}
    for kind in LOOPS:
        engine = toy_engine(*kind, **options)
        told[kind] = [a.token_ids for a in serve(engine, prompts, params)]
        assert [a.token_ids for a in serve(engine, prompts, params)] == told[kind]
        check_all_returned(engine)
    assert all(answers == told["eager", "plain"] for answers in told.values())
