"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from octavo.plotting import quantile
from octavo.provenance import measured

__all__ = [
    "UNITS",
    "Record",
    "figure",
    "summarise",
    "Report",
    "slug",
    "versions",
    "cpu_name",
    "bench_provenance",
]


# metric: how a person reads it, and by how much the number is multiplied for that
UNITS = {
    "output_tokens_per_s": ("tokens/s", 1.0),
    "prompt_tokens_per_s": ("prompt tokens/s", 1.0),
    "bytes_per_s": ("GB/s", 1e-9),
    "flop_per_s": ("TFLOP/s", 1e-12),
    "ms_per_token": ("ms a token", 1.0),
    "ms_per_step": ("ms a step", 1.0),
    "ms": ("ms", 1.0),
    "us": ("µs", 1.0),
    "s": ("s", 1.0),
}


@dataclass(frozen=True)
class Record:
    """One line of a result file: the form that all benchmarks of the book share."""

    name: str
    metric: str
    """Says the unit too; `UNITS` has those that `octavo bench` uses."""
    median: float
    p10: float | None
    p90: float | None
    """10th and 90th percentile of the repetitions, interpolated; None where there was one."""
    repetitions: int
    limit: float | None
    """The best that the machine's measured ceilings allow, in the same unit."""
    config: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def share(self) -> float | None:
        """How much of the limit was reached: 1 is all. None without a limit."""
        if not self.limit or not self.median:
            return None
        ratio = self.median / self.limit
        return ratio if self.metric.endswith("_per_s") else 1 / ratio

    def line(self) -> str:
        """The record for a person: median, band, limit."""
        unit, factor = UNITS.get(self.metric, (self.metric, 1.0))
        name = " ".join(filter(None, (self.name, self.config.get("backend"))))
        text = f"{name:40} {figure(self.median * factor):>8} {unit}"
        if self.p10 is not None and self.p90 is not None:
            low, high = figure(self.p10 * factor), figure(self.p90 * factor)
            text += f" ({low} to {high})"
        if self.limit is not None:
            text += f", limit {figure(self.limit * factor)}"
        if self.share is not None:
            text += f": {self.share:.0%} of it"
        return text + (f", {figure(us)} µs" if (us := self.config.get("us")) else "")


def figure(x: float) -> str:
    """Three digits, or all of those before the point: "0.0135", "8.12", "26,955"."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def summarise(
    name: str,
    metric: str,
    values: Sequence[float],
    limit: float | None = None,
    config: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Record:
    """The record of repeated measurements (at least one) of the same thing."""
    several = len(values) > 1
    p10, p90 = (quantile(tuple(values), q) if several else None for q in (0.1, 0.9))
    middle, count = float(median(values)), len(values)
    more = dict(config or {}), dict(provenance or {})
    return Record(name, metric, middle, p10, p90, count, limit, *more)


@dataclass
class Report:
    """What a benchmark says: lines for a person, records for a program."""

    out: TextIO
    config: dict[str, Any] = field(default_factory=dict)
    """Settings that hold for all records."""
    provenance: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failures: int = 0

    def say(self, text: str = "") -> None:
        """Print a line and keep it."""
        self.lines.append(text)
        print(text, file=self.out, flush=True)

    def add(
        self,
        name: str,
        metric: str,
        values: Sequence[float],
        limit: float | None = None,
        **config: Any,
    ) -> Record:
        """Keep a record of repeated measurements and print it; `config` are its own settings."""
        made = summarise(name, metric, values, limit, self.config | config, self.provenance)
        self.records.append(made)
        self.say(made.line())
        return made

    def save(self, file: Path) -> None:
        """Write the records as a JSON list."""
        file.write_text(json.dumps([asdict(r) for r in self.records], indent=1) + "\n")

    def save_in(self, folder: Path, stem: str) -> Path:
        """Write records and log into the device's own folder below `folder`; returns it."""
        own = folder / slug(str(self.provenance.get("device", "unknown")))
        own.mkdir(parents=True, exist_ok=True)
        self.save(own / f"{stem}.json")
        (own / f"{stem}.log").write_text("\n".join(self.lines) + "\n", encoding="utf-8")
        return own


def slug(name: str) -> str:
    """A name as a file can have it: "NVIDIA H200" is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")


_PACKAGES = ("torch", "triton", "flash-attn", "transformers")


def versions() -> dict[str, str | None]:
    """Versions of what decides about speed; None where a package isn't installed."""
    from octavo import __version__

    found: dict[str, str | None] = {"octavo": __version__}
    found["python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def bench_provenance(device: str) -> dict[str, Any]:
    """Where and when: `octavo.provenance` and the versions; `device` as torch names it."""
    import torch

    said = asdict(measured()) | versions()
    if device == "cpu":
        said |= {"device": "CPU", "cpu": cpu_name(), "driver": None}
        said["threads"] = torch.get_num_threads()
    else:
        said["device"] = torch.cuda.get_device_name(device)
    return {**said, "torch": torch.__version__}
