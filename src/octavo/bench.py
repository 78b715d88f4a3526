"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.bench_record import Report, slug
from octavo.bench_workload import CARD, CPU, Span
from octavo.config import OctavoError
from octavo.options import ENGINE_OPTIONS, add_options
from octavo.request import SamplingParams

__all__ = ["add_bench", "settle", "read_batches", "check_places", "bench_command", "keep"]


_HELP = """\
Measure how fast Octavo is here, beside what this machine allows at most.

examples:
  octavo bench throughput                     many requests at once, on a CPU a few small ones
  octavo bench latency --model smollm2-135m   one request alone, then steady batches
  octavo bench kernels                        single operations against memory and arithmetic
  octavo bench throughput --no-overlap --no-cuda-graphs     without those two

NAME-shape, such as qwen3-0.6b-shape or llama-3.1-8b-shape, is a model of that shape with
random weights: it runs as fast as the real one, and nothing has to be downloaded.
Each figure is the median of several repetitions after a warm-up, with the 10th and 90th
percentile, and its limit by a roofline from rates that were measured on the spot.
"""


def _default(name: str) -> str:
    """For a help text: what holds on a card, and on a CPU."""
    mark = ":" if name == "lens" else ","
    values = (getattr(CARD, name), getattr(CPU, name))
    card, cpu = (mark.join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)
    return f"(default {card}; on a CPU {cpu})"


_COMMON: dict[str, tuple[type, str]] = {
    "model": (str, f"a model as for octavo run, or NAME-shape {_default('model')}"),
    "repetitions": (int, "repetitions that count, at least 3 (default 3; kernels 20)"),
    "json": (Path, "write the records to this file"),
    "out": (Path, "write records and log into a folder of the device's name in this one"),
}
_SAMPLING: dict[str, tuple[type, str]] = {
    "seed": (int, "seed of the workload and of sampling (default 0)"),
    "temperature": (float, "temperature of sampling (default 0.6)"),
}
_THROUGHPUT: dict[str, tuple[type, str]] = {
    "requests": (int, f"requests that come at once {_default('requests')}"),
    "input_len": (str, f"MIN:MAX tokens of a prompt {_default('lens')}"),
    "output_len": (str, f"MIN:MAX tokens of an answer {_default('lens')}"),
}
_LATENCY: dict[str, tuple[type, str]] = {
    "batches": (str, f"batch sizes to watch {_default('batches')}"),
    "context": (int, f"tokens around which they are watched {_default('context')}"),
    "tokens": (int, f"answer of the request that is alone {_default('tokens')}"),
    "traces": (Path, "keep the profiler's traces of decode steps in this folder"),
}
_KERNELS = {name: ENGINE_OPTIONS[name] for name in ("device", "dtype")}
_ABOUT = {
    "throughput": "many requests at once: output tokens/s, prompt tokens/s",
    "latency": "one request alone and steady batches: ms a token, ms a step",
    "kernels": "single operations: bytes/s and FLOP/s",
}
_WHAT = {
    "throughput": _COMMON | _THROUGHPUT | _SAMPLING,
    "latency": _COMMON | _LATENCY | _SAMPLING,
    "kernels": _COMMON,
}


def add_bench(commands: Any) -> None:
    """Add `octavo bench` to the command's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    text = "measure speed beside what this machine allows"
    bench = commands.add_parser("bench", help=text, description=_HELP, formatter_class=raw)
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for kind, about in _ABOUT.items():
        parser = kinds.add_parser(kind, help=about, description=f"Measure {about}.")
        parser.set_defaults(run=bench_command, kind=kind)
        add_options(parser.add_argument_group("what is measured"), _WHAT[kind])
        engine = _KERNELS if kind == "kernels" else ENGINE_OPTIONS
        add_options(parser.add_argument_group("the engine"), engine)


def settle(args: argparse.Namespace) -> None:
    """Fill in what doesn't depend on the device, in place; `OctavoError` for what can't be."""
    if args.repetitions is None:
        args.repetitions = 20 if args.kind == "kernels" else 3
    if args.repetitions < 3:
        raise OctavoError(
            f"--repetitions {args.repetitions}: a median and a band need at least 3"
        )
    for name, default in (("seed", 0), ("temperature", 0.6)):
        if getattr(args, name, None) is None:
            setattr(args, name, default)
    SamplingParams(temperature=args.temperature, seed=args.seed)  # says what is wrong
    for name in ("requests", "context", "tokens"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise OctavoError(f"--{name} {value}: give a whole number from 1")
    for name in ("input_len", "output_len"):
        if (text := getattr(args, name, None)) is not None:
            flag = "--" + name.replace("_", "-")
            setattr(args, name, Span.parse(text, flag))
    if getattr(args, "batches", None) is not None:
        args.batches = read_batches(args.batches)
    check_places(args)


def read_batches(text: str) -> tuple[int, ...]:
    """ "256,64,8" as numbers."""
    try:
        batches = tuple(int(part) for part in text.split(","))
    except ValueError:
        batches = ()
    if not batches or min(batches) < 1:
        raise OctavoError(f"--batches {text}: give whole numbers from 1, such as 256,64,8")
    return batches


def check_places(args: argparse.Namespace) -> None:
    """Can the results be written where they shall go? Folders are made."""
    for name in ("out", "traces"):
        if (folder := getattr(args, name, None)) is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OctavoError(f"--{name} {folder} can't be made: {error}") from error
    if args.json is not None and not (
        args.json.parent.is_dir() and not args.json.is_dir() and _writable(args.json)
    ):
        raise OctavoError(f"--json {args.json}: no file can be written there")


def _writable(file: Path) -> bool:
    return os.access(file if file.exists() else file.parent, os.W_OK)


def bench_command(args: argparse.Namespace) -> int:
    """`octavo bench`; returns the exit status: 1 if a measurement broke.

    What can't run here, or has no room, is said and is no failure.
    """
    settle(args)
    fresh, begin = "octavo.llm" not in sys.modules, time.perf_counter()
    from octavo.llm import LLM  # noqa: F401  (PyTorch comes with it)

    args.import_seconds = time.perf_counter() - begin if fresh else None
    from octavo import bench_runs

    report = Report(sys.stdout)
    measure: Callable[..., None] = getattr(bench_runs, args.kind)
    measure(args, report)
    keep(args, report)
    return int(report.failures > 0)


def keep(args: argparse.Namespace, report: Report) -> None:
    """Write the records where they were asked for, or else print them as JSON lines."""
    if args.json is not None:
        report.save(args.json)
        print(f"{len(report.records)} records in {args.json}")
    if args.out is not None:
        model = Path(str(report.config["model"])).name
        folder = report.save_in(args.out, f"{args.kind}_{slug(model)}")
        print(f"{len(report.records)} records and the log in {folder}")
    if args.json is None and args.out is None:
        print()
        for record in report.records:
            print(json.dumps(asdict(record)))
