"""Chapter 04, Blocks and block tables.

Generated from chapters/04_blocks.md; edit there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator

from octavo.config import ConfigError, OctavoError

__all__ = ["BlockPool", "slot_of"]


class BlockPool:
    """Blocks 0 to `num_blocks - 1`, each free, cached, or referenced by some requests.

    Implements `octavo.request.BlockAllocator`. One further block, number `num_blocks`,
    is never handed out: padded rows of a batch read and write it (`padding_block`).
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing; "
                "both numbers must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._kept = bytearray(num_blocks)  # 1: somebody knows what is in it
        self._num_touched = 0  # blocks from here on were never handed out
        self._freed: deque[int] = deque()
        self._cached: OrderedDict[int, None] = OrderedDict()  # kept, and held by nobody

    @property
    def padding_block(self) -> int:
        """The reserved block outside the pool."""
        return self.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._freed) + self.num_blocks - self._num_touched

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - self.num_free_blocks - len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """How many requests hold this block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; OctavoError if there are fewer free.

        All or nothing: a refused call takes none.
        """
        if count > self.num_free_blocks:
            raise OctavoError(f"{count} blocks wanted, {self.num_free_blocks} free")
        fresh = range(self._num_touched, min(self._num_touched + count, self.num_blocks))
        self._num_touched = fresh.stop
        block_ids = [*fresh, *(self._freed.popleft() for _ in range(count - len(fresh)))]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reader for each block; OctavoError for a free one.

        A cached block is in use again, with its content.
        """
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                if block_id not in self._cached:
                    raise OctavoError(f"block {block_id} is free and can't be shared")
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One reader fewer for each; a block without readers is cached if it is kept, else free.

        Freeing a block that nobody holds is an OctavoError: two owners both thought it theirs.
        """
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            if not count:
                raise OctavoError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] = count - 1
            if count == 1 and self._kept[block_id]:
                self._cached[block_id] = None
            elif count == 1:
                self._freed.append(block_id)

    def keep(self, block_id: int) -> None:
        """Its content is known: when its last reader leaves, it becomes cached, not free."""
        if not self._ref_counts[block_id] and block_id not in self._cached:
            raise OctavoError(f"block {block_id} is free; nothing in it can be kept")
        self._kept[block_id] = 1

    def forget(self, block_id: int) -> None:
        """Its content isn't wanted any more; a cached block becomes free at once.

        A block that isn't kept is left as it is.
        """
        self._kept[block_id] = 0
        if block_id in self._cached:
            del self._cached[block_id]
            self._freed.append(block_id)

    def is_kept(self, block_id: int) -> bool:
        """Was it marked by `keep`, and not forgotten since?"""
        return bool(self._kept[block_id])

    def cached_blocks(self) -> Iterator[int]:
        """The cached blocks, the one first that has been idle longest; the pool must not change meanwhile."""
        return iter(self._cached)

    def check_integrity(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise OctavoError unless every block is in exactly one state.

        With the `block_tables` of all requests that hold blocks, reference counts are compared
        with the number of tables that name each block.
        """
        times_freed = Counter(self._freed)
        for block_id, count in enumerate(self._ref_counts):
            freed, touched = times_freed[block_id], block_id < self._num_touched
            cached, kept = block_id in self._cached, self._kept[block_id] == 1
            states = freed + cached + (count > 0) + (not touched)
            if (
                states != 1
                or count < 0
                or (cached and not kept)
                or (kept and not count + cached)
            ):
                raise OctavoError(
                    f"block {block_id} is in no state or in two: references={count}, in the free "
                    f"queue={freed}, cached={cached}, kept={kept}, ever used={touched}"
                )
        if block_tables is not None:
            self._check_tables(block_tables)

    def _check_tables(self, block_tables: Iterable[Iterable[int]]) -> None:
        seen = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                seen[block_id] += 1
        wrong = [b for b, count in enumerate(seen) if count != self._ref_counts[b]]
        if wrong:
            block_id = wrong[0]
            raise OctavoError(
                f"block {block_id} has {self._ref_counts[block_id]} references and stands in "
                f"{seen[block_id]} block tables"
            )


def slot_of(block_table: list[int], position: int, block_size: int) -> int:
    """The slot of a position: its block's first slot plus its place inside the block."""
    return block_table[position // block_size] * block_size + position % block_size
