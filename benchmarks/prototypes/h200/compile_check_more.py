"""The launches of chapter 11's kernels, for `compile_check.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def checks(catch: Callable, label: Callable) -> dict[str, Callable[[], None]]:
    """Parts by name."""
    return {
        "fused": lambda: fused_kernels(catch, label),
        "sampler": lambda: sampler_kernels(catch, label),
        "graphs": lambda: graph_kernels(catch, label),
    }


def fused_kernels(catch: Callable, label: Callable) -> None:
    """Qwen3-0.6B's and Llama-8B's shapes, with dependent launch."""
    import fused
    import harness

    fused.dependent_launch = lambda device: True
    catchers = catch(fused)
    dtype, cpu = torch.bfloat16, torch.device("cpu")

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    label(catchers, "w1024")
    fused.rms_norm(zeros(2, 1024), zeros(1024), 1e-6)
    fused.add_rms_norm(zeros(2, 1024), zeros(2, 1024), zeros(1024), 1e-6)
    fused.silu_mul(zeros(2, 6144))
    for vectors in (1, 2, 3):
        for outputs, columns, how in (
            (4096, 1024, "norm"),
            (1024, 2048, "add"),
            (6144, 1024, "gated"),
            (1024, 3072, "add"),
            (4096, 14336, "add"),
        ):
            label(catchers, f"m{vectors} {outputs}x{columns} {how}")
            x, weight = zeros(vectors, columns), zeros(outputs, columns)
            norm = (zeros(columns), 1e-6) if how != "add" else None
            add = zeros(vectors, outputs) if how == "add" else None
            fused.gemv(x, weight, norm=norm, add_to=add, gated=how == "gated")
    for lengths in ([(1, 9)] * 2, [(1, 9)] * 128, [(1, 9), (20, 20)]):
        for block in (16, 256):
            label(catchers, f"S{len(lengths)} b{block}")
            case = harness.make_case(lengths, 16, 8, 128, block, dtype, device=cpu)
            step = fused.FusedAttention().bind(case.cache, case.metadata)
            tokens = sum(n for n, _ in lengths)
            for weight in (zeros(128), None):
                rotary = fused.Rotary(
                    torch.zeros(tokens, dtype=torch.int64),
                    zeros(64, 2, 128),
                    weight,
                    weight,
                    1e-6,
                )
                try:
                    step.turn_and_attend(0, zeros(tokens, 32 * 128), rotary, 16)
                except RuntimeError as error:
                    if "active drivers" not in str(
                        error
                    ):  # plain kernels launch in earnest
                        raise


def sampler_kernels(catch: Callable, label: Callable) -> None:
    """Vocabulary of Qwen3, with and without feeding."""
    import fused_sampler

    catchers = catch(fused_sampler)
    rows = torch.zeros(2, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        label(catchers, str(dtype)[6:])
        for feed in (None, torch.zeros(4, 100, dtype=torch.int32)):
            fused_sampler.sample(
                torch.zeros(2, 151936, dtype=dtype), rows, rows, torch.zeros(4),
                torch.zeros(4, 2, dtype=torch.int32), 151936, feed,
            )  # fmt: skip
    fused_sampler.random_noise(torch.zeros(4, 2, dtype=torch.int32), rows, 2**16)


def graph_kernels(catch: Callable, label: Callable) -> None:
    """The step's first kernel, tables of 256 and 16 blocks."""
    import graphs

    label(catch(graphs), "prepare")
    for block_size in (16, 256):
        rows = graphs.RunningRows(256, 4096, block_size, 9, "cpu")
        width = rows.block_table.shape[1]
        graphs.prepare_decode(
            graphs.DecodeInputs.make(8, width, 256, torch.device("cpu")), rows
        )
