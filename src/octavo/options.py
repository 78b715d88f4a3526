"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ENGINE_OPTIONS", "SAMPLING_OPTIONS", "add_options", "given"]


ENGINE_OPTIONS: dict[str, tuple[type, str]] = {
    "device": (
        str,
        "where to run: auto, cpu, cuda or cuda:1 (default: a GPU if there is one)",
    ),
    "dtype": (str, "number format: auto, float32, bfloat16, float16"),
    "max_model_len": (int, "longest prompt plus answer, in tokens"),
    "max_num_seqs": (int, "most requests that run at the same time"),
    "max_num_batched_tokens": (int, "most tokens computed in one step"),
    "block_size": (int, "tokens in one block of the KV cache"),
    "num_kv_blocks": (int, "blocks in the KV cache, instead of sizing it by memory"),
    "kv_cache_memory": (int, "bytes for the KV cache, instead of what is left over"),
    "gpu_memory_utilization": (float, "share of the card's memory to use, up to 1"),
    "prefix_cache": (str, "beginnings that were computed before: hash, radix, none"),
    "chunked_prefill": (bool, "cut prompts that don't fit into a step (default: yes)"),
    "max_chunk_tokens": (int, "most tokens of one prompt in one step"),
    "scheduling_policy": (str, "whose turn it is: fcfs, priority"),
    "batching": (str, "who goes first: decode-first, prefill-first"),
    "defer_shared_prefix": (bool, "wait for a beginning that another request computes"),
    "attention": (str, "who computes attention: auto, torch, native, triton, flash"),
    "layer_ops": (str, "who computes the layers: auto, torch, native, fused"),
    "sampler": (str, "who picks the tokens: auto, torch, fused"),
    "cuda_graphs": (bool, "replay recorded decode steps (default: on a GPU)"),
    "enforce_eager": (bool, "the same as --no-cuda-graphs, as other engines call it"),
    "overlap": (bool, "plan a step while one runs (default: on a GPU)"),
}
SAMPLING_OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "longest answer, in tokens (default 256)"),
    "temperature": (
        float,
        "0 always takes the likeliest token; higher is more varied (default 1)",
    ),
    "top_k": (int, "choose among the k likeliest tokens only"),
    "top_p": (float, "choose among the likeliest tokens that make up this probability"),
    "seed": (int, "makes the answer repeatable"),
    "n": (int, "answers to each prompt"),
}


def add_options(
    parser: argparse._ArgumentGroup, options: Mapping[str, tuple[type, str]]
) -> None:
    """An option for each name; True and False are `--name` and `--no-name`."""
    for name, (kind, text) in options.items():
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, type=kind, metavar="X", help=text)


def given(args: argparse.Namespace, options: Iterable[str]) -> dict[str, Any]:
    """The options that were given, by name."""
    values = {name: getattr(args, name) for name in options}
    return {name: value for name, value in values.items() if value is not None}
