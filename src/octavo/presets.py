"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.config import ConfigError, ModelConfig, RopeConfig

__all__ = ["Hardware", "HARDWARE", "T", "hardware_preset", "MODELS", "model_preset"]


@dataclass(frozen=True)
class Hardware:
    """One card as its vendor describes it; replace a field to put in what you measured.

    memory: bytes. bandwidth: bytes/s read from device memory. flops: dense FLOP/s in 16-bit
    with float32 accumulation. link_bandwidth: bytes/s to a neighbour, one direction.
    dtype: the 16-bit format that `flops` is for. source: the document the figures are from,
    and where documents disagree, which one is followed and why.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    link_bandwidth: float
    dtype: str
    source: str

    @property
    def ridge(self) -> float:
        """Operations per byte above which arithmetic, not memory, is the limit."""
        return self.flops / self.bandwidth


_GIB = 2**30
_SPARSE = "its TFLOPS for 16 bits are with sparsity, half of it is dense"
_T4 = (
    "NVIDIA T4 datasheet; bandwidth from product brief PB-09256 (320 GB/s, which is 256 bit "
    "x 10 Gb/s; the datasheet rounds to 300); PCIe 3.0 x16; it has no bfloat16"
)
_ADA = (
    "NVIDIA Ada GPU architecture whitepaper, appendix A (384 bit x 21 Gb/s; 16-bit with "
    "float32 accumulation); PCIe 4.0 x16"
)
_A100 = "NVIDIA A100 datasheet, SXM; NVLink 600 GB/s both ways"
_H100 = f"NVIDIA H100 datasheet, SXM ({_SPARSE}); NVLink 900 GB/s both ways"
_H200 = f"NVIDIA H200 datasheet, SXM ({_SPARSE}); NVLink 900 GB/s both ways"

HARDWARE = {
    "t4": Hardware("T4", 16 * _GIB, 320e9, 65e12, 16e9, "float16", _T4),
    "rtx-4090": Hardware("RTX 4090", 24 * _GIB, 1008e9, 165.2e12, 32e9, "bfloat16", _ADA),
    "a100": Hardware("A100 80 GB", 80 * _GIB, 2039e9, 312e12, 300e9, "bfloat16", _A100),
    "h100": Hardware("H100", 80 * _GIB, 3350e9, 989.5e12, 450e9, "bfloat16", _H100),
    "h200": Hardware("H200", 141 * _GIB, 4800e9, 989.5e12, 450e9, "bfloat16", _H200),
}


T = TypeVar("T")


def _preset(kind: str, name: str, presets: dict[str, T]) -> T:
    """Look up `name`, blind to case; `ConfigError` lists what there is."""
    if (found := presets.get(str(name).lower())) is None:
        raise ConfigError(f"{kind} {name!r} is unknown; give one of {', '.join(presets)}")
    return found


def hardware_preset(name: str) -> Hardware:
    """A card of `HARDWARE` by name, with the figures of NVIDIA's datasheets (`source`).

    Raises `ConfigError` that lists the names when there is no such card.
    """
    return _preset("hardware preset", name, HARDWARE)


def _llama3(factor: float) -> RopeConfig:
    """Llama 3's rotary settings; the release says how far positions are stretched."""
    return RopeConfig(
        500000.0,
        "llama3",
        factor,
        original_max_position_embeddings=8192,
        high_freq_factor=4.0,
    )


_LLAMA, _QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
_LLAMA3_STOP = (128001, 128008, 128009)

# architecture, vocabulary, hidden, intermediate, layers, heads, KV heads, head_dim, length
_SHAPES = {
    "smollm2-135m": (_LLAMA, 49152, 576, 1536, 30, 9, 3, 64, 8192),
    "qwen3-0.6b": (_QWEN3, 151936, 1024, 3072, 28, 16, 8, 128, 40960),
    "llama-3.2-1b": (_LLAMA, 128256, 2048, 8192, 16, 32, 8, 64, 131072),
    "llama-3.1-8b": (_LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, 131072),
    "llama-3.1-70b": (_LLAMA, 128256, 8192, 28672, 80, 64, 8, 128, 131072),
}
_SMOL: dict[str, Any] = {
    "rope": RopeConfig(100000.0),
    "eos_token_ids": (2,),
    "bos_token_id": 1,
}
_QWEN: dict[str, Any] = {"rope": RopeConfig(1e6), "eos_token_ids": (151645,)}
_META: dict[str, Any] = {"eos_token_ids": _LLAMA3_STOP, "bos_token_id": 128000}
_DETAILS = {
    "smollm2-135m": _SMOL | {"tie_word_embeddings": True},
    "qwen3-0.6b": _QWEN | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "llama-3.2-1b": _META | {"rope": _llama3(32.0), "tie_word_embeddings": True},
    "llama-3.1-8b": _META | {"rope": _llama3(8.0)},
    "llama-3.1-70b": _META | {"rope": _llama3(8.0)},
}
MODELS = {name: ModelConfig(*shape, **_DETAILS[name]) for name, shape in _SHAPES.items()}


def model_preset(name: str) -> ModelConfig:
    """A model of `MODELS` by name (shapes of the published instruct checkpoints, bfloat16).

    Raises `ConfigError` that lists the names when there is no such model.
    """
    return _preset("model preset", name, MODELS)
