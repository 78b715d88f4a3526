"""Graphs of decode steps: what is recorded, who sits where, what a step uploads, what padding does.

Without a card nothing is recorded and the same steps run as they are; `make test-gpu` runs
the recorded ones. That tokens are the same in every loop is in `test_contract.py` and
`test_overlap.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import drain, request, serve
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import (
    CONFIG,
    HostAttention,
    ToyModel,
    ToySampler,
    one_of_four,
    say,
    toy_engine,
    toy_runner,
)

from octavo import cuda_graphs
from octavo.attention import TorchAttention
from octavo.block_pool import BlockPool
from octavo.config import ConfigError
from octavo.cuda_graphs import DecodeGraphs, ladder
from octavo.decode_inputs import (
    DecodeInputs,
    RunningRows,
    feed_tokens,
    feed_tokens_plain,
    prepare_decode,
    prepare_decode_plain,
)
from octavo.graph_runner import CUDAGraphRunner, decoding_rows
from octavo.kernels import Tuning, triton_problem
from octavo.kv_cache import KVCache
from octavo.request import Plan, SamplingParams, ScheduledRequest
from octavo.scheduler import Scheduler
from octavo.triton_attention import TritonAttention

REAL = torch.cuda.is_available()
DEVICE = "cuda" if REAL else "cpu"
PROBLEM = triton_problem(torch.device(DEVICE), torch.float32)
needs_triton = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4] * 9, [5], [6, 7] * 5, [8] * 4]


def on_card(test: Any) -> Any:
    skip = pytest.mark.skipif(not REAL, reason="needs a CUDA card")
    return pytest.mark.gpu(skip(test))


def graphs_of(engine: Any) -> DecodeGraphs:
    return engine.runner.inner.graphs


def spied(uploads: list[int], staging: Any) -> None:
    """Note how many numbers each upload of a staging sends."""
    plain = staging.upload

    def upload(*arrays: np.ndarray) -> Any:
        uploads.append(sum(map(len, arrays)))
        return plain(*arrays)

    staging.upload = upload


# Sizes


@given(st.integers(1, 5000))
def test_b45_the_largest_size_is_the_largest_batch(most: int) -> None:
    sizes = ladder(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes)) and sizes[0] == 1
    for size, larger in pairwise(sizes):
        assert larger - size <= max(
            8, size // 4
        )  # padding is a small part of a large batch
    assert len(sizes) <= 25 + max(0, most - 256) // 32


def test_b45_what_no_graph_holds_is_counted_and_said_once_per_size(caplog: Any) -> None:
    engine = toy_engine("graphs", parts={"sizes": [1, 2]})
    with caplog.at_level(logging.WARNING, "octavo"):
        answers = serve(engine, PROMPTS[:4], GREEDY)
    assert [a.token_ids for a in answers] == [say(p, 8) for p in PROMPTS[:4]]
    stats = engine.runner.inner.stats
    assert (stats.num_graph_steps, stats.num_eager_steps) == (0, 8)
    assert [r.message for r in caplog.records] == [
        "4 decodes: no CUDA graph holds them, so they run eagerly"
    ]


def test_b45_with_the_ladder_every_step_of_decodes_is_a_graph(caplog: Any) -> None:
    engine = toy_engine("graphs", max_num_seqs=5)
    params = [SamplingParams(temperature=0, max_tokens=3 + i) for i in range(5)]
    serve(engine, PROMPTS, params)
    stats = engine.runner.inner.stats
    assert (stats.num_graph_steps, stats.num_eager_steps) == (6, 1) and not caplog.records
    assert stats.num_padded_rows == 0  # 5, 5, 4, 3, 2, 1: each has a graph of its own


def entry(
    row: int, start: int, count: int = 1, samples: bool = True, joins: bool = False
) -> Any:
    return ScheduledRequest(request("r", [0]), 0, row, start, count, samples, (), joins, ())


def test_only_steps_in_which_everybody_decodes_are_graphs() -> None:
    decode, last_of_a_prompt = entry(4, 9), entry(2, 3)
    assert decoding_rows(Plan(1, (decode, last_of_a_prompt))) == (4, 2)
    for other in (
        entry(1, 5, count=3),
        entry(1, 5, samples=False),
        entry(1, 0, joins=True),
        entry(1, 8, joins=True),
    ):
        assert decoding_rows(Plan(1, (decode, other))) == ()
        assert decoding_rows(Plan(1, (other,))) == ()
    assert decoding_rows(Plan(1)) == ()


def test_an_attention_or_a_sampler_that_reads_on_the_host_is_refused() -> None:
    class HostSampler(ToySampler):
        capturable = False

    rows, cache = RunningRows(2, 16, 4, 9), KVCache(CONFIG, 9, 4, torch.float64)
    good, bad = HostAttention(), TorchAttention()
    with pytest.raises(
        ConfigError, match="attention by TorchAttention .* cuda_graphs=False"
    ):
        DecodeGraphs(ToyModel(), ToySampler(3), cache, bad, rows, [1])
    with pytest.raises(ConfigError, match="sampler by HostSampler"):
        DecodeGraphs(ToyModel(), HostSampler(3), cache, good, rows, [1])


# Inputs


def rows_in_use(block_size: int = 4, length: int = 60) -> RunningRows:
    rows = RunningRows(5, length, block_size, 99, DEVICE)
    draw = torch.Generator().manual_seed(1)
    rows.token_ids.copy_(torch.randint(0, 1000, rows.token_ids.shape, generator=draw))
    rows.block_table[:5].copy_(
        torch.randint(0, 90, (5, rows.block_table.shape[1]), generator=draw)
    )
    rows.positions[:5] = torch.tensor([0, 3, 4, 31, length - 1])
    return rows


@needs_triton
@pytest.mark.parametrize(("block_size", "length"), [(4, 60), (1, 33), (3, 50), (16, 64)])
def test_the_kernels_of_a_step_do_what_the_plain_versions_do(
    block_size: int, length: int
) -> None:
    found = []
    for prepare, feed in (
        (prepare_decode, feed_tokens),
        (prepare_decode_plain, feed_tokens_plain),
    ):
        rows = rows_in_use(block_size, length)
        inputs = DecodeInputs.make(6, rows)
        inputs.rows[:4] = torch.tensor([4, 0, 2, 3], device=DEVICE)
        prepare(inputs, rows)
        tokens = torch.zeros(6, dtype=torch.int64, device=DEVICE)
        feed(torch.arange(70, 76, device=DEVICE), inputs, tokens, rows)
        found.append((rows, inputs, tokens))
    (rows, inputs, tokens), (plain_rows, plain, plain_tokens) = found
    assert rows.positions.tolist() == [1, 3, 5, 32, length, 0]
    for name in ("positions", "token_ids", "block_table"):
        mine, theirs = getattr(rows, name), getattr(plain_rows, name)
        assert torch.equal(mine[:5], theirs[:5]), name
    for name in DecodeInputs._fields[:-1]:
        assert torch.equal(getattr(inputs, name), getattr(plain, name)), name
    assert torch.equal(tokens, plain_tokens) and tokens.tolist() == list(range(70, 76))
    assert rows.token_ids[4, length] == 70 and rows.token_ids[0, 1] == 71
    for seat, count in enumerate(inputs.lengths.tolist()):
        used = -(-count // block_size)
        assert torch.equal(inputs.block_table[seat, :used], plain.block_table[seat, :used])
    assert inputs.slots[4:].tolist() == [99 * block_size] * 2  # the reserved block's first


def test_b41_a_row_is_as_wide_as_the_longest_request_and_shows_no_stale_column() -> None:
    """A long request ends, a short one takes its row and its seat: what it reads is its own."""
    engine = toy_engine("graphs", max_num_seqs=1, num_blocks=16)
    (long,) = serve(engine, [[7] * 40], temperature=0, max_tokens=24)
    assert len(long.token_ids) == 24 and long.token_ids == say([7] * 40, 24)  # 64 in all
    (short,) = serve(engine, [[1, 2]], GREEDY)
    assert short.token_ids == say([1, 2], 8)
    seen = graphs_of(engine).inputs.block_table[0]
    used = -(-9 // 4)
    own = engine.runner.inner.rows.block_table[0]
    assert torch.equal(seen[:used], own[:used])


def test_a_row_that_stood_still_goes_on_from_its_own_position() -> None:
    """Decodes pause while prompts run (prefill-first), rows come and go, seats are reused."""
    engine = toy_engine("graphs", batching="prefill-first", max_num_batched_tokens=18)
    names = [engine.add_request(PROMPTS[0], GREEDY)]
    deltas = [d for _ in range(3) for d in engine.step()]
    for prompt in PROMPTS[1:]:
        names.append(engine.add_request(prompt, GREEDY))
        deltas += engine.step()
    deltas += drain(engine)
    ended = {d.request_id: d.finished.token_ids for d in deltas if d.finished}
    assert [ended[n] for n in names] == [say(p, 8) for p in PROMPTS]


# Seats and uploads


def test_rows_sit_longest_first_and_answers_find_their_way_back() -> None:
    engine = toy_engine("graphs", max_num_seqs=5)
    names = [engine.add_request(p, GREEDY) for p in PROMPTS]
    engine.step()
    engine.step()
    inputs = graphs_of(engine).inputs
    lengths = inputs.lengths.tolist()
    assert lengths == sorted(lengths, reverse=True) == [11, 10, 5, 4, 2]
    rows = {r.request_id: r.row for r in engine.scheduler.running}
    by_length = [rows[names[i]] for i in (3, 1, 4, 0, 2)]
    assert inputs.rows.tolist() == by_length
    ended = {d.request_id: d.finished.token_ids for d in drain(engine) if d.finished}
    assert [ended[n] for n in names] == [say(p, 8) for p in PROMPTS]


def test_a_longer_request_on_the_same_row_takes_the_first_seat() -> None:
    """The youngest ends and a long prompt takes its row: the rows are the same, the order isn't."""
    engine = toy_engine("graphs", max_num_seqs=2)
    stays, goes = SamplingParams(temperature=0, max_tokens=12), SamplingParams(max_tokens=3)
    engine.add_request([1, 2, 3], stays)
    engine.add_request([4], goes)
    engine.step()
    engine.step()
    before = graphs_of(engine).inputs.rows.tolist()
    engine.add_request([5] * 20, stays)
    for _ in range(4):
        engine.step()
    assert graphs_of(engine).inputs.rows.tolist() == before[::-1]


