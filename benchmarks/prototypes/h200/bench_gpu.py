"""One script for the card: tests, ceilings, kernels, steps, the workload.

    python scratch/gpu/bench_gpu.py --parts tests,ceilings,decode,prefill [--out DIR]

Every part is guarded: a failure prints its traceback and the next part runs. Records are
written to DIR/bench_gpu.json after each part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for place in (HERE, HERE.parents[1] / "src"):
    sys.path.insert(0, str(place))

import torch  # noqa: E402

GPU = torch.cuda.is_available()
DEV = (
    "cuda" if GPU else "cpu"
)  # without a card: a dry run, tiny and untimed, in the interpreter
START = time.perf_counter()
RECORDS: list[dict[str, Any]] = []
PARTS: dict[str, tuple[Callable[[float], None], float]] = {}


def part(seconds: float) -> Callable:
    """Register a part; it is handed the time at which it should stop."""

    def register(run: Callable[[float], None]) -> Callable[[float], None]:
        PARTS[run.__name__.removeprefix("part_")] = (run, seconds)
        return run

    return register


def record(name: str, **values: Any) -> None:
    RECORDS.append({"name": name, **values})
    shown = "  ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()
    )
    print(f"{time.perf_counter() - START:6.1f}s {name:34s} {shown}", flush=True)


def timed(
    run: Callable[[], Any], repeat: int = 20, graph: bool = True
) -> tuple[float, float, float]:
    """Seconds of one call on the card: median, 10th and 90th percentile of `repeat` replays."""
    if not GPU:
        run()
        return 1.0, 1.0, 1.0
    run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
    return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]


# --- (a) tests -------------------------------------------------------------------------------


@part(200)
def part_tests(stop: float) -> None:
    """pytest over the kernels, on several processes because compiling is what takes long."""
    left = max(20, stop - time.perf_counter())
    environment = os.environ | {
        "PYTHONPATH": f"{HERE}:{HERE.parents[1] / 'src'}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    files = [str(f) for f in sorted(HERE.glob("test_gpu_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "12",
               "--tb=short", "--maxfail=12", "-rfE", "-W", "ignore", "-p", "no:benchmark",
               *(["-k", ONLY] if ONLY else []), *files]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=left
        )
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        text = "".join(
            x.decode() if isinstance(x, bytes) else x or ""
            for x in (late.stdout, late.stderr)
        )
        code = 124
    (OUT / "tests.log").write_text(text)
    print(text[-4000:], flush=True)
    record("tests", code=code, last=(text.strip().splitlines() or [""])[-1])


# --- (b) ceilings ----------------------------------------------------------------------------


@part(30)
def part_ceilings(stop: float) -> None:
    """What the memory and the matrix units give a large plain operation."""
    size = 2**32 if GPU else 2**12
    a, b = (torch.empty(size, dtype=torch.uint8, device=DEV).random_() for _ in "ab")
    words, there = (
        a.view(torch.int64),
        b.view(torch.int64),
    )  # bytes would be copied one by one
    median, low, high = timed(lambda: there.copy_(words))
    record(
        "ceiling/copy",
        TB_s=2 * size / median / 1e12,
        p10=2 * size / high / 1e12,
        p90=2 * size / low / 1e12,
    )
    median, *_ = timed(lambda: torch.sum(words))
    record("ceiling/read", TB_s=size / median / 1e12)
    del a, b, words, there
    side = 8192 if GPU else 64
    x, y = (torch.randn(side, side, device=DEV, dtype=torch.bfloat16) for _ in "xy")
    median, *_ = timed(lambda: x @ y)
    record("ceiling/matmul", TFLOP_s=2 * side**3 / median / 1e12)
    tiny = torch.zeros(32, device=DEV)
    median, *_ = timed(lambda: [tiny.add_(1) for _ in range(200)])
    record("ceiling/small kernel in a graph", us=median / 200 * 1e6)
    begin = time.perf_counter()
    for _ in range(1000):
        tiny.add_(1)
    record("ceiling/eager launch", us=(time.perf_counter() - begin) * 1e3)


# --- (c) attention ---------------------------------------------------------------------------

HEADS, KV_HEADS, DIM = (16, 8, 128) if GPU else (4, 2, 16)


class Layers:
    """Enough layers of K and V that no layer is found in the 60 MB of L2 when its turn comes."""

    def __init__(self, sequences: int, length: int, block_size: int) -> None:
        from harness import make_metadata

        self.bytes = sequences * length * KV_HEADS * DIM * 2 * 2
        self.count = max(1, min(160, -(-(3 << 28) // self.bytes))) if GPU else 2
        blocks = -(-length // block_size)
        total = sequences * blocks
        shape = (self.count, 2, total + 1, block_size, KV_HEADS, DIM)
        self.data = torch.empty(shape, dtype=torch.bfloat16, device=DEV).normal_()
        self.views = [(keys, values) for keys, values in self.data]
        table = torch.randperm(total, device=DEV).to(torch.int32).view(sequences, blocks)
        last = (
            table[:, (length - 1) // block_size].long() * block_size
            + (length - 1) % block_size
        )
        self.metadata = make_metadata([(1, length)] * sequences, table, last)
        self.q = torch.randn(sequences, HEADS, DIM, dtype=torch.bfloat16, device=DEV)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.views[index]


def decode_rate(layers: Layers, tuning: Any) -> tuple[float, float]:
    """(TB/s, microseconds a layer) of attention alone, no store."""
    import kernels

    step = kernels.TritonAttention(tuning).bind(layers, layers.metadata)
    median, *_ = timed(
        lambda: [step.attend(layers.q, *views) for views in layers.views], repeat=10
    )
    return layers.bytes * layers.count / median / 1e12, median / layers.count * 1e6


SHAPES = [(256, 1024), (64, 1024), (8, 1024), (1, 256)] if GPU else [(2, 40), (1, 70)]


def decode_tunings(sequences: int) -> Iterator[Any]:
    """Tilings, then splits at the first of them."""
    from kernels import Tuning

    shapes = [
        (16, 1, 9),
        (16, 1, 6),
        (16, 1, 12),
        (32, 1, 5),
        (32, 2, 5),
        (32, 2, 9),
        (64, 2, 4),
        (64, 4, 4),
        (128, 4, 3),
    ]
    for tile, warps, stages in shapes:
        yield Tuning(tile=tile, warps=warps, stages=stages)
    splits = {256: (1, 2), 64: (1, 2), 8: (2, 4, 8, 16), 1: (4, 8, 16, 32)}.get(
        sequences, (2,)
    )
    for count in splits:
        for here in (True, False):
            yield Tuning(splits=count, merge_here=here, min_keys=16)
    yield Tuning(splits=splits[-1], min_keys=64)
    yield Tuning(splits=splits[-1], min_keys=32)


@part(150)
def part_decode(stop: float) -> None:
    """Paged decode at four shapes: the default over block sizes, then tilings and splits."""
    from kernels import Tuning

    for sequences, length in SHAPES:
        for block_size in (16, 256, 1, 4):
            torch.cuda.empty_cache()
            layers = Layers(sequences, length, block_size)
            rate, us = decode_rate(layers, Tuning())
            record(
                f"decode/{sequences}x{length}",
                TB_s=rate,
                us=us,
                block=block_size,
                tuning="default",
            )
            if block_size == 16:
                sweep(sequences, length, layers, stop)
            del layers


def sweep(sequences: int, length: int, layers: Layers, stop: float) -> None:
    for tuning in decode_tunings(sequences):
        if time.perf_counter() > stop - 10:
            return record("decode/out of time")
        try:
            rate, us = decode_rate(layers, tuning)
        except Exception as error:
            record("decode/failed", tuning=str(tuning), error=repr(error)[:200])
            continue
        text = f"tile {tuning.tile} warps {tuning.warps} stages {tuning.stages} splits {tuning.splits} min {tuning.min_keys} here {tuning.merge_here}"
        record(f"decode/{sequences}x{length}", TB_s=rate, us=us, block=16, tuning=text)


@part(45)
def part_tune(stop: float) -> None:
    """A second look around the best of the first sweep."""
    from kernels import Tuning

    shapes = [
        (64, 4, 4),
        (64, 4, 3),
        (64, 4, 5),
        (32, 4, 5),
        (32, 2, 4),
        (32, 2, 3),
        (64, 8, 4),
        (128, 8, 3),
    ]
    for sequences, length in SHAPES:
        layers = Layers(sequences, length, 16)
        for tile, warps, stages in shapes:
            for splits in {8: (4, 8), 1: (2, 4)}.get(sequences, (None,)):
                if time.perf_counter() > stop:
                    return record("tune/out of time")
                try:
                    rate, us = decode_rate(
                        layers, Tuning(tile=tile, warps=warps, stages=stages, splits=splits)
                    )
                    record(
                        f"tune/{sequences}x{length}",
                        TB_s=rate,
                        us=us,
                        tuning=f"{tile} {warps} {stages} splits {splits}",
                    )
                except Exception as error:
                    record(
                        "tune/failed",
                        tuning=f"{tile} {warps} {stages}",
                        error=repr(error)[:200],
                    )
        del layers
        torch.cuda.empty_cache()


@part(20)
def part_ragged(stop: float) -> None:
    """256 lengths like the workload's, as they come and longest first."""
    import kernels
    from harness import make_metadata

    draw = torch.Generator().manual_seed(0)
    rows, most = (256, 2048) if GPU else (3, 40)
    lengths = torch.randint(most // 20, most, (rows,), generator=draw).tolist()
    for name, order in (
        ("as they come", lengths),
        ("longest first", sorted(lengths, reverse=True)),
    ):
        layers = Layers(rows, most, 16)
        table = layers.metadata.block_table
        layers.metadata = make_metadata([(1, n) for n in order], table, table[:, 0].long())
        layers.bytes = sum(lengths) * KV_HEADS * DIM * 4
        rate, us = decode_rate(layers, kernels.Tuning())
        record(f"decode/ragged {name}", TB_s=rate, us=us)
        del layers
        torch.cuda.empty_cache()


@part(80)
def part_prefill(stop: float) -> None:
    """Causal prefill: 32 prompts of 512, 8 of 2048, one chunk of 512 behind 4096."""
    import harness
    import kernels

    cases = (
        ("32x512", [(512, 512)] * 32),
        ("8x2048", [(2048, 2048)] * 8),
        ("16x512 behind 2048", [(512, 2560)] * 16),
    )
    for name, lengths in (
        cases if GPU else (("dry", [(5, 5)] * 2), ("dry behind", [(3, 9)]))
    ):
        flops = sum(4 * HEADS * DIM * (n * (m - n) + n * (n + 1) / 2) for n, m in lengths)
        for block_size in (16, 256):
            case = harness.make_case(
                lengths, HEADS, KV_HEADS, DIM, block_size, torch.bfloat16
            )
            tunings = [
                (128, 64, 4, 3),
                (128, 64, 4, 2),
                (128, 64, 4, 4),
                (64, 128, 4, 2),
                (128, 128, 4, 2),
                (64, 32, 4, 4),
            ]
            for query, key, warps, stages in tunings if block_size == 16 else tunings[:1]:
                if time.perf_counter() > stop - 5:
                    return record("prefill/out of time")
                tuning = kernels.Tuning(
                    query_tile=query,
                    key_tile=key,
                    prefill_warps=warps,
                    prefill_stages=stages,
                )
                try:
                    step = kernels.TritonAttention(tuning).bind(case.cache, case.metadata)
                    median, *_ = timed(
                        lambda: step.attend(case.q, case.cache.k, case.cache.v)
                    )
                except Exception as error:
                    record(
                        "prefill/failed",
                        tuning=str((query, key, warps, stages)),
                        error=repr(error)[:200],
                    )
                    continue
                record(
                    f"prefill/{name}",
                    TFLOP_s=flops / median / 1e12,
                    us=median * 1e6,
                    block=block_size,
                    tuning=str((query, key, warps, stages)),
                )
        if all(n == m for n, m in lengths):
            compare_prefill(name, case, flops)


def compare_prefill(name: str, case: Any, flops: float) -> None:
    """FlashAttention-2 as it comes with PyTorch, on packed (not paged) keys."""
    k, v, q = case.packed(case.k), case.packed(case.v), case.q
    most, cu = max(case.metadata.seqlens_q), case.metadata.cu_seqlens_q
    try:
        call = lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, most, most, 0.0, True, False
        )  # noqa: E731
        median, *_ = timed(call)
        record(
            f"prefill/{name}",
            TFLOP_s=flops / median / 1e12,
            us=median * 1e6,
            tuning="torch FA2, packed keys",
        )
    except Exception as error:
        record("prefill/torch FA2 failed", error=repr(error)[:300])


