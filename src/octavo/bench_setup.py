"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.bench_ceilings import Ceilings, measure_ceilings
from octavo.bench_record import Report, bench_provenance, figure
from octavo.bench_workload import CARD, CPU, Cost, Defaults, Workload, least_cost
from octavo.config import ModelConfig, OctavoError
from octavo.hf_config import read_model_config
from octavo.hub import resolve_model
from octavo.layers import Piece
from octavo.llm import LLM
from octavo.options import ENGINE_OPTIONS, given
from octavo.presets import Hardware
from octavo.shapes import named_shape

__all__ = [
    "MODEL_LEN",
    "defaults_for",
    "model_shape",
    "model_len",
    "check_lengths",
    "describe",
    "say_heading",
    "say_machine",
    "say_engine",
    "load",
    "find_ceilings",
    "Loaded",
]


MODEL_LEN = 4096


def defaults_for(device: torch.device) -> Defaults:
    """A card's defaults, or a CPU's smaller ones."""
    return CARD if device.type == "cuda" else CPU


def model_shape(name: str) -> ModelConfig:
    """The shape of whatever `LLM` takes for a model, without its weights."""
    return named_shape(name) or read_model_config(resolve_model(name))


def model_len(args: argparse.Namespace, defaults: Defaults) -> int:
    """Longest request: what was asked for, or 4,096 if the model goes that far."""
    own = model_shape(args.model or defaults.model).max_position_embeddings
    return args.max_model_len or min(MODEL_LEN, own)


def check_lengths(
    args: argparse.Namespace, defaults: Defaults, prompt: int, answer: int
) -> None:
    """`OctavoError` if the engine will be too short for a request of these tokens."""
    longest, most = prompt + answer, model_len(args, defaults)
    if longest > most:
        raise OctavoError(
            f"prompts of {prompt} and answers of {answer} tokens need "
            f"--max-model-len {longest}; it is {most}"
        )


def describe(llm: LLM) -> dict[str, Any]:
    """Everything that was chosen for this engine, by class and number."""
    engine, parts, scheduler = llm.engine, llm.parts, llm.scheduler
    runner: Any = engine.runner
    graphs, pool = getattr(runner, "graphs", None), scheduler.allocator
    model: Any = parts.model
    modules = model.modules() if isinstance(model, nn.Module) else ()
    ops = [type(m.ops).__name__ for m in modules if isinstance(m, Piece)]
    return {
        "loop": type(engine).__name__,
        "runner": type(runner).__name__,
        "graph_sizes": [] if graphs is None else list(graphs.sizes),
        "graph_bytes": 0 if graphs is None else graphs.num_bytes,
        "attention": type(parts.attention).__name__,
        "model": type(model).__name__,
        "layer_ops": ops[0] if ops else None,
        "sampler": type(runner.sampler).__name__,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "device": str(parts.device),
        "kv_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "prefix_cache": type(pool).__name__,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": scheduler.max_model_len,
    }


def say_heading(report: Report, rows: Iterable[tuple[str, str]]) -> None:
    """Lines of a name and what there is to say."""
    for name, text in rows:
        report.say(f"{name:11} {text}")


def say_machine(report: Report, device: torch.device) -> None:
    """Take down provenance and versions, and print them."""
    said = report.provenance = bench_provenance(str(device))
    parts = [said["device"], said.get("cpu"), said["driver"] and f"driver {said['driver']}"]
    parts += [said["date"], said["commit"] and f"commit {said['commit']}"]
    names = ("octavo", "python", "torch", "triton", "flash-attn", "transformers")
    versions = ", ".join(f"{name} {said[name] or 'not installed'}" for name in names)
    say_heading(
        report, [("device", ", ".join(filter(None, parts))), ("versions", versions)]
    )


def say_engine(report: Report, llm: LLM, name: str) -> None:
    e, m = report.config["engine"], llm.parts.config
    sizes, memory = e["graph_sizes"], f"{e['graph_bytes'] / 2**20:,.0f} MiB"
    graphs = f"{len(sizes)} sizes up to {max(sizes)}, {memory}" if sizes else "none"
    classes = (e["loop"], e["runner"], e["attention"], e["model"], e["layer_ops"])
    shape = f"{m.num_layers} layers, hidden {m.hidden_size}, {m.num_heads} heads, "
    shape += f"{m.num_kv_heads} KV heads of {m.head_dim}, vocabulary {m.vocab_size:,}, "
    shape += f"{figure(m.num_parameters / 1e6)} M parameters"
    say_heading(
        report,
        [
            ("model", f"{name}: {shape}, {e['dtype']}"),
            ("engine", ", ".join(filter(None, (*classes, e["sampler"])))),
            ("graphs", graphs),
            ("KV cache", f"{e['kv_blocks']:,} blocks of {e['block_size']} tokens"),
            (
                "at most",
                f"{e['max_num_seqs']} requests at a time, {e['max_num_batched_tokens']:,} "
                f"tokens a step, {e['max_model_len']:,} tokens a request",
            ),
        ],
    )


def load(
    args: argparse.Namespace, report: Report, defaults: Defaults, **options: Any
) -> LLM:
    """Make the engine, time that, and say what it is."""
    name = args.model or defaults.model
    length = model_len(args, defaults)
    options = {"seed": args.seed, "max_model_len": length} | options
    begin = time.perf_counter()
    llm = LLM(name, show_progress=False, **options | given(args, ENGINE_OPTIONS))
    ready = time.perf_counter() - begin
    report.config |= {"model": name, "seed": args.seed, "temperature": args.temperature}
    report.config["engine"] = describe(llm)
    say_engine(report, llm, name)
    if args.import_seconds is not None:
        report.add("startup/imports", "s", [args.import_seconds])
    report.add("startup/ready", "s", [ready])
    return llm


def find_ceilings(report: Report, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure them, print them, and put them into every record from here on."""
    ceilings = measure_ceilings(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    report.config["ceilings"] = dataclasses.asdict(ceilings)
    say_heading(report, [("ceilings", ceilings.line())])
    return ceilings


class Loaded(NamedTuple):
    """An engine, what it computes as the roofline wants it, and what it could reach."""

    llm: LLM
    model: ModelConfig
    hardware: Hardware

    @classmethod
    def of(cls, llm: LLM, report: Report) -> Loaded:
        """Measure the ceilings beside the engine."""
        parts = llm.parts
        hardware = find_ceilings(report, parts.device, parts.dtype).hardware()
        model = dataclasses.replace(parts.config, dtype=hardware.dtype)
        return cls(llm, model, hardware)

    def cost(self, workload: Workload) -> Cost:
        """The least a workload can cost here."""
        seats = self.llm.scheduler.max_num_seqs
        return least_cost(workload, self.model, self.hardware, seats)
