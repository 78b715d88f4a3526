"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.attention import Attend, AttentionBackend, PagedCache
from octavo.batch import Batch, DeviceRows, build_batch
from octavo.request import Plan, Request, StepResult

__all__ = [
    "CausalModel",
    "TokenSampler",
    "PendingStep",
    "Arrival",
    "Landing",
    "masked_requests",
    "mask_logits",
    "LaunchedStep",
    "RunnerStats",
    "ModelRunner",
]


class CausalModel(Protocol):
    """A model over a packed batch."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] for int [T] ids at int64 [T] positions."""
        ...

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden_size] to [N, vocab_size], written to `out` if it is given."""
        ...


class TokenSampler(Protocol):
    """Picks tokens; each row has sampling parameters of its own."""

    capturable: bool
    """May a call be recorded in a CUDA graph? If so, nothing is read on the host."""

    def assign(self, joining: Sequence[tuple[int, Request]]) -> None:
        """From now on these rows belong to these requests; one upload for all."""
        ...

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """int64 [N] tokens from logits [N, vocab_size] of the rows int64 [N]; `positions` int64
        [N] are those of the tokens to be sampled, from which the random numbers follow."""
        ...


class PendingStep(Protocol):
    """A launched step."""

    needs_mask: bool
    """Its sampling waits: call `sample` once every token before it is known."""

    def sample(self) -> None:
        """Launch the sampling, if that was held back."""
        ...

    def result(self) -> StepResult:
        """Wait for the tokens: each entry's sampled ids."""
        ...


class Arrival(NamedTuple):
    """Tokens on their way to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """The tokens; returns once the device has sent them."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.tolist()


class Landing:
    """Host memory for sampled tokens: three places in turn, pinned if they come from a card."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._pinned = device.type == "cuda"
        self._places = itertools.cycle([self._place(most) for _ in range(3)])

    def _place(self, most: int) -> Arrival:
        tokens = torch.empty(most, dtype=torch.int64, pin_memory=self._pinned)
        return Arrival(tokens, torch.cuda.Event() if self._pinned else None)

    def send(self, tokens: Tensor) -> Arrival:
        """Launch the copy of int64 [N] tokens to the next place."""
        place, event = next(self._places)
        place = place[: len(tokens)]
        place.copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()
        return Arrival(place, event)


def masked_requests(plan: Plan) -> list[tuple[int, Request]]:
    """(place among the plan's sampled tokens, request) of all that have a mask."""
    sampled = (entry.request for entry in plan.entries if entry.samples)
    return [(i, r) for i, r in enumerate(sampled) if r.token_mask is not None]


def mask_logits(logits: Tensor, masked: Sequence[tuple[int, Request]]) -> None:
    """Minus infinity, in place, where a request's mask says no; (row of logits, request)."""
    for row, request in masked:
        if request.token_mask is None or request.is_finished:
            continue
        allowed = torch.as_tensor(request.token_mask(request.token_ids), dtype=torch.bool)
        if logits.is_cuda and not allowed.is_cuda:
            allowed = allowed.pin_memory()
        forbidden = ~allowed.to(logits.device, non_blocking=True)
        logits[row, : len(forbidden)].masked_fill_(forbidden, float("-inf"))


class LaunchedStep:
    """A `PendingStep`. `pick` launches the sampling and gives int64 [N] tokens on the device.

    It is called at once, or from `sample` if a request has a mask, with `masked_requests(plan)`.
    `order` says where in the tokens each sampled entry of the plan finds its own, if they
    don't stand in the plan's order.
    """

    def __init__(
        self,
        plan: Plan,
        pick: Callable[[Sequence[tuple[int, Request]]], Tensor],
        landing: Landing,
        order: Sequence[int] | None = None,
    ) -> None:
        self.plan, self.order = plan, order
        self._pick: Callable[[Sequence[tuple[int, Request]]], Tensor] | None = pick
        self._landing = landing
        self._masked = masked_requests(plan)
        self._arrival: Arrival | None = None
        self.needs_mask = bool(self._masked)
        if not self.needs_mask:
            self.sample()

    @torch.inference_mode()
    def sample(self) -> None:
        """See `PendingStep.sample`."""
        if (pick := self._pick) is not None:
            self._pick, self.needs_mask = None, False  # the logits go with it
            self._arrival = self._landing.send(pick(self._masked))

    def result(self) -> StepResult:
        """See `PendingStep.result`. Samples, if nobody has asked for that yet."""
        self.sample()
        assert self._arrival is not None
        tokens = self._arrival.wait()
        if self.order is not None:
            tokens = [tokens[place] for place in self.order]
        sampled = iter(tokens)
        return StepResult([[next(sampled)] if e.samples else [] for e in self.plan.entries])


@dataclass
class RunnerStats:
    """Steps by how they ran; graphs are chapter 09's."""

    num_graph_steps: int = 0
    num_eager_steps: int = 0
    """Launched kernel by kernel."""
    num_padded_rows: int = 0
    """Rows of graphs that no request sat in."""


class ModelRunner:
    """Carries out plans: a `Runner` on a device."""

    def __init__(
        self,
        model: CausalModel,
        sampler: TokenSampler,
        cache: PagedCache,
        attention: AttentionBackend,
        rows: DeviceRows,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.cache = cache
        self.attention = attention
        self.rows = rows
        self.stats = RunnerStats()
        self._landing = Landing(rows.device, len(rows.token_ids))

    def execute(self, plan: Plan) -> StepResult:
        """Run a step; returns each entry's sampled ids once they have reached the host."""
        return self.submit(plan).result()

    @torch.inference_mode()
    def submit(self, plan: Plan) -> PendingStep:
        """Launch a step and return without waiting for it."""
        self.stats.num_eager_steps += 1
        batch = self._prepare(plan)
        pick = functools.partial(self._pick, batch, self._logits(batch))
        return LaunchedStep(plan, pick, self._landing)

    def _prepare(self, plan: Plan) -> Batch:
        """Rows and sampler learn who joined; the step's tensors."""
        self.rows.apply(plan)
        if joining := [(e.row, e.request) for e in plan.entries if e.joins]:
            self.sampler.assign(joining)
        return build_batch(plan, self.rows)

    def _logits(self, batch: Batch) -> Tensor:
        """[N, vocab_size]; with N = 0 the head isn't called."""
        attend = self.attention.bind(self.cache, batch.attention)
        hidden = self.model(batch.input_ids, batch.positions, attend)
        chosen = hidden[batch.sample_indices]
        return self.model.compute_logits(chosen) if len(chosen) else chosen

    def _pick(
        self, batch: Batch, logits: Tensor, masked: Sequence[tuple[int, Request]]
    ) -> Tensor:
        """int64 [N]: the tokens sampled, which are written to their rows too."""
        if not len(logits):
            return batch.sample_rows
        mask_logits(logits, masked)
        tokens = self.sampler(logits, batch.sample_rows, batch.sample_positions)
        self.rows.write_tokens(batch.sample_rows, batch.sample_positions, tokens)
        return tokens
