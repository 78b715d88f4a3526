"""Chapter 05, Prefix caching.

Generated from chapters/05_prefix_caching.md; edit there.
"""

from __future__ import annotations

from octavo.block_pool import BlockPool
from octavo.config import PREFIX_CACHES as PREFIX_CACHES
from octavo.config import require_choice
from octavo.hash_cache import HashPrefixCache as HashPrefixCache
from octavo.plain_cache import NoPrefixCache as NoPrefixCache
from octavo.radix_cache import RadixPrefixCache as RadixPrefixCache

__all__ = ["make_prefix_cache"]


_CACHES = {"none": NoPrefixCache, "hash": HashPrefixCache, "radix": RadixPrefixCache}


def make_prefix_cache(name: str, pool: BlockPool) -> NoPrefixCache:
    """The cache of that name over `pool`; ConfigError for one that isn't in PREFIX_CACHES."""
    require_choice("prefix_cache", name, PREFIX_CACHES)
    return _CACHES[name](pool)
