"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.config import DTYPE_BYTES, ConfigError, ModelConfig, require_int
from octavo.presets import HARDWARE as HARDWARE
from octavo.presets import MODELS as MODELS
from octavo.presets import Hardware
from octavo.presets import hardware_preset as hardware_preset
from octavo.presets import model_preset as model_preset

__all__ = [
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
    require_int("tensor_parallel_size", ranks, 1)
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
