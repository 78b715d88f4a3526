"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import date

__all__ = ["Provenance", "commit_name", "computed", "measured"]


def _command(*words: str) -> str | None:
    """First line that a command prints; None when it is missing or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


@dataclass(frozen=True)
class Provenance:
    """What a figure's numbers were made on; fields that don't apply are None."""

    device: str
    driver: str | None = None
    torch: str | None = None
    date: str | None = None
    commit: str | None = None

    def line(self) -> str:
        """The footer: device, driver, torch, date, commit."""
        named = {"driver": self.driver, "torch": self.torch, "commit": self.commit}
        parts = [f"{name} {value}" for name, value in named.items() if value]
        parts.insert(len(parts) - bool(self.commit), self.date or "")
        return " · ".join(part for part in (self.device, *parts) if part)


def commit_name() -> str | None:
    """Short name of the checked-out commit, with a + if files differ from it."""
    name = _command("git", "rev-parse", "--short", "HEAD")
    return name and name + ("+" if _command("git", "status", "--porcelain", "-uno") else "")


def computed(basis: str) -> Provenance:
    """Provenance of numbers that no device produced; `basis` says what they rest on."""
    return Provenance(
        f"computed from {basis}", None, None, str(date.today()), commit_name()
    )


def measured() -> Provenance:
    """Provenance of numbers measured on this machine; imports torch to name the device."""
    import torch

    device, driver = "CPU", None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        driver = _command(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return Provenance(device, driver, torch.__version__, str(date.today()), commit_name())
