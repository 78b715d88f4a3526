"""Chapter 09, CUDA graphs and overlapped scheduling.

Generated from chapters/09_cuda_graphs.md; edit there.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.batch import Batch, DeviceRows
from octavo.kernels import _jit, tl

__all__ = [
    "RunningRows",
    "DecodeInputs",
    "prepare_decode_plain",
    "prepare_decode",
    "feed_tokens_plain",
    "feed_tokens",
]


class RunningRows(DeviceRows):
    """`DeviceRows` with one row more, for padding, and the position each one computes next.

    `positions` int64 [max_num_seqs + 1]. The padding row stays at position 0, and its block
    table names the reserved block only.
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

    def place(self, batch: Batch) -> None:
        """Note where each row of an eager step will stand after it."""
        lengths = batch.attention.lengths
        assert lengths is not None, "`build_batch` always sets them"
        self.positions[batch.rows] = lengths.to(torch.int64)


class DecodeInputs(NamedTuple):
    """What a recorded step reads, at fixed addresses; B is the number of seats."""

    rows: Tensor
    """int64 [B]: the row in each seat; the padding row in those that nobody has."""
    ids: Tensor
    """int32 [B]"""
    positions: Tensor
    """int64 [B]"""
    next_positions: Tensor
    """int64 [B]: of the tokens to be sampled."""
    lengths: Tensor
    """int32 [B]: keys to attend to, the step's own included."""
    slots: Tensor
    """int64 [B]"""
    block_table: Tensor
    """int32 [B, W]: what lies behind a row's last block is whatever was there before."""

    @classmethod
    def make(cls, size: int, rows: RunningRows) -> DecodeInputs:
        """`size` seats, all of them the padding row's."""
        width, device = rows.block_table.shape[1], rows.device
        wide = partial(torch.zeros, size, dtype=torch.int64, device=device)
        narrow = partial(torch.zeros, size, dtype=torch.int32, device=device)
        table = torch.zeros(size, width, dtype=torch.int32, device=device)
        seats = torch.full_like(wide(), rows.padding_row)
        return cls(seats, narrow(), wide(), wide(), narrow(), wide(), table)

    def first(self, size: int) -> DecodeInputs:
        """Views of the first `size` seats."""
        return DecodeInputs(*(tensor[:size] for tensor in self))


def prepare_decode_plain(inputs: DecodeInputs, rows: RunningRows) -> None:
    """Fill a step's inputs from the rows, and move each row on by one token."""
    seats, size = inputs.rows, rows.block_size
    position = rows.positions[seats]
    table = rows.block_table[seats]
    block = table.gather(1, (position // size)[:, None])[:, 0].to(torch.int64)
    inputs.ids.copy_(rows.token_ids[seats, position])
    inputs.positions.copy_(position)
    inputs.next_positions.copy_(position + 1)
    inputs.lengths.copy_(position + 1)
    inputs.slots.copy_(block * size + position % size)
    inputs.block_table.copy_(table)
    rows.positions[seats] = position + (seats != rows.padding_row)


@_jit
def _prepare_kernel(
    seats, ids, positions, next_positions, lengths, slots, table,
    row_positions, token_ids, block_table, token_stride, table_stride, padding_row,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAD_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a seat."""
    seat = tl.program_id(0)
    row = tl.load(seats + seat)
    position = tl.load(row_positions + row)
    own_table = block_table + row * table_stride
    block = tl.load(own_table + position // BLOCK_SIZE).to(tl.int64)
    tl.store(ids + seat, tl.load(token_ids + row * token_stride + position))
    tl.store(positions + seat, position)
    tl.store(next_positions + seat, position + 1)
    tl.store(lengths + seat, (position + 1).to(tl.int32))
    tl.store(slots + seat, block * BLOCK_SIZE + position % BLOCK_SIZE)
    column = tl.arange(0, PAD_WIDTH)
    used = (column * BLOCK_SIZE <= position) & (column < WIDTH)
    blocks = tl.load(own_table + column, mask=used, other=0)
    tl.store(table + seat * WIDTH + column, blocks, mask=used)
    tl.store(row_positions + row, position + 1, mask=row != padding_row)


def prepare_decode(inputs: DecodeInputs, rows: RunningRows) -> None:
    """`prepare_decode_plain` in one kernel; copies only what a block table has in use."""
    width = inputs.block_table.shape[1]
    _prepare_kernel[(len(inputs.rows),)](
        *inputs, rows.positions, rows.token_ids, rows.block_table,
        rows.token_ids.stride(0), rows.block_table.stride(0), rows.padding_row,
        BLOCK_SIZE=rows.block_size, WIDTH=width, PAD_WIDTH=1 << (width - 1).bit_length(),
    )  # fmt: skip


def feed_tokens_plain(
    token_ids: Tensor, inputs: DecodeInputs, tokens: Tensor, rows: RunningRows
) -> None:
    """Put sampled ids, int64 [B], into `tokens` for the host and into their rows."""
    tokens.copy_(token_ids)
    rows.write_tokens(inputs.rows, inputs.next_positions, token_ids)


@_jit
def _feed_kernel(token_ids, seats, next_positions, tokens, row_tokens, token_stride):
    """One program a seat."""
    seat = tl.program_id(0)
    token = tl.load(token_ids + seat)
    place = tl.load(seats + seat) * token_stride + tl.load(next_positions + seat)
    tl.store(tokens + seat, token)
    tl.store(row_tokens + place, token.to(tl.int32))


def feed_tokens(
    token_ids: Tensor, inputs: DecodeInputs, tokens: Tensor, rows: RunningRows
) -> None:
    """`feed_tokens_plain` in one kernel."""
    _feed_kernel[(len(token_ids),)](
        token_ids, inputs.rows, inputs.next_positions, tokens,
        rows.token_ids, rows.token_ids.stride(0), num_warps=1,
    )  # fmt: skip
