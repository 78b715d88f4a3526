"""The form that all benchmark results of the book share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """One line of a result file."""

    name: str
    metric: str
    median: float
    p10: float | None
    p90: float | None
    repetitions: int
    limit: float | None
    config: dict[str, Any]
    provenance: dict[str, Any]
