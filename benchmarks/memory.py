"""Does memory cost more when there is more of it? Pool and prefix caches at 1e3 to 1e6 blocks.

Prints microseconds as the median over rounds, one column for each pool size, and what a new pool
costs in milliseconds; with `--out FILE` writes the records as JSON. Each pool is *worn*: all
its blocks were in use before, so that taking one means evicting or reusing one.

    python benchmarks/memory.py --out benchmarks/results/cpu/memory.json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from octavo.bench_record import Record, cpu_name
from octavo.block_pool import BlockPool
from octavo.plotting import quantile
from octavo.prefix_cache import PREFIX_CACHES, NoPrefixCache, make_prefix_cache
from octavo.provenance import commit_name
from octavo.request import Request, SamplingParams, StepResult
from octavo.scheduler import Scheduler

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BLOCK, PROMPT, DECODES = 16, 2000, 256


def microseconds(action: Callable[[], object], calls: int, rounds: int = 15) -> list[float]:
    """Microseconds of one call, in each round."""
    laps = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        laps.append((time.perf_counter() - start) / calls * 1e6)
    return laps


def enter(cache: NoPrefixCache, token_ids: list[int]) -> Request:
    """A request whose whole prompt is computed and published."""
    request = Request("r", token_ids)
    found = cache.match(request)
    cache.share(found)
    missing = -(-len(token_ids) // BLOCK) - len(found)
    request.block_table = found + cache.allocate(missing)
    cache.publish(request, len(found) * BLOCK, len(token_ids))
    return request


def worn_cache(name: str, num_blocks: int) -> NoPrefixCache:
    """A cache that is full of texts which nobody uses any more."""
    cache = make_prefix_cache(name, BlockPool(num_blocks, BLOCK))
    for number in range(num_blocks // 100):
        request = enter(cache, [number] + [7] * (100 * BLOCK - 1))
        cache.free(request.block_table[::-1])
    return cache


def measure_pool(num_blocks: int) -> Iterator[tuple[str, list[float]]]:
    """Making one, and a block or eight taken and given back in a pool with holes."""
    made = microseconds(lambda: BlockPool(num_blocks, BLOCK), 1, rounds=5)
    yield "pool: make (ms)", [lap / 1000 for lap in made]
    pool = BlockPool(num_blocks, BLOCK)
    pool.free(pool.allocate(num_blocks)[::2])
    yield (
        "pool: allocate and free 1",
        microseconds(lambda: pool.free(pool.allocate(1)), 2000),
    )
    yield (
        "pool: allocate and free 8",
        microseconds(lambda: pool.free(pool.allocate(8)), 500),
    )


def measure_cache(name: str, num_blocks: int) -> Iterator[tuple[str, list[float]]]:
    """Each verb once, with a prompt of 2,000 tokens and a request that decodes."""
    cache = worn_cache(name, num_blocks)
    yield (
        f"{name}: evict and allocate 1, free",
        microseconds(
            lambda: cache.free(cache.allocate(1)), 300 if name != "none" else 2000
        ),
    )
    held = enter(cache, list(range(PROMPT + 1)))
    again = Request("again", list(held.token_ids))
    fresh = microseconds(lambda: (again.block_hashes.clear(), cache.match(again)), 100)
    yield f"{name}: match {PROMPT} tokens", fresh
    yield f"{name}: match once more", microseconds(lambda: cache.match(again), 100)
    found = held.block_table[:-1]
    yield (
        f"{name}: share and free {len(found)} blocks",
        microseconds(lambda: (cache.share(found), cache.free(found)), 100),
    )
    if num_blocks > 2000:
        held.block_table += cache.allocate(15 * 50)

    def fill_one() -> None:
        held.token_ids.extend([5] * BLOCK)
        if len(held.token_ids) > len(held.block_table) * BLOCK:
            held.block_table.extend(cache.allocate(1))
        cache.publish(held, len(held.token_ids) - BLOCK, len(held.token_ids))

    yield f"{name}: publish a full block", microseconds(fill_one, 50)
    yield (
        f"{name}: publish, none full",
        microseconds(lambda: cache.publish(held, 1, 2), 2000),
    )


def measure_step(name: str, num_blocks: int) -> Iterator[tuple[str, list[float]]]:
    """Schedule and update of a step in which 256 requests decode, spread over block borders."""
    cache = make_prefix_cache(name, BlockPool(num_blocks, BLOCK))
    scheduler = Scheduler(
        cache, max_num_seqs=DECODES, max_num_batched_tokens=8192, max_model_len=4096
    )
    for number in range(DECODES):
        prompt = [number] * (1 + number % BLOCK)
        scheduler.add(Request(str(number), prompt, SamplingParams(max_tokens=None)))

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult([(1,)] * len(plan.entries)))

    step()
    yield f"{name}: a step of {DECODES} decodes", microseconds(step, 1, rounds=30)


def measure(num_blocks: int) -> Iterator[tuple[str, list[float]]]:
    """All rows for one pool size."""
    yield from measure_pool(num_blocks)
    for name in PREFIX_CACHES:
        yield from measure_cache(name, num_blocks)
        gc.collect()
        yield from measure_step(name, num_blocks)
        gc.collect()


def to_record(
    name: str, num_blocks: int, laps: list[float], origin: dict[str, Any]
) -> Record:
    metric = "milliseconds" if name.endswith("(ms)") else "microseconds"
    low, high = quantile(tuple(laps), 0.1), quantile(tuple(laps), 0.9)
    config = {"num_blocks": num_blocks, "block_size": BLOCK}
    return Record(
        f"cpu/memory/{name}",
        metric,
        statistics.median(laps),
        low,
        high,
        len(laps),
        None,
        config,
        origin,
    )


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    parser.add_argument(
        "--largest", type=int, default=SIZES[-1], help="leave out larger pools"
    )
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.largest]
    origin = {
        "device": cpu_name(),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "commit": commit_name(),
    }
    records, rows = [], dict[str, list[float]]()
    for num_blocks in sizes:
        for name, laps in measure(num_blocks):
            records.append(to_record(name, num_blocks, laps, origin))
            rows.setdefault(name, []).append(records[-1].median)
    print(
        f"{'microseconds, by blocks in the pool':38}" + "".join(f"{n:>12,}" for n in sizes)
    )
    for name, medians in rows.items():
        print(f"{name:38}" + "".join(f"{median:12.2f}" for median in medians))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([asdict(r) for r in records], indent=1) + "\n")


if __name__ == "__main__":
    main()
