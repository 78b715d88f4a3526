"""Parts of `bench_gpu.py`: the engine with graphs, plain and overlapped, on whole workloads."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from bench_gpu import DEV, GPU, part, record
from bench_gpu_more import BF16, qwen3, random_model, with_launch

from octavo.block_pool import BlockPool
from octavo.engine import Engine
from octavo.kv_cache import KVCache
from octavo.request import SamplingParams
from octavo.scheduler import Scheduler

SEQS, LENGTH, TOKENS = (256, 4096, 16384) if GPU else (3, 60, 64)


class IdsOnly:
    """A codec without text: what the workload is about is tokens."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


class Built:
    """A model on the card with cache, rows and captured graphs; engines are made around it."""

    def __init__(self, block_size: int, tokens: int = TOKENS) -> None:
        import fused
        from fused_sampler import FusedSampler
        from graphs import DecodeGraphs, GraphRunner, RunningRows, ladder

        with_launch(fused, True)
        self.config = qwen3()
        self.block_size, self.tokens = block_size, tokens
        model = random_model(self.config)
        self.blocks = (700_000 if GPU else 400) // block_size
        cache = KVCache(self.config, self.blocks, block_size, BF16, DEV)
        rows = RunningRows(SEQS, LENGTH, block_size, self.blocks, DEV)
        sampler = FusedSampler(SEQS + 1, self.config.vocab_size, DEV)
        runs, attention = fused.FusedModel(model), fused.FusedAttention()
        begin, before = time.perf_counter(), memory()
        graphs = DecodeGraphs(runs, sampler, cache, attention, rows, ladder(SEQS), BF16)
        graphs.capture()
        record(
            "engine/capture",
            seconds=time.perf_counter() - begin,
            sizes=len(graphs.sizes),
            MiB=(memory() - before) / 2**20,
            block=block_size,
        )
        self.runner = GraphRunner(runs, sampler, cache, attention, rows, graphs)

    def engine(self, kind: str) -> Engine:
        from overlap import OverlappedEngine

        scheduler = Scheduler(
            BlockPool(self.blocks, self.block_size), max_num_seqs=SEQS,
            max_num_batched_tokens=self.tokens, max_model_len=LENGTH,
        )  # fmt: skip
        made = OverlappedEngine if kind == "overlapped" else Engine
        return made(
            scheduler, self.runner, IdsOnly(), vocab_size=self.config.vocab_size, seed=0
        )


def memory() -> int:
    if not GPU:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """256 requests, prompts and answers of 100 to 1,024 tokens, drawn with seed 0."""
    draw = random.Random(0)
    count, least, most = (256, 100, 1024) if GPU else (5, 2, 12)
    prompts = [
        [draw.randint(0, 10000 if GPU else 50) for _ in range(draw.randint(least, most))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=0.6, ignore_eos=True, max_tokens=draw.randint(least, most)
        )
        for _ in range(count)
    ]
    return prompts, params


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def serve(engine: Engine, prompts: list, params: Any) -> tuple[float, int]:
    """(seconds, output tokens)"""
    wait()
    begin = time.perf_counter()
    for prompt, param in zip(prompts, params, strict=True):
        engine.add_request(prompt, param)
    count = 0
    while engine.has_unfinished:
        count += sum(len(delta.token_ids) for delta in engine.step())
    wait()
    return time.perf_counter() - begin, count


def host_profile(engine: Engine, prompts: list, params: list) -> None:
    """Where the host's time goes, function by function (profiling itself slows it down)."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    serve(engine, prompts, params)
    profiler.disable()
    stats = pstats.Stats(profiler).stats
    rows = sorted(
        (
            (v[2], v[0], f"{k[0].rsplit('/', 1)[-1]}:{k[1]}:{k[2]}")
            for k, v in stats.items()
        ),
        reverse=True,
    )[:25]
    record(
        "engine/host profile",
        top=[(name, calls, round(own, 4)) for own, calls, name in rows],
    )


@part(200)
def part_engine(stop: float) -> None:
    """The workload, one request alone, and 256 requests near 1,024, plain and overlapped."""
    for block_size in (256, 16) if GPU else (4,):
        built = Built(block_size)
        prompts, params = workload()
        sizes = {
            "prompt": sum(map(len, prompts)),
            "output": sum(p.max_tokens or 0 for p in params),
        }
        for kind in (
            ("overlapped", "plain") if block_size == 256 or not GPU else ("overlapped",)
        ):
            runs = 3 if kind == "overlapped" else 2
            measure_engine(built, kind, runs, prompts, params, sizes, stop)
        if GPU and block_size == 256 and time.perf_counter() < stop - 30:
            host_profile(built.engine("overlapped"), prompts, params)
        del built
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


def measure_engine(
    built: Built,
    kind: str,
    runs: int,
    prompts: list,
    params: list,
    sizes: dict,
    stop: float,
) -> None:
    label = {"kind": kind, "block": built.block_size}
    serve(
        built.engine(kind),
        prompts[:8],
        [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=3)] * len(prompts[:8]),
    )
    rates = []
    for _ in range(runs):
        if time.perf_counter() > stop - 8:
            break
        engine = built.engine(kind)
        seconds, count = serve(engine, prompts, params)
        rates.append(count / seconds)
        assert count == sizes["output"], (count, sizes)
    if rates:
        stats = built.runner.stats
        record(
            "engine/workload",
            tokens_per_s=statistics.median(rates),
            all=[round(r) for r in rates],
            steps=engine.stats.num_steps,
            preempted=engine.stats.num_preemptions,
            eager=stats.num_eager_steps,
            graphs=stats.num_graph_steps,
            **sizes,
            **label,
        )
    most = 256 if GPU else 4
    alone = [
        serve(
            built.engine(kind),
            [[7] * 8],
            [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=most)],
        )[0]
        for _ in range(3)
    ]
    record("engine/alone", ms_per_token=statistics.median(alone) / most * 1e3, **label)
    steady_state(built, kind, label)


def steady_state(built: Built, kind: str, label: dict) -> None:
    """Decode steps of a full batch around 1,024 tokens of context, and the host's own time."""
    engine = built.engine(kind)
    length, steps = (976, 96) if GPU else (9, 4)
    for row in range(SEQS):
        engine.add_request(
            [7 + row] * length,
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps + 30),
        )
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(8 if GPU else 1):
        engine.step()
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wait()
    record("engine/256 near 1024", ms=(time.perf_counter() - begin) / steps * 1e3, **label)
    while engine.has_unfinished:
        engine.step()
    prefill_rate(built, kind, label)


def prefill_rate(built: Built, kind: str, label: dict) -> None:
    """The workload's prompts with one token each."""
    prompts, _ = workload()
    one = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1)] * len(prompts)
    times = [serve(built.engine(kind), prompts, one)[0] for _ in range(3)]
    record(
        "engine/prefill",
        tokens_per_s=sum(map(len, prompts)) / statistics.median(times),
        **label,
    )
