"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["resting_collector"]


class _Rest:
    """How many want the collector to rest, and whether it was we who laid it to rest."""

    def __init__(self) -> None:
        # Not a Lock: within `begin` a collection may end a forgotten stream, which calls `end`.
        self.lock = threading.RLock()
        self.users, self.ours = 0, False

    def begin(self) -> None:
        with self.lock:
            if self.users == 0 and gc.get_freeze_count() == 0:
                self.ours = True
                gc.freeze()
            self.users += 1

    def end(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0 and self.ours:
                self.ours = False
                gc.unfreeze()


_rest = _Rest()


@contextmanager
def resting_collector() -> Iterator[None]:
    """Within it, Python's garbage collector passes over the objects that were there before.

    What nobody refers to is freed as ever. May be nested, and entered by several threads.
    """
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()
