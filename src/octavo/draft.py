"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.request import Plan, PrefillPolicy, PrefixCache, Request, ScheduledRequest

__all__ = ["num_blocks_for", "Draft", "new_tuple"]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the keys and values of `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass
class Draft:
    """The step being planned: what is left of both budgets, and who has got how much."""

    step: int
    cache: PrefixCache
    policy: PrefillPolicy
    budget: int
    """Tokens that nobody has been promised."""
    room: int
    """Blocks that the cache can hand out."""
    decodes: list[ScheduledRequest] = field(default_factory=list)
    prompts: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    stalled: bool = False
    """Somebody who runs is short of blocks, so nobody may come in."""

    @property
    def is_empty(self) -> bool:
        """Has nobody got a share?"""
        return not self.decodes and not self.prompts

    def affordable(self, work_left: int) -> int:
        """Tokens that may run now; the policy has its say where there are several."""
        if work_left > 1:
            return self.policy.take(work_left, self.budget)
        return min(work_left, self.budget)

    def freeze(self, rows: Sequence[int], blocks: Sequence[int]) -> Plan:
        """The plan, with what was given back; decodes first: attention cuts the batch in two."""
        entries = (*self.decodes, *self.prompts)
        return Plan(self.step, entries, tuple(self.preempted), tuple(rows), tuple(blocks))

    def blocks_missing(self, request: Request, count: int) -> int:
        """Blocks to append so that `count` more tokens have a place."""
        end = request.num_computed_tokens + count
        return num_blocks_for(end, self.cache.block_size) - len(request.block_table)

    def book(self, request: Request, count: int, joins: bool = False) -> None:
        """Plan its next `count` tokens: progress is booked now and filled in by `update`."""
        start, table = request.num_computed_tokens, request.block_table
        size = self.cache.block_size
        request.num_computed_tokens = end = start + count
        request.last_step = self.step
        blocks: Sequence[int] = ()
        if end > size * len(table):
            blocks = self.cache.allocate(-(-end // size) - len(table))
            table.extend(blocks)
            self.room -= len(blocks)
        samples = end == len(request.token_ids) + request.num_inflight_tokens
        if samples:
            request.num_inflight_tokens += 1
        known = tuple(request.token_ids) if joins else ()
        blocks = tuple(table if joins else blocks)  # a new row needs the whole table
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
        entry = new_tuple(ScheduledRequest, share)
        (self.decodes if count == 1 else self.prompts).append(entry)


new_tuple: Any = tuple.__new__  # `ScheduledRequest(...)`, less the time of its constructor
