"""Chapter 05, Prefix caching.

Generated from chapters/05_prefix_caching.md; edit there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.block_pool import BlockPool
from octavo.config import OctavoError
from octavo.plain_cache import NoPrefixCache
from octavo.request import Request

__all__ = [
    "TOKEN_BYTES",
    "as_bytes",
    "sha256",
    "Known",
    "same_text",
    "HashPrefixCache",
    "RUN",
]


TOKEN_BYTES = array("I").itemsize


def as_bytes(token_ids: Sequence[int], start: int, end: int) -> bytes:
    """Tokens `start` to `end - 1` as bytes: made, compared and hashed at the speed of C."""
    return array("I", token_ids[start:end]).tobytes()


def sha256(data: bytes) -> bytes:
    """The 32 bytes of SHA-256."""
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class Known:
    """What a block holds: its tokens, behind everything that `parent` spells."""

    block_id: int
    digest: bytes
    tokens: bytes
    parent: Known | str | None
    """The block before it; for the first block of a text its salt."""

    def spells(self, tokens: bytes, parent: Known | str | None) -> bool:
        """Does it hold these tokens, behind the same text?"""
        return self.tokens == tokens and same_text(self.parent, parent)


def same_text(a: Known | str | None, b: Known | str | None) -> bool:
    """Do two chains spell the same salt and tokens? At once if they are the same chain."""
    while a is not b:
        if not isinstance(a, Known) or not isinstance(b, Known):
            return a == b
        if a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True


class HashPrefixCache(NoPrefixCache):
    """Finds blocks by a digest of their tokens and of all tokens before them.

    As in vLLM: a dictionary from digest to block; least recently freed blocks give way.
    `digest` maps bytes to a name; names may collide, since content is compared as well.
    """

    def __init__(self, pool: BlockPool, digest: Callable[[bytes], bytes] = sha256) -> None:
        super().__init__(pool)
        self.digest = digest
        self._by_digest: dict[bytes, Known] = {}
        self._by_block: dict[int, Known] = {}

    def _blocks(self, request: Request, first: int, end: int) -> list[tuple[bytes, bytes]]:
        """(digest, tokens) of the request's blocks `first` to `end - 1`.

        Digests stay in `request.block_hashes`, so that each is computed once.
        """
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) < first:
            self._blocks(request, len(hashes), first)
        data, width = (
            as_bytes(request.token_ids, first * size, end * size),
            size * TOKEN_BYTES,
        )
        name = hashes[-1] if hashes else self.digest(repr(request.cache_salt).encode())
        blocks = []
        for index in range(first, end):
            tokens = data[(index - first) * width : (index - first + 1) * width]
            if index == len(hashes):
                name = self.digest(name + tokens)
                hashes.append(name)
            blocks.append((hashes[index], tokens))
        return blocks

    def _find(self, request: Request, limit: int) -> list[Known]:
        """The known blocks along the request's beginning, at most `limit`."""
        found: list[Known] = []
        parent: Known | str | None = request.cache_salt
        for first in range(0, limit, RUN):
            for digest, tokens in self._blocks(request, first, min(first + RUN, limit)):
                known = self._by_digest.get(digest)
                if known is None or not known.spells(tokens, parent):
                    return found
                found.append(known)
                parent = known
        return found

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest known beginning of `request.token_ids`, whole blocks only.

        At most (num_tokens - 1) // block_size: the last token must run to be sampled from.
        """
        limit = (request.num_tokens - 1) // self.block_size
        return [known.block_id for known in self._find(request, limit)]

    def publish(self, request: Request, start: int, end: int) -> None:
        """Positions `start` to `end - 1` are written: the blocks they filled may be found.

        A block whose content is known under another block stays with its request alone.
        """
        first, last = self._filled(request, start, end)
        if first == last:
            return  # no block is full that wasn't before
        first, parent = self._place(request, first)
        for index, (digest, tokens) in enumerate(self._blocks(request, first, last), first):
            known = self._by_digest.get(digest)
            if known is None:
                known = Known(request.block_table[index], digest, tokens, parent)
                self._by_digest[digest] = self._by_block[known.block_id] = known
                self.pool.keep(known.block_id)
            elif not known.spells(tokens, parent):
                return  # another text has this name; nothing behind it could be found
            parent = known

    def _place(self, request: Request, first: int) -> tuple[int, Known | str | None]:
        """(blocks known of the request's first `first`, the last of them or the salt)."""
        if first and (known := self._by_block.get(request.block_table[first - 1])):
            return first, known
        found = self._find(request, first)
        return len(found), found[-1] if found else request.cache_salt

    def _evict(self) -> None:
        """The block that has been idle longest loses its name and becomes free."""
        known = self._by_block.pop(next(self.pool.cached_blocks()))
        del self._by_digest[known.digest]
        self.pool.forget(known.block_id)

    def clear(self) -> None:
        """Forget all content; blocks in use stay in use, but nobody finds them."""
        for block_id in self._by_block:
            self.pool.forget(block_id)
        self._by_block.clear()
        self._by_digest.clear()

    def _known_blocks(self) -> list[int]:
        for block_id, known in self._by_block.items():
            if known.block_id != block_id or self._by_digest.get(known.digest) is not known:
                raise OctavoError(f"block {block_id} isn't found under its own digest")
        if len(self._by_digest) != len(self._by_block):
            raise OctavoError("a digest leads to a block that doesn't know of it")
        return list(self._by_block)


RUN = 64  # blocks looked up at a time: a text nobody knows isn't hashed to its end
