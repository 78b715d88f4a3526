"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from collections import deque

from octavo.request import (
    FinishReason,
    Plan,
    Progress,
    Request,
    RequestError,
    RequestStatus,
    ScheduledRequest,
    StepResult,
)

__all__ = ["StaticBatcher", "SlotBatcher"]


class StaticBatcher:
    """Fills its slots from the queue, then runs them until the last of them has ended.

    A slot is `slot_size` tokens of KV memory: one block of that size, numbered as its row.
    Implements `octavo.request.SchedulerLike` for the plain loop (`update` comes before the
    next `schedule`); it has no token budget and never preempts.
    """

    def __init__(self, num_slots: int, slot_size: int) -> None:
        self.slot_size = slot_size
        self.slots: list[Request | None] = [None] * num_slots
        self.waiting: deque[Request] = deque()
        self._step = 0

    @property
    def running(self) -> list[Request]:
        """The requests in the slots."""
        return [request for request in self.slots if request is not None]

    @property
    def has_unfinished(self) -> bool:
        """Is anybody in a slot or in the queue?"""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; `RequestError` if no slot is long enough for prompt and a token."""
        if not 0 < request.num_prompt_tokens < self.slot_size:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; a slot of "
                f"{self.slot_size} takes 1 to {self.slot_size - 1}"
            )
        request.max_total_tokens = min(request.max_total_tokens, self.slot_size)
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Refill the slots if that is allowed now, then one step for everybody in them."""
        self._step += 1
        if self._may_refill():
            self._refill()
        entries = [self._book(row, r) for row, r in enumerate(self.slots) if r is not None]
        return Plan(self._step, tuple(sorted(entries, key=lambda entry: entry.count > 1)))

    def _may_refill(self) -> bool:
        return not self.running

    def _refill(self) -> None:
        for row, holder in enumerate(self.slots):
            if holder is None and self.waiting:
                self.slots[row] = request = self.waiting.popleft()
                request.status, request.row = RequestStatus.RUNNING, row
                request.block_table, request.num_cached_tokens = [row], 0

    def _book(self, row: int, request: Request) -> ScheduledRequest:
        start, count = request.num_computed_tokens, request.work_left
        request.num_computed_tokens += count
        request.num_inflight_tokens += 1
        request.last_step = self._step
        blocks, known = ((), ()) if start else ((row,), tuple(request.token_ids))
        return ScheduledRequest(
            request, 0, row, start, count, True, blocks, not start, known
        )

    def update(self, plan: Plan, result: StepResult) -> list[Progress]:
        """Append what was sampled; returns the requests that gained a token."""
        progress = []
        for entry, token_ids in zip(plan.entries, result.token_ids, strict=True):
            request = entry.request
            request.num_inflight_tokens -= 1
            if not request.is_finished:
                request.token_ids.extend(token_ids)
                progress.append((request, token_ids))
                self._end_if_done(request, token_ids[-1])
        return progress

    def _end_if_done(self, request: Request, token_id: int) -> None:
        stop_ids = request.sampling_params.stop_token_ids or ()
        if token_id in request.eos_token_ids or token_id in stop_ids:
            request.stop_reason = (
                token_id if token_id not in request.eos_token_ids else None
            )
            self._end(request, FinishReason.STOP)
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.row is not None:
            self.slots[request.row] = None
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        request.row = None

    def finish(self, request: Request, num_output_tokens: int, stop_reason: str) -> None:
        """A stop string ended the text after `num_output_tokens`; drop the rest."""
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
        """A step broke: end the requests that it held and return them."""
        failed = [e.request for e in plan.entries if not e.request.is_finished]
        for request in failed:
            request.num_inflight_tokens = 0
            self._end(request, FinishReason.ERROR)
        return failed


class SlotBatcher(StaticBatcher):
    """Fixed slots and a queue: an empty slot is refilled in the very next step."""

    def _may_refill(self) -> bool:
        return True
