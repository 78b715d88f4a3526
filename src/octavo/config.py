"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "OctavoError",
    "ConfigError",
    "ModelLoadError",
    "ROPE_TYPES",
    "RopeConfig",
    "SUPPORTED_ARCHITECTURES",
    "DTYPE_BYTES",
    "ModelConfig",
    "tiny_config",
    "ATTENTION_BACKENDS",
    "EngineConfig",
]


class OctavoError(Exception):
    """Root of every error that the package raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A model description or an engine setting that can't work; says why and what would."""


class ModelLoadError(OctavoError, RuntimeError):
    """Weights or a tokeniser that can't be found or read; names the file and the remedy."""


def _require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise `ConfigError` unless `value` is an int with low <= value <= high."""
    limits = f">= {low}" if high is None else f"from {low} to {high}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        raise ConfigError(f"{name}={value!r}: give a whole number {limits}")


def _require_number(name: str, value: Any, low: float, high: float | None = None) -> None:
    """Raise `ConfigError` unless low < value (<= high); NaN and infinity never pass."""
    limits = f"> {low:g}" + (f" and <= {high:g}" if high is not None else "")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and low < value < float("inf") and (high is None or value <= high)
    if not inside:
        raise ConfigError(f"{name}={value!r}: give a finite number {limits}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={value!r}: give one of {', '.join(choices)}")


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
_ROPE_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


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
        _require_choice("rope type", self.type, ROPE_TYPES)
        for name in ("theta", "factor", *_ROPE_NEEDS["llama3"], *_ROPE_OPTIONAL):
            if (value := getattr(self, name)) is not None:
                _require_number(f"rope {name}", value, 0)
        if self.type in ("llama3", "yarn"):
            original = self.original_max_position_embeddings
            _require_int("rope original_max_position_embeddings", original, 1)
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor={self.low_freq_factor!r}, high_freq_factor="
                f"{self.high_freq_factor!r}: the first must be below the second"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read the rotary settings of a parsed config.json (transformers 4 or 5 style).

        Raises `ConfigError` for a type outside `ROPE_TYPES`, a missing factor, or a rotation
        of only a part of each head.
        """
        given = _rope_settings(config)
        kind = given.get("rope_type", given.get("type", "default"))
        _require_choice("rope type", kind, ROPE_TYPES)
        if missing := [name for name in _ROPE_NEEDS[kind] if name not in given]:
            raise ConfigError(
                f"rope type {kind!r} needs {', '.join(missing)}; add it to config.json"
            )
        partial = given.get(
            "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
        )
        if partial not in (None, 1, 1.0):
            raise ConfigError(
                f"partial_rotary_factor={partial!r}: Octavo rotates whole heads only"
            )
        fields = {"theta": given["rope_theta"], "type": kind}
        if kind != "default":
            fields |= _scaled_rope_fields(kind, given, config)
        return cls(**fields)


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary dictionary of a config.json of either style, with its theta inside."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(
        isinstance(v, Mapping) for v in given.values()
    ):
        raise ConfigError(
            f"rope settings {given!r} differ from layer to layer or aren't a dictionary: "
            "Octavo supports one set of rotary settings for all layers"
        )
    top = {"rope_theta": config.get("rope_theta") or RopeConfig.theta}
    return {**top, **{key: value for key, value in given.items() if value is not None}}


def _length_ratio(longest: Any, original: Any) -> float:
    """How many times longer than in pretraining the model's texts may be."""
    _require_int("rope original_max_position_embeddings", original, 1)
    _require_int("max_position_embeddings", longest or original, 1)
    return float((longest or original) / original)


