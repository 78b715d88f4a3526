"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.request import Plan, ScheduledRequest

__all__ = ["Staging", "DeviceRows", "AttentionMetadata", "Batch", "build_batch"]


class Staging:
    """Pinned memory for the integers that steps send to their device: `turns` buffers in turn.

    On a CPU nothing needs pinning or waiting for, and `upload` is a plain copy.
    """

    def __init__(self, device: torch.device, capacity: int = 2**16, turns: int = 8) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._buffers = [self._buffer(capacity) for _ in range(turns)]
        self._fetched = [torch.cuda.Event() for _ in range(turns)] if self._pinned else []
        self._turn = 0

    def _buffer(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int64, pin_memory=self._pinned)

    def _writable(self, count: int) -> Tensor:
        """int64 [count] in the next buffer, once the device has fetched what that held."""
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        if self._pinned:
            self._fetched[turn].synchronize()
        if len(self._buffers[turn]) < count:
            self._buffers[turn] = self._buffer(2 * count)
        return self._buffers[turn][:count]

    def upload(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Integer arrays as int64 tensors on the device, by one copy on the current stream."""
        spans, total = [], 0
        for array in arrays:
            spans.append(slice(total, total + len(array)))
            total += len(array) + len(array) % 2  # to a multiple of 16 bytes
        buffer = self._writable(total)
        numbers = buffer.numpy()
        for span, array in zip(spans, arrays, strict=True):
            numbers[span] = array
        there = buffer.to(self.device, non_blocking=True, copy=True)
        if self._pinned:
            self._fetched[self._turn].record()
        return tuple(there[span] for span in spans)


class DeviceRows:
    """Persistent per-request tensors, one row a running request.

    `token_ids` int32 [max_num_seqs, max_model_len + 1]; `block_table` int32
    [max_num_seqs, ceil(max_model_len / block_size)], filled up with `padding_block`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        padding_block: int,
        device: torch.device | str = "cpu",
    ) -> None:
        tokens, blocks = max_model_len + 1, -(-max_model_len // block_size)
        self.block_size = block_size
        self.padding_block = padding_block
        self.token_ids = torch.zeros(max_num_seqs, tokens, dtype=torch.int32, device=device)
        self.block_table = torch.full_like(self.token_ids[:, :blocks], padding_block)
        self.staging = Staging(self.device)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)  # filled columns, on the host

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self.token_ids.device

    def apply(self, plan: Plan) -> None:
        """Bring the rows up to date with a plan, in at most two uploads: new requests, new blocks."""
        if joining := [entry for entry in plan.entries if entry.joins]:
            self._join(joining)
        if growing := [entry for entry in plan.entries if entry.new_block_ids]:
            self._append_blocks(growing)

    def _join(self, entries: Sequence[ScheduledRequest]) -> None:
        """Write the tokens of requests that are new on their rows, and forget the last owners' blocks."""
        rows = np.array([entry.row for entry in entries])
        counts = np.array([len(entry.new_token_ids) for entry in entries])
        ids = _joined(entry.new_token_ids for entry in entries)
        columns = _ranges(np.zeros_like(counts), counts)
        row, token_row, column, token_id = self.staging.upload(
            rows, np.repeat(rows, counts), columns, ids
        )
        self.token_ids[token_row, column] = token_id.int()
        self.block_table.index_fill_(0, row, self.padding_block)
        self._num_blocks[rows] = 0

    def _append_blocks(self, entries: Sequence[ScheduledRequest]) -> None:
        rows = np.array([entry.row for entry in entries])
        counts = np.array([len(entry.new_block_ids) for entry in entries])
        columns = _ranges(self._num_blocks[rows], counts)
        blocks = _joined(entry.new_block_ids for entry in entries)
        row, column, block = self.staging.upload(np.repeat(rows, counts), columns, blocks)
        self.block_table[row, column] = block.int()
        self._num_blocks[rows] += counts

    def write_tokens(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Put tokens at their rows and positions, int64 [N] each, where the next step reads them."""
        self.token_ids[rows, positions] = token_ids.int()


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`starts[i], starts[i] + 1, ...` for `counts[i]` numbers, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


def _joined(parts: Iterable[Sequence[int]]) -> np.ndarray:
    """int64: the numbers of all parts, one part after the other."""
    packed = b"".join(struct.pack(f"{len(part)}q", *part) for part in parts)
    return np.frombuffer(packed, np.int64)


@dataclass(frozen=True)
class AttentionMetadata:
    """What attention needs to know of a packed batch of S sequences and T tokens.

    The first `num_decodes` sequences have one token each.
    """

    num_decodes: int
    seqlens_q: tuple[int, ...]
    """Tokens of this step, by sequence (on the host)."""
    seqlens_k: tuple[int, ...]
    """Tokens to attend to, the step's own included (on the host)."""
    cu_seqlens_q: Tensor
    """int32 [S + 1]: where each sequence's tokens begin."""
    cu_seqlens_k: Tensor
    """int32 [S + 1]: the same over `seqlens_k`."""
    block_table: Tensor
    """int32 [S, most blocks of any]: padded with the reserved block."""
    slot_mapping: Tensor
    """int64 [T]: the slot of each token's key and value."""
    lengths: Tensor | None = None
    """int32 [S]: `seqlens_k` on the device. In chapter 09's graphs only this one is up to date."""


@dataclass(frozen=True)
class Batch:
    """A step as tensors; T tokens, N of which are sampled from."""

    input_ids: Tensor
    """int32 [T]"""
    positions: Tensor
    """int64 [T]"""
    sample_indices: Tensor
    """int64 [N]: tokens whose logits are wanted."""
    sample_rows: Tensor
    """int64 [N]: the row of each."""
    sample_positions: Tensor
    """int64 [N]: the positions that the sampled tokens will have."""
    rows: Tensor
    """int64 [S]: each sequence's row."""
    attention: AttentionMetadata


def build_batch(plan: Plan, rows: DeviceRows) -> Batch:
    """Pack a plan's entries, in one upload. `rows.apply(plan)` comes first."""
    columns = list(zip(*plan.entries, strict=True))
    row, start, count, samples = (np.array(column) for column in columns[2:6])
    picked, ends, lengths = np.flatnonzero(samples), np.cumsum(count), start + count
    sums = (np.concatenate([[0], each]) for each in (ends, np.cumsum(lengths)))
    token_rows, positions, last, sampled, places, sequence_rows, *small = rows.staging.upload(
        np.repeat(row, count), _ranges(start, count),
        ends[picked] - 1, row[picked], lengths[picked], row, *sums, lengths,
    )  # fmt: skip
    size = rows.block_size
    blocks = rows.block_table[token_rows, positions // size]
    return Batch(
        input_ids=rows.token_ids[token_rows, positions],
        positions=positions,
        sample_indices=last,
        sample_rows=sampled,
        sample_positions=places,
        rows=sequence_rows,
        attention=_attention_metadata(
            count,
            lengths,
            [tensor.int() for tensor in small],
            rows.block_table[sequence_rows, : -(-int(lengths.max()) // size)],
            blocks.long() * size + positions % size,
        ),
    )


def _attention_metadata(
    counts: np.ndarray,
    lengths: np.ndarray,
    on_device: Sequence[Tensor],
    block_table: Tensor,
    slot_mapping: Tensor,
) -> AttentionMetadata:
    cu_seqlens_q, cu_seqlens_k, device_lengths = on_device
    return AttentionMetadata(
        num_decodes=int((counts == 1).sum()),
        seqlens_q=tuple(counts.tolist()),
        seqlens_k=tuple(lengths.tolist()),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        slot_mapping=slot_mapping,
        lengths=device_lengths,
    )
