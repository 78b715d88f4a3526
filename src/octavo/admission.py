"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from octavo.draft import Draft, num_blocks_for
from octavo.queues import Queues
from octavo.request import (
    BlockAllocator,
    PrefillPolicy,
    PrefixCache,
    Request,
    RequestError,
)

__all__ = ["check_length", "check_fits", "Admission"]


def check_length(request: Request, max_model_len: int) -> None:
    """RequestError unless the prompt has tokens and leaves room for one more."""
    if not request.num_prompt_tokens:
        raise RequestError("the prompt has no tokens; give at least one")
    if request.num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {request.num_prompt_tokens} tokens and max_model_len is "
            f"{max_model_len}, which leaves no room for an answer; shorten it to "
            f"{max_model_len - 1} or fewer"
        )


def check_fits(
    num_tokens: int, allocator: BlockAllocator, policy: PrefillPolicy, budget: int
) -> None:
    """RequestError if so many tokens, all of one request, could never be computed.

    They must fit into the whole pool, and `policy` must take them with a step's whole `budget`.
    """
    size, have = allocator.block_size, allocator.num_blocks
    need = num_blocks_for(num_tokens, size)
    if need > have:
        raise RequestError(
            f"{num_tokens} tokens of prompt and answer need {need} KV blocks of {size} tokens "
            f"and the pool has {have}: it holds at most {have * size} tokens; lower "
            "max_tokens, shorten the prompt or enlarge the KV cache"
        )
    if not policy.take(num_tokens, budget):
        raise RequestError(
            f"prompt and answer may reach {num_tokens} tokens, to be computed in one step "
            f"after a preemption, and max_num_batched_tokens is {budget}; "
            "raise it, lower max_tokens or allow chunked prefill"
        )


class Admission:
    """Decides who of the waiting comes in, and with which blocks of its beginning.

    `defer_shared_prefix` lets a request wait while somebody who runs computes its next block.
    """

    def __init__(
        self, queues: Queues, cache: PrefixCache, defer_shared_prefix: bool = False
    ) -> None:
        self.queues, self.cache = queues, cache
        self.block_size = cache.block_size
        self.defer_shared_prefix = defer_shared_prefix

    def admit_waiting(self, draft: Draft) -> None:
        """In order: if the first has to wait for room, so do all behind it."""
        queues = self.queues
        passed: list[Request] = []
        while self._may_admit(draft) and len(passed) < queues.num_rows:
            request = queues.waiting[0]
            prefix = self._find_prefix(request)
            if prefix is None:
                passed.append(queues.waiting.popleft())
            elif not self._admit(request, prefix, draft):
                break
        queues.waiting.extendleft(reversed(passed))

    def _may_admit(self, draft: Draft) -> bool:
        queues = self.queues
        if draft.preempted or draft.stalled or draft.budget < 1 or not queues.free_rows:
            return False
        if not queues.waiting or not draft.room:
            return False
        return not queues.waiting[0].num_inflight_tokens

    def _admit(self, request: Request, prefix: list[int], draft: Draft) -> bool:
        """Let it join with these blocks, if there is room for the rest; did it?"""
        count = draft.affordable(request.num_tokens - len(prefix) * self.block_size)
        room = draft.room - self.cache.num_revived(prefix)
        if not count or self.blocks_to_join(request, prefix) > room:
            return False
        draft.room = room
        self.queues.waiting.popleft()
        self._join(request, prefix)
        draft.book(request, count, joins=True)
        draft.budget -= count
        return True

    def blocks_to_join(self, request: Request, prefix: list[int]) -> int:
        """Blocks for all tokens it has, and for those that the running have and lack a place for."""
        size = self.block_size
        need = num_blocks_for(request.num_tokens, size) - len(prefix)
        for other in self.queues.running:
            if len(other.token_ids) > size * len(other.block_table):
                need += num_blocks_for(other.num_tokens, size) - len(other.block_table)
        return need

    def _join(self, request: Request, prefix: list[int]) -> None:
        self.cache.share(prefix)
        request.block_table = list(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size
        request.num_written_tokens = request.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        self.queues.run(request)

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
            for other in self.queues.running
        )
