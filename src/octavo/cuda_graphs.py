"""Chapter 09, CUDA graphs and overlapped scheduling.

Generated from chapters/09_cuda_graphs.md; edit there.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from octavo.attention import AttentionBackend, PagedCache
from octavo.batch import AttentionMetadata
from octavo.config import ConfigError
from octavo.decode_inputs import (
    DecodeInputs,
    RunningRows,
    feed_tokens,
    feed_tokens_plain,
    prepare_decode,
    prepare_decode_plain,
)
from octavo.model_runner import CausalModel, TokenSampler

__all__ = ["ladder", "check_capturable", "DecodeGraphs"]


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: every one where a row counts, coarser where it doesn't.

    The last is `max_num_seqs`, so that no decode step is too large for a graph (B45).
    """
    fine, coarse = range(8, 64, 8), range(64, 256, 16)
    sizes = {1, 2, 3, 4, *fine, *coarse, *range(256, max_num_seqs, 32)}
    return sorted(size for size in sizes if size < max_num_seqs) + [max_num_seqs]


def check_capturable(**parts: Any) -> None:
    """ConfigError for the first part whose steps can't be recorded, with a way out."""
    for name, part in parts.items():
        if not part.capturable:
            raise ConfigError(
                f"cuda_graphs=True: {name} by {type(part).__name__} reads numbers of the "
                f"step on the host, which no CUDA graph can; choose another {name}, or "
                "cuda_graphs=False"
            )


class DecodeGraphs:
    """Recorded decode steps, one for each of `sizes`; they share inputs, logits and memory.

    A step is two graphs: `forward` up to the logits, then `sample`, which also puts tokens into
    their rows; in between, masks may be put on `logits`. Raises `ConfigError` for an attention
    or a sampler that can't be recorded.
    """

    def __init__(
        self,
        model: CausalModel,
        sampler: TokenSampler,
        cache: PagedCache,
        attention: AttentionBackend,
        rows: RunningRows,
        sizes: Sequence[int],
    ) -> None:
        check_capturable(attention=attention, sampler=sampler)
        self.model, self.sampler, self.cache = model, sampler, cache
        self.attention, self.rows, self.sizes = attention, rows, sorted(sizes)
        most, device = self.sizes[-1], rows.device
        self.inputs = DecodeInputs.make(most, rows)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self.bytes_by_size: dict[int, int] = {}
        self._on_gpu = device.type == "cuda"
        self._prepare = prepare_decode if self._on_gpu else prepare_decode_plain
        self._feed = feed_tokens if self._on_gpu else feed_tokens_plain
        self._sums = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._replays: dict[int, tuple[Callable[[], None], ...]] = {}

    def _forward(self, size: int) -> None:
        inputs = self.inputs.first(size)
        self._prepare(inputs, self.rows)
        attend = self.attention.bind(self.cache, self._metadata(inputs))
        hidden = self.model(inputs.ids, inputs.positions, attend)
        if self.logits is None:
            self.logits = self.model.compute_logits(hidden)
        else:
            self.model.compute_logits(hidden, self.logits[:size])

    def _sample(self, size: int) -> None:
        assert self.logits is not None, "the first forward makes them"
        inputs = self.inputs.first(size)
        token_ids = self.sampler(self.logits[:size], inputs.rows, inputs.next_positions)
        self._feed(token_ids, inputs, self.tokens[:size], self.rows)

    def _metadata(self, inputs: DecodeInputs) -> AttentionMetadata:
        size = len(inputs.rows)
        ones, sums = (1,) * size, self._sums[: size + 1]
        return AttentionMetadata(
            num_decodes=size,
            seqlens_q=ones,
            seqlens_k=ones,  # nobody knows them on the host; `lengths` has them
            cu_seqlens_q=sums,
            cu_seqlens_k=sums,
            block_table=inputs.block_table,
            slot_mapping=inputs.slots,
            lengths=inputs.lengths,
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Run every size once, then record each, the largest first. Comes before the first step.

        Without a card nothing is recorded: `forward` and `sample` run the step as it is.
        """
        for size in reversed(self.sizes):
            self._forward(size)
            self._sample(size)
        if self._on_gpu:
            self._record()
        else:
            self._replays = {size: self._works(size) for size in self.sizes}

    def _works(self, size: int) -> tuple[Callable[[], None], ...]:
        return partial(self._forward, size), partial(self._sample, size)

    def _record(self) -> None:
        device, pool = self.rows.device, torch.cuda.graph_pool_handle()
        with _recording(device):
            for work in self._works(self.sizes[0]):
                work()  # so that the stream has its workspace
            free = torch.cuda.mem_get_info(device)[0]
            for size in reversed(self.sizes):
                works = self._works(size)
                self._replays[size] = tuple(_recorded(work, pool) for work in works)
                before, free = free, torch.cuda.mem_get_info(device)[0]
                self.bytes_by_size[size] = max(0, before - free)

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs, their inputs and logits (B48)."""
        held = [t for t in (*self.inputs, self.tokens, self.logits) if t is not None]
        return sum(self.bytes_by_size.values()) + sum(tensor.nbytes for tensor in held)

    def expected_bytes(self, num_sizes: int) -> int:
        """`num_bytes` if there were so many sizes, judged by the few that were recorded."""
        _, *rest = (self.bytes_by_size[size] for size in reversed(self.sizes))
        each = sum(rest) // max(1, len(rest))
        return self.num_bytes + (num_sizes - len(self.sizes)) * each

    def size_for(self, count: int) -> int | None:
        """The smallest recorded size that holds `count` decodes; None if there is none."""
        place = bisect_left(self.sizes, count)
        return self.sizes[place] if place < len(self.sizes) and self._replays else None

    def forward(self, size: int) -> None:
        """Run the model on who sits in the first `size` seats, up to `logits`."""
        self._replays[size][0]()

    def sample(self, size: int) -> Tensor:
        """Sample from `logits`; int64 [size] tokens, which are in their rows then, too."""
        self._replays[size][1]()
        return self.tokens[:size]

    def close(self) -> None:
        """Give graphs and logits back (B52); from then on `size_for` finds nothing."""
        if self._on_gpu:
            torch.cuda.synchronize(self.rows.device)
        self._replays, self.bytes_by_size, self.logits = {}, {}, None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that graphs are recorded on."""
    return torch.cuda.Stream(device)


@contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    """On the side stream, with the garbage collector at rest."""
    collecting = gc.isenabled()
    gc.disable()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(_side_stream(device)):
            yield
    finally:
        torch.cuda.synchronize(device)
        if collecting:
            gc.enable()


def _recorded(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What launches `work` again."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    try:
        work()
    finally:
        graph.capture_end()
    return graph.replay
