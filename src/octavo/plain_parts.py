"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from octavo.request import BlockAllocator, PrefixCache, Request

__all__ = ["CountingAllocator", "as_prefix_cache", "WholePrompts"]


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
