"""How a plan's numbers get to the device, and what a launched step may and may not wait for."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from toy_engine import CONFIG, VOCAB, ToyModel, ToySampler

from octavo.attention import TorchAttention
from octavo.batch import DeviceRows, Staging, build_batch
from octavo.kv_cache import KVCache
from octavo.model_runner import Landing, LaunchedStep, ModelRunner, mask_logits
from octavo.request import Plan, Request, RequestStatus, ScheduledRequest

REAL = torch.cuda.is_available()
DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"),
        marks=[pytest.mark.gpu, pytest.mark.skipif(not REAL, reason="needs a CUDA card")],
    ),
]
every_device = pytest.mark.parametrize("device", DEVICES, ids=str)


def entry(
    row: int,
    start: int,
    count: int,
    blocks: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    samples: bool = True,
    mask: Any = None,
) -> ScheduledRequest:
    """A request's share of a step; it joins if it brings tokens."""
    request = Request(str(row), list(tokens) or [0], token_mask=mask)
    return ScheduledRequest(
        request, 0, row, start, count, samples, blocks, bool(tokens), tokens
    )


class Counted(Staging):
    num_uploads = 0

    def upload(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        self.num_uploads += 1
        return super().upload(*arrays)


class Unused(ToyModel):
    """A model whose head isn't to be called."""

    def compute_logits(self, hidden: Any, out: Any = None) -> Any:
        raise AssertionError("nothing is sampled")


def toy_runner(device: torch.device, rows: int = 4, model: Any = ToyModel) -> ModelRunner:
    device_rows = DeviceRows(rows, 64, 4, 40, device)
    device_rows.staging = Counted(device)
    cache = KVCache(CONFIG, 40, 4, torch.float64, device)
    sampler = ToySampler(rows, device)
    toy = model(device=str(device))
    return ModelRunner(toy, sampler, cache, TorchAttention(), device_rows)


# --- uploads -----------------------------------------------------------------------------------


@every_device
def test_uploads_keep_their_numbers_whatever_is_sent_after_them(
    device: torch.device,
) -> None:
    staging = Staging(device, capacity=4, turns=2)
    draw, sent = np.random.default_rng(0), []
    for size in (3, 1, 9, 2, 40, 0, 40, 7):  # buffers are reused, and grow
        arrays = [draw.integers(-(2**40), 2**40, n) for n in (size, 1, size // 2)]
        sent.append((arrays, staging.upload(*arrays)))
    for arrays, tensors in sent:
        assert all(t.dtype == torch.int64 and t.device.type == device.type for t in tensors)
        assert [t.tolist() for t in tensors] == [a.tolist() for a in arrays]


@every_device
def test_every_uploaded_array_begins_at_a_multiple_of_16_bytes(
    device: torch.device,
) -> None:
    """Else Triton would compile each kernel twice."""
    sizes = (1, 3, 0, 2, 5, 1)
    tensors = Staging(device).upload(*(np.arange(n) for n in sizes))
    assert [len(t) for t in tensors] == list(sizes)
    assert all(t.data_ptr() % 16 == 0 for t in tensors if len(t))


def test_booleans_and_narrow_integers_arrive_as_int64() -> None:
    flags, small = np.array([True, False]), np.array([-3], np.int32)
    arrived = Staging(torch.device("cpu")).upload(flags, small)
    assert [t.tolist() for t in arrived] == [[1, 0], [-3]]
    assert {t.dtype for t in arrived} == {torch.int64}


@every_device
def test_a_step_is_three_uploads_however_many_requests_it_holds(
    device: torch.device,
) -> None:
    for count in (1, 7, 64):
        rows = DeviceRows(count, 64, 4, 999, device)
        rows.staging = staging = Counted(device)
        plan = Plan(
            1, tuple(entry(i, 0, 5, (2 * i, 2 * i + 1), (i,) * 5) for i in range(count))
        )
        rows.apply(plan)
        batch = build_batch(plan, rows)
        assert staging.num_uploads == 3
        assert batch.input_ids.tolist() == [i for i in range(count) for _ in range(5)]
        quiet = Plan(2, tuple(entry(i, 5, 1) for i in range(count)))
        rows.apply(quiet)
        build_batch(quiet, rows)
        assert staging.num_uploads == 4  # who neither joins nor grows sends nothing


def test_a_request_too_long_for_its_row_is_an_error_and_not_its_neighbours_text() -> None:
    rows = DeviceRows(2, 8, 4, 9)
    with pytest.raises(IndexError):
        rows.apply(Plan(1, (entry(0, 0, 10, (1,), tuple(range(10))),)))
    with pytest.raises(IndexError):
        rows.apply(Plan(1, (entry(0, 0, 1, (1, 2, 3), (5,)),)))
    assert not rows.token_ids[1].any()


# --- launched steps ------------------------------------------------------------------------------


@every_device
def test_three_steps_may_be_in_flight_before_the_first_is_read(
    device: torch.device,
) -> None:
    landing = Landing(device, 4)
    arrivals = [landing.send(torch.tensor([i, i + 1], device=device)) for i in range(3)]
    assert [arrival.wait() for arrival in arrivals] == [[0, 1], [1, 2], [2, 3]]


@every_device
def test_a_chunk_that_samples_nothing_calls_neither_head_nor_sampler(
    device: torch.device,
) -> None:
    runner = toy_runner(device, model=Unused)
    chunk = entry(0, 0, 5, (1, 2), tuple(range(9)), samples=False)
    assert runner.execute(Plan(1, (chunk,))).token_ids == [[]]
    assert runner.stats.num_eager_steps == 1


@every_device
def test_a_plan_with_and_without_samples_finds_each_token(device: torch.device) -> None:
    entries = (
        entry(2, 0, 1, (1,), (7,)),
        entry(0, 0, 5, (2, 3), tuple(range(9)), samples=False),
        entry(1, 0, 3, (4,), (1, 2, 3)),
    )
    first, none, second = toy_runner(device).execute(Plan(1, entries)).token_ids
    alone = [toy_runner(device).execute(Plan(1, (e,))).token_ids for e in entries]
    assert [[first], [none], [second]] == alone and len(first) == len(second) == 1


def test_tokens_in_another_order_than_the_plans_are_put_in_place() -> None:
    plan = Plan(1, (entry(0, 3, 1), entry(1, 0, 2, samples=False), entry(2, 3, 1)))
    step = LaunchedStep(
        plan, lambda masked: torch.tensor([50, 60]), Landing(torch.device("cpu"), 4), [1, 0]
    )
    assert step.result().token_ids == [[60], [], [50]]


# --- masks ---------------------------------------------------------------------------------------


def only(*allowed: int) -> np.ndarray:
    mask = np.zeros(VOCAB, bool)
    mask[list(allowed)] = True
    return mask


@every_device
@pytest.mark.parametrize(
    "kind", [np.asarray, torch.as_tensor, list], ids=["numpy", "torch", "list"]
)
def test_a_mask_may_be_an_array_or_a_tensor(device: torch.device, kind: Any) -> None:
    seen = []

    def mask(token_ids: Any) -> Any:
        seen.append(list(token_ids))
        return kind(only(11))

    entries = (entry(0, 0, 2, (1,), (4, 5), mask=mask), entry(1, 0, 2, (2,), (4, 5)))
    step = toy_runner(device).submit(Plan(1, entries))
    assert step.needs_mask and not seen
    step.sample()
    step.sample()  # nothing left to do
    assert not step.needs_mask and seen == [[4, 5]]
    (masked,), (free,) = step.result().token_ids
    plain = toy_runner(device).execute(Plan(1, entries[1:])).token_ids
    assert masked == 11 and [[free]] == plain


def test_without_masks_a_step_is_launched_to_its_end() -> None:
    runner = toy_runner(torch.device("cpu"))
    plan = Plan(1, (entry(0, 0, 2, (1,), (4, 5)),))
    step = runner.submit(plan)
    assert not step.needs_mask
    ((token,),) = step.result().token_ids
    assert runner.rows.token_ids[0, 2] == token  # where the next step reads it


def test_a_step_lets_go_of_its_logits_once_it_has_sampled() -> None:
    """Two steps may be under way, and chapter 08 has reserved room for one."""
    runner, kept = toy_runner(torch.device("cpu")), []
    compute = runner.model.compute_logits

    def watched(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = compute(hidden, out)
        kept.append(weakref.ref(logits))
        return logits

    runner.model.compute_logits = watched
    free = runner.submit(Plan(1, (entry(0, 0, 2, (1,), (4, 5)),)))
    assert kept[0]() is None
    held = runner.submit(Plan(1, (entry(1, 0, 2, (2,), (4, 5), mask=lambda ids: only(3)),)))
    assert kept[1]() is not None
    held.sample()
    assert kept[1]() is None and free.result().token_ids and held.result().token_ids


def test_the_result_samples_if_nobody_has() -> None:
    masked = entry(0, 0, 2, (1,), (4, 5), mask=lambda ids: only(3))
    step = toy_runner(torch.device("cpu")).submit(Plan(1, (masked,)))
    assert step.result().token_ids == [[3]]


def test_a_request_that_has_ended_is_not_asked_for_its_mask() -> None:
    def mask(token_ids: Any) -> Any:
        raise AssertionError("its grammar is at its end")

    zombie = entry(0, 0, 2, (1,), (4, 5), mask=mask)
    step = toy_runner(torch.device("cpu")).submit(Plan(1, (zombie,)))
    zombie.request.status = RequestStatus.FINISHED
    assert len(step.result().token_ids[0]) == 1


def test_padding_of_the_vocabulary_is_left_to_the_sampler() -> None:
    """B63: logits may be wider than the mask."""
    logits = torch.zeros(2, VOCAB + 5)
    mask_logits(logits, [(1, Request("r", [0], token_mask=lambda ids: only(2)))])
    assert not logits[0].any() and logits[1].isinf().nonzero().flatten().tolist() == [
        i for i in range(VOCAB) if i != 2
    ]


# --- on the card ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs a CUDA card")
class TestOnTheCard:
    def test_the_host_waits_for_nothing_before_the_result(self) -> None:
        """Launched behind a kernel that spins, a whole step returns while that still runs."""
        from octavo.triton_attention import TritonAttention

        runner = toy_runner(torch.device("cuda"))
        runner.model = ToyModel(torch.float32, "cuda")
        runner.cache = KVCache(CONFIG, 40, 4, torch.float32, "cuda")
        runner.attention = TritonAttention()
        prompt = entry(0, 0, 5, (1, 2), (4, 5, 6, 7, 8))
        plans = [
            Plan(1, (prompt,)),
            Plan(2, (entry(0, 5, 1), entry(1, 0, 6, (3, 4), tuple(range(6))))),
            Plan(3, (entry(0, 6, 1), entry(1, 6, 1))),
        ]
        expected = [runner.execute(plan).token_ids for plan in plans]  # compiles, too
        runner.sampler.assign = lambda joining: None  # the toy's reads on the host
        done = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        done.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps = [runner.submit(plan) for plan in plans]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not done.query()  # still spinning
        assert [step.result().token_ids for step in steps] == expected

    def test_staging_waits_before_it_overwrites_what_the_card_has_not_fetched(self) -> None:
        staging = Staging(torch.device("cuda"), capacity=64, turns=2)
        torch.cuda._sleep(200_000_000)
        sent = [staging.upload(np.full(64, i)) for i in range(6)]
        assert [tensor.unique().tolist() for (tensor,) in sent] == [[i] for i in range(6)]

    def test_landing_places_are_not_reused_too_early(self) -> None:
        landing = Landing(torch.device("cuda"), 64)
        for first in range(0, 30, 3):
            torch.cuda._sleep(5_000_000)
            arrivals = [
                landing.send(torch.full((64,), i, device="cuda"))
                for i in range(first, first + 3)
            ]
            got = [set(arrival.wait()) for arrival in arrivals]
            assert got == [{i} for i in range(first, first + 3)]


def test_every_place_of_the_landing_is_its_own() -> None:
    landing = Landing(torch.device("cpu"), 2)
    places = [landing.send(torch.tensor([i])).tokens.data_ptr() for i in range(6)]
    assert len(set(places[:3])) == 3 and places[3:] == places[:3]
    assert all(a != b for a, b in itertools.pairwise(places))