def test_a_decode_step_uploads_appended_blocks_and_nothing_else() -> None:
    """Who sits where goes up when the batch changes; of a step without news nothing does."""
    engine = toy_engine("graphs", max_num_seqs=5)
    params = [SamplingParams(temperature=0, max_tokens=9 + (i > 2)) for i in range(5)]
    for prompt, param in zip(PROMPTS, params, strict=True):
        engine.add_request(prompt, param)
    engine.step()
    uploads: list[int] = []
    spied(uploads, engine.runner.inner.rows.staging)
    seated = 5
    for plan_number in range(1, 10):
        uploads.clear()
        engine.step()
        plan = engine.runner.plans[plan_number]
        blocks = sum(len(e.new_block_ids) for e in plan.entries)
        expected = [3 * blocks] if blocks else []
        if plan_number == 1 or len(plan.entries) != seated:
            expected.append(graphs_of(engine).size_for(len(plan.entries)) or 0)
            seated = len(plan.entries)
        assert uploads == expected, plan_number
    assert seated == 2 and not engine.has_unfinished


@pytest.mark.parametrize("num_requests", [1, 2, 3, 5, 6])
def test_tokens_are_the_same_at_every_number_of_seats(num_requests: int) -> None:
    """One size only, so that all but one batch is padded."""
    engine = toy_engine("graphs", parts={"sizes": [6]})
    prompts = [[i + 1] * (1 + 3 * i) for i in range(num_requests)]
    answers = serve(engine, prompts, GREEDY)
    assert [a.token_ids for a in answers] == [say(p, 8) for p in prompts]
    assert engine.runner.inner.stats.num_padded_rows == 7 * (6 - num_requests)


