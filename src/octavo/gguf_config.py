"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from octavo.config import ModelLoadError, RopeConfig
from octavo.layers import rope_frequencies

__all__ = ["open_gguf", "gguf_config", "Metadata"]


class _Reader(gguf.GGUFReader):
    """A reader that stops at the end of the file instead of reading less than asked for."""

    def _get(
        self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any
    ) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"{len(self.data)} bytes long, but it needs at least {end}")
        return super()._get(offset, dtype, count, *rest, **named)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Map a GGUF file and read its tables. Raises `ModelLoadError` for anything else."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as cause:
        raise ModelLoadError(f"{path} can't be opened: {cause}") from cause
    if start[:4] != b"GGUF":
        raise ModelLoadError(
            f"{path} isn't a GGUF file, it starts with {start!r}: perhaps an error page or "
            "a Git LFS pointer was saved in its place; download it again"
        )
    try:
        return _Reader(path)
    except Exception as cause:  # the package raises whatever a wrong byte leads to
        raise ModelLoadError(_explain_unreadable(path, cause)) from cause


def _explain_unreadable(path: Path, cause: Exception) -> str:
    if "GGMLQuantizationType" in str(cause):
        return (
            f"{path} uses a quantisation type that isn't known here ({cause}); use a file "
            "of another type (such as Q8_0 or Q4_K_M), or a newer gguf package"
        )
    return (
        f"{path} is truncated or corrupt ({cause}); the download probably stopped "
        "half-way: delete it and download it again"
    )


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SETTINGS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def gguf_config(reader: gguf.GGUFReader, path: Path) -> dict[str, Any]:
    """The config.json of the model in a GGUF file, in transformers' names.

    Raises `ModelLoadError` for other architectures and settings that can't be kept.
    """
    metadata = Metadata(reader, path)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    config = {name: metadata.number(key) for name, key in _SETTINGS.items()}
    _check_layers(path, shapes, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    derived = config["hidden_size"] // heads
    head_dim = metadata.number("attention.key_length", derived)
    _check_head_widths(metadata, head_dim)
    return config | {
        "architectures": [_ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "head_dim": head_dim,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "vocab_size": shapes["token_embd.weight"][1],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader, metadata, head_dim),
        "bos_token_id": metadata.raw("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.raw("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


class Metadata:
    """A GGUF file's key-value table. Everything it refuses is a `ModelLoadError`."""

    def __init__(self, reader: gguf.GGUFReader, path: Path) -> None:
        self.fields, self.path = reader.fields, path
        self.architecture = self.raw("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{path} holds a model of architecture {self.architecture!r}; Octavo "
                f"reads GGUF files of {', '.join(_ARCHITECTURES)}"
            )

    def raw(self, key: str) -> Any:
        """The value of a full key: text, a number or a list; None if absent."""
        field = self.fields.get(key)
        try:
            return None if field is None else field.contents()
        except ValueError as cause:  # text that isn't UTF-8
            raise ModelLoadError(f"{self.path}: {key} is corrupt ({cause})") from cause

    def number(self, key: str, default: float | None = None) -> Any:
        """The value of `{architecture}.{key}`, which must be one number above 0.

        A float32 comes back as the shortest decimal that means it, such as 1e-05.
        """
        value: Any = self.raw(f"{self.architecture}.{key}")
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ModelLoadError(
                f"{self.path}: {self.architecture}.{key} is {value!r}, but one positive "
                "number for all layers is needed; the file is corrupt or of a model that "
                "Octavo can't run"
            )
        return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_layers(path: Path, shapes: Iterable[str], num_layers: int) -> None:
    """Refuse a file without an embedding or with other layers than it says."""
    found = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    if "token_embd.weight" not in shapes or len(found) != num_layers:
        raise ModelLoadError(
            f"{path} says that it has {num_layers} layers, and has tensors of {len(found)}"
            f"{'' if 'token_embd.weight' in shapes else ' and no token_embd.weight'}; it "
            "isn't a whole model (one part of several?): use a single, complete file"
        )


def _check_head_widths(metadata: Metadata, head_dim: int) -> None:
    """Keys, values and the rotation must all be `head_dim` wide."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if (width := metadata.number(key, head_dim)) != head_dim:
            raise ModelLoadError(
                f"{metadata.path}: {key} is {width}, but heads are {head_dim} wide; "
                "Octavo runs models whose keys, values and rotations have one width"
            )


def _rope_scaling(
    reader: gguf.GGUFReader, metadata: Metadata, head_dim: int
) -> dict[str, Any] | None:
    """The `rope_scaling` entry of config.json, or None."""
    divisors = [t for t in reader.tensors if t.name == "rope_freqs.weight"]
    kind = metadata.raw(f"{metadata.architecture}.rope.scaling.type") or "none"
    if kind == "none" and not divisors:
        return None
    if kind == "none":
        values = torch.tensor(np.array(divisors[0].data, dtype=np.float32))
        return _llama3_scaling(values, metadata, head_dim)
    if divisors or kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{metadata.path}: rope scaling {kind!r}"
            f"{' with a rope_freqs tensor' if divisors else ''} isn't supported; linear, "
            "yarn and llama3 are: use the original checkpoint"
        )
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    return scaling if kind == "linear" else scaling | _yarn_fields(metadata)


def _llama3_scaling(
    divisors: Tensor, metadata: Metadata, head_dim: int
) -> dict[str, Any] | None:
    """The setting behind llama3's divisors [head_dim / 2], checked against each of them."""
    if bool((divisors == 1).all()):
        return None
    theta = metadata.number("rope.freq_base", 10000.0)
    factor = round(divisors.max().item(), 4)
    candidate = RopeConfig(theta, "llama3", factor, original_max_position_embeddings=8192)
    plain = rope_frequencies(RopeConfig(theta), head_dim)[0]
    expected = plain / rope_frequencies(candidate, head_dim)[0]
    if divisors.shape != expected.shape or not torch.allclose(
        divisors, expected, rtol=1e-4
    ):
        raise ModelLoadError(
            f"{metadata.path}: the tensor rope_freqs.weight isn't a llama3 scaling of an "
            "8192-token model; Octavo can't express it: use the original checkpoint"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": candidate.low_freq_factor,
        "high_freq_factor": candidate.high_freq_factor,
        "original_max_position_embeddings": candidate.original_max_position_embeddings,
    }


def _yarn_fields(metadata: Metadata) -> dict[str, Any]:
    """YaRN's settings; those without a counterpart must have their default."""
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if metadata.raw(f"{metadata.architecture}.rope.scaling.{key}") not in (None, 1, -1):
            raise ModelLoadError(
                f"{metadata.path}: rope.scaling.{key} isn't 1, which Octavo can't "
                "express; use the original checkpoint"
            )
    length = metadata.number("context_length")
    original = metadata.number("rope.scaling.original_context_length", length)
    return {
        "original_max_position_embeddings": original,
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }
