"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.config import ModelLoadError
from octavo.request import RequestError

__all__ = [
    "TokenDecoder",
    "REPLACEMENT",
    "num_unfinished",
    "Detokenizer",
    "StopChecker",
    "Tokenizer",
    "TOKENIZER_FILES",
]


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


def _check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as dicts with a role and content, or `RequestError` naming the bad one."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise RequestError(
            f"messages is a {kind}: give a list such as [{{'role': 'user', 'content': 'Hello'}}]"
        )
    if not messages:
        raise RequestError("messages is empty: a chat needs at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{name} is {message!r}: expected a dict with 'role' and 'content'"
        )
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{name} has no 'role': say 'system', 'user' or 'assistant'")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        found = (
            "no 'content'"
            if content is None
            else f"content of type {type(content).__name__}"
        )
        raise RequestError(f"{name} (role {message['role']!r}) has {found}: give a string")
    return dict(message)


def _byte_tokens(run: bytes) -> list[str]:
    """A run of bytes as byte tokens, with one U+FFFD for each byte that is in no character."""
    tokens: list[str] = []
    for char in run.decode("utf-8", errors="surrogateescape"):
        broken = "\udc80" <= char <= "\udcff"  # how surrogateescape shows a stray byte
        tokens += [REPLACEMENT] if broken else [f"<0x{b:02X}>" for b in char.encode()]
    return tokens


class Tokenizer:
    """Text to ids and back, and chats to text, as the model's own files define it.

    `hf_tokenizer`: a fast `transformers` tokeniser (`from_pretrained` opens one).
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}
        self._byte_of = self._find_byte_tokens()
        self.vocab_size: int = max(self._backend.get_vocab().values(), default=-1) + 1
        """One more than the highest id that has a token (a model may have more rows)."""
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self._adds_bos = self._encode("", add_special_tokens=True)[:1] == [
            self.bos_token_id
        ]

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the special tokens this tokeniser adds.

        A text that begins with its own begin-of-text token doesn't get a second one.
        """
        ids = self._encode(text, add_special_tokens=True)
        return ids[1:] if self._adds_bos and ids[1:2] == [self.bos_token_id] else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Ids without a token give ""; stray bytes give U+FFFD.

        No clean-up of spaces. As `transformers` decodes, except that in a run of byte
        tokens (`<0xE2>`) the whole characters survive beside broken ones.
        """
        if self._byte_of and not self._byte_of.keys().isdisjoint(token_ids):
            return self._backend.decoder.decode(
                self._mended_tokens(token_ids, skip_special_tokens)
            )
        try:
            return self._backend.decode(token_ids, skip_special_tokens)
        except OverflowError:  # below 0 or above 32 bits
            known = [i for i in token_ids if 0 <= i < self.vocab_size]
            return self._backend.decode(known, skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a chat; arguments as `render_chat`. The template brings its own specials."""
        text = self.render_chat(messages, add_generation_prompt, **kwargs)
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"the prompt is a {type(text).__name__}: give a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of the prompt is half of a surrogate pair: decode the"
                " text properly first (an emoji in JSON needs both of its \\u escapes)"
            ) from None
        return self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The chat as the model's template writes it, ready for an answer.

        `messages`: dicts with "role" and "content" (text). `template_kwargs` go to the template
        (`enable_thinking=False` for Qwen3, `tools=[...]`, or a `chat_template` of your own).
        Raises `RequestError` if there is no template, or if a message is malformed or refused.
        """
        chat = _check_messages(messages)
        if not self._hf.chat_template and not template_kwargs.get("chat_template"):
            raise RequestError(
                "this model has no chat template (is it a base model?): send a plain prompt with"
                " `generate`, or pass chat_template='...'"
            )
        template_kwargs |= {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._hf.apply_chat_template(chat, **template_kwargs)
        except Exception as error:  # a template is a program and may raise anything
            index = self._find_refused(chat, str(error), template_kwargs)
            raise RequestError(
                f"the chat template refused messages[{index}] (role {chat[index]['role']!r}): {error}"
            ) from error

    def _find_refused(self, chat: list[dict], complaint: str, kwargs: dict) -> int:
        """Index of the first message with which the template makes the same complaint."""
        for index in range(len(chat) - 1):
            try:
                self._hf.apply_chat_template(chat[: index + 1], **kwargs)
            except Exception as error:
                if str(error) == complaint:
                    return index
        return len(chat) - 1

    def _find_byte_tokens(self) -> dict[int, int]:
        """Id -> byte for the byte tokens of a decoder with byte fallback; else empty."""
        decoder = self._backend.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return {}
        ids = {self._backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {
            i: byte
            for i, byte in ids.items()
            if i is not None and i not in self._special_ids
        }

    def _mended_tokens(self, ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        """The ids' tokens, every run of byte tokens sorted into characters and stray bytes."""
        tokens: list[str] = []
        run = bytearray()
        for i in ids:
            if i in self._byte_of:
                run.append(self._byte_of[i])
                continue
            skipped = not 0 <= i < self.vocab_size or (
                skip_special_tokens and i in self._special_ids
            )
            token = None if skipped else self._backend.id_to_token(i)
            if token is not None:  # what leaves no text doesn't end a run of bytes
                tokens += [*_byte_tokens(bytes(run)), token]
                run.clear()
        return tokens + _byte_tokens(bytes(run))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Tokenizer:
        """Open the tokeniser in a model's directory; nothing is downloaded.

        Raises `ModelLoadError` if there is none or it can't be read.
        """
        path = Path(directory)
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise ModelLoadError(
                f"no tokeniser in {path}: none of {', '.join(TOKENIZER_FILES)} is there; copy the"
                " tokeniser files of the model into the directory, next to config.json"
            )
        try:
            hf_tokenizer = _open_with_transformers(path)
        except Exception as error:  # transformers raises many kinds for files it can't read
            raise ModelLoadError(
                f"can't read the tokeniser in {path}: {error}; the files may be incomplete:"
                " fetch them again"
            ) from error
        if not hf_tokenizer.is_fast:
            raise ModelLoadError(
                f"the tokeniser in {path} exists only as Python code: save it once with"
                " transformers as a fast tokeniser, which writes a tokenizer.json"
            )
        return cls(hf_tokenizer)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokeniser's directory holds at least one of these."""


def _open_with_transformers(path: Path) -> Any:
    from transformers import (
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )  # takes seconds: only here

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except ValueError:
        if not (path / "tokenizer.json").is_file():
            raise
        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