def test_the_seats_behind_a_smaller_batch_move_nobody() -> None:
    """A batch of 4 shrinks to 2: the old seats 3 and 4 must not advance rows any more."""
    engine = toy_engine("graphs", parts={"sizes": [4]})
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (4, 9, 4, 9)]
    answers = serve(engine, PROMPTS[:4], params)
    assert [a.token_ids for a in answers] == [
        say(p, s.max_tokens) for p, s in zip(PROMPTS[:4], params, strict=True)
    ]
    rows = engine.runner.inner.rows
    assert rows.positions[rows.padding_row] == 0


# Padding


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_b42_nan_in_the_reserved_block_reaches_nobody(loop: str) -> None:
    told = []
    for poison in (0.0, float("nan")):
        engine = toy_engine("graphs", loop, parts={"sizes": [6]})
        for layer in range(CONFIG.num_layers):
            for pages in engine.runner.inner.cache.layer(layer):
                pages[-1] = poison
        answers = serve(engine, PROMPTS[:3], GREEDY)
        told.append([a.token_ids for a in answers])
        logits = graphs_of(engine).logits
        assert logits is not None and not logits[:3].isnan().any()
    assert told[0] == told[1] == [say(p, 8) for p in PROMPTS[:3]]


def test_b42_the_reserved_block_belongs_to_no_request() -> None:
    engine = toy_engine("graphs", num_blocks=20, parts={"sizes": [6]})
    serve(engine, PROMPTS, GREEDY)
    given_out = {b for p in engine.runner.plans for e in p.entries for b in e.new_block_ids}
    rows = engine.runner.inner.rows
    assert rows.padding_block == 20 and rows.padding_block not in given_out
    assert set(rows.block_table[rows.padding_row].tolist()) == {20}


