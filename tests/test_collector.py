"""While a stream is read, the garbage collector passes over what was there before it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from helpers import counting_engine

from octavo import SamplingParams
from octavo.collector import resting_collector


@pytest.fixture(autouse=True)
def nothing_is_left_frozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0


def streaming() -> Iterator[int]:
    """The number of objects set aside, after each token of two answers."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for _ in counting_engine().stream([[1, 2], [3]], params):
        yield gc.get_freeze_count()


def test_the_collector_passes_over_old_objects_only() -> None:
    old = [[]]
    with resting_collector():
        young = [[]]
        seen = {id(x) for x in gc.get_objects()}
        assert id(young) in seen and id(old) not in seen
    assert id(old) in {id(x) for x in gc.get_objects()}


def test_a_circle_made_meanwhile_is_collected() -> None:
    class Circle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            gone.append(True)

    gone: list[bool] = []
    with resting_collector():
        Circle()
        gc.collect()
        assert gone


def test_a_stream_rests_the_collector_until_its_last_word() -> None:
    counts = list(streaming())
    assert len(counts) == 8 and min(counts) > 1000


def test_a_stream_that_is_closed_early_wakes_it() -> None:
    stream = streaming()
    assert next(stream) > 1000
    stream.close()


def test_the_last_of_several_wakes_it() -> None:
    first, second = streaming(), streaming()
    assert next(first) and next(second)
    first.close()
    assert gc.get_freeze_count() > 1000
    second.close()


def test_an_error_wakes_it() -> None:
    with pytest.raises(ValueError, match="broken"), resting_collector():
        raise ValueError("broken")


def test_what_the_program_itself_has_set_aside_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert before and set(streaming()) == {before}
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


def test_threads_may_enter_and_leave_in_any_order() -> None:
    def enter_and_leave() -> None:
        barrier.wait()
        for _ in range(200):
            with resting_collector():
                pass

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    with resting_collector():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gc.get_freeze_count() > 1000
