"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from octavo.config import DTYPE_BYTES, ConfigError, ModelConfig, RopeConfig

__all__ = [
    "Hardware",
    "HARDWARE",
    "T",
    "hardware_preset",
    "MODELS",
    "model_preset",
    "Scheduled",
    "Chunk",
    "Work",
    "attention_pairs",
    "shard",
    "step_work",
    "decode_work",
    "prefill_work",
    "decode_ceiling",
    "prefill_ceiling",
    "critical_batch",
    "kv_capacity",
    "max_batch",
]


@dataclass(frozen=True)
class Hardware:
    """One card as its vendor describes it; replace a field to put in what you measured.

    memory: bytes. bandwidth: bytes/s read from device memory. flops: dense FLOP/s in 16-bit
    with float32 accumulation. link_bandwidth: bytes/s to a neighbour, one direction.
    dtype: the 16-bit format that `flops` is for. source: the document.
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
_SPARSE = "the 1,979 TFLOPS there are with sparsity, half of it is dense"
_T4 = "NVIDIA T4 datasheet and product brief PB-09256; PCIe 3.0 x16; it has no bfloat16"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A; PCIe 4.0 x16"
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


class Scheduled(Protocol):
    """What the cost model must know about one request's share of a step."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def samples(self) -> bool: ...


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens after `start` cached ones; the plainest `Scheduled`."""

    start: int
    count: int
    samples: bool = True


@dataclass(frozen=True)
class Work:
    """Bytes and floating-point operations of one step on one card.

    flops: a multiplication and an addition count as two. weight_bytes: read once a step.
    kv_bytes: cache read and written. link_bytes: sent by this card to its neighbours.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    link_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes that pass between the card's memory and its arithmetic."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte of memory traffic; 0 for an empty step."""
        return self.flops / self.memory_bytes if self.memory_bytes else 0.0

    def seconds(self, hardware: Hardware) -> float:
        """Shortest time on `hardware`: max(bytes / bandwidth, flops / rate) + link."""
        memory = self.memory_bytes / hardware.bandwidth
        arithmetic = self.flops / hardware.flops
        return max(memory, arithmetic) + self.link_bytes / hardware.link_bandwidth

    def bound(self, hardware: Hardware) -> str:
        """The limit that decides: "bandwidth" or "arithmetic"."""
        return "arithmetic" if self.intensity > hardware.ridge else "bandwidth"


def attention_pairs(start: int, count: int) -> int:
    """Query-key pairs of `count` causal queries after `start` cached tokens."""
    return count * start + count * (count + 1) // 2


def _matrix_weights(model: ModelConfig) -> int:
    """Weights of one layer that take part in a matrix product (no norms, no biases)."""
    attention = model.hidden_size * (model.qkv_size + model.q_size)
    return attention + 3 * model.hidden_size * model.intermediate_size


def _step_flops(model: ModelConfig, entries: list[Scheduled]) -> float:
    """Operations of a step on a model (or on one rank's share of it)."""
    tokens = sum(entry.count for entry in entries)
    pairs = sum(attention_pairs(entry.start, entry.count) for entry in entries)
    sampled = sum(entry.samples for entry in entries)
    layer = 2 * _matrix_weights(model) * tokens + 4 * model.q_size * pairs
    return model.num_layers * layer + 2 * model.hidden_size * model.vocab_size * sampled


def _weight_bytes(model: ModelConfig, samples: bool) -> float:
    """Bytes of weights that a step reads."""
    head = model.vocab_size * model.hidden_size if samples else 0
    layers = model.num_layers * model.layer_parameters + model.hidden_size
    return (layers + head) * DTYPE_BYTES[model.dtype]


def _kv_bytes(model: ModelConfig, entries: list[Scheduled]) -> float:
    """Bytes of keys and values that a step reads (`start`) and writes (`count`)."""
    tokens = sum(entry.start + entry.count for entry in entries)
    return tokens * model.kv_bytes_per_token(DTYPE_BYTES[model.dtype])


