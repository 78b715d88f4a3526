"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.config import ConfigError, EngineConfig, ModelLoadError, OctavoError
from octavo.request import RequestError, SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM, RequestOutput


__all__ = [
    "LLM",
    "ConfigError",
    "EngineConfig",
    "ModelLoadError",
    "OctavoError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`LLM` and `RequestOutput` bring torch along; they are imported when asked for."""
    if name in ("LLM", "RequestOutput"):
        from octavo import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