def _scaled_rope_fields(
    kind: str, given: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that only scaled rotary embeddings have."""
    if kind == "linear":
        return {"factor": given["factor"]}
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    original = original or given.get("original_max_position_embeddings") or longest
    fields = {"original_max_position_embeddings": original}
    if kind == "llama3":
        return fields | {name: given[name] for name in _ROPE_NEEDS["llama3"]}
    fields["factor"] = given.get("factor") or _length_ratio(longest, original)
    fields["truncate"] = bool(given.get("truncate", True))
    return fields | {name: given[name] for name in _ROPE_OPTIONAL if given.get(name)}


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
        _require_choice("architecture", self.architecture, SUPPORTED_ARCHITECTURES)
        for name in _SIZES:
            _require_int(name, getattr(self, name), 1)
        _require_number("rms_norm_eps", self.rms_norm_eps, 0)
        _require_choice("hidden_act", self.hidden_act, ("silu",))
        _require_choice("dtype", self.dtype, tuple(DTYPE_BYTES))
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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json as written by transformers 4 or 5.

        Raises `ConfigError` for an unknown architecture, a quantised checkpoint, sliding-window
        attention, an unknown rotary type, and missing or impossible sizes.
        """
        architecture = _read_architecture(config)
        _refuse_quantised(config)
        sizes = _read_sizes(config)
        _refuse_sliding_window(config, sizes["num_layers"])
        bos = _token_ids("bos_token_id", config.get("bos_token_id"))
        kv_heads = config.get("num_key_value_heads")
        return cls(
            architecture=architecture,
            **sizes,
            num_kv_heads=sizes["num_heads"] if kv_heads is None else kv_heads,
            head_dim=_read_head_dim(config, architecture),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            hidden_act=config.get("hidden_act", "silu"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias")) and architecture == "LlamaForCausalLM",
            rope=RopeConfig.from_hf(config),
            eos_token_ids=_token_ids("eos_token_id", config.get("eos_token_id")),
            bos_token_id=bos[0] if bos else None,
            dtype=_read_dtype(config),
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read `directory`/config.json; `ConfigError` names file, cause and remedy."""
        path = Path(directory) / "config.json"
        config = _read_json(path)
        for name in ("quantize_config.json", "quant_config.json"):
            if (path.parent / name).exists():
                config.setdefault("quantization_config", {"quant_method": f"see {name}"})
        try:
            return cls.from_hf(config)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


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
            " num_attention_heads and num_key_value_heads in config.json"
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


_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QUANTISED = ("quantization_config", "compression_config", "quantization")


def _read_architecture(config: Mapping[str, Any]) -> str:
    """The first supported name in `architectures`; by `model_type` where there is none."""
    names = config.get("architectures") or [_MODEL_TYPES.get(str(config.get("model_type")))]
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = names[0] or config.get("model_type")
    raise ConfigError(
        f"architecture {found!r} isn't supported; Octavo runs "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}: choose a checkpoint of one of these"
    )


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    """Refuse checkpoints whose weights need a dequantiser of their own (AWQ, GPTQ, ...)."""
    for key in _QUANTISED:
        if given := config.get(key):
            method = given.get("quant_method") if isinstance(given, Mapping) else given
            raise ConfigError(
                f"the checkpoint is quantised ({key}, method {method!r}), which Octavo "
                "can't read; use the original float32, bfloat16 or float16 checkpoint, or a "
                "GGUF file"
            )


def _refuse_sliding_window(config: Mapping[str, Any], num_layers: int) -> None:
    """Refuse models in which some layer sees only the most recent tokens."""
    kinds = config.get("layer_types") or []
    partial = sorted({str(kind) for kind in kinds} - {"full_attention"})
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    whole_layers = config.get("max_window_layers")
    if window and not kinds and whole_layers is not None and whole_layers < num_layers:
        partial = [f"sliding_window={window}"]
    if partial:
        raise ConfigError(
            f"some layers don't attend to the whole past ({', '.join(partial)}); Octavo "
            "supports full attention in every layer: set use_sliding_window to false if the "
            "model allows it, or choose another checkpoint"
        )


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    """An id, a list of ids or None as a tuple; `ConfigError` for anything else."""
    ids = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
    for token_id in ids:
        _require_int(name, token_id, 0)
    return tuple(dict.fromkeys(ids))


def _read_dtype(config: Mapping[str, Any]) -> str:
    """The checkpoint's dtype: `dtype` (newer) or `torch_dtype`; absent means float32."""
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(given).removeprefix("torch.")


_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}


def _read_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The required sizes under their own names; each must be a whole number above 0."""
    sizes = {}
    for ours, theirs in _REQUIRED.items():
        if config.get(theirs) is None:
            raise ConfigError(
                f"{theirs} is missing; take the complete config.json of the model"
            )
        _require_int(theirs, config[theirs], 1)
        sizes[ours] = config[theirs]
    return sizes


def _read_head_dim(config: Mapping[str, Any], architecture: str) -> int:
    """`head_dim` if given, else the family's rule (Llama: hidden size over heads)."""
    if (given := config.get("head_dim")) is not None:
        _require_int("head_dim", given, 1)
        return int(given)
    if architecture == "Qwen3ForCausalLM":
        return 128
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ConfigError(
            f"hidden_size={hidden} isn't a multiple of num_attention_heads={heads} and "
            "head_dim isn't given; add head_dim to config.json, or mend the two numbers"
        )
    return int(hidden // heads)


def _read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; `ConfigError` when the file is missing, broken or no object."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} doesn't exist: give a model directory that holds config.json, the "
            "safetensors files and the tokeniser's files"
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} can't be read ({error}): download it again") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} holds no JSON object: download it again")
    return parsed


ATTENTION_BACKENDS = ("auto", "torch")


@dataclass(frozen=True)
class EngineConfig:
    """Every switch of the engine; `ConfigError` names field, value and allowed range.

    dtype: "auto" is the checkpoint's on CUDA (float16 instead of bfloat16 below sm_80); on
        the CPU bfloat16 only where the CPU multiplies it natively, else float32.
    device: "auto" (CUDA if there is any), "cpu", "cuda" or "cuda:N".
    max_model_len: longest prompt plus output, in tokens; None is the model's own limit,
        lowered with a warning if the pool of blocks is smaller.
    max_num_seqs: requests that may run at once; None is 256 on CUDA and 32 on the CPU.
    max_num_batched_tokens: tokens in one step; None makes room for the longest prompt.
    block_size: tokens in one KV block.
    num_kv_blocks, kv_cache_memory (bytes): size of the pool, set by hand; at most one.
    gpu_memory_utilization: share of the card's memory to use when neither is set.
    attention: the backend's name; "auto" takes the fastest that the machine supports.
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
    attention: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, ("auto", *DTYPE_BYTES))
        _require_choice("attention", self.attention, ATTENTION_BACKENDS)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={self.device!r}: give auto, cpu, cuda or cuda:N")
        _require_int("block_size", self.block_size, 1)
        for name in _OPTIONAL_COUNTS:
            if (value := getattr(self, name)) is not None:
                _require_int(name, value, 1)
        _require_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**64 - 1)
        _check_budgets(self)


_OPTIONAL_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "kv_cache_memory",
)


def _check_budgets(config: EngineConfig) -> None:
    """Refuse settings that contradict each other; unset ones are resolved later."""
    budget = config.max_num_batched_tokens
    for name in ("max_model_len", "max_num_seqs"):
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
