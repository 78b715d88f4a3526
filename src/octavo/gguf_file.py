"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint import StoredTensor
from octavo.config import ConfigError, ModelConfig, ModelLoadError
from octavo.gguf_config import Metadata, gguf_config, open_gguf
from octavo.hf_config import model_config_from_hf
from octavo.models import build_model
from octavo.weights import check_tensors, checkpoint_targets

__all__ = ["checkpoint_name", "restore_rows", "convert_gguf"]


_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a GGUF tensor; an unknown one comes back unchanged."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    table = _IN_LAYER if match and match[1] else _TOP
    if match is None or match[2] not in table:
        return name
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{table[match[2]]}.{match[3]}"


def restore_rows(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: in each head, rows (0, 1), (2, 3), ... become halves."""
    heads = x.reshape(num_heads, -1, 2, *x.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(x.shape)


def convert_gguf(path: Path, directory: Path) -> None:
    """Write a GGUF model into an existing empty directory as a bfloat16 checkpoint.

    Llama and Qwen3. Raises `ModelLoadError` that names the file, the cause and the remedy.
    """
    reader = open_gguf(path)
    try:
        settings = gguf_config(reader, path)
        config = model_config_from_hf(settings)
    except ConfigError as cause:
        raise ModelLoadError(f"{path}: {cause}") from cause
    sources = _sources(reader, config, path)
    tensors: Iterator[Tensor] = (_dequantise(source, path) for source in sources)
    _write_safetensors(directory / "model.safetensors", sources, tensors)
    metadata = Metadata(reader, path)
    for name, content in (
        ("config.json", settings),
        ("generation_config.json", _generation_config(metadata)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    _save_tokenizer(path, metadata, directory)


class _Source(NamedTuple):
    """A tensor of the GGUF file and what it will be in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    tensor: gguf.ReaderTensor
    permuted_heads: int | None


def _sources(reader: gguf.GGUFReader, config: ModelConfig, path: Path) -> list[_Source]:
    """The tensors to convert, in file order, checked against the model."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    permuted = config.architecture == "LlamaForCausalLM"
    sources = []
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        kind = tensor.name.split(".")[-2] if "." in tensor.name else ""
        shape = tuple(int(size) for size in reversed(tensor.shape))
        name, row_heads = (
            checkpoint_name(tensor.name),
            heads.get(kind) if permuted else None,
        )
        sources.append(_Source(name, shape, tensor, row_heads))
    model = build_model(config, torch.bfloat16, "meta")
    stored = {s.name: StoredTensor(s.name, path, s.shape, "BF16") for s in sources}
    check_tensors(stored, checkpoint_targets(model), path)
    return sources


def _dequantise(source: _Source, path: Path) -> Tensor:
    """One tensor in bfloat16, in the checkpoint's row order."""
    kind = source.tensor.tensor_type
    try:
        values = gguf.dequantize(source.tensor.data, kind).reshape(source.shape)
    except NotImplementedError as cause:
        raise ModelLoadError(
            f"{path}: tensor {source.tensor.name} is quantised as {kind.name}, which the "
            "gguf package can't undo; use a file of another type, such as Q8_0 or Q4_K_M"
        ) from cause
    if not np.isfinite(values).all():
        raise ModelLoadError(
            f"{path}: tensor {source.tensor.name} holds infinities or NaN, so the file is "
            "corrupt; delete it and download it again"
        )
    if source.permuted_heads is not None:
        values = restore_rows(values, source.permuted_heads)
    return torch.from_numpy(np.array(values, copy=not values.flags.writeable)).bfloat16()


def _write_safetensors(
    file: Path, sources: list[_Source], tensors: Iterable[Tensor]
) -> None:
    """Write bfloat16 tensors as one safetensors file, holding one of them at a time."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in sources:
        start, end = end, end + 2 * int(np.prod(source.shape))
        entry = {"dtype": "BF16", "shape": source.shape, "data_offsets": [start, end]}
        table[source.name] = entry
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            out.write(tensor.contiguous().view(torch.int16).numpy().tobytes())


def _save_tokenizer(path: Path, metadata: Metadata, directory: Path) -> None:
    """Write the tokeniser and chat template of a GGUF file into a directory."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as cause:  # many libraries take part; all of them mean the same here
        raise ModelLoadError(
            f"the tokeniser in {path} can't be read ({type(cause).__name__}: {cause}); use "
            "another GGUF file of this model, or the original checkpoint"
        ) from cause
    if metadata.raw("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.save_pretrained(str(directory))


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: the ids that begin, end and pad a text (B77)."""
    ids = {
        name: metadata.raw(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "padding", "eos", "eot")
    }
    ends = dict.fromkeys(i for i in (ids["eos"], ids["eot"]) if i is not None)
    given = {"bos": ids["bos"], "pad": ids["padding"], "eos": list(ends) or None}
    return {f"{name}_token_id": value for name, value in given.items() if value is not None}
