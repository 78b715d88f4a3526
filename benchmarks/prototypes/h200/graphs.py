"""Decode steps as CUDA graphs (chapter 09): a ladder of sizes, inputs that advance on the card."""

from __future__ import annotations

import functools
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from fused_sampler import FusedSampler
from torch import Tensor

from octavo.attention import AttentionBackend, PagedCache
from octavo.batch import AttentionMetadata, Batch, DeviceRows, _ranges
from octavo.request import Plan, Request, ScheduledRequest, StepResult
from octavo.sampler import row_keys

__all__ = [
    "ladder",
    "Staging",
    "RunningRows",
    "prepare_decode",
    "prepare_decode_plain",
    "DecodeGraphs",
    "Pending",
    "GraphRunner",
]

logger = logging.getLogger("octavo")


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: every one where a row counts, coarser where it doesn't.

    Always ends with `max_num_seqs`, so that no decode step is too large for a graph (B45).
    """
    sizes = [1, 2, 3, 4, *range(8, 64, 8), *range(64, max_num_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


# --- uploads ---------------------------------------------------------------------------------


class Staging:
    """Pinned memory, twice, for the numbers that a step sends to the card.

    A copy from ordinary memory makes the host wait once it is large, and a pinned buffer that
    is written while the card still reads it sends nonsense: so two take turns, each with an
    event that says when it may be written again.
    """

    def __init__(self, device: torch.device, capacity: int = 2**16) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = [self._buffer(capacity) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._turn = 0

    def _buffer(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int64, pin_memory=self._on_gpu)

    def upload(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """int64 arrays as device tensors, through one copy on the current stream."""
        total = sum(len(array) for array in arrays)
        turn = self._turn
        self._turn = 1 - turn
        if self._on_gpu:
            self._events[turn].synchronize()  # from two uploads ago: done long since
        if len(self._buffers[turn]) < total:
            self._buffers[turn] = self._buffer(2 * total)
        buffer = self._buffers[turn][:total]
        np.concatenate(arrays, out=buffer.numpy(), casting="same_kind")
        there = (
            buffer.to(self.device, non_blocking=True) if self._on_gpu else buffer.clone()
        )
        if self._on_gpu:
            self._events[turn].record()
        return there.split([len(array) for array in arrays])


def _numbers(values: Sequence[int] | itertools.chain[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


# --- rows --------------------------------------------------------------------------------------


class RunningRows(DeviceRows):
    """`DeviceRows` with one row more, for padding, and the position each row computes next.

    The reserved row's blocks are the reserved block, and it stays at position 0.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        padding_block: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(max_num_seqs + 1, max_model_len, block_size, padding_block, device)
        self.padding_row = max_num_seqs
        self.positions = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.staging = Staging(self.device)

    def apply(self, plan: Plan) -> None:
        """New requests and new blocks: at most two uploads, whatever the number of requests."""
        joining = [entry for entry in plan.entries if entry.joins]
        if joining:
            self._join(joining)
        self._append_blocks([entry for entry in plan.entries if entry.new_block_ids])

    def _join(self, entries: Sequence[ScheduledRequest]) -> None:
        rows = _numbers([entry.row for entry in entries])
        counts = _numbers([len(entry.new_token_ids) for entry in entries])
        ids = _numbers(itertools.chain.from_iterable(e.new_token_ids for e in entries))
        columns = _ranges(np.zeros_like(counts), counts)
        row, token_row, column, token = self.staging.upload(
            rows, np.repeat(rows, counts), columns, ids
        )
        self.token_ids[token_row, column] = token.to(torch.int32)
        self.block_table[row] = self.padding_block  # no stale columns (B41)
        self._num_blocks[rows] = 0

    def _append_blocks(self, entries: Sequence[ScheduledRequest]) -> None:
        if not entries:
            return
        rows = _numbers([entry.row for entry in entries])
        counts = _numbers([len(entry.new_block_ids) for entry in entries])
        blocks = _numbers(itertools.chain.from_iterable(e.new_block_ids for e in entries))
        columns = _ranges(self._num_blocks[rows], counts)
        row, column, block = self.staging.upload(np.repeat(rows, counts), columns, blocks)
        self.block_table[row, column] = block.to(torch.int32)
        self._num_blocks[rows] += counts

    def build_batch(self, plan: Plan) -> tuple[Batch, Tensor]:
        """As `batch.build_batch`, one upload; and the entries' rows' next positions are set.

        The second value is int64 [N]: the positions of the tokens to be sampled.
        """
        entries = plan.entries
        row, start, count, samples = (
            _numbers([getattr(entry, name) for entry in entries])
            for name in ("row", "start", "count", "samples")
        )
        picked, ends, length = np.flatnonzero(samples), np.cumsum(count), start + count
        sums = np.concatenate([[0], ends, [0], np.cumsum(length)])
        parts = (
            np.repeat(row, count), _ranges(start, count), ends[picked] - 1, row[picked], row,
            length, length[picked], sums,
        )  # fmt: skip
        (token_rows, positions, last, sampled, rows, lengths, places, cu) = (
            self.staging.upload(*parts)
        )
        size = self.block_size
        self.positions[rows] = lengths
        blocks = self.block_table[token_rows, positions // size]
        cu_q, cu_k = cu.to(torch.int32).view(2, -1)
        metadata = AttentionMetadata(
            num_decodes=int((count == 1).sum()),
            seqlens_q=tuple(count.tolist()),
            seqlens_k=tuple(length.tolist()),
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            block_table=self.block_table[rows, : -(-int(length.max()) // size)],
            slot_mapping=blocks.long() * size + positions % size,
        )
        ids = self.token_ids[token_rows, positions]
        host_rows = tuple(row[picked].tolist())
        return Batch(ids, positions, last, sampled, host_rows, metadata), places


# --- inputs of a decode step --------------------------------------------------------------------


class DecodeInputs(NamedTuple):
    """What a captured step reads, at fixed addresses; B is the size of the graph."""

    rows: Tensor
    """int64 [B]: the row of each; the padding row behind the real ones."""
    ids: Tensor
    """int32 [B]"""
    positions: Tensor
    """int64 [B]"""
    next_positions: Tensor
    """int64 [B]: of the tokens to be sampled."""
    lengths: Tensor
    """int32 [B]"""
    slots: Tensor
    """int64 [B]"""
    table: Tensor
    """int32 [B, W]"""

    @classmethod
    def make(
        cls, size: int, width: int, padding_row: int, device: torch.device
    ) -> DecodeInputs:
        """For batches up to `size`, all of them padding."""
        wide, narrow = ({"dtype": d, "device": device} for d in (torch.int64, torch.int32))
        return cls(
            torch.full((size,), padding_row, **wide),
            torch.zeros(size, **narrow),
            torch.zeros(size, **wide),
            torch.zeros(size, **wide),
            torch.zeros(size, **narrow),
            torch.zeros(size, **wide),
            torch.zeros(size, width, **narrow),
        )

    def first(self, size: int) -> DecodeInputs:
        """Views of the first `size`."""
        return DecodeInputs(*(x[:size] for x in self))


@triton.jit
def _prepare_kernel(
    batch_rows, ids, positions, next_positions, lengths, slots, table,
    row_positions, token_ids, block_table, token_stride, table_stride, padding_row,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAD_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a row of the batch: look up, then move the row on by one token."""
    i = tl.program_id(0)
    row = tl.load(batch_rows + i)
    position = tl.load(row_positions + row)
    block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    tl.store(ids + i, tl.load(token_ids + row * token_stride + position))
    tl.store(positions + i, position)
    tl.store(next_positions + i, position + 1)
    tl.store(lengths + i, (position + 1).to(tl.int32))
    tl.store(slots + i, block * BLOCK_SIZE + position % BLOCK_SIZE)
    column = tl.arange(0, PAD_WIDTH)
    used = (column * BLOCK_SIZE <= position) & (column < WIDTH)
    blocks = tl.load(block_table + row * table_stride + column, mask=used, other=0)
    tl.store(table + i * WIDTH + column, blocks, mask=used)
    tl.store(row_positions + row, position + 1, mask=row != padding_row)


def prepare_decode(inputs: DecodeInputs, rows: RunningRows) -> None:
    """Fill a step's inputs from the rows and advance them, in one kernel."""
    width = inputs.table.shape[1]
    _prepare_kernel[(len(inputs.rows),)](
        *inputs, rows.positions, rows.token_ids, rows.block_table,
        rows.token_ids.stride(0), rows.block_table.stride(0), rows.padding_row,
        BLOCK_SIZE=rows.block_size, WIDTH=width, PAD_WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip


def prepare_decode_plain(inputs: DecodeInputs, rows: RunningRows) -> None:
    """The same in PyTorch."""
    at, size = inputs.rows, rows.block_size
    position = rows.positions[at]
    inputs.ids.copy_(rows.token_ids[at, position])
    inputs.positions.copy_(position)
    inputs.next_positions.copy_(position + 1)
    inputs.lengths.copy_(position + 1)
    inputs.slots.copy_(
        rows.block_table[at, position // size].long() * size + position % size
    )
    inputs.table.copy_(rows.block_table[at])
    rows.positions[at] = torch.where(at == rows.padding_row, position, position + 1)


@dataclass(frozen=True)
class DecodeMetadata(AttentionMetadata):
    """`AttentionMetadata` of decodes whose lengths only the card knows."""

    lengths: Tensor
    """int32 [B]"""


def decode_metadata(inputs: DecodeInputs) -> DecodeMetadata:
    """Every sequence has one token; the sums, which kernels for decodes don't read, are those."""
    size = len(inputs.rows)
    ones = (1,) * size
    sums = torch.arange(size + 1, dtype=torch.int32, device=inputs.rows.device)
    return DecodeMetadata(
        size, ones, ones, sums, sums, inputs.table, inputs.slots, inputs.lengths
    )


# --- capture -----------------------------------------------------------------------------------


class GraphModel(Protocol):
    """A `CausalModel` that writes logits where it is told to."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Any) -> Tensor: ...
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...


class DecodeGraphs:
    """One captured decode step for each size of a ladder; they share inputs and memory."""

    def __init__(
        self,
        model: GraphModel,
        sampler: FusedSampler,
        cache: PagedCache,
        attention: AttentionBackend,
        rows: RunningRows,
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.model, self.sampler, self.cache = model, sampler, cache
        self.attention, self.rows, self.sizes = attention, rows, sorted(sizes)
        device, most = rows.device, self.sizes[-1]
        width = rows.block_table.shape[1]
        self.inputs = DecodeInputs.make(most, width, rows.padding_row, device)
        # Logits have one place for all sizes: kept apart, they would be the graphs' largest part.
        self.logits = torch.empty(most, sampler.vocab_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._replays: dict[int, Callable[[], Any]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Every size runs once before any is captured: whatever grows has its final place then.

        Largest first: the smaller ones fit into the memory that it took. The warm-up runs touch
        only what is reserved, because every seat belongs to the padding row.
        """
        self.inputs.rows.fill_(self.rows.padding_row)
        if (
            self.rows.device.type != "cuda"
        ):  # no card: steps run as they are, which tests need
            self._replays = {
                size: functools.partial(self._step, size) for size in self.sizes
            }
            return
        for size in self.sizes:
            self._step(size)
        torch.cuda.synchronize(self.rows.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.rows.device)
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                self._replays[size] = self._captured(size, pool)
        torch.cuda.synchronize(self.rows.device)

    def _captured(self, size: int, pool: Any) -> Callable[[], Any]:
        """By hand: `torch.cuda.graph` would collect garbage before each of them."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)
        self._step(size)
        graph.capture_end()
        return graph.replay

    def _step(self, size: int) -> None:
        inputs = self.inputs.first(size)
        prepare_decode(inputs, self.rows)
        attend = self.attention.bind(self.cache, decode_metadata(inputs))
        hidden = self.model(inputs.ids, inputs.positions, attend)
        logits = self.model.compute_logits(hidden, self.logits[:size])
        feed = self.rows.token_ids
        self.tokens[:size] = self.sampler.free_sample(
            logits, inputs.rows, inputs.next_positions, feed
        )

    def size_for(self, count: int) -> int | None:
        """The smallest captured size for `count` decodes; None if there is none."""
        place = bisect_left(self.sizes, count)
        return self.sizes[place] if place < len(self.sizes) and self._replays else None

    def replay(self, size: int) -> None:
        """Run the step of that size on whatever `inputs.rows` names."""
        self._replays[size]()


# --- the runner --------------------------------------------------------------------------------


class Pending:
    """A submitted step: its tokens are on their way to the host."""

    def __init__(
        self,
        plan: Plan,
        tokens: Tensor,
        event: torch.cuda.Event | None,
        order: np.ndarray | None,
    ) -> None:
        self.plan, self.tokens, self.event, self.order = plan, tokens, event, order

    def result(self) -> StepResult:
        """Wait for the tokens; the one place where the host waits for the card."""
        if self.event is not None:
            self.event.synchronize()
        tokens = self.tokens.numpy()
        if self.order is not None:  # sorted by length on the card, by arrival in the plan
            return StepResult([[token] for token in tokens[self.order].tolist()])
        sampled = iter(tokens.tolist())
        return StepResult([[next(sampled)] if e.samples else [] for e in self.plan.entries])


@dataclass
class RunnerStats:
    """Steps by how they ran."""

    num_graph_steps: int = 0
    num_eager_steps: int = 0
    num_padded_rows: int = 0


class GraphRunner:
    """Carries out plans, decode steps through graphs: a `Runner`, with `submit` for overlap."""

    def __init__(
        self,
        model: GraphModel,
        sampler: FusedSampler,
        cache: PagedCache,
        attention: AttentionBackend,
        rows: RunningRows,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model, self.sampler, self.cache = model, sampler, cache
        self.attention, self.rows, self.graphs = attention, rows, graphs
        self.stats = RunnerStats()
        self._batch: list[int] = []
        self._order = np.zeros(0, np.int64)
        self._size = 0
        self._on_gpu = rows.device.type == "cuda"
        self._landing = itertools.cycle([self._landing_place() for _ in range(3)])

    def _landing_place(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Pinned memory for a step's tokens: two steps may be in flight while a third is read."""
        place = torch.empty(
            self.rows.padding_row + 1, dtype=torch.int64, pin_memory=self._on_gpu
        )
        return place, torch.cuda.Event() if self._on_gpu else None

    @torch.inference_mode()
    def submit(self, plan: Plan) -> Pending:
        """Launch a step and return without waiting for it."""
        if self.graphs is not None and all(
            entry.count == 1 and entry.samples and not entry.joins for entry in plan.entries
        ):
            size = self.graphs.size_for(len(plan.entries))
            if size is not None:
                return self._replay(plan, size)
            logger.warning("%d decodes are more than any graph holds", len(plan.entries))
        return self._eager(plan)

    def execute(self, plan: Plan) -> StepResult:
        """See `Runner.execute`."""
        return self.submit(plan).result()

    def _replay(self, plan: Plan, size: int) -> Pending:
        assert self.graphs is not None
        self.stats.num_graph_steps += 1
        self.stats.num_padded_rows += size - len(plan.entries)
        self.rows.apply(plan)
        rows = [entry.row for entry in plan.entries]
        if rows != self._batch or size != self._size:
            self._seat(plan, rows, size)
        self.graphs.replay(size)
        if self.sampler.has_filtered(rows):
            self._sample_filtered(rows)
        return self._land(plan, self.graphs.tokens[: len(rows)], self._order)

    def _seat(self, plan: Plan, rows: list[int], size: int) -> None:
        """Who sits where changes only when somebody comes or goes: each grows by one a step.

        Longest first, because a long one started last would run alone at the end.
        """
        longest = np.argsort(-_numbers([e.start for e in plan.entries]), kind="stable")
        seats = np.full(size, self.rows.padding_row)
        seats[: len(rows)] = np.asarray(rows)[longest]
        self.graphs.inputs.rows[:size] = self.rows.staging.upload(seats)[0]  # type: ignore[union-attr]
        self._order = np.argsort(longest)
        self._batch, self._size = rows, size

    def _sample_filtered(self, rows: list[int]) -> None:
        """Top-k and top-p aren't in the graph: their rows are sampled anew from its logits."""
        assert self.graphs is not None
        inputs = self.graphs.inputs
        seats = self._order[self.sampler.filtered(rows)]
        at = torch.from_numpy(seats).to(self.rows.device)
        picked = np.asarray(rows)[self.sampler.filtered(rows)]
        places = inputs.next_positions[at]
        tokens = self.sampler(self.graphs.logits[at], picked, places)
        self.graphs.tokens[at] = tokens
        self.rows.token_ids[inputs.rows[at], places] = tokens.to(torch.int32)

    def _eager(self, plan: Plan) -> Pending:
        self.stats.num_eager_steps += 1
        self._batch = []
        self.rows.apply(plan)
        joining = [(e.row, e.request) for e in plan.entries if e.joins]
        self.sampler.assign_many(joining, self.rows.staging)
        batch, places = self.rows.build_batch(plan)
        attend = self.attention.bind(self.cache, batch.attention)
        hidden = self.model(batch.input_ids, batch.positions, attend)
        if not batch.host_rows:
            return self._land(plan, batch.sample_rows, None)
        logits = self.model.compute_logits(hidden[batch.sample_indices])
        tokens = self.sampler.free_sample(logits, batch.sample_rows, places)
        if self.sampler.has_filtered(batch.host_rows):
            tokens = self.sampler(logits, batch.host_rows, places)
        self.rows.token_ids[batch.sample_rows, places] = tokens.to(torch.int32)
        return self._land(plan, tokens, None)

    def _land(self, plan: Plan, tokens: Tensor, order: np.ndarray | None) -> Pending:
        """Start the copy to the host."""
        place, event = next(self._landing)
        place = place[: len(tokens)]
        place.copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()
        return Pending(plan, place, event, order)


def assign_many(
    sampler: FusedSampler, joining: Sequence[tuple[int, Request]], staging: Staging
) -> None:
    """`Sampler.assign` for all requests that join a step, in one upload."""
    if not joining:
        return
    for row, request in joining:
        params = request.sampling_params
        if params.top_k > 0 or params.top_p < 1:
            sampler.assign(row, request)
        else:
            sampler.note(row, params)
    rows = _numbers([row for row, _ in joining])
    heats = [
        0.0 if r.sampling_params.is_greedy else r.sampling_params.temperature
        for _, r in joining
    ]
    bits = np.asarray(heats, np.float32).view(np.int32).astype(np.int64)
    keys = np.asarray([row_keys(r.seed, r.sample_index) for _, r in joining], np.int64)
    row, heat, key = staging.upload(rows, bits, keys.ravel())
    sampler.heat[row] = heat.to(torch.int32).view(torch.float32)
    sampler.keys[row] = key.view(-1, 2).to(torch.int32)
