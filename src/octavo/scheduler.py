"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.admission import Admission, check_fits, check_length
from octavo.config import ConfigError, OctavoError
from octavo.draft import Draft, new_tuple
from octavo.plain_parts import WholePrompts, as_prefix_cache
from octavo.queues import Queues
from octavo.request import (
    BlockAllocator,
    FinishReason,
    Plan,
    PrefillPolicy,
    PrefixCache,
    Progress,
    Request,
    RequestStatus,
    ScheduledRequest,
    StepResult,
)

__all__ = ["ORDERS", "BATCHINGS", "Scheduler"]


ORDERS = ("fcfs", "priority")
BATCHINGS = ("decode-first", "prefill-first")


class Scheduler:
    """Decides what runs in each step: continuous batching with both budgets.

    Running requests come first, oldest first; then waiting ones join in order of arrival, each
    with the prefix that the allocator, if it is a `PrefixCache`, finds for it. When memory
    runs out the youngest running request is preempted: it gives up its blocks and computes
    prompt and output anew later. Pure Python: no torch, no clock, no I/O.

    `policy` cuts prompts (default: never). `order` "priority" serves lower
    `Request.priority` first, "fcfs" by arrival only. `batching` "prefill-first" runs a step of
    prompts whenever there are any. `defer_shared_prefix` lets a request wait while somebody
    else computes its next block. Raises `ConfigError` for limits that can't be kept.
    """

    def __init__(
        self,
        allocator: BlockAllocator | PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: PrefillPolicy | None = None,
        order: str = "fcfs",
        batching: str = "decode-first",
        defer_shared_prefix: bool = False,
    ) -> None:
        _check_options(max_num_seqs, max_num_batched_tokens, order, batching)
        self.allocator, self.cache = allocator, as_prefix_cache(allocator)
        self.block_size = allocator.block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy or WholePrompts()
        self.batching = batching
        self.queues = Queues(max_num_seqs, by_priority=order == "priority")
        self.admission = Admission(self.queues, self.cache, defer_shared_prefix)
        self.max_used_blocks = 0
        self._num_arrived = 0
        self._step = 0
        self._completed_step = 0
        self._leaving: list[Request] = []
        self._released_rows: list[int] = []
        self._released_blocks: list[int] = []

    @property
    def waiting(self) -> deque[Request]:
        """Requests that don't run, the next one first."""
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        """Requests that have a row, the oldest first."""
        return self.queues.running

    @property
    def has_unfinished(self) -> bool:
        """Is anything queued, running, or waiting for its last step to come back?"""
        return bool(self.waiting or self.running or self._leaving)

    def add(self, request: Request) -> None:
        """Queue a request; raises `RequestError` if it could never be served."""
        check_length(request, self.max_model_len)
        limit = min(request.max_total_tokens, self.max_model_len)
        to_compute = limit - 1  # the last token sampled never gets a key or a value
        check_fits(to_compute, self.allocator, self.policy, self.max_num_batched_tokens)
        request.max_total_tokens = limit
        own_ids = request.sampling_params.stop_token_ids or ()
        request.end_token_ids = request.eos_token_ids.union(own_ids)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.queues.wait(request)

    def schedule(self) -> Plan:
        """Plan the next step and book its progress.

        An empty plan means that nothing can run before an earlier step comes back.
        """
        self._step += 1
        budget, room = self.max_num_batched_tokens, self.cache.num_free_blocks
        draft = Draft(self._step, self.cache, self.policy, budget, room)
        self._fill(draft)
        self._check_progress(draft)
        used = self.allocator.num_blocks - draft.room
        self.max_used_blocks = max(self.max_used_blocks, used)
        rows, self._released_rows = self._released_rows, []
        blocks, self._released_blocks = self._released_blocks, []
        return draft.freeze(rows, blocks)

    def _fill(self, draft: Draft) -> None:
        if self.batching == "prefill-first":
            self._continue_running(draft, prompts_only=True)
            self.admission.admit_waiting(draft)
        if draft.is_empty:
            self._continue_running(draft)
            if self.batching == "decode-first":
                self.admission.admit_waiting(draft)

    def _continue(self, request: Request, draft: Draft) -> None:
        end = len(request.token_ids) + request.num_inflight_tokens
        if end >= request.max_total_tokens:
            return  # its last token is on the way
        count = draft.affordable(end - request.num_computed_tokens)
        missing = draft.blocks_missing(request, count)
        fits = missing <= draft.room
        if count and (fits or self._make_room(request, missing, draft)):
            draft.book(request, count)
            draft.budget -= count

    def _continue_running(self, draft: Draft, prompts_only: bool = False) -> None:
        size, step, decodes = self.block_size, self._step, draft.decodes
        running = self.queues.running
        draft.budget -= len(running)  # one token set aside for each
        for request in running:  # who is preempted meanwhile is taken from the end
            start = request.num_computed_tokens
            end = start + 1
            decode = len(request.token_ids) + request.num_inflight_tokens == end
            if decode and prompts_only:
                draft.budget += 1  # it stands still, and somebody else may have its token
            elif not decode or end >= request.max_total_tokens:
                draft.budget += 1  # a prompt, or one whose end is planned
                self._continue(request, draft)
            elif start < size * len(request.block_table):  # the usual case: `book` in short
                request.num_computed_tokens = end
                request.num_inflight_tokens += 1
                request.last_step = step
                share = (request, request.epoch, request.row, start, 1, True, (), False, ())
                decodes.append(new_tuple(ScheduledRequest, share))
            elif draft.room:  # its last block is full
                draft.book(request, 1)
            else:  # and somebody has to give up a block
                draft.budget += 1
                self._continue(request, draft)

    def _make_room(self, request: Request, need: int, draft: Draft) -> bool:
        """Preempt until `request` can have its blocks; False if it must wait or was itself the youngest."""
        while need > draft.room:
            draft.stalled = True
            if need <= draft.room + self._num_leaving_blocks():
                return False
            victim = self.running[-1]
            if victim is request and request.work_left > 1 and len(self.running) > 1:
                return False
            self._preempt(victim, draft)
            draft.room = self.cache.num_free_blocks
            if victim is request:
                return False
            draft.budget += 1  # the token that was set aside for it
        return True

    def _num_leaving_blocks(self) -> int:
        return sum(len(request.block_table) for request in self._leaving)

    def _preempt(self, request: Request, draft: Draft) -> None:
        self.queues.remove(request)
        self._release(request)
        request.num_computed_tokens = request.num_written_tokens = 0
        request.epoch += 1
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.queues.wait(request)
        draft.preempted.append(request)

    def _release(self, request: Request) -> None:
        """Give row and blocks back, last block first: the head of a prompt is worth keeping longest."""
        if request.row is not None:
            self.queues.free_rows.append(request.row)
            self._released_rows.append(request.row)
        self.cache.free(request.block_table[::-1])
        self._released_blocks.extend(request.block_table)
        request.row, request.block_table = None, []

    def _check_progress(self, draft: Draft) -> None:
        idle = draft.is_empty and self._completed_step == self._step - 1
        if idle and (self.waiting or self.running) and not draft.preempted:
            raise OctavoError(
                f"nothing can run: {len(self.waiting)} waiting, {len(self.running)} running, "
                f"{self.allocator.num_free_blocks} of {self.allocator.num_blocks} blocks free"
            )

    def update(self, plan: Plan, result: StepResult) -> list[Progress]:
        """Fill in what a step produced; returns the requests that gained tokens."""
        progress: list[Progress] = []
        size, ended = self.block_size, RequestStatus.FINISHED
        for entry, token_ids in zip(plan.entries, result.token_ids, strict=True):
            request, epoch, _, start, count, samples, _, _, _ = entry
            if start % size + count >= size:
                self._publish(request, epoch, start, start + count)
            if not samples:
                continue
            request.num_inflight_tokens -= 1
            if request.status is not ended:
                known = request.token_ids
                known += token_ids
                over = len(known) >= request.max_total_tokens
                if over or not request.end_token_ids.isdisjoint(token_ids):
                    token_ids = self._end_within(request, token_ids)
                progress.append((request, token_ids))
        self._complete(plan)
        return progress

    def _publish(self, request: Request, epoch: int, start: int, end: int) -> None:
        """Whole blocks among these positions may be found from now on, if they are still its own."""
        if epoch != request.epoch or request.row is None:
            return
        end = min(end, len(request.token_ids))
        whole = end - end % self.block_size
        if whole > start:  # a block is full that wasn't before
            self.cache.publish(request, start, end)
            request.num_written_tokens = whole

    def _end_within(self, request: Request, token_ids: Sequence[int]) -> Sequence[int]:
        """End it at the first of these new tokens that ends it; returns those that stay."""
        known = request.token_ids
        first = len(known) - len(token_ids)
        for position in range(first, len(known)):
            ends = known[position] in request.end_token_ids
            if ends or position + 1 >= request.max_total_tokens:
                del known[position + 1 :]
                break
        self._end(request, self._reason_to_stop(request, known[-1]))
        return token_ids[: len(known) - first]

    def _reason_to_stop(self, request: Request, token_id: int) -> FinishReason:
        if token_id not in request.end_token_ids:
            return FinishReason.LENGTH
        request.stop_reason = None if token_id in request.eos_token_ids else token_id
        return FinishReason.STOP

    def _complete(self, plan: Plan) -> None:
        """The step is over: what only waited for it may go."""
        self._completed_step = plan.step
        for request in [r for r in self._leaving if r.last_step <= plan.step]:
            self._leaving.remove(request)
            self._release(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.queues.remove(request)
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


def _check_options(seqs: int, tokens: int, order: str, batching: str) -> None:
    if not 1 <= seqs <= tokens:
        raise ConfigError(
            f"max_num_seqs={seqs} must be at least 1 and at most max_num_batched_tokens="
            f"{tokens}: a step gives every running request its one token"
        )
    if order not in ORDERS:
        raise ConfigError(f"order={order!r}: choose one of {', '.join(ORDERS)}")
    if batching not in BATCHINGS:
        raise ConfigError(f"batching={batching!r}: choose one of {', '.join(BATCHINGS)}")
