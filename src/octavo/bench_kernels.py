"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from octavo.attention import AttentionBackend, TorchAttention, store_kv
from octavo.bench_cases import (
    Bench,
    Case,
    attention_case,
    gemv_case,
    norm_case,
    products,
    sampler_case,
    store_case,
    swiglu_case,
)
from octavo.bench_ceilings import Ceilings, call_seconds
from octavo.bench_record import Record, Report
from octavo.config import OctavoError
from octavo.kernels import triton_problem, write_kv
from octavo.layers import TorchOps, add_rms_norm
from octavo.native_attention import NativeAttention
from octavo.sampler import Sampler

__all__ = [
    "Sizes",
    "ON_CARD",
    "ON_CPU",
    "Skip",
    "attention_backends",
    "Pieces",
    "pieces",
    "Make",
    "attention_makers",
    "piece_makers",
    "measure_case",
    "measure_kernels",
]


class Sizes(NamedTuple):
    """What is measured: (sequences, context) and numbers of tokens."""

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    stored: tuple[int, ...]
    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    footprint: int


ON_CARD = Sizes(
    ((256, 1024), (64, 1024), (8, 1024), (1, 256)),
    ((32, 512), (8, 2048)),
    (8192,),
    (1, 64, 256, 8192),
    (1, 256),
    3 << 28,
)
ON_CPU = Sizes(((8, 256), (1, 256)), ((2, 128),), (128,), (1, 64), (1, 8), 1 << 26)

Skip = Callable[[str, str], None]


def attention_backends(
    bench: Bench, skip: Skip
) -> Iterator[tuple[str, AttentionBackend, int]]:
    """(name, backend, block size) of those that can run here; `skip` hears of the others."""
    from octavo.flash_attention import FlashAttention, flash_problem
    from octavo.triton_attention import TritonAttention

    model, dtype, device = bench.model, bench.dtype, bench.device
    if problem := triton_problem(device, dtype):
        skip("attention by triton", problem)
    else:
        yield "triton", TritonAttention(), 16
    if problem := flash_problem(device, dtype, 256, model.head_dim):
        skip("attention by flash", problem)
    else:
        yield "flash", FlashAttention(), 256
    try:
        if device.type != "cpu":
            raise OctavoError(f"the C code runs on a CPU, not on {device}")
        yield "native", NativeAttention(dtype, model.head_dim), 16
    except OctavoError as reason:
        skip("attention by native", str(reason))
    yield "torch", TorchAttention(), 16


class Pieces(NamedTuple):
    """One way to compute the small operations."""

    store: Callable[..., Any]
    norm: Callable[..., Any]
    swiglu: Callable[..., Any]
    linear: Callable[..., Any]
    sampler: Callable[..., Any]


def pieces(bench: Bench, skip: Skip) -> dict[str, Pieces]:
    """The plain version of each operation, and the fused one where it can run."""
    plain = Pieces(store_kv, add_rms_norm, TorchOps().swiglu, F.linear, Sampler)
    if problem := triton_problem(bench.device, bench.dtype):
        skip("fused kernels", problem)
        return {"torch": plain}
    from octavo.fused import add_rms_norm as fused_norm
    from octavo.fused import silu_mul
    from octavo.fused_sampler import FusedSampler
    from octavo.gemv import gemv

    fused = Pieces(write_kv, fused_norm, silu_mul, gemv, FusedSampler)
    return {"torch": plain, "fused": fused}


Make = partial[Case]


def attention_makers(bench: Bench, sizes: Sizes, skip: Skip) -> Iterator[Make]:
    """What makes the cases of attention; a case's data should be gone before the next one's."""
    shapes = [(count, 1, length) for count, length in sizes.decode]
    shapes += [(count, length, length) for count, length in sizes.prefill]
    backends = list(attention_backends(bench, skip))
    for shape in shapes:
        for name, backend, block in backends:
            yield partial(attention_case, bench, name, backend, shape, block)


def piece_makers(bench: Bench, sizes: Sizes, skip: Skip) -> Iterator[Make]:
    """The same for the small operations."""
    known = pieces(bench, skip).items()
    for tokens in sizes.stored:
        yield from (partial(store_case, bench, n, p.store, tokens) for n, p in known)
    for tokens in sizes.tokens:
        yield from (partial(norm_case, bench, n, p.norm, tokens) for n, p in known)
        yield from (partial(swiglu_case, bench, n, p.swiglu, tokens) for n, p in known)
    for product in products(bench.model):
        yield from (partial(gemv_case, bench, n, p.linear, product) for n, p in known)
    for batch, top_p in itertools.product(sizes.sampled, (1.0, 0.9)):
        yield from (
            partial(sampler_case, bench, n, p.sampler, batch, top_p) for n, p in known
        )


def measure_case(
    case: Case, bench: Bench, ceilings: Ceilings, repetitions: int, report: Report
) -> Record:
    """Time a case and record its rate beside its ceiling."""

    def run() -> None:
        for call in case.calls:
            call()

    seconds = call_seconds(run, bench.device, repetitions, case.graph)
    each = [s / len(case.calls) for s in seconds]
    metric = "flop_per_s" if case.ceiling == "flops" else "bytes_per_s"
    return report.add(
        f"kernel/{case.name}",
        metric,
        [case.amount / s for s in each],
        getattr(ceilings, case.ceiling),
        backend=case.backend,
        us=median(each) * 1e6,
        graph=case.graph and bench.device.type == "cuda",
        pieces_of_data=len(case.calls),
    )


def measure_kernels(
    bench: Bench, sizes: Sizes, ceilings: Ceilings, repetitions: int, report: Report
) -> None:
    """All cases that can run here; one that fails is reported, counted, and costs no other."""

    def skip(what: str, why: str) -> None:
        report.say(f"no {what}: {why}")

    for makers in (attention_makers, piece_makers):
        for make in makers(bench, sizes, skip):
            try:
                measure_case(make(), bench, ceilings, repetitions, report)
            except Exception as error:  # a compiler's, too little memory, ...
                report.failures += 1
                what = " ".join(map(str, (make.func.__name__, *make.args[1:])))
                report.say(f"failed: {what}: {type(error).__name__}: {error}")
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
