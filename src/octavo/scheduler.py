"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.config import ConfigError, OctavoError
from octavo.request import (
    BlockAllocator,
    FinishReason,
    Plan,
    PrefillPolicy,
    Progress,
    Request,
    RequestError,
    RequestStatus,
    ScheduledRequest,
    StepResult,
)

__all__ = ["CountingAllocator", "WholePrompts", "Scheduler", "PrefillFirst"]


class CountingAllocator:
    """The plain `BlockAllocator`: a stack of free block ids."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` ids; IndexError if there are fewer, which the caller should have asked."""
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back."""
        self._free.extend(block_ids)


class WholePrompts:
    """The `PrefillPolicy` that never splits a prompt."""

    def take(self, work_left: int, budget: int) -> int:
        """All of it if it fits into what is left of the step, else nothing."""
        return work_left if work_left <= budget else 0


@dataclass
class _Draft:
    """The step being planned."""

    budget: int
    entries: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def freeze(self, step: int, rows: Sequence[int], blocks: Sequence[int]) -> Plan:
        """Decodes first (the sort is stable), so that attention can cut the batch in two."""
        entries = sorted(self.entries, key=lambda entry: entry.count > 1)
        return Plan(step, tuple(entries), tuple(self.preempted), tuple(rows), tuple(blocks))


class Scheduler:
    """Decides what runs in each step: continuous batching with both budgets.

    Running requests come first, oldest first; then waiting ones join in order of arrival.
    When memory runs out the youngest running request is preempted: it gives up its blocks
    and computes prompt and output anew later. Pure Python: no torch, no clock, no I/O.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: PrefillPolicy | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs} must be at least 1 and at most "
                f"max_num_batched_tokens={max_num_batched_tokens}: a step gives every "
                "running request its one token"
            )
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy or WholePrompts()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.max_used_blocks = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self._step = 0
        self._completed_step = 0
        self._leaving: list[Request] = []
        self._released_rows: list[int] = []
        self._released_blocks: list[int] = []

    @property
    def has_unfinished(self) -> bool:
        """Is anything queued, running, or waiting for its last step to come back?"""
        return bool(self.waiting or self.running or self._leaving)

    def add(self, request: Request) -> None:
        """Queue a request; raises `RequestError` if it could never be served."""
        self._check_length(request)
        limit = min(request.max_total_tokens, self.max_model_len)
        self._check_fits(limit - 1)  # the last token sampled never gets a key or a value
        request.max_total_tokens = limit
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(request)

    def _check_length(self, request: Request) -> None:
        if not request.num_prompt_tokens:
            raise RequestError("the prompt has no tokens; give at least one")
        if request.num_prompt_tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens and max_model_len is "
                f"{self.max_model_len}, which leaves no room for an answer; shorten it to "
                f"{self.max_model_len - 1} or fewer"
            )

    def _check_fits(self, num_tokens: int) -> None:
        need, have = self.num_blocks_for(num_tokens), self.allocator.num_blocks
        size = self.allocator.block_size
        if need > have:
            raise RequestError(
                f"{num_tokens} tokens of prompt and answer need {need} KV blocks of {size} tokens "
                f"and the pool has {have}: it holds at most {have * size} tokens; lower "
                "max_tokens, shorten the prompt or enlarge the KV cache"
            )
        if not self.policy.take(num_tokens, self.max_num_batched_tokens):
            raise RequestError(
                f"prompt and answer may reach {num_tokens} tokens, to be computed in one step "
                f"after a preemption, and max_num_batched_tokens is {self.max_num_batched_tokens}; "
                "raise it, lower max_tokens or allow chunked prefill"
            )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.allocator.block_size)

    def schedule(self) -> Plan:
        """Plan the next step and book its progress.

        An empty plan means that nothing can run before an earlier step comes back.
        """
        self._step += 1
        draft = _Draft(self.max_num_batched_tokens)
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        self._check_progress(draft)
        used = self.allocator.num_blocks - self.allocator.num_free_blocks
        self.max_used_blocks = max(self.max_used_blocks, used)
        rows, self._released_rows = self._released_rows, []
        blocks, self._released_blocks = self._released_blocks, []
        return draft.freeze(self._step, rows, blocks)

    def _continue_running(self, draft: _Draft) -> None:
        index = 0
        while index < len(self.running):  # a preemption shortens the list behind us
            request = self.running[index]
            count = self._affordable(request, draft)
            if count and self._make_room(request, count, draft):
                self._book(request, count, draft)
            index += 1

    def _affordable(self, request: Request, draft: _Draft) -> int:
        """Tokens of this request that the policy lets run now."""
        if request.num_tokens + request.num_inflight_tokens >= request.max_total_tokens:
            return 0  # its last token is on the way
        return self.policy.take(request.work_left, draft.budget)

    def _admit_waiting(self, draft: _Draft) -> None:
        """First come, first served: if the first in the queue has to wait, so do all behind it."""
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            count = 0 if request.num_inflight_tokens else self._affordable(request, draft)
            if (
                not count
                or self._blocks_missing(request, count) > self.allocator.num_free_blocks
            ):
                return
            self.waiting.popleft()
            self._join(request)
            self._book(request, count, draft)

    def _join(self, request: Request) -> None:
        request.row = self._free_rows.pop()
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens is None:
            request.num_cached_tokens = 0
        place = len(self.running)
        while place and self.running[place - 1].arrival > request.arrival:
            place -= 1
        self.running.insert(place, request)  # in order of arrival: the last is the youngest

    def _blocks_missing(self, request: Request, count: int) -> int:
        """Blocks to append so that `count` more tokens have a place."""
        end = request.num_computed_tokens + count
        return self.num_blocks_for(end) - len(request.block_table)

    def _book(self, request: Request, count: int, draft: _Draft) -> None:
        """Progress is booked now and filled in by `update`."""
        start, joins = request.num_computed_tokens, not request.num_computed_tokens
        blocks = self.allocator.allocate(max(0, self._blocks_missing(request, count)))
        samples = count == request.work_left
        known = tuple(request.token_ids) if joins else ()
        assert request.row is not None
        entry = ScheduledRequest(
            request,
            request.epoch,
            request.row,
            start,
            count,
            samples,
            tuple(blocks),
            joins,
            known,
        )
        draft.entries.append(entry)
        draft.budget -= count
        request.block_table.extend(blocks)
        request.num_computed_tokens += count
        request.num_inflight_tokens += samples
        request.last_step = self._step

    def _make_room(self, request: Request, count: int, draft: _Draft) -> bool:
        """Preempt until `request` can have its blocks; False if it must wait or was itself the youngest."""
        need = self._blocks_missing(request, count)
        while need > self.allocator.num_free_blocks:
            if need <= self.allocator.num_free_blocks + self._num_leaving_blocks():
                return False
            victim = self.running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _num_leaving_blocks(self) -> int:
        return sum(len(request.block_table) for request in self._leaving)

    def _preempt(self, request: Request, draft: _Draft) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.epoch += 1
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)
        draft.preempted.append(request)

    def _release(self, request: Request) -> None:
        """Give row and blocks back, last block first: the head of a prompt is worth keeping longest."""
        if request.row is not None:
            self._free_rows.append(request.row)
            self._released_rows.append(request.row)
        self.allocator.free(reversed(request.block_table))
        self._released_blocks.extend(request.block_table)
        request.row, request.block_table = None, []

    def _check_progress(self, draft: _Draft) -> None:
        idle = not draft.entries and self._completed_step == self._step - 1
        if idle and (self.waiting or self.running) and not draft.preempted:
            raise OctavoError(
                f"nothing can run: {len(self.waiting)} waiting, {len(self.running)} running, "
                f"{self.allocator.num_free_blocks} of {self.allocator.num_blocks} blocks free"
            )

    def update(self, plan: Plan, result: StepResult) -> list[Progress]:
        """Fill in what a step produced; returns the requests that gained tokens."""
        progress = []
        for entry, token_ids in zip(plan.entries, result.token_ids, strict=True):
            request = entry.request
            request.num_inflight_tokens -= entry.samples
            if entry.samples and not request.is_finished:
                progress.append(Progress(request, self._append(request, token_ids)))
        self._complete(plan)
        return progress

    def _append(self, request: Request, token_ids: Sequence[int]) -> Sequence[int]:
        """Append sampled tokens up to the one that ends the request; returns those appended."""
        for count, token_id in enumerate(token_ids, 1):
            request.token_ids.append(token_id)
            if (reason := self._reason_to_stop(request, token_id)) is not None:
                self._end(request, reason)
                return token_ids[:count]
        return token_ids

    def _reason_to_stop(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in request.eos_token_ids:
            return FinishReason.STOP
        if token_id in (request.sampling_params.stop_token_ids or ()):
            request.stop_reason = token_id
            return FinishReason.STOP
        if request.num_tokens >= request.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _complete(self, plan: Plan) -> None:
        """The step is over: what only waited for it may go."""
        self._completed_step = plan.step
        for request in [r for r in self._leaving if r.last_step <= plan.step]:
            self._leaving.remove(request)
            self._release(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        if request in queue:
            queue.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        if request.last_step > self._completed_step and request.row is not None:
            self._leaving.append(request)
        else:
            self._release(request)

    def finish(self, request: Request, num_output_tokens: int, stop_reason: str) -> None:
        """A stop string was found in the text of the first `num_output_tokens`; drop the rest.

        It also corrects a request that reached its length in that very step.
        """
        if request.finish_reason not in (None, FinishReason.LENGTH, FinishReason.STOP):
            return
        del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
        if not request.is_finished:
            self._end(request, FinishReason.STOP)
        request.finish_reason, request.stop_reason = FinishReason.STOP, stop_reason

    def abort(self, request: Request) -> None:
        """End a request wherever it stands; doing so twice is harmless."""
        if not request.is_finished:
            self._end(request, FinishReason.ABORT)

    def fail(self, plan: Plan) -> list[Request]:
        """A step broke: end the requests it held (and return them), give back what they had."""
        failed = [e.request for e in plan.entries if not e.request.is_finished]
        for entry in plan.entries:
            entry.request.num_inflight_tokens -= entry.samples
        for request in failed:
            self._end(request, FinishReason.ERROR)
        self._complete(plan)
        return failed


class PrefillFirst(Scheduler):
    """Newcomers before those who run: a step computes prompts or decodes, never both.

    The order of nano-vllm's first versions; here to be compared with the decode-first `Scheduler`.
    """

    def _continue_running(self, draft: _Draft) -> None:
        self._admit_waiting(draft)
        if not draft.entries:
            super()._continue_running(draft)
