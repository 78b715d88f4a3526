"""Chapter 03, Continuous batching.

Generated from chapters/03_scheduler.md; edit there.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable

from octavo.request import Request, RequestStatus

__all__ = ["Queues"]


class Queues:
    """Who waits and who runs, both in the order in which they are served.

    `num_rows` requests can run, each in a row of its own. They are ordered by arrival, or
    `by_priority`: a lower `Request.priority` first, equal ones by arrival.
    """

    def __init__(self, num_rows: int, by_priority: bool = False) -> None:
        self.num_rows = num_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._place = _by_priority if by_priority else _by_arrival

    def wait(self, request: Request) -> None:
        """Put it where its turn is among those who wait."""
        _insert(self.waiting, request, self._place)

    def run(self, request: Request) -> None:
        """It has left the waiting and runs from now on; IndexError if no row is free."""
        request.row = self.free_rows.pop()
        request.status = RequestStatus.RUNNING
        _insert(self.running, request, self._place)

    def remove(self, request: Request) -> None:
        """Take it out of the queue it stands in, if any; its row is still its own."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        if request in queue:
            queue.remove(request)


def _by_arrival(request: Request) -> tuple[int, int]:
    return 0, request.arrival


def _by_priority(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _insert(
    queue: list[Request] | deque[Request],
    request: Request,
    place: Callable[[Request], tuple[int, int]],
) -> None:
    """Where its place in the order is, which is nearly always the end."""
    if not queue or place(queue[-1]) < place(request):
        queue.append(request)
    else:
        queue.insert(bisect(queue, place(request), key=place), request)
