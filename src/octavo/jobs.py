"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.request import SamplingParams

__all__ = ["Job", "make_job", "read_jobs"]


@dataclass(frozen=True)
class Job:
    """One prompt on its way through the command."""

    name: str
    messages: Sequence[Mapping[str, Any]] = ()
    """A conversation, or empty."""
    prompt: str | None = None
    """Text to be continued as it is, if it is no conversation."""
    params: SamplingParams = field(default_factory=SamplingParams)
    error: str | None = None
    """Why it can't be served."""

    @property
    def title(self) -> str:
        """One line to recognise it by."""
        text = self.prompt if self.prompt is not None else ""
        if self.messages:
            text = str(self.messages[-1].get("content", ""))
        line = " ".join(text.split())
        return line if len(line) <= 72 else line[:71] + "…"


def make_job(
    name: str,
    text: str,
    params: SamplingParams,
    system: str | None = None,
    raw: bool = False,
) -> Job:
    """A job for one text: a chat of one message, or with `raw` the text itself."""
    if raw:
        return Job(name, prompt=text, params=params)
    head = [{"role": "system", "content": system}] if system is not None else []
    return Job(name, [*head, {"role": "user", "content": text}], params=params)


def read_jobs(
    lines: Iterable[str], params: SamplingParams, system: str | None, raw: bool
) -> list[Job]:
    """Jobs from JSON lines.

    A line is a string, or an object with "prompt" (text) or "messages" (a conversation),
    and optionally "id" and any field of `SamplingParams`. Blank lines are skipped.
    """
    jobs = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                jobs.append(_read_job(str(number), line, params, system, raw))
            except (ValueError, TypeError, RecursionError) as error:
                jobs.append(Job(str(number), error=f"line {number}: {error}"))
    return jobs


def _read_job(
    name: str, line: str, params: SamplingParams, system: str | None, raw: bool
) -> Job:
    entry = json.loads(line)
    if isinstance(entry, str):
        return make_job(name, entry, params, system, raw)
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(
            'expected a string, or an object with either "prompt" or "messages"'
        )
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    if unknown := set(entry) - fields - {"prompt", "messages", "id"}:
        raise ValueError(
            f"unknown field {min(unknown)!r}; there are {', '.join(sorted(fields))}"
        )
    params = dataclasses.replace(params, **{k: v for k, v in entry.items() if k in fields})
    name = str(entry.get("id", name)).encode(errors="replace").decode()
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError('"messages" must be a list of {"role", "content"} objects')
        return Job(name, messages, params=params)
    if not isinstance(entry["prompt"], str):
        raise ValueError('"prompt" must be text')
    return make_job(name, entry["prompt"], params, system, raw)
