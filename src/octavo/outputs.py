"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.detokenizer import Detokenizer, StopChecker
from octavo.request import FinishReason, Request, RequestError

__all__ = [
    "RequestMetrics",
    "CompletionOutput",
    "refusal",
    "RequestDelta",
    "TextCodec",
    "Answer",
]


@dataclass(frozen=True)
class RequestMetrics:
    """Times are the engine's clock, in seconds; None where a request never got that far."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_time: float
    first_token_time: float | None
    finished_time: float

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class CompletionOutput:
    """One finished answer."""

    index: int
    """Which of the `n` answers."""
    text: str
    token_ids: list[int]
    """The sampled ids, the one that ended it included."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop id or stop string; None for the model's own end of sequence."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """What went wrong, when `finish_reason` is "error"."""


def refusal(error: RequestError) -> CompletionOutput:
    """The answer to a prompt that can't be served: no text, and the reason."""
    return CompletionOutput(0, "", [], FinishReason.ERROR, error=str(error))


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step added to one answer."""

    request_id: str
    index: int
    text: str
    """New text that no later token can change."""
    token_ids: Sequence[int]
    finished: CompletionOutput | None = None


class TextCodec(Protocol):
    """What the engine needs of a tokeniser."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Answer:
    """The output side of one request: text so far, and where a stop string cut it."""

    def __init__(self, request: Request, codec: TextCodec, arrival_time: float) -> None:
        params = request.sampling_params
        self.request = request
        self.detokenizer = Detokenizer(
            codec, skip_special_tokens=params.skip_special_tokens
        )
        self.stops = StopChecker(params.stop or (), params.include_stop_str_in_output)
        self.pieces: list[str] = []
        self.num_tokens = 0
        self.arrival_time = arrival_time
        self.first_token_time: float | None = None

    def push(self, token_ids: Sequence[int], now: float) -> None:
        """Take sampled tokens in; those behind a stop string are ignored."""
        if token_ids and self.first_token_time is None:
            self.first_token_time = now
        for token_id in token_ids:
            self.num_tokens += 1
            if not self._is_silent(token_id):
                self.pieces.append(self.stops.push(self.detokenizer.push(token_id)))
            if self.stops.matched is not None:
                return

    def _is_silent(self, token_id: int) -> bool:
        """Is this the id that ended the answer? It is reported, but is no part of the text."""
        request, params = self.request, self.request.sampling_params
        ended = request.finish_reason is FinishReason.STOP
        last = self.num_tokens == request.num_output_tokens
        return ended and last and not params.include_stop_str_in_output

    def close(self) -> None:
        """The end: release what was held back for a character or a stop string."""
        if self.stops.matched is None:
            self.pieces.append(self.stops.push(self.detokenizer.flush()))
        if self.stops.matched is None:
            self.pieces.append(self.stops.flush())

    def completion(self, now: float, error: str | None = None) -> CompletionOutput:
        """The whole answer, once it has ended."""
        request = self.request
        reason = FinishReason.ERROR if error is not None else request.finish_reason
        metrics = RequestMetrics(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finished_time=now,
        )
        return CompletionOutput(
            index=request.sample_index,
            text="".join(self.pieces),
            token_ids=request.output_token_ids,
            finish_reason=reason or FinishReason.ERROR,
            stop_reason=request.stop_reason,
            metrics=metrics,
            error=error,
        )
