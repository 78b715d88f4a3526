"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from octavo.config import ConfigError, OctavoError
from octavo.request import (
    BlockAllocator,
    FinishReason,
    Plan,
    PrefillPolicy,
    PrefixCache,
    Progress,
    Request,
    RequestError,
    RequestStatus,
    ScheduledRequest,
    StepResult,
)

__all__ = [
    "CountingAllocator",
    "as_prefix_cache",
    "WholePrompts",
    "ORDERS",
    "BATCHINGS",
    "Scheduler",
]


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


class _Uncached:
    """A plain `BlockAllocator` where a `PrefixCache` is expected: it never finds anything."""

    num_cached_blocks = 0

    def __init__(self, allocator: BlockAllocator) -> None:
        self.block_size, self.num_blocks = allocator.block_size, allocator.num_blocks
        self._allocator, self.allocate = allocator, allocator.allocate
        self._more_readers: Counter[int] = Counter()  # of blocks that were shared

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free_blocks

    def match(self, request: Request) -> list[int]:
        return []

    def num_revived(self, block_ids: Sequence[int]) -> int:
        return 0

    def publish(self, request: Request, start: int, end: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def share(self, block_ids: Sequence[int]) -> None:
        own = getattr(self._allocator, "share", self._more_readers.update)
        own(block_ids)

    def free(self, block_ids: Iterable[int]) -> None:
        if self._more_readers:
            block_ids = [block for block in block_ids if self._was_last_reader(block)]
        self._allocator.free(block_ids)

    def _was_last_reader(self, block_id: int) -> bool:
        readers = self._more_readers.pop(block_id, 0)
        if readers > 1:
            self._more_readers[block_id] = readers - 1
        return not readers


def as_prefix_cache(allocator: BlockAllocator | PrefixCache) -> PrefixCache:
    """The allocator itself if it can find blocks, else one that finds nothing around it."""
    if hasattr(allocator, "match"):
        return cast(PrefixCache, allocator)
    return _Uncached(allocator)


class WholePrompts:
    """The `PrefillPolicy` that never splits a prompt."""

    def take(self, work_left: int, budget: int) -> int:
        """All of it if it fits into what is left of the step, else nothing."""
        return work_left if work_left <= budget else 0


@dataclass
class _Draft:
    """The step being planned."""

    budget: int
    """Tokens that nobody has been promised."""
    room: int
    """Blocks that the allocator can hand out."""
    decodes: list[ScheduledRequest] = field(default_factory=list)
    prompts: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    stalled: bool = False
    """Somebody who runs is short of blocks, so nobody may come in."""

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prompts

    def freeze(self, step: int, rows: Sequence[int], blocks: Sequence[int]) -> Plan:
        """Decodes first, so that attention can cut the batch in two."""
        entries = (*self.decodes, *self.prompts)
        return Plan(step, entries, tuple(self.preempted), tuple(rows), tuple(blocks))


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
        self.defer_shared_prefix = defer_shared_prefix
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.max_used_blocks = 0
        self._place = _by_priority if order == "priority" else _by_arrival
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
        own_ids = request.sampling_params.stop_token_ids or ()
        request.end_token_ids = request.eos_token_ids.union(own_ids)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        _insert(self.waiting, request, self._place)

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
        draft = _Draft(self.max_num_batched_tokens, self.cache.num_free_blocks)
        self._fill(draft)
        self._check_progress(draft)
        used = self.allocator.num_blocks - draft.room
        self.max_used_blocks = max(self.max_used_blocks, used)
        rows, self._released_rows = self._released_rows, []
        blocks, self._released_blocks = self._released_blocks, []
        return draft.freeze(self._step, rows, blocks)

    def _fill(self, draft: _Draft) -> None:
        if self.batching == "prefill-first":
            self._continue_running(draft, prompts_only=True)
            self._admit_waiting(draft)
        if draft.is_empty:
            self._continue_running(draft)
            if self.batching == "decode-first":
                self._admit_waiting(draft)

    def _continue(self, request: Request, draft: _Draft) -> None:
        end = len(request.token_ids) + request.num_inflight_tokens
        if end >= request.max_total_tokens:
            return  # its last token is on the way
        count = self._affordable(request, end - request.num_computed_tokens, draft.budget)
        missing = self._blocks_missing(request, count)
        fits = missing <= draft.room
        if count and (fits or self._make_room(request, missing, draft)):
            self._book(request, count, draft)
            draft.budget -= count

    def _affordable(self, request: Request, work_left: int, budget: int) -> int:
        """Tokens of this request that may run now; the policy has its say where there are several."""
        return (
            self.policy.take(work_left, budget) if work_left > 1 else min(work_left, budget)
        )

    def _continue_running(self, draft: _Draft, prompts_only: bool = False) -> None:
        size, step, decodes = self.block_size, self._step, draft.decodes
        draft.budget -= len(self.running)  # one token set aside for each
        for request in self.running:  # who is preempted meanwhile is taken from the end
            start = request.num_computed_tokens
            end = start + 1
            decode = len(request.token_ids) + request.num_inflight_tokens == end
            if decode and prompts_only:
                draft.budget += 1  # it stands still, and somebody else may have its token
            elif not decode or end >= request.max_total_tokens:
                draft.budget += 1  # a prompt, or one whose end is planned
                self._continue(request, draft)
            elif start < size * len(
                request.block_table
            ):  # the common case: `_book` in short
                request.num_computed_tokens = end
                request.num_inflight_tokens += 1
                request.last_step = step
                share = (request, request.epoch, request.row, start, 1, True, (), False, ())
                decodes.append(_new_tuple(ScheduledRequest, share))
            elif draft.room:  # its last block is full
                self._book(request, 1, draft)
            else:  # and somebody has to give up a block
                draft.budget += 1
                self._continue(request, draft)

    def _blocks_missing(self, request: Request, count: int) -> int:
        """Blocks to append so that `count` more tokens have a place."""
        end = request.num_computed_tokens + count
        return self.num_blocks_for(end) - len(request.block_table)

    def _book(
        self, request: Request, count: int, draft: _Draft, joins: bool = False
    ) -> None:
        """Progress is booked now and filled in by `update`."""
        start, table = request.num_computed_tokens, request.block_table
        request.num_computed_tokens = end = start + count
        request.last_step = self._step
        blocks: Sequence[int] = ()
        if end > self.block_size * len(table):
            blocks = self.cache.allocate(-(-end // self.block_size) - len(table))
            table.extend(blocks)
            draft.room -= len(blocks)
        samples = end == len(request.token_ids) + request.num_inflight_tokens
        if samples:
            request.num_inflight_tokens += 1
        known = tuple(request.token_ids) if joins else ()
        blocks = tuple(
            table if joins else blocks
        )  # its row is empty: it needs the whole table
        share = (
            request,
            request.epoch,
            request.row,
            start,
            count,
            samples,
            blocks,
            joins,
            known,
        )
        entry = _new_tuple(ScheduledRequest, share)
        (draft.decodes if count == 1 else draft.prompts).append(entry)

    def _admit_waiting(self, draft: _Draft) -> None:
        """In order: if the first has to wait for room, so do all behind it."""
        passed: list[Request] = []
        while self._may_admit(draft) and len(passed) < self.max_num_seqs:
            request = self.waiting[0]
            prefix = self._find_prefix(request)
            if prefix is None:
                passed.append(self.waiting.popleft())
            elif not self._admit(request, prefix, draft):
                break
        self.waiting.extendleft(reversed(passed))

    def _may_admit(self, draft: _Draft) -> bool:
        short = draft.preempted or draft.stalled or draft.budget < 1 or not self._free_rows
        if short or not self.waiting or not draft.room:
            return False
        return not self.waiting[0].num_inflight_tokens

    def _admit(self, request: Request, prefix: list[int], draft: _Draft) -> bool:
        """Let it join with these blocks, if there is room for the rest; did it?"""
        start = len(prefix) * self.block_size
        count = self._affordable(request, request.num_tokens - start, draft.budget)
        room = draft.room - self.cache.num_revived(prefix)
        if not count or self._blocks_to_join(request, prefix) > room:
            return False
        draft.room = room
        self.waiting.popleft()
        self._join(request, prefix)
        self._book(request, count, draft, joins=True)
        draft.budget -= count
        return True

    def _blocks_to_join(self, request: Request, prefix: list[int]) -> int:
        """Blocks for all tokens it has, and for those that the running have and lack a place for."""
        need, size = self.num_blocks_for(request.num_tokens) - len(prefix), self.block_size
        for other in self.running:
            if len(other.token_ids) > size * len(other.block_table):
                need += self.num_blocks_for(other.num_tokens) - len(other.block_table)
        return need

    def _join(self, request: Request, prefix: list[int]) -> None:
        self.cache.share(prefix)
        request.block_table = list(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size
        request.num_written_tokens = request.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        request.row = self._free_rows.pop()
        request.status = RequestStatus.RUNNING
        _insert(self.running, request, self._place)

    def _find_prefix(self, request: Request) -> list[int] | None:
        """Blocks to begin with; None if it should wait for somebody who computes them."""
        found = self.cache.match(request)
        leader = request.leader
        if leader is not None and not leader.is_finished:
            whole = min(leader.num_prompt_tokens, request.num_tokens - 1) // self.block_size
            if len(found) < whole:
                written = leader.num_written_tokens >= whole * self.block_size
                return leader.block_table[:whole] if written else None
        if self.defer_shared_prefix and self._is_coming(request, len(found)):
            return None
        return found

    def _is_coming(self, request: Request, num_found: int) -> bool:
        """Is somebody who runs computing the first whole block that wasn't found?"""
        start = num_found * self.block_size
        end = start + self.block_size
        if end >= request.num_tokens:
            return False  # what is missing is no whole block, so nobody could share it
        return any(
            other.num_written_tokens <= start
            and other.num_prompt_tokens >= end
            and other.cache_salt == request.cache_salt
            and other.token_ids[start] == request.token_ids[start]
            and other.token_ids[:end] == request.token_ids[:end]
            for other in self.running
        )

    def _make_room(self, request: Request, need: int, draft: _Draft) -> bool:
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

    def _preempt(self, request: Request, draft: _Draft) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = request.num_written_tokens = 0
        request.epoch += 1
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        _insert(self.waiting, request, self._place)
        draft.preempted.append(request)

    def _release(self, request: Request) -> None:
        """Give row and blocks back, last block first: the head of a prompt is worth keeping longest."""
        if request.row is not None:
            self._free_rows.append(request.row)
            self._released_rows.append(request.row)
        self.cache.free(request.block_table[::-1])
        self._released_blocks.extend(request.block_table)
        request.row, request.block_table = None, []

    def _check_progress(self, draft: _Draft) -> None:
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
        end = min(end, request.num_tokens)
        if end // self.block_size > start // self.block_size:
            self.cache.publish(request, start, end)
            request.num_written_tokens = end // self.block_size * self.block_size

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


def _by_arrival(request: Request) -> tuple[int, int]:
    return 0, request.arrival


def _by_priority(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


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


def _insert(
    queue: list[Request] | deque[Request],
    request: Request,
    place: Callable[[Request], tuple[int, int]],
) -> None:
    """Where its place in the order is, which is nearly always the end."""
    if not queue or place(queue[-1]) < place(request):
        queue.append(request)
    else:
        queue.insert(bisect(queue, place(request), key=place), request)


_new_tuple: Any = tuple.__new__  # `ScheduledRequest(...)`, less the time of its constructor
