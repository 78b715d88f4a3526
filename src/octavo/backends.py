"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from octavo.attention import AttentionBackend, TorchAttention
from octavo.config import ConfigError, EngineConfig, ModelConfig
from octavo.layers import LayerOps, TorchOps, use_ops
from octavo.model_runner import CausalModel
from octavo.models.llama import LlamaForCausalLM
from octavo.native import NativeError, can_compile
from octavo.native_attention import NativeAttention
from octavo.native_layers import NativeOps, multiplies_bfloat16
from octavo.sampler import Sampler

__all__ = [
    "logger",
    "choose_device",
    "choose_dtype",
    "choose_attention",
    "choose_layer_ops",
    "choose_layers",
    "choose_sampler",
    "make_sampler",
    "choose_graphs",
    "choose_overlap",
]


logger = logging.getLogger("octavo")


def choose_device(name: str) -> torch.device:
    """The device for `EngineConfig.device`; ConfigError if it isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use "
            "device='cpu', or install a CUDA build of torch"
        )
    return device


def choose_dtype(
    name: str, checkpoint: str, device: torch.device, *, native: bool = True
) -> torch.dtype:
    """The dtype for `EngineConfig.dtype` given the checkpoint's own; `native`: may C be used?"""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        narrow = checkpoint == "bfloat16" and (
            multiplies_bfloat16() or (native and can_compile())
        )
        return torch.bfloat16 if narrow else torch.float32
    if checkpoint == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        logger.warning(
            "this card has no bfloat16 (it needs compute capability 8.0): float16"
        )
        return torch.float16
    return getattr(torch, checkpoint)


def _native_or(
    plain: Any, native: Callable[[], Any], asked: str, device: torch.device
) -> Any:
    """`native()` if it is asked for, or if "auto" finds that it can be had; else `plain`."""
    if asked == "torch":
        return plain
    try:
        if device.type != "cpu":
            raise NativeError(f"the C code runs on a CPU, not on {device}")
        return native()
    except NativeError as reason:
        if asked == "native":
            raise
        if device.type == "cpu":
            logger.info("plain PyTorch on the CPU: %s", str(reason))  # no frames kept alive
        return plain


def _kernels_serve(setting: str, name: str, asked: str, problem: str | None) -> bool:
    """Can the kernels called `name` be used? ConfigError if they were asked for and can't."""
    if problem is not None and asked == name:
        raise ConfigError(f"{setting}={name!r}: {problem}")
    if problem is not None:
        logger.info("%s by PyTorch: %s", setting, problem)
    return problem is None


def choose_attention(
    name: str,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
) -> AttentionBackend:
    """The backend for `EngineConfig.attention`; an `OctavoError` if it can't be had here."""
    if name == "flash":
        from octavo.flash_attention import FlashAttention, flash_problem

        _kernels_serve(
            "attention",
            name,
            name,
            flash_problem(device, dtype, block_size, model.head_dim),
        )
        return FlashAttention()
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        from octavo.kernels import triton_problem  # loads Triton
        from octavo.triton_attention import TritonAttention

        if _kernels_serve("attention", "triton", name, triton_problem(device, dtype)):
            return TritonAttention()
        return TorchAttention()
    build = partial(NativeAttention, dtype, model.head_dim)
    return cast(AttentionBackend, _native_or(TorchAttention(), build, name, device))


def choose_layer_ops(name: str, dtype: torch.dtype, device: torch.device) -> LayerOps:
    """PyTorch's arithmetic or C's; NativeError if that is asked for and can't be had."""
    return cast(LayerOps, _native_or(TorchOps(), partial(NativeOps, dtype), name, device))


def choose_layers(
    name: str, dtype: torch.dtype, device: torch.device
) -> Callable[[LlamaForCausalLM], CausalModel]:
    """What makes a model compute as `EngineConfig.layer_ops` says, with the same weights.

    An `OctavoError` if that can't be had here.
    """
    if name == "fused" or (name == "auto" and device.type == "cuda"):
        from octavo.fused import fused_problem
        from octavo.fused_model import FusedModel

        if _kernels_serve("layer_ops", "fused", name, fused_problem(device, dtype)):
            return FusedModel
        name = "torch"
    return partial(_computing_with, choose_layer_ops(name, dtype, device))


def _computing_with(ops: LayerOps, model: LlamaForCausalLM) -> CausalModel:
    use_ops(model, ops)
    return model


def choose_sampler(name: str, dtype: torch.dtype, device: torch.device) -> str:
    """Which sampler `EngineConfig.sampler` means: "torch" or "fused"; ConfigError if it can't be had."""
    if name == "fused" or (name == "auto" and device.type == "cuda"):
        from octavo.kernels import triton_problem

        if _kernels_serve("sampler", "fused", name, triton_problem(device, dtype)):
            return "fused"
    return "torch"


def make_sampler(
    kind: str, num_rows: int, vocab_size: int, device: torch.device
) -> Sampler:
    """A sampler of the kind that `choose_sampler` named."""
    if kind == "fused":
        from octavo.fused_sampler import FusedSampler

        return FusedSampler(num_rows, vocab_size, device)
    return Sampler(num_rows, vocab_size, device)


def choose_graphs(
    config: EngineConfig, attention: AttentionBackend, sampler: str, device: torch.device
) -> bool:
    """Are decode steps replayed from graphs? ConfigError if they are asked for and can't be."""
    able = attention.capturable and sampler == "fused"
    wanted = False if config.enforce_eager else config.cuda_graphs
    if wanted and not able:
        raise ConfigError(
            "cuda_graphs=True: a recorded step can't read lengths on the host, so it needs "
            "attention='triton' or 'flash' and sampler='fused'"
        )
    return able and device.type == "cuda" if wanted is None else wanted


def choose_overlap(config: EngineConfig, device: torch.device) -> bool:
    """Is the next step planned while one runs? On a CPU both would want the same cores."""
    return device.type == "cuda" if config.overlap is None else config.overlap
