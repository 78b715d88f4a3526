"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.checkpoint import (
    DTYPE_BYTES,
    StoredTensor,
    how_to_replace,
    open_safetensors,
    stored_tensors,
)
from octavo.config import ModelConfig, ModelLoadError
from octavo.hf_config import read_model_config
from octavo.layers import MergedLinear
from octavo.models import build_model
from octavo.models.llama import LlamaForCausalLM

__all__ = [
    "Progress",
    "init_random_weights",
    "checkpoint_targets",
    "load_weights",
    "load_model",
    "check_tensors",
    "load_generation_eos",
]


Progress = Callable[[int, int], None]


def init_random_weights(
    model: nn.Module, seed: int, device: torch.device | str = "cpu"
) -> None:
    """Fill every parameter in place from `seed`: matrices ~ N(0, 1/in), norms around 1.

    Biases are random and non-zero. The draw happens in float32 on `device`, whose kind decides
    which numbers a seed gives.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        if name.endswith("bias"):
            values = 0.1 * noise
        elif parameter.dim() == 1:
            values = 1 + 0.1 * noise
        else:
            values = noise if "embed" in name else noise * parameter.size(-1) ** -0.5
        parameter.detach().copy_(values)


def checkpoint_targets(model: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> the parameter, or rows of a merged one, it is copied into."""
    targets: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, MergedLinear):  # its pieces stand beside it, not below it
            parent = prefix.rpartition(".")[0]
            own = module.pieces()
        else:
            parent = prefix
            own = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
        targets |= {f"{parent}.{name}".lstrip("."): tensor for name, tensor in own.items()}
    return targets


def load_weights(
    model: nn.Module, directory: Path, progress: Progress | None = None
) -> None:
    """Copy a checkpoint's tensors into the model's parameters, converting the dtype.

    `progress(done_bytes, total_bytes)` is called after each tensor. Returns only if every
    parameter was written; raises `ModelLoadError` otherwise.
    """
    stored, targets = stored_tensors(directory), checkpoint_targets(model)
    check_tensors(stored, targets, directory)
    total, done = sum(stored[name].num_bytes for name in targets), 0
    for file in dict.fromkeys(stored[name].file for name in targets):
        with open_safetensors(file) as opened:
            for name in [name for name in targets if stored[name].file == file]:
                _copy_tensor(stored[name], opened.get_tensor(name), targets.pop(name))
                done += stored[name].num_bytes
                if progress is not None:
                    progress(done, total)
    _check_tied_head(model, stored)


def _copy_tensor(stored: StoredTensor, given: Tensor, target: Tensor) -> None:
    """Copy into the model; `ModelLoadError` where what arrives isn't finite."""
    target.copy_(given)
    if _all_finite(target):
        return
    where = f"tensor {stored.name} in {stored.file}"
    if _all_finite(given):
        kind = str(target.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{where} has numbers too large for {kind}; use bfloat16 or float32"
        )
    raise ModelLoadError(
        f"{where} holds infinities or NaN, so the file is corrupt; "
        f"{how_to_replace(stored.file)}"
    )


def _all_finite(x: Tensor) -> bool:
    return all(bool(edge.isfinite()) for edge in torch.aminmax(x))


def load_model(
    directory: Path | str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[LlamaForCausalLM, ModelConfig]:
    """The model of a checkpoint directory, ready to run, and its config.

    Raises `ConfigError` for a config.json that can't be used and `ModelLoadError` for
    weights that don't fit it.
    """
    directory = Path(directory)
    config = read_model_config(directory)
    model = build_model(config, dtype, device)
    load_weights(model, directory, progress)
    return model, config


def check_tensors(
    stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor], where: Path
) -> None:
    """Compare a table with what the model needs; `ModelLoadError` names the first fault."""
    if missing := targets.keys() - stored.keys():
        raise ModelLoadError(
            f"{where} lacks tensor {_list(missing)}; the checkpoint is incomplete, or its "
            "config.json describes another model (tied head? biases?): "
            f"{how_to_replace(where, 'download it again')}"
        )
    extra = [
        name for name in stored.keys() - targets.keys() if not _is_surplus(name, targets)
    ]
    if extra:
        raise ModelLoadError(
            f"{where} has tensor {_list(extra)}, for which the model in config.json has no "
            "place; config and weights don't match (number of layers? biases?): check both"
        )
    for name, target in targets.items():
        _check_tensor(stored[name], target)


def _check_tensor(stored: StoredTensor, target: Tensor) -> None:
    if stored.shape != tuple(target.shape):
        raise ModelLoadError(
            f"tensor {stored.name} in {stored.file} has shape {list(stored.shape)}, but "
            f"config.json asks for {list(target.shape)}; they belong to different models"
        )
    if stored.dtype not in DTYPE_BYTES:
        raise ModelLoadError(
            f"tensor {stored.name} in {stored.file} is stored as {stored.dtype}; Octavo "
            f"reads {', '.join(DTYPE_BYTES)}: use an unquantised checkpoint or a GGUF file"
        )


def _is_surplus(name: str, targets: Mapping[str, object]) -> bool:
    """Whether a stored tensor is known to be redundant for this model."""
    tied_head = name == "lm_head.weight" and name not in targets
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _check_tied_head(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a stored head that differs from the embedding it is tied to."""
    own = checkpoint_targets(model)
    if "lm_head.weight" in own or "lm_head.weight" not in stored:
        return
    embedding, file = own["model.embed_tokens.weight"], stored["lm_head.weight"].file
    with open_safetensors(file) as opened:
        head = opened.get_tensor("lm_head.weight").to(embedding)
    if not torch.equal(head, embedding):
        raise ModelLoadError(
            f"config.json ties the head to the embedding, but lm_head.weight in {file} "
            "differs from it; set tie_word_embeddings to false to use the stored head, or "
            "remove it"
        )


def load_generation_eos(directory: Path | str) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json; empty if there is no such file or entry.

    Raises `ModelLoadError` if the file can't be understood.
    """
    file = Path(directory) / "generation_config.json"
    if not file.exists():
        return ()
    try:
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise ValueError(f"eos_token_id={given!r} isn't an id or a list of ids")
    except (OSError, ValueError, AttributeError) as cause:
        raise ModelLoadError(
            f"{file} can't be used ({cause}); mend or delete it"
        ) from cause
    return tuple(dict.fromkeys(ids))