# Memory


def test_b48_the_memory_of_all_sizes_is_judged_by_a_few() -> None:
    rows, cache = RunningRows(64, 64, 4, 9), KVCache(CONFIG, 9, 4, torch.float64)
    parts = ToyModel(), ToySampler(65), cache, HostAttention(), rows
    few = DecodeGraphs(*parts, [1, 4, 64])
    few.capture()
    buffers = few.num_bytes
    held = (*few.inputs, few.tokens, few.logits)
    assert buffers == sum(t.nbytes for t in held if t is not None)
    few.bytes_by_size = {64: 100_000_000, 4: 3_000_000, 1: 1_000_000}  # as a card might say
    assert few.num_bytes == buffers + 104_000_000
    assert few.expected_bytes(3) == few.num_bytes
    assert few.expected_bytes(11) == few.num_bytes + 8 * 2_000_000
    one = DecodeGraphs(*parts, [64])
    one.capture()
    one.bytes_by_size = {64: 5}
    assert one.expected_bytes(11) == one.num_bytes


def test_b52_a_closed_runner_gives_its_graphs_back_and_runs_on_eagerly() -> None:
    engine = toy_engine("graphs")
    runner, graphs = engine.runner.inner, graphs_of(engine)
    serve(engine, PROMPTS, GREEDY)
    steps = runner.stats.num_graph_steps
    runner.close()
    runner.close()
    assert graphs.logits is None and graphs.size_for(1) is None and runner.graphs is None
    answers = serve(engine, PROMPTS, GREEDY)
    assert [a.token_ids for a in answers] == [say(p, 8) for p in PROMPTS]
    assert runner.stats.num_graph_steps == steps


