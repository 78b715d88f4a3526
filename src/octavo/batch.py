"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.request import Plan, ScheduledRequest

__all__ = ["DeviceRows", "AttentionMetadata", "Batch", "build_batch"]


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
        self._num_blocks = np.zeros(max_num_seqs, np.int64)  # filled columns, on the host

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self.token_ids.device

    def apply(self, plan: Plan) -> None:
        """Bring the rows up to date with a plan: new requests, new blocks."""
        for entry in plan.entries:
            if entry.joins:
                self._clear(entry)
        self._append_blocks([entry for entry in plan.entries if entry.new_block_ids])

    def _clear(self, entry: ScheduledRequest) -> None:
        ids = torch.tensor(entry.new_token_ids, dtype=torch.int32)
        self.token_ids[entry.row, : len(ids)] = ids.to(self.device, non_blocking=True)
        self.block_table[entry.row] = self.padding_block
        self._num_blocks[entry.row] = 0

    def _append_blocks(self, entries: Sequence[ScheduledRequest]) -> None:
        """All appended blocks of a step in one write."""
        if not entries:
            return
        rows = np.array([entry.row for entry in entries])
        counts = np.array([len(entry.new_block_ids) for entry in entries])
        blocks = np.concatenate([entry.new_block_ids for entry in entries])
        columns = _ranges(self._num_blocks[rows], counts)
        index = torch.from_numpy(np.stack([np.repeat(rows, counts), columns])).to(
            self.device
        )
        values = torch.from_numpy(blocks).to(self.device, torch.int32)
        self.block_table[index[0], index[1]] = values
        self._num_blocks[rows] += counts

    def write_sampled(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Put sampled tokens behind `positions`, int64 [N] each, where the next step reads them."""
        self.token_ids[rows, positions + 1] = token_ids.to(torch.int32)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`starts[i], starts[i] + 1, ...` for `counts[i]` numbers, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


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
    """int32 [S]: `seqlens_k` on the device, where a fixed address matters (chapter 09)."""


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
    host_rows: tuple[int, ...]
    """The same rows on the host."""
    attention: AttentionMetadata


def build_batch(plan: Plan, rows: DeviceRows) -> Batch:
    """Pack a plan's entries. `rows.apply(plan)` comes first."""
    entries = np.array(
        [(e.row, e.start, e.count, e.samples) for e in plan.entries], np.int64
    )
    row, start, count, samples = entries.T
    picked = np.flatnonzero(samples)
    arrays = np.repeat(row, count), _ranges(start, count), np.cumsum(count)[picked] - 1
    token_rows, positions, last, sequence_rows, sampled = (
        torch.from_numpy(array).to(rows.device, non_blocking=True)
        for array in (*arrays, row.copy(), row[picked])
    )
    return Batch(
        input_ids=rows.token_ids[token_rows, positions],
        positions=positions,
        sample_indices=last,
        sample_rows=sampled,
        host_rows=tuple(row[picked].tolist()),
        attention=_attention_metadata(
            rows, sequence_rows, start, count, token_rows, positions
        ),
    )


def _attention_metadata(
    rows: DeviceRows,
    sequence_rows: Tensor,
    start: np.ndarray,
    count: np.ndarray,
    token_rows: Tensor,
    positions: Tensor,
) -> AttentionMetadata:
    size, seqlens_k = rows.block_size, start + count
    blocks = rows.block_table[token_rows, positions // size]
    return AttentionMetadata(
        num_decodes=int((count == 1).sum()),
        seqlens_q=tuple(count.tolist()),
        seqlens_k=tuple(seqlens_k.tolist()),
        cu_seqlens_q=_cumulative(count, rows.device),
        cu_seqlens_k=_cumulative(seqlens_k, rows.device),
        block_table=rows.block_table[sequence_rows, : -(-int(seqlens_k.max()) // size)],
        slot_mapping=blocks.long() * size + positions % size,
    )


def _cumulative(lengths: np.ndarray, device: torch.device) -> Tensor:
    sums = np.concatenate([[0], np.cumsum(lengths)])
    return torch.from_numpy(sums.astype(np.int32)).to(device, non_blocking=True)
