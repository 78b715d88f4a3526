"""Host time of scheduling: a step of 256 decodes, an admission with a hit, an hour of traffic.

    python benchmarks/scheduling.py [--profile] [--hour] [--trace FILE] [--out FILE]

Times are medians over the steps of the best of several runs, in microseconds. A shared machine
only ever adds time, so the best run says most about the code.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from octavo.block_pool import BlockPool
from octavo.prefix_cache import PREFIX_CACHES, make_prefix_cache
from octavo.presets import HARDWARE, MODELS
from octavo.request import Plan, Request, SamplingParams, StepResult
from octavo.roofline import kv_capacity
from octavo.scheduler import Scheduler
from octavo.simulate import Simulation, simulate
from octavo.step_cost import StepCost
from octavo.traces import (
    Arrival,
    exponential_lengths,
    poisson_arrivals,
    read_trace,
    with_shared_prefixes,
)

BATCH, CONTEXT, BLOCK_SIZE, HIT = 256, 1024, 16, 2000
Timings = dict[str, dict[str, float]]


def make_scheduler(name: str, num_blocks: int = 40_000, seqs: int = BATCH) -> Scheduler:
    """A scheduler over the cache of that name."""
    return Scheduler(
        make_prefix_cache(name, BlockPool(num_blocks, BLOCK_SIZE)),
        max_num_seqs=seqs,
        max_num_batched_tokens=1 << 19,
        max_model_len=1 << 15,
    )


def prompt(number: int, length: int) -> list[int]:
    """A prompt that no other number begins like."""
    return [number, *range(length - 1)]


def answer(plan: Plan) -> StepResult:
    """Token 0 for everybody."""
    return StepResult([[0]] * len(plan.entries))


def decoding(name: str) -> Scheduler:
    """256 requests in the middle of their answers, at all phases of their last block."""
    scheduler = make_scheduler(name)
    for number in range(BATCH):
        ids = prompt(number, CONTEXT + number % BLOCK_SIZE)
        scheduler.add(Request(str(number), ids, SamplingParams(max_tokens=4000)))
    plan = scheduler.schedule()
    scheduler.update(plan, answer(plan))
    return scheduler


def time_decodes(name: str, steps: int = 160) -> dict[str, float]:
    """Median microseconds of schedule, update and both, for a step of 256 decodes."""
    scheduler, laps = decoding(name), []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        scheduler.update(plan, answer(plan))
        laps.append((planned - begin, time.perf_counter() - planned))
    schedule, update = zip(*laps, strict=True)
    both = [sum(lap) for lap in laps]
    named = {"schedule": schedule, "update": update, "step": both}
    return {what: 1e6 * statistics.median(times) for what, times in named.items()}


def time_admissions(name: str, rounds: int = 60) -> dict[str, float]:
    """Median microseconds to add and plan a newcomer whose 2,000 tokens are in the cache."""
    scheduler, laps = make_scheduler(name), []
    for number in range(rounds):
        ids = prompt(0, HIT) + [7, 7, number]
        request = Request(str(number), ids, SamplingParams(max_tokens=1))
        begin = time.perf_counter()
        scheduler.add(request)
        plan = scheduler.schedule()
        laps.append(time.perf_counter() - begin)
        scheduler.update(plan, answer(plan))
        assert number == 0 or name == "none" or request.num_cached_tokens == HIT
    return {"admission": 1e6 * statistics.median(laps[1:])}


def best_of(measure: Callable[[str], dict[str, float]], name: str, runs: int) -> Timings:
    """The run whose last figure is lowest."""
    return {
        name: min((measure(name) for _ in range(runs)), key=lambda t: [*t.values()][-1])
    }


def profile_steps(name: str, steps: int = 300) -> None:
    """Where the time of those steps goes (the profiler itself more than doubles it)."""
    scheduler, profiler = decoding(name), cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        plan = scheduler.schedule()
        scheduler.update(plan, answer(plan))
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def hour_of_traffic(trace: str | None) -> list[Arrival]:
    """The trace, or 100,000 requests in an hour: 512 tokens in, 128 out on average."""
    if trace is not None:
        return read_trace(trace)
    lengths = exponential_lengths(256, 128, 4096)
    return with_shared_prefixes(poisson_arrivals(100_000 / 3600, 100_000, lengths), 20, 256)


def simulate_hour(name: str, arrivals: Iterable[Arrival]) -> tuple[Simulation, float]:
    """Llama-3.1-70B on eight H100s serves them; (what it did, seconds that took here)."""
    model, card = MODELS["llama-3.1-70b"], HARDWARE["h100"]
    tokens = kv_capacity(model, card, tensor_parallel_size=8)
    scheduler = make_scheduler(name, tokens // BLOCK_SIZE, seqs=512)
    begin = time.process_time()
    done = simulate(scheduler, arrivals, StepCost(model, card, 8))
    return done, time.process_time() - begin


def show(title: str, table: Timings) -> None:
    print(f"\n{title}")
    columns = next(iter(table.values()))
    print(f"{'':8}", *(f"{column:>12}" for column in columns))
    for name, row in table.items():
        print(f"{name:8}", *(f"{value:12.4g}" for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--caches", nargs="*", default=PREFIX_CACHES)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--hour", action="store_true", help="simulate 100,000 requests")
    parser.add_argument("--trace", help="simulate the arrivals of this file instead")
    parser.add_argument("--out", help="write the figures as JSON")
    args = parser.parse_args()
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "load when it began": os.getloadavg()[0],
    }
    steps: Timings = {}
    admissions: Timings = {}
    for name in args.caches:
        steps |= best_of(time_decodes, name, args.runs)
        admissions |= best_of(time_admissions, name, args.runs)
    show(f"a step of {BATCH} decodes, blocks of {BLOCK_SIZE} (µs, limit 300)", steps)
    show(f"admission, {HIT} tokens in the cache (µs, limit 200)", admissions)
    hours: Timings = {}
    if args.hour or args.trace:
        arrivals = hour_of_traffic(args.trace)
        for name in args.caches:
            done, spent = simulate_hour(name, arrivals)
            hours[name] = {"seconds here": spent} | done.summary()
        for name, row in hours.items():
            print(f"\n{name}: {len(arrivals)} requests (seconds)")
            print("\n".join(f"  {what:16} {value:10.4g}" for what, value in row.items()))
    if args.profile:
        for name in args.caches:
            print(f"\nprofile with cache {name!r}")
            profile_steps(name)
    if args.out:
        figures = {"steps": steps, "admissions": admissions, "hours": hours}
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(machine | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
