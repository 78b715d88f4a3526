"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.request import RequestError

__all__ = ["TokenDecoder", "REPLACEMENT", "num_unfinished", "Detokenizer", "StopChecker"]


class TokenDecoder(Protocol):
    """What a `Detokenizer` needs of a tokeniser."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that form no character become U+FFFD.

        A finished character must stay what it is whatever ids follow, for its text may have
        been sent. `Tokenizer` keeps that promise (its `decode` says where it had to mend it).
        """
        ...


REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are not (yet) a character."""

_MOST_PENDING = 3  # bytes of an unfinished UTF-8 character, so also its replacement marks
_WINDOW = 4  # ids kept before the older half is let go


def num_unfinished(text: str) -> int:
    """How many characters at the end of `text` later bytes may still change, 0 to 3."""
    if not text.endswith(REPLACEMENT):  # nearly always
        return 0
    tail = text[-_MOST_PENDING:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class Detokenizer:
    """Turns one request's token ids into text as they come.

    The texts of all `push` calls and of `flush`, joined, equal `decode` of all ids, for
    byte-level, byte-fallback and SentencePiece-style decoders. Text is returned as soon as
    it is certain: only U+FFFD at the end, at most three, is ever held back. A push decodes
    a bounded number of ids, however long the answer.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # ids that the next one may need as context
        self._window_text = ""  # their text
        self._num_sent = 0  # characters of it that were returned
        self._pieces: list[str] = []

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that became final, "" while a character is open."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._window_text and not self._decode([token_id, token_id]):
            self._window.pop()  # it leaves no trace, here or anywhere
            return ""
        self._window_text = text
        piece = self._send_up_to(len(text) - num_unfinished(text))
        if len(self._window) >= _WINDOW:
            self._shorten_window()
        return piece

    def flush(self) -> str:
        """End of the answer: return what was held back (marks of a character never finished)."""
        return self._send_up_to(len(self._window_text))

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens
        )

    def _send_up_to(self, end: int) -> str:
        piece = self._window_text[self._num_sent : end]
        if piece:
            self._num_sent = end
            self._pieces.append(piece)
        return piece

    def _shorten_window(self) -> None:
        """Keep the newer half of the window if it can stand without the older one."""
        newer = self._window[len(self._window) // 2 :]
        text = self._decode(newer)
        held = self._window_text[self._num_sent :]
        if len(text) >= (_MOST_PENDING if held else 1):
            self._window, self._window_text = newer, text
            self._num_sent = len(text) - len(held)


class StopChecker:
    """Finds stop strings in a stream of text, and never lets a part of one slip out.

    The match that is complete first wins; of those that end at the same character, the
    longest. The returned texts, joined, are the whole text cut before that match (behind
    it with `include_stop_str_in_output`), however the text was divided into pushes.

    `stop`: one string or several, none of them empty (`RequestError`).
    """

    def __init__(
        self, stop: str | Sequence[str], include_stop_str_in_output: bool = False
    ) -> None:
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop={stop!r}: expected non-empty strings")
        self.matched: str | None = None
        """The stop string that was found, or None."""
        self._include = include_stop_str_in_output
        self._held = ""  # what may be the beginning of a stop string

    def push(self, text: str) -> str:
        """Add text; return what can no longer be part of a stop string. After a match: ""."""
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        if (found := self._find(text)) is not None:
            begin, end = found
            self.matched, self._held = text[begin:end], ""
            return text[: end if self._include else begin]
        kept = self._begin_of_doubt(text)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """End of the answer: return what was held back. It was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """Begin and end of the first match to end, the longest of several; None without one."""
        first: tuple[int, int] | None = None  # as (end, begin), so that `min` is the rule
        for stop in self.stop:
            if (begin := text.find(stop)) >= 0:
                match = (begin + len(stop), begin)
                first = match if first is None else min(first, match)
        return first and (first[1], first[0])

    def _begin_of_doubt(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        first = len(text)
        for stop in self.stop:
            begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= begin < first and not stop.startswith(text[begin:]):
                begin = text.find(stop[0], begin + 1)
            first = begin if 0 <= begin < first else first
        return first
