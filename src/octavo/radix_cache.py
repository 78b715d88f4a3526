"""Chapter 05, Prefix caching.

Generated from chapters/05_prefix_caching.md; edit there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.block_pool import BlockPool
from octavo.config import OctavoError
from octavo.hash_cache import TOKEN_BYTES, as_bytes
from octavo.plain_cache import NoPrefixCache
from octavo.request import Request

__all__ = ["Node", "RadixPrefixCache", "common_blocks"]


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that no known text leaves in its middle."""

    parent: Node | None = None
    key: bytes = b""
    """Its place among the parent's children: the tokens of its first block."""
    tokens: bytearray = field(default_factory=bytearray)
    """Of all its blocks, `TOKEN_BYTES` each."""
    blocks: list[int] = field(default_factory=list)
    children: dict[bytes, Node] = field(default_factory=dict)


class RadixPrefixCache(NoPrefixCache):
    """Finds blocks in a tree with a path for each known beginning.

    As in SGLang: runs of blocks that are split where texts part, leaves that give way, least
    recently used first. Reference counts lock: a block with readers is never given up.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._root = Node()
        self._node_of: dict[int, Node] = {}
        self._width = pool.block_size * TOKEN_BYTES

    def _key(self, request: Request, node: Node, depth: int) -> bytes:
        """Under what name the request's block `depth` would hang below `node`."""
        size = self.block_size
        tokens = as_bytes(request.token_ids, depth * size, (depth + 1) * size)
        return tokens if node.parent else repr(request.cache_salt).encode() + tokens

    def _walk(
        self, request: Request, node: Node, depth: int, limit: int
    ) -> tuple[Node, int, list[int]]:
        """Follow the request's blocks `depth` to `limit - 1` from the end of `node`.

        Returns the node reached, how many of its blocks agree, and the blocks on the way.
        """
        size, taken, found = self.block_size, len(node.blocks), list[int]()
        while node.children and depth < limit and taken == len(node.blocks):
            child = node.children.get(self._key(request, node, depth))
            if child is None:
                break
            end = min(depth + len(child.blocks), limit)
            mine = as_bytes(request.token_ids, depth * size, end * size)
            taken = common_blocks(mine, child.tokens, self._width)
            found += child.blocks[:taken]
            node, depth = child, depth + taken
        return node, taken, found

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest known beginning of `request.token_ids`, whole blocks only.

        At most (num_tokens - 1) // block_size: the last token must run to be sampled from.
        """
        limit = (request.num_tokens - 1) // self.block_size
        return self._walk(request, self._root, 0, limit)[2]

    def publish(self, request: Request, start: int, end: int) -> None:
        """Positions `start` to `end - 1` are written: the blocks they filled may be found.

        A block whose content is known under another block stays with its request alone.
        """
        first, last = self._filled(request, start, end)
        if first == last:
            return  # no block is full that wasn't before
        node, depth = self._place(request, first)
        node, taken, found = self._walk(request, node, depth, last)
        if depth + len(found) < last:
            self._insert(request, self._split(node, taken), depth + len(found), last)

    def _place(self, request: Request, first: int) -> tuple[Node, int]:
        """Where to start looking: at the request's own last block, or at the root."""
        newest = request.block_table[first - 1] if first else None
        node = self._node_of.get(newest) if newest is not None else None
        return (node, first) if node and node.blocks[-1] == newest else (self._root, 0)

    def _split(self, node: Node, count: int) -> Node:
        """The node that ends after the first `count` blocks of `node`; the rest hangs below it."""
        if count == len(node.blocks):
            return node
        cut, parent = count * self._width, node.parent
        assert parent is not None  # the root has no blocks
        upper = Node(parent, node.key, node.tokens[:cut], node.blocks[:count])
        parent.children[node.key] = upper
        node.tokens, node.blocks = node.tokens[cut:], node.blocks[count:]
        node.parent, node.key = upper, bytes(node.tokens[: self._width])
        upper.children[node.key] = node
        for block_id in upper.blocks:
            self._node_of[block_id] = upper
        return upper

    def _insert(self, request: Request, node: Node, first: int, last: int) -> None:
        """Put the request's blocks `first` to `last - 1` behind `node`: a leaf grows longer."""
        if node.children or not node.parent:
            parent, key = node, self._key(request, node, first)
            node = parent.children[key] = Node(parent, key)
        size, blocks = self.block_size, request.block_table[first:last]
        node.tokens += as_bytes(request.token_ids, first * size, last * size)
        node.blocks += blocks
        for block_id in blocks:
            self._node_of[block_id] = node
            self.pool.keep(block_id)

    def _evict(self) -> None:
        """The end of a leaf becomes free: of those in nobody's use, the one idle longest."""
        for _ in range(self.num_cached_blocks):
            block_id = next(self.pool.cached_blocks())
            node = self._node_of[block_id]
            if not node.children and node.blocks[-1] == block_id:
                return self._cut(node, len(node.blocks) - 1)
            # What is below it was used later, and so it was too: to the end of the queue.
            self.pool.share([block_id])
            self.pool.free([block_id])
        # Whatever is cached has blocks in use below it. Without it nobody can find those.
        block_id = next(self.pool.cached_blocks())
        node = self._node_of[block_id]
        self._cut(node, node.blocks.index(block_id))

    def _cut(self, node: Node, count: int) -> None:
        """Take all that comes after the first `count` blocks of `node` out of the tree."""
        gone, below = node.blocks[count:], list(node.children.values())
        for child in below:  # the list grows as we go
            gone += child.blocks
            below += child.children.values()
        for block_id in gone:
            del self._node_of[block_id]
            self.pool.forget(block_id)
        del node.blocks[count:], node.tokens[count * self._width :]
        node.children.clear()
        if not count and node.parent:
            del node.parent.children[node.key]

    def clear(self) -> None:
        """Forget all content; blocks in use stay in use, but nobody finds them."""
        for block_id in self._node_of:
            self.pool.forget(block_id)
        self._node_of.clear()
        self._root = Node()

    def _known_blocks(self) -> list[int]:
        blocks, nodes = list[int](), [self._root]
        for node in nodes:  # the list grows as we go
            nodes += node.children.values()
            blocks += node.blocks
            self._check_node(node)
        if len(blocks) != len(self._node_of):
            raise OctavoError(
                f"{len(blocks)} blocks in the tree, {len(self._node_of)} known"
            )
        return blocks

    def _check_node(self, node: Node) -> None:
        if len(node.tokens) != self._width * len(node.blocks):
            raise OctavoError(f"{len(node.tokens)} bytes of text in blocks {node.blocks}")
        if any(self._node_of.get(block_id) is not node for block_id in node.blocks):
            raise OctavoError(f"one of blocks {node.blocks} is known elsewhere")
        for key, child in node.children.items():
            first = bytes(child.tokens[: self._width])
            if (
                child.parent is not node
                or child.key != key
                or not key.endswith(first)
                or not first
            ):
                raise OctavoError(f"blocks {child.blocks} hang in the wrong place")


def common_blocks(a: bytes, b: bytes | bytearray, width: int) -> int:
    """How many blocks of `width` bytes two texts have in common at their beginning."""
    count = min(len(a), len(b)) // width
    if a[: count * width] == b[: count * width]:
        return count
    lengths = range(1, count + 1)  # from some length on they differ: halve
    return bisect_left(lengths, True, key=lambda n: a[: n * width] != b[: n * width])