def test_b49_what_is_set_up_on_the_way_is_not_taken_for_graphs(monkeypatch: Any) -> None:
    """Every size runs before the free memory is read; then the largest is recorded first."""
    rows, cache = RunningRows(8, 64, 4, 9), KVCache(CONFIG, 9, 4, torch.float64)
    graphs = DecodeGraphs(
        ToyModel(), ToySampler(9), cache, HostAttention(), rows, [1, 4, 8]
    )
    events: list[Any] = []
    free = iter([1000, 400, 390, 385])

    def read_memory(device: Any) -> tuple[int, int]:
        events.append("memory")
        return next(free), 2000

    def recorded(work: Any, pool: Any) -> Any:
        events.append("recording")
        work()
        return work

    plain = graphs._forward

    def forward(size: int) -> None:
        events.append(size)
        plain(size)

    monkeypatch.setattr(graphs, "_on_gpu", True)
    monkeypatch.setattr(graphs, "_forward", forward)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", read_memory)
    monkeypatch.setattr(cuda_graphs, "_recording", lambda device: nullcontext())
    monkeypatch.setattr(cuda_graphs, "_recorded", recorded)
    graphs.capture()
    each = [x for size in (8, 4, 1) for x in ("recording", size, "recording", "memory")]
    assert events == [8, 4, 1, 1, "memory", *each]
    assert graphs.bytes_by_size == {8: 600, 4: 10, 1: 5}
    assert [graphs.size_for(n) for n in (1, 2, 5, 9)] == [1, 4, 8, None]


@on_card
def test_b48_and_b52_on_a_card_the_memory_is_counted_and_comes_back() -> None:
    """Only what PyTorch counts is compared: other processes may use the card meanwhile."""
    import gc

    def held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    serve(toy_engine("graphs", parts=on_the_card()), PROMPTS, GREEDY)  # what is set up once
    before = held()
    engine = toy_engine("graphs", parts=on_the_card())
    graphs = graphs_of(engine)
    assert gc.isenabled() and set(graphs.bytes_by_size) == set(graphs.sizes)
    assert graphs.num_bytes > 0 and graphs.expected_bytes(50) >= graphs.num_bytes
    serve(engine, PROMPTS, GREEDY)
    engine.runner.inner.close()
    answers = serve(engine, PROMPTS, GREEDY)
    assert [a.token_ids for a in answers] == [say(p, 8) for p in PROMPTS]
    del engine, graphs
    allocated, reserved = held()
    assert allocated == before[0] and reserved <= before[1]


@on_card
def test_a_recording_that_fails_leaves_a_card_that_works() -> None:
    class Unlucky(ToyModel):
        luck = 3

        def compute_logits(self, hidden: Any, out: Any = None) -> Any:
            self.luck -= 1
            if not self.luck:
                raise MemoryError("no room")
            return super().compute_logits(hidden, out)

    rows = RunningRows(2, 16, 4, 9, "cuda")
    cache = KVCache(CONFIG, 9, 4, torch.float32, "cuda")
    model = Unlucky(torch.float32, "cuda")
    graphs = DecodeGraphs(
        model, ToySampler(3, "cuda"), cache, TritonAttention(), rows, [1, 2]
    )
    with pytest.raises((MemoryError, RuntimeError)):
        graphs.capture()
    engine = toy_engine("graphs", parts=on_the_card())
    assert [a.token_ids for a in serve(engine, PROMPTS, GREEDY)] == [
        say(p, 8) for p in PROMPTS
    ]


# The same, bit for bit


def on_the_card(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"dtype": dtype, "device": "cuda", "attention": TritonAttention()}


def logits_of_first(
    prompts: Sequence[Sequence[int]], parts: dict[str, Any], poison: float = 0.0
) -> torch.Tensor:
    """The first prompt's logits in each of seven decode steps; it is the longest of the batch."""
    engine = toy_engine("graphs", parts=parts)
    for layer in range(CONFIG.num_layers):
        for pages in engine.runner.inner.cache.layer(layer):
            pages[-1] = poison
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    engine.step()
    found = []
    while engine.has_unfinished:
        engine.step()
        logits = graphs_of(engine).logits
        assert logits is not None
        found.append(logits[0].clone())
    return torch.stack(found)


@pytest.mark.parametrize("neighbours", [1, 3, 5])
@pytest.mark.parametrize("parts", [{}, pytest.param({"sizes": [6]}, id="padded")])
def test_b62_neighbours_and_padding_never_change_a_bit(neighbours: int, parts: Any) -> None:
    """(a) What others say doesn't matter at all; (b) that they are there costs rounding only."""
    check_determinism(neighbours, parts, 1e-12)


