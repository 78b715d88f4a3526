"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from octavo.config import ModelLoadError
from octavo.native import cache_root

__all__ = [
    "DTYPE_BYTES",
    "StoredTensor",
    "how_to_replace",
    "open_safetensors",
    "read_table",
    "stored_tensors",
]


DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


class StoredTensor(NamedTuple):
    """One entry of a safetensors table; `dtype` in the file's spelling, such as "BF16"."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


# As module hub names converted models: after a .gguf file, or a wheel and the version.
_CONVERTED = re.compile(r".+-([0-9a-f]{12}|[0-9a-f]{8}-v\d+)")


def how_to_replace(path: Path, in_general: str = "delete it and download it again") -> str:
    """What to do about a damaged checkpoint, so that the next start gets a whole one."""
    for folder in (path, *path.parents):
        if folder.parent == cache_root() and _CONVERTED.fullmatch(folder.name):
            return f"remove the directory {folder}: it is made again at the next start"
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return f"remove the directory {folder.parent}: it is downloaded again then"
    return in_general


def open_safetensors(file: Path) -> safe_open:
    """Map a safetensors file; its header is checked against the file's length."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as cause:
        raise ModelLoadError(
            f"{file} can't be read as safetensors ({cause}): it is missing, truncated, "
            f"corrupt, or a Git LFS pointer in its place; {how_to_replace(file)}"
        ) from cause


def read_table(file: Path) -> list[StoredTensor]:
    """The table of a safetensors file, without its data. Raises `ModelLoadError`."""
    with open_safetensors(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        return [
            StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        ]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory, by name.

    Raises `ModelLoadError` for missing weights, an unreadable or truncated file, a tensor
    in two shards, and an index that doesn't tell the truth.
    """
    files, weight_map = _weight_files(directory)
    found: dict[str, StoredTensor] = {}
    for entry in (entry for file in files for entry in read_table(file)):
        if first := found.get(entry.name):
            raise ModelLoadError(
                f"tensor {entry.name} is in two shards of {directory}, {first.file.name} "
                f"and {entry.file.name}; remove one, or download the checkpoint again"
            )
        found[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise ModelLoadError(
                f"{directory / _INDEX} says that tensor {name} is in {shard}, but it "
                "isn't; index and shards come from different downloads: fetch both again"
            )
    return found


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files, and the index's weight map (empty for a single file)."""
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE], {}
    if not (directory / _INDEX).exists():
        raise ModelLoadError(_explain_no_weights(directory))
    weight_map = _read_index(directory / _INDEX)
    files = [directory / shard for shard in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(
                f"{directory / _INDEX} names the shard {file.name}, which isn't there; "
                "the download is incomplete: fetch the missing shard"
            )
    return files, weight_map


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _read_index(file: Path) -> dict[str, str]:
    """Tensor name -> shard name, from a model.safetensors.index.json."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ModelLoadError(
            f"{file} isn't a readable shard index ({cause!r}); download it again"
        ) from cause


def _explain_no_weights(directory: Path) -> str:
    """Why a directory without model.safetensors and index can't be loaded."""
    wanted = f"{directory} has neither {_SINGLE} nor {_INDEX}"
    if shards := sorted(directory.glob("*.safetensors")):
        return f"{wanted}, but {shards[0].name}: the index is missing, download it"
    if ggufs := sorted(directory.glob("*.gguf")):
        return f"{wanted}, but a GGUF file: give its path instead, {ggufs[0]}"
    if list(directory.glob("*.bin")) or list(directory.glob("*.pth")):
        return (
            f"{wanted}, only pickled PyTorch weights, which may run code when opened and "
            "aren't read; use a revision with safetensors, or convert them with "
            "transformers' save_pretrained"
        )
    return f"{wanted}; give a directory with a model's config.json and safetensors weights"
