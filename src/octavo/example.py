"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from octavo.request import (
    FinishReason,
    Plan,
    Progress,
    Request,
    RequestStatus,
    ScheduledRequest,
    StepResult,
)

__all__ = [
    "EXAMPLE_PROMPTS",
    "CountingTokenizer",
    "count_up",
    "checksum",
    "CountingRunner",
    "OneAtATimeScheduler",
]


EXAMPLE_PROMPTS = {
    "short": "1 2 3 4 5 6 7 8 9 10",
    "sharing": "1 2 3 4 5 6 7 8 40",
    "long": " ".join(str(n) for n in range(20, 60)),
}
"""The three requests that go through the whole book: the second shares its first eight tokens
with the first, the third is too long for a small token budget."""


class CountingTokenizer:
    """Numbers separated by blanks; token n is the number n."""

    vocab_size = 100

    def encode(self, text: str) -> list[int]:
        """One token a number; anything else is a ValueError."""
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Each number with a blank behind it."""
        return "".join(f"{n} " for n in token_ids)


def count_up(context: Sequence[int]) -> int:
    """The next number; after 99 comes 0."""
    return (context[-1] + 1) % CountingTokenizer.vocab_size


def checksum(context: Sequence[int]) -> int:
    """A token that depends on every token before it and on its place, so that any mix-up shows."""
    total = 7
    for token in context:
        total = (total * 31 + token + 1) % 9973
    return total % CountingTokenizer.vocab_size


class CountingRunner:
    """A `Runner` in pure Python over a paged cache of tokens.

    It reads only what a runner in another process could read: the plan, never the ledger.
    """

    def __init__(
        self, block_size: int, next_token: Callable[[Sequence[int]], int] = count_up
    ):
        self.block_size = block_size
        self.next_token = next_token
        self.slots: dict[tuple[int, int], int] = {}
        self.row_tokens: dict[int, list[int]] = {}
        self.row_blocks: dict[int, list[int]] = {}

    def execute(self, plan: Plan) -> StepResult:
        """All writes of the step come before its first read, as in a real forward pass."""
        for entry in plan.entries:
            self._write(entry)
        return StepResult([self._sample(entry) for entry in plan.entries])

    def _write(self, entry: ScheduledRequest) -> None:
        if entry.joins:
            self.row_tokens[entry.row] = list(entry.new_token_ids)
            self.row_blocks[entry.row] = []
        self.row_blocks[entry.row].extend(entry.new_block_ids)
        for position in range(entry.start, entry.start + entry.count):
            self.slots[self._slot(entry.row, position)] = self.row_tokens[entry.row][
                position
            ]

    def _sample(self, entry: ScheduledRequest) -> list[int]:
        if not entry.samples:
            return []
        end = entry.start + entry.count
        token = self.next_token([self.slots[self._slot(entry.row, p)] for p in range(end)])
        self.row_tokens[entry.row].append(token)
        return [token]

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        return self.row_blocks[row][block], offset


class OneAtATimeScheduler:
    """Serves requests one after the other, with one row and the same blocks for each."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.queue: deque[Request] = deque()
        self.step = 0

    @property
    def has_unfinished(self) -> bool:
        """Is anybody left?"""
        return bool(self.queue)

    def add(self, request: Request) -> None:
        """Line up."""
        self.queue.append(request)

    def schedule(self) -> Plan:
        """All the work left of the request in front."""
        self.step += 1
        if not self.queue:
            return Plan(self.step)
        request, start = self.queue[0], self.queue[0].num_computed_tokens
        count = request.work_left
        blocks = tuple(
            range(len(request.block_table), -(-(start + count) // self.block_size))
        )
        known = tuple(request.token_ids) if start == 0 else ()
        entry = ScheduledRequest(
            request, 0, 0, start, count, True, blocks, start == 0, known
        )
        request.status = RequestStatus.RUNNING
        request.block_table.extend(blocks)
        request.num_computed_tokens += count
        request.num_inflight_tokens += 1
        return Plan(self.step, (entry,))

    def update(self, plan: Plan, result: StepResult) -> list[Progress]:
        """Append what was sampled; the front leaves when it is done."""
        pairs = zip(plan.entries, result.token_ids, strict=True)
        return [self._append(entry.request, token_ids) for entry, token_ids in pairs]

    def _append(self, request: Request, token_ids: Sequence[int]) -> Progress:
        request.num_inflight_tokens -= 1
        request.token_ids.extend(token_ids)
        last = token_ids[-1]
        if last in request.eos_token_ids:
            self._end(request, FinishReason.STOP)
        elif last in (request.sampling_params.stop_token_ids or ()):
            request.stop_reason = last
            self._end(request, FinishReason.STOP)
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, FinishReason.LENGTH)
        return request, token_ids

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        if request in self.queue:
            self.queue.remove(request)

    def fail(self, plan: Plan) -> list[Request]:
        """The step broke: its request ends with an error."""
        for entry in plan.entries:
            self._end(entry.request, FinishReason.ERROR)
        return [entry.request for entry in plan.entries]

    def finish(self, request: Request, num_output_tokens: int, stop_reason: str) -> None:
        """A stop string was found: drop what came after it."""
        del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
        request.stop_reason = stop_reason
        self._end(request, FinishReason.STOP)

    def abort(self, request: Request) -> None:
        """End it now, unless it has ended."""
        if not request.is_finished:
            self._end(request, FinishReason.ABORT)
