"""Chapter 01, Foundations and roadmap.

Generated from chapters/01_foundations.md; edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config import ConfigError

__all__ = ["require_supported", "read_switch", "read_names"]


def require_supported(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` if a checkpoint's `value` isn't one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{name} {value!r} isn't supported; Octavo runs {', '.join(choices)}: choose a "
            "checkpoint with one of these"
        )


def read_switch(config: Mapping[str, Any], name: str, absent: bool = False) -> bool:
    """True or false; `absent` where there is no entry or null. Else `ConfigError`."""
    given = config.get(name)
    if given not in (None, True, False):
        raise ConfigError(f"{name}={given!r}: give true or false")
    return absent if given is None else bool(given)


def read_names(config: Mapping[str, Any], name: str) -> list[str]:
    """A list of names, where a single one may stand alone; empty if there is no entry.

    Raises `ConfigError` for anything else.
    """
    given = config.get(name) or []
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"{name}={given!r}: give a list of names")
    return names