# --- the rest, once it exists -----------------------------------------------------------------

OUT, ONLY = Path("."), ""
sys.modules.setdefault("bench_gpu", sys.modules[__name__])  # this file runs as __main__
for more in ("bench_gpu_more", "bench_gpu_engine"):
    try:
        __import__(more)  # registers parts
    except Exception:
        traceback.print_exc()


def main() -> None:
    global OUT, ONLY
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default="", help="a pytest -k expression")
    parser.add_argument("--limit", type=float, default=520, help="seconds in all")
    args = parser.parse_args()
    OUT, ONLY = args.out, args.only
    OUT.mkdir(parents=True, exist_ok=True)
    if GPU:
        import triton

        record(
            "machine",
            device=torch.cuda.get_device_name(),
            torch=torch.__version__,
            triton=triton.__version__,
        )
    for name in args.parts.split(","):
        run, seconds = PARTS[name]
        now = time.perf_counter()
        if now - START > args.limit - 10:
            record(f"part/{name}", skipped="no time left")
            continue
        try:
            run(min(now + seconds, START + args.limit))
        except Exception:
            traceback.print_exc()
            record(f"part/{name}", failed=traceback.format_exc()[-1500:])
        record(f"part/{name}", seconds=time.perf_counter() - now)
        (OUT / "bench_gpu.json").write_text(json.dumps(RECORDS, indent=1))
        if GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