@on_card
@pytest.mark.parametrize("neighbours", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [None, [6]])
def test_b62_on_a_card(neighbours: int, dtype: torch.dtype, sizes: Any) -> None:
    rounding = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    check_determinism(neighbours, {**on_the_card(dtype), "sizes": sizes}, rounding)


def check_determinism(neighbours: int, parts: Any, rounding: float) -> None:
    mine = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 8]
    some = [[i + 1] * (2 + i) for i in range(neighbours)]
    others = [[50 + 3 * i, *range(1 + i)] for i in range(neighbours)]
    here = logits_of_first([mine, *some], parts)
    assert torch.equal(here, logits_of_first([mine, *others], parts))
    assert torch.equal(
        here, logits_of_first([mine, *some], parts, poison=float("nan"))
    )  # B42
    alone = logits_of_first([mine], parts)
    assert (here[0] - alone[0]).norm() <= rounding * alone[0].norm()


@on_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_a_graph_computes_what_its_step_computes_eagerly(
    count: int, dtype: torch.dtype
) -> None:
    """Bit for bit: the recorded step against the same step run kernel by kernel, equal shapes."""
    engine = toy_engine("graphs", parts=on_the_card(dtype))
    for i in range(count):
        engine.add_request([i + 1] * (1 + 4 * i), GREEDY)  # no block is full in these steps
    for _ in range(3):
        engine.step()
    graphs = graphs_of(engine)
    size = graphs.size_for(count)
    assert size == count and graphs.logits is not None
    rows, found = graphs.rows, []
    kept = rows.positions.clone(), rows.token_ids.clone()
    for step in (graphs._works(size), graphs._replays[size]):
        rows.positions.copy_(kept[0])
        rows.token_ids.copy_(kept[1])
        with torch.inference_mode():
            for work in step:
                work()
        found.append([t.clone() for t in (graphs.logits, graphs.tokens, rows.token_ids)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_card
def test_the_eager_runner_and_the_graphs_agree_at_equal_shapes() -> None:
    """Four requests, a graph of four: every token, temperature included."""
    params = [SamplingParams(temperature=0.5 * i, max_tokens=40, seed=i) for i in range(4)]
    told = []
    for runner in ("eager", "graphs"):
        engine = toy_engine(runner, parts=on_the_card(), max_model_len=64)
        told.append([a.token_ids for a in serve(engine, PROMPTS[:4], params)])
    assert told[0] == told[1] and engine.runner.inner.stats.num_graph_steps == 39


# Two graphs


def test_a_mask_comes_between_the_two_graphs_and_finds_its_seat() -> None:
    """The masked request is neither the first of the plan nor in the first seat."""
    engine = toy_engine("graphs", max_num_seqs=5)
    names = [engine.add_request(p, GREEDY) for p in PROMPTS]
    engine._groups[names[2]][0].token_mask = one_of_four
    ended = {d.request_id: d.finished.token_ids for d in drain(engine) if d.finished}
    masks = [None, None, one_of_four, None, None]
    assert [ended[n] for n in names] == [
        say(p, 8, mask=m) for p, m in zip(PROMPTS, masks, strict=True)
    ]
    assert engine.runner.inner.stats.num_graph_steps == 7


@needs_triton
def test_the_real_kernels_around_the_toy() -> None:
    """Triton's attention, prepare and feed; in the interpreter without a card."""
    tiny = Tuning(tile=16, splits=2, min_keys=16, query_tile=16, key_tile=16)
    pool = BlockPool(30, 4)
    scheduler = Scheduler(pool, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=40)
    parts = {"dtype": torch.float32, "device": DEVICE, "attention": TritonAttention(tiny)}
    runner = toy_runner("graphs", scheduler, sizes=[3], **parts)
    assert isinstance(runner, CUDAGraphRunner) and runner.graphs is not None
    runner.graphs._prepare, runner.graphs._feed = prepare_decode, feed_tokens
    requests = [request(str(n), [n] * n, temperature=0, max_tokens=4) for n in (2, 7)]
    for r in requests:
        scheduler.add(r)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
    assert [r.output_token_ids for r in requests] == [say([n] * n, 4) for n in (2, 7)]
    assert runner.stats.num_graph_steps == 3