def shard(model: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """The share of `model` that one of `tensor_parallel_size` ranks holds.

    Raises `ConfigError` when heads or inner width can't be divided, or when KV heads can be
    neither divided nor repeated evenly.
    """
    ranks = tensor_parallel_size
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"tensor_parallel_size={ranks!r}: give a whole number >= 1")
    for name in ("num_heads", "intermediate_size"):
        if getattr(model, name) % ranks:
            raise ConfigError(
                f"tensor_parallel_size={ranks} doesn't divide {name}="
                f"{getattr(model, name)}; choose a size that does"
            )
    if model.num_kv_heads % ranks and ranks % model.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={ranks} neither divides num_kv_heads="
            f"{model.num_kv_heads} nor is a multiple of it; choose one that does either"
        )
    return replace(
        model,
        vocab_size=math.ceil(model.vocab_size / ranks),
        num_heads=model.num_heads // ranks,
        num_kv_heads=max(1, model.num_kv_heads // ranks),
        intermediate_size=model.intermediate_size // ranks,
    )


def _link_bytes(model: ModelConfig, tokens: int, ranks: int) -> float:
    """Bytes that each rank sends for a step's all-reduces (ring)."""
    hidden_states = tokens * model.hidden_size * DTYPE_BYTES[model.dtype]
    return (2 * model.num_layers + 1) * hidden_states * 2 * (ranks - 1) / ranks


def step_work(
    model: ModelConfig, entries: Iterable[Scheduled], tensor_parallel_size: int = 1
) -> Work:
    """Work of one step on one card (on each of the ranks, if there are several).

    `entries` may mix prefills, chunks and decodes; weights and cache have `model.dtype`.
    Raises `ConfigError` when the model can't be divided that way.
    """
    share = shard(model, tensor_parallel_size)
    if not (entries := list(entries)):
        return Work()
    tokens = sum(entry.count for entry in entries)
    return Work(
        flops=_step_flops(share, entries),
        weight_bytes=_weight_bytes(share, any(entry.samples for entry in entries)),
        kv_bytes=_kv_bytes(share, entries),
        link_bytes=_link_bytes(model, tokens, tensor_parallel_size),
    )


def decode_work(
    model: ModelConfig, batch: int, context: int, tensor_parallel_size: int = 1
) -> Work:
    """Work of a step in which `batch` requests of `context` cached tokens add one each."""
    return step_work(model, [Chunk(context, 1)] * batch, tensor_parallel_size)


def prefill_work(model: ModelConfig, prompt: int, tensor_parallel_size: int = 1) -> Work:
    """Work of one prompt of `prompt` tokens computed whole, up to its first new token."""
    return step_work(model, [Chunk(0, prompt)], tensor_parallel_size)


def decode_ceiling(
    model: ModelConfig,
    hardware: Hardware,
    batch: int,
    context: int,
    tensor_parallel_size: int = 1,
) -> float:
    """Most tokens/s that `batch` decoding requests can get from `hardware` together."""
    work = decode_work(model, batch, context, tensor_parallel_size)
    seconds = work.seconds(hardware)
    return batch / seconds if seconds else 0.0


def prefill_ceiling(
    model: ModelConfig, hardware: Hardware, prompt: int, tensor_parallel_size: int = 1
) -> float:
    """Most prompt tokens/s for prompts of `prompt` tokens, computed one at a time."""
    seconds = prefill_work(model, prompt, tensor_parallel_size).seconds(hardware)
    return prompt / seconds if prompt else 0.0


def critical_batch(
    model: ModelConfig, hardware: Hardware, context: int, tensor_parallel_size: int = 1
) -> int | None:
    """Smallest decode batch at which arithmetic is the limit; None if there is no such."""
    one = decode_work(model, 1, context, tensor_parallel_size)
    spare = one.flops / hardware.ridge - one.kv_bytes
    return math.ceil(one.weight_bytes / spare) if spare > 0 else None


def kv_capacity(
    model: ModelConfig,
    hardware: Hardware,
    utilization: float = 0.9,
    tensor_parallel_size: int = 1,
) -> int:
    """Tokens whose keys and values fit beside the weights; 0 if the weights don't fit.

    `utilization` is the share of memory to use; activations are not counted.
    """
    share, width = shard(model, tensor_parallel_size), DTYPE_BYTES[model.dtype]
    room = hardware.memory * utilization - share.num_parameters * width
    return max(0, int(room // share.kv_bytes_per_token(width)))


def max_batch(
    model: ModelConfig,
    hardware: Hardware,
    context: int,
    utilization: float = 0.9,
    tensor_parallel_size: int = 1,
) -> int:
    """Requests of `context` tokens each (at least 1) that fit at once."""
    tokens = kv_capacity(model, hardware, utilization, tensor_parallel_size)
    return tokens // max(1, context)
