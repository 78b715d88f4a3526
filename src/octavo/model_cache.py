"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from octavo.checkpoint import read_table
from octavo.config import ModelLoadError
from octavo.native import cache_root, logger

__all__ = ["FindFault", "cached_directory", "find_damage"]


FindFault = Callable[[Path], str | None]


def cached_directory(
    name: str, fill: Callable[[Path], None], find_fault: FindFault = lambda made: None
) -> Path:
    """The cache's directory `name`, made by `fill(empty_directory)` where it is needed.

    That is if it isn't there yet, or if `find_fault(directory)` says what is wrong with it.
    It exists whole or not at all. Raises `ModelLoadError` if the cache can't be written.
    """
    final = cache_root() / name
    if final.is_dir():
        if (fault := find_fault(final)) is None:
            return final
        logger.warning("%s is damaged (%s) and is made again", final, fault)
    work = _begin(final)
    try:
        fill(work / name)
        _publish(work / name, final, find_fault)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _begin(final: Path) -> Path:
    """A new directory in the cache that holds an empty one with the name of `final`."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
        (work / final.name).mkdir()
    except OSError as cause:
        raise ModelLoadError(
            f"the cache {final.parent} can't be written ({cause}); set OCTAVO_CACHE to a "
            "directory with room for the model"
        ) from cause
    return work


def _publish(made: Path, final: Path, find_fault: FindFault) -> None:
    """Move a finished directory to its place, unless another process was first."""
    try:
        if final.is_dir() and find_fault(final) is not None:
            final.rename(made.parent / "damaged")  # and it goes with the rest of the work
        made.rename(final)
    except OSError as cause:
        if not final.is_dir() or find_fault(final) is not None:
            raise ModelLoadError(f"{final} can't be written: {cause}") from cause


_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def find_damage(made: Path) -> str | None:
    """What is wrong with a converted model: the first file that can't be read, or None."""
    name = "model.safetensors"
    try:
        read_table(made / name)
        for name in _JSON_FILES:
            json.loads((made / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, ModelLoadError):
        return f"{name} is missing or can't be read"
    return None
