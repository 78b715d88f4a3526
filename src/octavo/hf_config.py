"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config import (
    DTYPE_BYTES,
    ROPE_TYPES,
    SUPPORTED_ARCHITECTURES,
    YARN_NUMBERS,
    ConfigError,
    ModelConfig,
    RopeConfig,
    require_int,
)
from octavo.hf_fields import read_names, read_switch, require_supported

__all__ = ["rope_from_hf", "model_config_from_hf", "read_model_config"]


_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


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


def rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Read the rotary settings of a parsed config.json (transformers 4 or 5 style).

    Raises `ConfigError` for a type outside `ROPE_TYPES`, a missing factor, or a rotation
    of only a part of each head.
    """
    given = _rope_settings(config)
    kind = given.get("rope_type", given.get("type", "default"))
    require_supported("rope type", kind, ROPE_TYPES)
    if missing := [name for name in _ROPE_NEEDS[kind] if name not in given]:
        raise ConfigError(
            f"rope type {kind!r} needs {', '.join(missing)}; take the complete config.json "
            "of the model"
        )
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ConfigError(
            f"partial_rotary_factor={partial!r}: Octavo rotates whole heads only"
        )
    fields = {"theta": given["rope_theta"], "type": kind}
    if kind != "default":
        fields |= _scaled_rope_fields(kind, given, config)
    return RopeConfig(**fields)


def _length_ratio(longest: Any, original: Any) -> float:
    """How many times longer than in pretraining the model's texts may be."""
    require_int("rope original_max_position_embeddings", original, 1)
    require_int("max_position_embeddings", longest or original, 1)
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
    fields["truncate"] = read_switch(given, "truncate", True)
    return fields | {name: given[name] for name in YARN_NUMBERS if given.get(name)}


_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QUANTISED = ("quantization_config", "compression_config", "quantization")


def _read_architecture(config: Mapping[str, Any]) -> str:
    """The first supported name in `architectures`; by `model_type` where there is none."""
    kind = str(config.get("model_type"))
    names = read_names(config, "architectures") or [_MODEL_TYPES.get(kind, kind)]
    found = next((name for name in names if name in SUPPORTED_ARCHITECTURES), names[0])
    require_supported("architecture", found, SUPPORTED_ARCHITECTURES)
    return found


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
    kinds = read_names(config, "layer_types")
    partial = sorted(set(kinds) - {"full_attention"})
    window = read_switch(config, "use_sliding_window") and config.get("sliding_window")
    whole_layers = config.get("max_window_layers")
    if window and not kinds and whole_layers is not None:
        require_int("max_window_layers", whole_layers, 0)
        partial = [f"sliding_window={window}"] if whole_layers < num_layers else []
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
        require_int(name, token_id, 0)
    return tuple(dict.fromkeys(ids))


def _read_dtype(config: Mapping[str, Any]) -> str:
    """The checkpoint's dtype: `dtype` (newer) or `torch_dtype`; absent means float32."""
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    require_supported("dtype", name, tuple(DTYPE_BYTES))
    return name


def _read_activation(config: Mapping[str, Any]) -> str:
    given = config.get("hidden_act", "silu")
    require_supported("hidden_act", given, ("silu",))
    return str(given)


_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}


def _read_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes by our names: those required, whole and above 0, and the KV heads.

    Without grouped-query attention there are as many KV heads as heads, and often no entry.
    """
    sizes = {}
    for ours, theirs in _REQUIRED.items():
        if config.get(theirs) is None:
            raise ConfigError(
                f"{theirs} is missing; take the complete config.json of the model"
            )
        require_int(theirs, config[theirs], 1)
        sizes[ours] = config[theirs]
    kv_heads = config.get("num_key_value_heads")
    return sizes | {"num_kv_heads": sizes["num_heads"] if kv_heads is None else kv_heads}


def _read_head_dim(config: Mapping[str, Any], architecture: str) -> int:
    """`head_dim` if given, else the family's rule (Llama: hidden size over heads)."""
    if (given := config.get("head_dim")) is not None:
        require_int("head_dim", given, 1)
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


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json as written by transformers 4 or 5.

    Raises `ConfigError` for an unknown architecture, a quantised checkpoint, sliding-window
    attention, an unknown rotary type, and missing or impossible sizes.
    """
    architecture = _read_architecture(config)
    _refuse_quantised(config)
    sizes = _read_sizes(config)
    _refuse_sliding_window(config, sizes["num_layers"])
    bos = _token_ids("bos_token_id", config.get("bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        **sizes,
        head_dim=_read_head_dim(config, architecture),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        hidden_act=_read_activation(config),
        tie_word_embeddings=read_switch(config, "tie_word_embeddings"),
        attention_bias=read_switch(config, "attention_bias"),
        mlp_bias=read_switch(config, "mlp_bias") and architecture == "LlamaForCausalLM",
        rope=rope_from_hf(config),
        eos_token_ids=_token_ids("eos_token_id", config.get("eos_token_id")),
        bos_token_id=bos[0] if bos else None,
        dtype=_read_dtype(config),
    )


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


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read `directory`/config.json; `ConfigError` names file, cause and remedy."""
    path = Path(directory) / "config.json"
    config = _read_json(path)
    for name in ("quantize_config.json", "quant_config.json"):
        if (path.parent / name).exists():
            config.setdefault("quantization_config", {"quant_method": f"see {name}"})
    try:
        return model_config_from_hf(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
