"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = [
    "OctavoError",
    "ConfigError",
    "ModelLoadError",
    "require_int",
    "require_number",
    "require_choice",
    "ROPE_TYPES",
    "YARN_NUMBERS",
    "RopeConfig",
    "SUPPORTED_ARCHITECTURES",
    "DTYPE_BYTES",
    "ModelConfig",
    "tiny_config",
    "ATTENTION_BACKENDS",
    "LAYER_OPS",
    "SAMPLERS",
    "PREFIX_CACHES",
    "EngineConfig",
]


class OctavoError(Exception):
    """Root of every error that the package raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A model description or an engine setting that can't work; says why and what would."""


class ModelLoadError(OctavoError, RuntimeError):
    """Weights or a tokeniser that can't be found or read; names the file and the remedy."""


def require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise `ConfigError` unless `value` is an int with low <= value <= high."""
    limits = f">= {low}" if high is None else f"from {low} to {high}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        raise ConfigError(f"{name}={value!r}: give a whole number {limits}")


def require_number(name: str, value: Any, low: float, high: float | None = None) -> None:
    """Raise `ConfigError` unless low < value (<= high); NaN and infinity never pass."""
    limits = f"> {low:g}" + (f" and <= {high:g}" if high is not None else "")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and low < value < float("inf") and (high is None or value <= high)
    if not inside:
        raise ConfigError(f"{name}={value!r}: give a finite number {limits}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={value!r}: give one of {', '.join(choices)}")


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_NUMBERS = ("theta", "factor", "low_freq_factor", "high_freq_factor")
YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings after normalisation; lengths in tokens.

    `factor` stretches positions (linear, llama3, yarn); `low_freq_factor` and
    `high_freq_factor` belong to llama3; the fields from `beta_fast` on to yarn.
    Sources: Su et al. 2021 (RoFormer), Peng et al. 2023 (YaRN), Llama 3.1's release.
    Raises `ConfigError` for an unknown type or a value without meaning.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        require_choice("rope type", self.type, ROPE_TYPES)
        for name in (*_ROPE_NUMBERS, *YARN_NUMBERS):
            if (value := getattr(self, name)) is not None:
                require_number(f"rope {name}", value, 0)
        if self.type in ("llama3", "yarn"):
            original = self.original_max_position_embeddings
            require_int("rope original_max_position_embeddings", original, 1)
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor={self.low_freq_factor!r}, high_freq_factor="
                f"{self.high_freq_factor!r}: the first must be below the second"
            )


SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only model, whatever file they came from.

    `head_dim` is the width of one head in elements and need not be hidden_size / num_heads.
    `attention_bias` covers the q, k, v and o projections; `dtype` is the checkpoint's.
    `eos_token_ids` holds what config.json says; generation settings may add more.
    Raises `ConfigError` when the numbers don't fit together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = RopeConfig()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require_choice("architecture", self.architecture, SUPPORTED_ARCHITECTURES)
        for name in _SIZES:
            require_int(name, getattr(self, name), 1)
        require_number("rms_norm_eps", self.rms_norm_eps, 0)
        require_choice("hidden_act", self.hidden_act, ("silu",))
        require_choice("dtype", self.dtype, tuple(DTYPE_BYTES))
        _check_heads(self)

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of one token in one layer; values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the merged query, key and value projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def has_qk_norm(self) -> bool:
        """Whether each query and key head is normalised before the rotation (Qwen3)."""
        return self.architecture == "Qwen3ForCausalLM"

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes that one token's keys and values take in the cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, MLP, norms, biases."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = hidden * (self.qkv_size + self.q_size)
        attention += (self.qkv_size + hidden) * self.attention_bias
        mlp = 3 * hidden * inner + (2 * inner + hidden) * self.mlp_bias
        norms = 2 * hidden + 2 * self.head_dim * self.has_qk_norm
        return attention + mlp + norms

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_layers * self.layer_parameters + self.hidden_size


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def _check_heads(config: ModelConfig) -> None:
    """Refuse head counts and widths that attention can't be computed with."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_heads={config.num_heads} isn't a multiple of num_kv_heads="
            f"{config.num_kv_heads}: each KV head must serve equally many query heads; check "
            "num_attention_heads and num_key_value_heads in config.json"
        )
    if config.head_dim % 2:
        raise ConfigError(
            f"head_dim={config.head_dim}: rotary embedding turns pairs, so the width of a "
            "head must be even; check head_dim in config.json"
        )


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> ModelConfig:
    """A model small enough for float64 tests; `overrides` are fields of `ModelConfig`."""
    fields: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    }
    return ModelConfig(architecture, **(fields | overrides))


