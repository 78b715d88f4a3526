"""Three prefix caches and one suite: what is found is what was written, and no answer changes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_pool import BlockPool
from octavo.config import ConfigError, OctavoError
from octavo.example import CountingRunner, checksum
from octavo.prefix_cache import (
    PREFIX_CACHES,
    HashPrefixCache,
    NoPrefixCache,
    RadixPrefixCache,
    make_prefix_cache,
)
from octavo.request import Request, SamplingParams
from octavo.scheduler import Scheduler

Make = Callable[[BlockPool], NoPrefixCache]

MAKERS: dict[str, Make] = {
    "none": NoPrefixCache,
    "hash": HashPrefixCache,
    "radix": RadixPrefixCache,
    "hash, a third collides": lambda pool: HashPrefixCache(
        pool, lambda d: bytes([sum(d) % 3])
    ),
    "hash, all collide": lambda pool: HashPrefixCache(pool, lambda data: b""),
}
FINDING = ("hash", "radix")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tables(requests: list[Request]) -> Iterator[list[int]]:
    return (request.block_table for request in requests)


# --- the caches alone, against a record of what was written to each block ---------------------


class Trace:
    """Random verbs on one cache, beside the text that each block was given."""

    def __init__(self, cache: NoPrefixCache, rng: random.Random, alphabet: int = 2) -> None:
        self.cache, self.rng, self.alphabet = cache, rng, alphabet
        self.size = cache.block_size
        self.text_of: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.living: list[Request] = []
        self.idle: list[Request] = []
        self.published: dict[Request, int] = {}
        self.found: list[int] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.alphabet) for _ in range(count)]

    def draw_request(self) -> Request:
        if self.idle and self.rng.random() < 0.4:
            return self.idle.pop()  # preempted or turned away before
        length = self.rng.randint(1, 4 * self.size + 1)
        salt = self.rng.choice([None, None, "a", "None"])
        return Request("r", self.tokens(length), cache_salt=salt)

    def enter(self) -> None:
        cache, request = self.cache, self.draw_request()
        free, hit = cache.num_free_blocks, cache.match(request)
        assert cache.match(request) == hit and cache.num_free_blocks == free
        assert len(hit) <= (request.num_tokens - 1) // self.size
        for index, block in enumerate(hit):
            beginning = tuple(request.token_ids[: (index + 1) * self.size])
            assert self.text_of[block] == (request.cache_salt, beginning)
        need, revived = (
            ceil_div(request.num_tokens, self.size) - len(hit),
            cache.num_revived(hit),
        )
        if need > free - revived:
            self.idle.append(request)
            return
        cache.share(hit)
        request.block_table = hit + cache.allocate(need)
        assert cache.num_free_blocks == free - revived - need
        self.published[request] = len(hit) * self.size
        self.write(request, len(hit) * self.size)
        self.living.append(request)
        self.found.append(len(hit))

    def write(self, request: Request, start: int) -> None:
        for end in range(self.size, request.num_tokens + 1, self.size):
            if end > start:
                block = request.block_table[end // self.size - 1]
                self.text_of[block] = (request.cache_salt, tuple(request.token_ids[:end]))

    def grow(self, request: Request) -> None:
        old, more = request.num_tokens, self.rng.randint(1, 2 * self.size)
        missing = ceil_div(old + more, self.size) - len(request.block_table)
        if missing <= self.cache.num_free_blocks:
            request.block_table += self.cache.allocate(missing)
            request.token_ids += self.tokens(more)
            self.write(request, old)

    def publish(self, request: Request) -> None:
        start = self.published[request]
        end = self.rng.randint(start, request.num_tokens)
        self.cache.publish(request, start, end)
        self.published[request] = end

    def leave(self, request: Request) -> None:
        self.living.remove(request)
        self.cache.free(reversed(request.block_table))
        request.block_table = []
        if self.rng.random() < 0.4:
            self.idle.append(request)

    def move(self) -> None:
        name = self.rng.choice(
            ["enter", "enter", "grow", "publish", "publish", "leave", "clear"]
        )
        if name == "enter":
            self.enter()
        elif name == "clear":
            if self.rng.random() < 0.1:
                self.cache.clear()
                assert self.cache.num_cached_blocks == 0
        elif self.living:
            getattr(self, name)(self.rng.choice(self.living))
        self.check()

    def check(self) -> None:
        cache = self.cache
        cache.check_integrity(tables(self.living))
        assert cache.num_used_blocks + cache.num_free_blocks == cache.num_blocks
        assert cache.num_cached_blocks <= cache.num_free_blocks


def run_trace(make: Make, num_blocks: int, size: int, seed: int, moves: int = 50) -> Trace:
    trace = Trace(make(BlockPool(num_blocks, size)), random.Random(seed))
    for _ in range(moves):
        trace.move()
    rest = trace.cache.allocate(trace.cache.num_free_blocks)  # a promise that is kept
    trace.cache.check_integrity([rest, *tables(trace.living)])
    trace.cache.free(rest)
    for request in list(trace.living):
        trace.leave(request)
    trace.cache.check_integrity([])
    assert trace.cache.num_used_blocks == 0
    return trace


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=120, deadline=None)
@given(st.integers(1, 16), st.integers(1, 5), st.integers(0, 2**32))
def test_every_hit_holds_what_was_written(
    name: str, num_blocks: int, size: int, seed: int
) -> None:
    run_trace(MAKERS[name], num_blocks, size, seed)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_chain_and_tree_find_the_same_while_nothing_is_evicted(
    size: int, seed: int
) -> None:
    found = [run_trace(MAKERS[name], 1000, size, seed).found for name in FINDING]
    assert found[0] == found[1]


def test_collisions_cost_hits_and_nothing_else() -> None:
    hits = {
        name: sum(sum(run_trace(make, 12, 2, seed).found) for seed in range(40))
        for name, make in MAKERS.items()
    }
    assert hits["none"] == 0
    assert 0 < hits["hash, all collide"] <= hits["hash, a third collides"] < hits["hash"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 14), st.integers(1, 3), st.integers(0, 2**32))
def test_b13_evictable_and_protected_add_up_to_the_tree(
    num_blocks: int, size: int, seed: int
) -> None:
    trace = Trace(RadixPrefixCache(BlockPool(num_blocks, size)), random.Random(seed))
    for _ in range(40):
        trace.move()
        in_tree = trace.cache._known_blocks()
        protected = sum(trace.cache.pool.ref_count(block) > 0 for block in in_tree)
        assert (
            protected + trace.cache.num_cached_blocks == len(in_tree) == len(set(in_tree))
        )


def test_b13_the_tree_splits_shrinks_and_grows_again() -> None:
    cache = RadixPrefixCache(BlockPool(6, 2))
    for text in ([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [1, 1, 9, 9], [8, 8, 8, 8, 8, 8]):
        for _ in range(2):
            request = enter(cache, text + [0])
            cache.publish(request, 0, request.num_tokens)
            cache.check_integrity([request.block_table])
            cache.free(reversed(request.block_table))
            assert cache.num_cached_blocks + cache.pool.num_free_blocks == 6
            assert len(cache.match(Request("r", text + [0]))) == len(text) // 2


# --- one verb at a time -----------------------------------------------------------------------


def enter(cache: NoPrefixCache, token_ids: list[int], salt: str | None = None) -> Request:
    """A request with its blocks, as the scheduler gives them; nothing is published yet."""
    request = Request("r", list(token_ids), cache_salt=salt)
    hit = cache.match(request)
    cache.share(hit)
    missing = ceil_div(request.num_tokens, cache.block_size) - len(hit)
    request.block_table = hit + cache.allocate(missing)
    return request


def visit(cache: NoPrefixCache, token_ids: list[int], salt: str | None = None) -> Request:
    """A request that came, was computed and left again."""
    request = enter(cache, token_ids, salt)
    cache.publish(request, 0, request.num_tokens)
    cache.free(reversed(request.block_table))
    return request


@pytest.mark.parametrize("name", FINDING)
def test_a_finished_request_leaves_its_blocks_cached_and_free_for_others(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(8, 4))
    visit(cache, list(range(10)))
    assert (cache.num_used_blocks, cache.num_cached_blocks, cache.num_free_blocks) == (
        0,
        2,
        8,
    )
    assert len(cache.allocate(8)) == 8
    assert cache.num_cached_blocks == 0
    assert cache.match(Request("r", list(range(10)))) == []


@pytest.mark.parametrize("name", FINDING)
def test_the_end_of_a_text_goes_before_its_beginning(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(5, 2))
    visit(cache, [1, 1, 2, 2, 3, 3, 4, 4, 0])
    sizes = []
    for _ in range(5):
        sizes.append(len(cache.match(Request("r", [1, 1, 2, 2, 3, 3, 4, 4, 0]))))
        cache.allocate(1)
        cache.check_integrity()
    assert sizes == [4, 4, 3, 2, 1]  # the fifth block was free, then one goes at a time


@pytest.mark.parametrize("name", FINDING)
def test_what_was_used_last_stays_longest(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(6, 2))
    visit(cache, [1, 1, 0])
    visit(cache, [2, 2, 0])
    visit(cache, [1, 1, 0])
    cache.allocate(5)
    assert cache.match(Request("r", [1, 1, 0])) and not cache.match(Request("r", [2, 2, 0]))


@pytest.mark.parametrize("name", FINDING)
def test_blocks_in_use_are_never_evicted(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(4, 2))
    held = enter(cache, [1, 1, 2, 2, 0])
    cache.publish(held, 0, 5)
    assert cache.num_free_blocks == 1
    with pytest.raises(OctavoError, match="2 blocks wanted, 1 free or cached"):
        cache.allocate(2)
    cache.check_integrity([held.block_table])
    assert cache.match(Request("r", [1, 1, 2, 2, 0])) == held.block_table[:2]


@pytest.mark.parametrize("name", FINDING)
def test_clear_forgets_everything_and_harms_nobody(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(8, 2))
    visit(cache, [1, 1, 2, 2, 0])
    held = enter(cache, [5, 5, 6, 6, 0])
    cache.publish(held, 0, 5)
    cache.clear()
    cache.check_integrity([held.block_table])
    assert cache.num_cached_blocks == 0
    assert cache.match(Request("r", [5, 5, 6, 6, 0])) == []
    held.token_ids += [7, 7]
    held.block_table += cache.allocate(1)
    cache.publish(held, 5, 7)  # what it holds is still right, and may be found again
    assert cache.match(Request("r", [5, 5, 6, 6, 0])) == held.block_table[:2]
    cache.check_integrity([held.block_table])


@pytest.mark.parametrize("name", FINDING)
def test_publish_goes_by_known_tokens(name: str) -> None:
    """A step may have written further than the host knows; nothing is named for a guess."""
    cache = make_prefix_cache(name, BlockPool(8, 2))
    request = enter(cache, [1, 1, 2])
    cache.publish(request, 0, 4)
    assert cache._known_blocks() == request.block_table[:1]
    assert len(cache.match(Request("r", [1, 1, 2, 2, 0]))) == 1


def family(num_blocks: int) -> tuple[RadixPrefixCache, Request, list[Request]]:
    """A tree whose stem belongs to one request, and two more that hold only branches.

    All three came in one step, so the two have second copies of the stem.
    """
    cache = RadixPrefixCache(BlockPool(num_blocks, 2))
    texts = ([1, 1, 2, 2, 0], [1, 1, 2, 2, 3, 3, 0], [1, 1, 2, 2, 4, 4, 5, 5, 0])
    stem, *branches = [enter(cache, text) for text in texts]
    for request in (stem, *branches):
        cache.publish(request, 0, request.num_tokens)
    cache.check_integrity(tables([stem, *branches]))
    return cache, stem, branches


def test_an_older_stem_stays_while_its_branches_can_go() -> None:
    cache, stem, branches = family(num_blocks=20)
    for request in (stem, *branches):
        cache.free(reversed(request.block_table))
    assert next(cache.pool.cached_blocks()) == stem.block_table[1]
    texts = [request.token_ids for request in (stem, *branches)]
    sizes = []
    cache.allocate(cache.pool.num_free_blocks)
    for _ in range(6):
        sizes.append([len(cache.match(Request("r", text))) for text in texts])
        if cache.num_free_blocks:
            cache.allocate(1)
        cache.check_integrity()
    assert sizes == [[2, 3, 4], [2, 2, 4], [2, 2, 3], [2, 2, 2], [1, 1, 1], [0, 0, 0]]


def test_a_stem_goes_with_branches_in_use_only_if_it_must() -> None:
    cache, stem, branches = family(num_blocks=15)
    visit(cache, [9, 9, 0])  # younger than the stem, and free to go
    cache.free(reversed(stem.block_table))
    held, room = [r.token_ids for r in branches], cache.num_free_blocks
    taken = cache.allocate(room - 2)
    assert [len(cache.match(Request("r", text))) for text in held] == [3, 4]
    taken += cache.allocate(1)  # only the stem is left: what is behind it can't be found
    assert [len(cache.match(Request("r", text))) for text in held] == [1, 1]
    taken += cache.allocate(1)
    cache.check_integrity([taken, *tables(branches)])
    assert not cache._root.children and cache.num_free_blocks == 0
    for request in branches:
        cache.free(reversed(request.block_table))
    assert cache.num_cached_blocks == 0


def test_digests_are_computed_once() -> None:
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return bytes([len(calls)]) * 4

    cache = HashPrefixCache(BlockPool(100, 2), counting)
    request = enter(cache, list(range(41)))
    cache.publish(request, 0, 41)
    cost = len(calls)
    assert cost == 1 + 20  # the salt and each full block
    request.block_table += cache.allocate(1)
    request.token_ids += [41, 42]
    cache.publish(request, 41, 43)
    cache.match(request)
    assert len(calls) == cost + 1


def test_a_long_unknown_prompt_is_not_hashed_to_its_end() -> None:
    calls = []
    cache = HashPrefixCache(BlockPool(100, 1), lambda data: calls.append(data) or data[-4:])  # type: ignore[func-returns-value]
    cache.match(Request("r", list(range(100_000))))
    assert len(calls) < 100


def test_a_growing_answer_is_published_without_walking_from_the_root() -> None:
    class Steps(dict[Any, Any]):
        looked_up = 0

        def get(self, key: Any, default: Any = None) -> Any:
            Steps.looked_up += 1
            return super().get(key, default)

    cache = RadixPrefixCache(BlockPool(1000, 2))
    request = enter(cache, list(range(1001)))
    cache.publish(request, 0, 1001)
    cache._root.children = Steps(cache._root.children)
    for _ in range(50):
        request.token_ids += [7, 7]
        request.block_table += cache.allocate(1)
        cache.publish(request, request.num_tokens - 2, request.num_tokens)
    assert Steps.looked_up == 0
    assert len(cache.match(Request("r", request.token_ids))) == 550


@pytest.mark.parametrize("name", FINDING)
def test_salts_never_meet(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(40, 4))
    text = list(range(9))
    for salt in (None, "red", "blue", "None", "r\ud800"):
        assert cache.match(Request("r", text, cache_salt=salt)) == []
        visit(cache, text, salt)
        assert len(cache.match(Request("r", text, cache_salt=salt))) == 2
    cache.check_integrity([])


def test_a_salt_that_is_gone_leaves_nothing_behind() -> None:
    cache = RadixPrefixCache(BlockPool(4, 2))
    for tenant in range(50):
        visit(cache, [1, 1, 2, 2, 0], f"tenant {tenant}")
    cache.allocate(4)
    assert not cache._root.children


def test_the_names_are_checked() -> None:
    assert PREFIX_CACHES == ("none", "hash", "radix")
    assert [
        type(make_prefix_cache(name, BlockPool(1))).__name__ for name in PREFIX_CACHES
    ] == [
        "NoPrefixCache",
        "HashPrefixCache",
        "RadixPrefixCache",
    ]
    with pytest.raises(
        ConfigError, match="prefix_cache='tree': give one of none, hash, radix"
    ):
        make_prefix_cache("tree", BlockPool(1))


@pytest.mark.parametrize("size", [1, 2, 16])
def test_very_long_texts(size: int) -> None:
    """100,000 tokens, and then chains deeper than Python's recursion limit go away."""
    text = [n % 97 for n in range(100_000)]
    for name in FINDING:
        cache = make_prefix_cache(name, BlockPool(220_000 // size + 2, size))
        visit(cache, text)
        assert len(cache.match(Request("r", text))) == (len(text) - 1) // size
        visit(cache, text[:50_000] + [98] * 50_000)
        cache.check_integrity([])
        cache.allocate(cache.num_free_blocks)
        assert cache.match(Request("r", text)) == []


# --- behind the scheduler ---------------------------------------------------------------------


def scheduler_on(cache: NoPrefixCache, **options: Any) -> Scheduler:
    limits: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "max_model_len": 48,
    }
    return Scheduler(cache, **(limits | options))


def serve(
    cache: NoPrefixCache, requests: list[Request], depth: int = 1, **options: Any
) -> list[list[int]]:
    """Serve requests that arrive one a step, with `depth` steps planned ahead."""
    scheduler, runner = (
        scheduler_on(cache, **options),
        CountingRunner(cache.block_size, checksum),
    )
    coming, flying = deque(requests), deque[Any]()
    while coming or scheduler.has_unfinished or flying:
        if coming:
            scheduler.add(coming.popleft())
        if scheduler.has_unfinished:
            plan = scheduler.schedule()
            flying.append((plan, runner.execute(plan)))
        if len(flying) == depth or not scheduler.has_unfinished:
            scheduler.update(*flying.popleft())
        held = [*scheduler.running, *scheduler._leaving]
        cache.check_integrity(tables(held))
    assert cache.num_used_blocks == 0
    return [request.output_token_ids for request in requests]


def draw_requests(rng: random.Random, count: int = 10) -> list[Request]:
    pages = [[rng.randrange(9) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    requests: list[Request] = []
    for number in range(count):
        prompt = rng.choice(pages) + [rng.randrange(9) for _ in range(rng.randint(0, 5))]
        params = SamplingParams(max_tokens=rng.randint(1, 12))
        salt = rng.choice([None, None, None, "tenant"])
        first = Request(str(number), prompt, params, cache_salt=salt)
        first.priority = rng.randrange(3)
        requests.append(first)
        for _ in range(rng.choice([0, 0, 0, 2])):
            follower = Request(
                str(number), list(prompt), params, cache_salt=salt, leader=first
            )
            follower.priority = first.priority
            requests.append(follower)
    return requests


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32))
def test_b17_no_cache_changes_an_answer(size: int, seed: int) -> None:
    """Small pools, preemptions, samples, salts, both orders, plain and one step ahead."""
    plain = serve(NoPrefixCache(BlockPool(2000, size)), draw_requests(random.Random(seed)))
    rng = random.Random(seed + 1)
    for name, make in MAKERS.items():
        num_blocks = rng.choice([ceil_div(40, size), ceil_div(60, size), 500])
        options = {
            "defer_shared_prefix": rng.random() < 0.5,
            "order": rng.choice(["fcfs", "priority"]),
            "batching": rng.choice(["decode-first", "prefill-first"]),
            "depth": rng.choice([1, 2]),
        }
        requests = draw_requests(random.Random(seed))
        answers = serve(make(BlockPool(num_blocks, size)), requests, **options)
        assert answers == plain, (name, num_blocks, options)


@pytest.mark.parametrize("name", FINDING)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_b01_b18_every_length_twice(name: str, size: int) -> None:
    for length in (1, size - 1, size, size + 1, 3 * size - 1, 3 * size, 3 * size + 1):
        if length < 1:
            continue
        pair = [Request(n, list(range(length)), SamplingParams(max_tokens=2)) for n in "ab"]
        cold, warm = serve(make_prefix_cache(name, BlockPool(99, size)), pair, depth=1)
        assert cold == warm
        assert pair[1].num_cached_tokens == (length - 1) // size * size


@pytest.mark.parametrize("name", FINDING)
def test_a_preempted_request_finds_its_own_blocks(name: str) -> None:
    cache = make_prefix_cache(name, BlockPool(12, 4))
    pair = [Request(n, [ord(n)] * 10, SamplingParams(max_tokens=25)) for n in "ab"]
    serve(cache, pair)
    assert pair[1].num_preemptions and pair[1].num_cached_tokens == 0  # B40: the first time


@pytest.mark.parametrize("name", FINDING)
def test_b24_b07_a_pool_that_only_just_suffices(name: str) -> None:
    """Every pool from the smallest that holds the longest request: no hang, no lost block."""
    for num_blocks in range(9, 16):
        batch = [
            Request(str(n), [*range(12), n], SamplingParams(max_tokens=20))
            for n in range(5)
        ]
        serve(make_prefix_cache(name, BlockPool(num_blocks, 4)), batch)


@pytest.mark.parametrize("name", FINDING)
def test_an_abort_at_any_step_gives_everything_back(name: str) -> None:
    for moment in range(12):
        cache = make_prefix_cache(name, BlockPool(14, 4))
        scheduler, runner = scheduler_on(cache), CountingRunner(4, checksum)
        batch = [
            Request(str(n), [*range(9), n % 2], SamplingParams(max_tokens=10))
            for n in range(4)
        ]
        for request in batch:
            scheduler.add(request)
        flying: deque[Any] = deque()
        step = 0
        while scheduler.has_unfinished or flying:
            if step == moment:
                scheduler.abort(batch[1])
            if scheduler.has_unfinished:
                plan = scheduler.schedule()
                flying.append((plan, runner.execute(plan)))
            if len(flying) == 2 or not scheduler.has_unfinished:
                scheduler.update(*flying.popleft())
            cache.check_integrity(tables([*scheduler.running, *scheduler._leaving]))
            step += 1
        assert cache.num_used_blocks == 0
        assert batch[0].output_token_ids == batch[2].output_token_ids
