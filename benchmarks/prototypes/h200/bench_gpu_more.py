"""Parts of `bench_gpu.py` for chapter 11's kernels and whole steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench_gpu import DEV, GPU, part, record, timed
from torch import Tensor

BF16 = torch.bfloat16


def qwen3() -> Any:
    """Qwen3-0.6B's shape; a tiny one where there is no card."""
    from octavo.config import tiny_config
    from octavo.presets import MODELS

    if GPU:
        return MODELS["qwen3-0.6b"]
    return tiny_config(architecture="Qwen3ForCausalLM", max_position_embeddings=4096)


def random_model(config: Any) -> Any:
    """Weights drawn on the device: matrices ~ N(0, 1/in), norms around 1."""
    from octavo.models import build_model

    model = build_model(config, BF16, DEV)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(1, 0.1)
        else:
            parameter.normal_(0, 1 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model


def attempt(name: str, run: Callable[[], Any], calls: int = 1, **more: Any) -> None:
    try:
        median, low, high = timed(run)
    except Exception as error:
        record(name, error=repr(error)[:300], **more)
        return
    record(
        name, us=median / calls * 1e6, p10=low / calls * 1e6, p90=high / calls * 1e6, **more
    )


@part(70)
def part_fused(stop: float) -> None:
    """Norm, SwiGLU: plain, torch.compile, Triton; 28 in a row on different buffers."""
    import fused

    from octavo import layers

    def plain_silu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    weight = torch.randn(1024, device=DEV, dtype=BF16)
    for tokens in (1, 8, 64, 256):
        x, r = (torch.randn(28, tokens, 1024, device=DEV, dtype=BF16) for _ in "xr")
        both = torch.randn(28, tokens, 6144, device=DEV, dtype=BF16)
        norms = {"plain": layers.add_rms_norm, "triton": fused.add_rms_norm}
        silus = {"plain": plain_silu, "triton": fused.silu_mul}
        if GPU and tokens in (1, 256) and time.perf_counter() < stop - 25:
            norms["compiled"] = torch.compile(layers.add_rms_norm, dynamic=False)
            silus["compiled"] = torch.compile(plain_silu, dynamic=False)
        for how, norm in norms.items():
            attempt(
                f"fused/add_rms_norm {how}",
                lambda n=norm: [n(a, b, weight, 1e-6) for a, b in zip(x, r, strict=True)],
                28,
                tokens=tokens,
            )
        for how, silu in silus.items():
            attempt(
                f"fused/silu_mul {how}",
                lambda s=silu: [s(a) for a in both],
                28,
                tokens=tokens,
            )


PRODUCTS = {
    "qkv": (4096, 1024, "norm"), "o": (1024, 2048, "add"), "gate_up": (6144, 1024, "gated"),
    "down": (1024, 3072, "add"), "head": (151936, 1024, "plain"),
}  # fmt: skip


def call_gemv(
    x: Tensor, weight: Tensor, gain: Tensor, out: Tensor, how: str, shape: Any
) -> Tensor:
    import fused

    norm = (gain, 1e-6) if how in ("norm", "gated") else None
    return fused.gemv(
        x,
        weight,
        norm=norm,
        add_to=out if how == "add" else None,
        gated=how == "gated",
        shape=shape,
    )


@part(80)
def part_gemv(stop: float) -> None:
    """Each product of a layer, 28 matrices in a row (more than L2 holds): cuBLAS and gemv."""
    from fused import GemvShape

    import fused

    with_launch(fused, True)
    shapes = [
        GemvShape(*s)
        for s in (
            (2, 1024, 4),
            (4, 1024, 4),
            (8, 1024, 4),
            (2, 512, 2),
            (1, 1024, 1),
            (2, 512, 1),
            (2, 1024, 1),
            (4, 256, 1),
            (4, 512, 1),
            (4, 512, 2),
            (2, 1024, 2),
        )
    ]
    for name, (outputs, columns, how) in PRODUCTS.items():
        if not GPU:
            outputs, columns = 16, 64
        count = 28 if name != "head" else 1
        weights = [
            torch.randn(outputs, columns, device=DEV, dtype=BF16) for _ in range(count)
        ]
        gain = torch.randn(columns, device=DEV, dtype=BF16)
        size = outputs * columns * 2
        for vectors in (1, 2) if GPU else (1,):
            x = torch.randn(vectors, columns, device=DEV, dtype=BF16)
            out = torch.zeros(vectors, outputs, device=DEV, dtype=BF16)
            measure_product(
                f"gemv/{name}",
                [lambda w=w: F.linear(x, w) for w in weights],
                size,
                "cuBLAS",
                vectors,
            )
            for shape in shapes if vectors == 1 else [None]:
                if time.perf_counter() > stop - 3:
                    return record("gemv/out of time")
                calls = [
                    lambda w=w, s=shape: call_gemv(x, w, gain, out, how, s) for w in weights
                ]
                measure_product(
                    f"gemv/{name}",
                    calls,
                    size,
                    str(tuple(shape)) if shape else "default",
                    vectors,
                )
        del weights


def measure_product(
    name: str, calls: list[Callable[[], Any]], size: int, how: str, vectors: int
) -> None:
    try:
        median, *_ = timed(lambda: [call() for call in calls], repeat=10)
    except Exception as error:
        record(name, how=how, vectors=vectors, error=repr(error)[:200])
        return
    each = median / len(calls)
    record(name, how=how, vectors=vectors, us=each * 1e6, TB_s=size / each / 1e12)


@part(40)
def part_sampler(stop: float) -> None:
    """Temperature 0.6 over Qwen3's vocabulary."""
    from fused_sampler import FusedSampler

    from octavo.request import Request, SamplingParams
    from octavo.sampler import Sampler

    vocab = 151936 if GPU else 5000
    for count in (1, 8, 64, 256) if GPU else (2,):
        logits = torch.randn(count, vocab, device=DEV, dtype=BF16)
        rows, host = torch.arange(count, device=DEV), list(range(count))
        samplers = {
            "torch": Sampler(count, vocab, DEV),
            "fused": FusedSampler(count, vocab, DEV),
        }
        for sampler in samplers.values():
            for row in host:
                sampler.assign(
                    row, Request("r", [0], SamplingParams(temperature=0.6), seed=row)
                )
        fused = samplers["fused"]
        attempt("sampler/fused", lambda: fused.free_sample(logits, rows, rows), batch=count)
        plain = samplers["torch"]
        if GPU:
            torch.cuda.synchronize()
        median, *_ = timed(lambda: plain(logits, host, rows), graph=False)
        record("sampler/torch, eager", us=median * 1e6, batch=count)
        same = float(
            (fused.free_sample(logits, rows, rows) == plain(logits, host, rows))
            .float()
            .mean()
        )
        record("sampler/same tokens", share=same, batch=count)


class StepInputs:
    """A decode step at fixed lengths: everything a graph reads lies still."""

    def __init__(
        self, model: Any, config: Any, sequences: int, length: int, block_size: int
    ) -> None:
        from fused_sampler import FusedSampler
        from harness import make_metadata

        from octavo.kv_cache import KVCache
        from octavo.request import Request, SamplingParams

        blocks = -(-length // block_size)
        self.cache = KVCache(config, sequences * blocks, block_size, BF16, DEV)
        self.cache._data.normal_()
        table = (
            torch.randperm(sequences * blocks, device=DEV)
            .to(torch.int32)
            .view(sequences, blocks)
        )
        last = (
            table[:, (length - 1) // block_size].long() * block_size
            + (length - 1) % block_size
        )
        self.metadata = make_metadata([(1, length)] * sequences, table, last)
        self.ids = torch.randint(0, config.vocab_size, (sequences,), device=DEV)
        self.positions = torch.full((sequences,), length - 1, device=DEV)
        self.rows = torch.arange(sequences, device=DEV)
        self.sampler = FusedSampler(sequences, config.vocab_size, DEV)
        for row in range(sequences):
            self.sampler.assign(
                row, Request("r", [0], SamplingParams(temperature=0.6), seed=row)
            )

    def run(self, model: Any, attention: Any) -> Tensor:
        attend = attention.bind(self.cache, self.metadata)
        hidden = model(self.ids, self.positions, attend)
        return self.sampler.free_sample(
            model.compute_logits(hidden), self.rows, self.positions + 1
        )


STEPS = (
    [(1, 256), (1, 1024), (8, 1024), (64, 1024), (256, 1024)] if GPU else [(1, 9), (4, 9)]
)


@part(170)
def part_step(stop: float) -> None:
    """A whole decode step in a graph: embedding, layers, head, sampling."""
    import fused
    import kernels

    config = qwen3()
    model = random_model(config)
    weight_bytes = sum(p.numel() for p in model.parameters()) * 2
    for sequences, length in STEPS:
        for block_size in (16, 256) if sequences in (1, 256) else (16,):
            if time.perf_counter() > stop - 15:
                return record("step/out of time")
            inputs = StepInputs(model, config, sequences, length, block_size)
            limit = (
                weight_bytes + sequences * length * config.kv_bytes_per_token(2)
            ) / 4.24e12
            variants = step_variants(model, sequences, fused, kernels)
            for how, (runs, attention, pdl) in variants.items():
                with_launch(fused, pdl)
                try:
                    with torch.inference_mode():
                        median, low, high = timed(
                            lambda r=runs, a=attention: inputs.run(r, a)
                        )
                    record(
                        f"step/{sequences}x{length}",
                        ms=median * 1e3,
                        p10=low * 1e3,
                        p90=high * 1e3,
                        limit=limit * 1e3,
                        how=how,
                        block=block_size,
                    )
                except Exception as error:
                    record(
                        f"step/{sequences}x{length}",
                        how=how,
                        block=block_size,
                        error=repr(error)[:400],
                    )
            if GPU and block_size == 16:
                with_launch(fused, True)
                profile(
                    f"step/{sequences}x{length}",
                    lambda: inputs.run(fused.FusedModel(model), fused.FusedAttention()),
                )
            del inputs
            gc.collect()
            if GPU:
                torch.cuda.empty_cache()


def step_variants(model: Any, sequences: int, fused: Any, kernels: Any) -> dict[str, tuple]:
    """name -> (model, attention backend, dependent launch?)"""
    variants = {
        "fused": (fused.FusedModel(model), fused.FusedAttention(), True),
        "fused, no dependent launch": (
            fused.FusedModel(model),
            fused.FusedAttention(),
            False,
        ),
        "plain layers, triton attention": (model, kernels.TritonAttention(), False),
    }
    if sequences <= 3:
        variants["fused, no gemv"] = (
            fused.FusedModel(model, gemv_rows=0),
            fused.FusedAttention(),
            True,
        )
    return variants


def with_launch(fused: Any, wanted: bool) -> None:
    """Dependent launch on or off for what is captured next."""
    fused.dependent_launch = lambda device: wanted and device.type == "cuda"


def profile(name: str, run: Callable[[], Any]) -> None:
    """The kernels of an eager step by their time on the card."""
    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as traced:
            run()
            torch.cuda.synchronize()
    rows = sorted(traced.key_averages(), key=lambda e: -e.device_time_total)[:12]
    record(
        f"{name} kernels",
        top=[(e.key[:60], e.count, round(e.device_time_total, 1)) for e in rows],
    )


@part(60)
def part_prefill_step(stop: float) -> None:
    """A step of prompts, eager: the workload's mean length, 8,192 and 16,384 tokens."""
    import fused
    import kernels
    from harness import make_metadata

    from octavo.kv_cache import KVCache

    config = qwen3()
    model = random_model(config)
    for budget in (8192, 16384) if GPU else (40,):
        count, length, block_size = (budget // 558, 558, 16) if GPU else (2, 20, 4)
        blocks = -(-length // block_size)
        cache = KVCache(config, count * blocks, block_size, BF16, DEV)
        table = (
            torch.randperm(count * blocks, device=DEV).to(torch.int32).view(count, blocks)
        )
        place = torch.arange(length, device=DEV)
        slots = (
            table[:, place // block_size].long() * block_size + place % block_size
        ).flatten()
        metadata = make_metadata([(length, length)] * count, table, slots)
        ids = torch.randint(0, config.vocab_size, (count * length,), device=DEV)
        positions = place.repeat(count)
        variants = {
            "fused": (fused.FusedModel(model), fused.FusedAttention()),
            "plain layers, triton attention": (model, kernels.TritonAttention()),
        }
        for how, (runs, attention) in variants.items():
            with_launch(fused, how == "fused")

            def step(runs: Any = runs, attention: Any = attention) -> Tensor:
                hidden = runs(ids, positions, attention.bind(cache, metadata))
                return runs.compute_logits(hidden[length - 1 :: length])

            try:
                with torch.inference_mode():
                    median, low, high = timed(step, repeat=8, graph=False)
                record(
                    f"prefill_step/{budget}",
                    tokens_per_s=count * length / median,
                    ms=median * 1e3,
                    p10=low * 1e3,
                    p90=high * 1e3,
                    how=how,
                )
                if GPU and budget == 16384:
                    profile(f"prefill_step/{budget} {how}", step)
            except Exception as error:
                record(f"prefill_step/{budget}", how=how, error=repr(error)[:400])
        del cache