ATTENTION_BACKENDS = ("auto", "torch", "native", "triton", "flash")
LAYER_OPS = ("auto", "torch", "native", "fused")
SAMPLERS = ("auto", "torch", "fused")
PREFIX_CACHES = ("none", "hash", "radix")


@dataclass(frozen=True)
class EngineConfig:
    """Every switch of the engine; `ConfigError` names field, value and allowed range.

    dtype: "auto" is the checkpoint's on CUDA (float16 instead of bfloat16 below sm_80); on
        the CPU bfloat16 only where the CPU multiplies it natively, else float32.
    device: "auto" (CUDA if there is any), "cpu", "cuda" or "cuda:N".
    max_model_len: longest prompt plus output, in tokens; None is the model's own limit,
        lowered with a warning if the pool of blocks is smaller.
    max_num_seqs: requests that may run at once; None is 256 on CUDA and 32 on the CPU.
    max_num_batched_tokens: tokens in one step; None is 8,192 on CUDA and 2,048 on the CPU, and
        more if prompts must stay whole.
    block_size: tokens in one KV block.
    num_kv_blocks, kv_cache_memory (bytes): size of the pool, set by hand; at most one.
    gpu_memory_utilization: share of the card's memory to use when neither is set.
    prefix_cache: "hash", "radix" or "none" (chapter 05).
    chunked_prefill: cut prompts that don't fit into what is left of a step (chapter 06);
        max_chunk_tokens: most tokens of one prompt in one step.
    scheduling_policy: "fcfs", or "priority" (lower `priority` first); batching: "decode-first",
        or "prefill-first"; defer_shared_prefix: wait a step for a prefix that another request
        is computing (chapter 03).
    attention: who computes attention, "torch", "native" (C on a CPU), "triton" (kernels on a
        CUDA card) or "flash" (the flash-attn package); layer_ops: who computes the layers,
        "torch", "native" or "fused" (kernels on a CUDA card); sampler: who picks the tokens,
        "torch" or "fused". "auto" takes the fastest that the machine supports.
    cuda_graphs: replay recorded decode steps; enforce_eager: the same as cuda_graphs=False.
    overlap: plan the next step while one runs (chapter 09). None: both on a CUDA card only.
    seed: base for requests without a seed of their own; None takes fresh entropy.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: str = "hash"
    chunked_prefill: bool = True
    max_chunk_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    batching: str = "decode-first"
    defer_shared_prefix: bool = False
    attention: str = "auto"
    layer_ops: str = "auto"
    sampler: str = "auto"
    cuda_graphs: bool | None = None
    enforce_eager: bool = False
    overlap: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, ("auto", *DTYPE_BYTES))
        require_choice("attention", self.attention, ATTENTION_BACKENDS)
        require_choice("layer_ops", self.layer_ops, LAYER_OPS)
        require_choice("sampler", self.sampler, SAMPLERS)
        require_choice("prefix_cache", self.prefix_cache, PREFIX_CACHES)
        require_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        require_choice("batching", self.batching, ("decode-first", "prefill-first"))
        for name in ("chunked_prefill", "defer_shared_prefix", "enforce_eager"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}={value!r}: give True or False")
        for name in ("cuda_graphs", "overlap"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ConfigError(f"{name}={value!r}: give True, False or None")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={self.device!r}: give auto, cpu, cuda or cuda:N")
        require_int("block_size", self.block_size, 1)
        for name in _OPTIONAL_COUNTS:
            if (value := getattr(self, name)) is not None:
                require_int(name, value, 1)
        require_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        if self.seed is not None:
            require_int("seed", self.seed, 0, 2**64 - 1)
        _check_budgets(self)
        if self.cuda_graphs and self.enforce_eager:
            raise ConfigError("cuda_graphs=True, enforce_eager=True: give one of them")


_OPTIONAL_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "kv_cache_memory",
    "max_chunk_tokens",
)


def _check_budgets(config: EngineConfig) -> None:
    """Refuse settings that contradict each other; unset ones are resolved later."""
    budget = config.max_num_batched_tokens
    names = (
        ("max_num_seqs",) if config.chunked_prefill else ("max_model_len", "max_num_seqs")
    )
    for name in names:
        value = getattr(config, name)
        if budget is not None and value is not None and budget < value:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is below {name}={value}: give at least "
                f"{value}, or lower {name} to {budget}"
            )
    if config.num_kv_blocks is not None and config.kv_cache_memory is not None:
        raise ConfigError(
            f"num_kv_blocks={config.num_kv_blocks} and kv_cache_memory="
            f"{config.kv_cache_memory} both size the pool of KV blocks: give one of them"
        )
