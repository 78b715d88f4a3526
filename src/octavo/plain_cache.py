"""Chapter 05, Prefix caching.

Generated from chapters/05_prefix_caching.md; edit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.block_pool import BlockPool
from octavo.config import OctavoError
from octavo.request import Request

__all__ = ["NoPrefixCache"]


class NoPrefixCache:
    """Finds nothing: the plain version, and the half that all caches share.

    Implements `octavo.request.PrefixCache` over a `BlockPool` that is its own from then on:
    blocks are taken and given back through the cache only.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.num_blocks = pool.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks kept for their content and used by nobody."""
        return self.pool.num_cached_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return self.pool.num_free_blocks + self.pool.num_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some request holds."""
        return self.pool.num_used_blocks

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; cached ones give way only if they must.

        All or nothing: OctavoError if `num_free_blocks` is less.
        """
        if count > self.pool.num_free_blocks:
            self._make_room(count)
        return self.pool.allocate(count)

    def _make_room(self, count: int) -> None:
        if count > self.num_free_blocks:
            raise OctavoError(
                f"{count} blocks wanted, {self.num_free_blocks} free or cached"
            )
        while count > self.pool.num_free_blocks:
            self._evict()

    def free(self, block_ids: Iterable[int]) -> None:
        """One reader fewer for each; without readers a known block stays cached."""
        self.pool.free(block_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """One more reader for each; a cached block is in use again, with its content."""
        self.pool.share(block_ids)

    def num_revived(self, block_ids: Sequence[int]) -> int:
        """How many of them are cached now and would leave `num_free_blocks` when shared."""
        return sum(not self.pool.ref_count(block_id) for block_id in block_ids)

    def match(self, request: Request) -> list[int]:
        """Blocks that hold a beginning of `request.token_ids`; here none."""
        return []

    def publish(self, request: Request, start: int, end: int) -> None:
        """Positions `start` to `end - 1` are written; here nobody cares."""

    def clear(self) -> None:
        """Forget all content."""

    def _evict(self) -> None:
        """Turn at least one cached block into a free one."""
        raise OctavoError("nothing is cached")

    def _filled(self, request: Request, start: int, end: int) -> tuple[int, int]:
        """(first, last): positions `start` to `end - 1` filled its blocks `first` to `last - 1`."""
        first = start // self.block_size
        return first, max(first, min(end, len(request.token_ids)) // self.block_size)

    def check_integrity(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise OctavoError unless the pool's books and the cache's own are right."""
        self.pool.check_integrity(block_tables)
        known = sorted(self._known_blocks())
        kept = [b for b in range(self.num_blocks) if self.pool.is_kept(b)]
        if known != kept:
            raise OctavoError(f"the cache knows blocks {known}, the pool keeps {kept}")

    def _known_blocks(self) -> list[int]:
        """The blocks whose content it knows, each once; OctavoError if its books are wrong."""
        return []
