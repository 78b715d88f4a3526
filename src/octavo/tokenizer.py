"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from octavo.config import ModelLoadError
from octavo.detokenizer import REPLACEMENT
from octavo.request import RequestError

__all__ = ["Tokenizer", "TOKENIZER_FILES"]


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
        self._require_template(template_kwargs)
        template_kwargs |= {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._hf.apply_chat_template(chat, **template_kwargs)
        except Exception as error:  # a template is a program and may raise anything
            raise RequestError(
                self._explain_failure(error, chat, template_kwargs)
            ) from error

    def _require_template(self, kwargs: dict) -> None:
        if not self._hf.chat_template and not kwargs.get("chat_template"):
            raise RequestError(
                "this model has no chat template (is it a base model?): send a plain prompt with"
                " `generate`, or pass chat_template='...'"
            )

    def _explain_failure(self, error: Exception, chat: list[dict], kwargs: dict) -> str:
        """Why a chat has no text: the template is broken, or it refused a message."""
        if isinstance(error, TemplateSyntaxError):
            place = f"is broken at line {error.lineno} ({error.message})"
            if kwargs.get("chat_template"):
                return f"the chat_template that was passed {place}: mend it there"
            remedy = "fetch the file again, or pass chat_template='...'"
            return f"the chat template{self._template_file()} {place}: {remedy}"
        index = self._find_refused(chat, str(error), kwargs)
        role = chat[index]["role"]
        return f"the chat template refused messages[{index}] (role {role!r}): {error}"

    def _template_file(self) -> str:
        """Where the model's template was read from, such as " in x.jinja"; empty if unknown.

        As `transformers` does, a file of its own goes before an entry in the settings.
        """
        names = ("chat_template.jinja", "tokenizer_config.json")
        files = [Path(self._hf.name_or_path) / name for name in names]
        known = [file for file in files if self._hf.name_or_path and file.is_file()]
        return f" in {known[0]}" if known else ""

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
