"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from octavo.assembly import Parts, all_eos_token_ids, build_engine
from octavo.backends import (
    choose_attention,
    choose_device,
    choose_dtype,
    choose_graphs,
    choose_layers,
    choose_overlap,
    choose_sampler,
)
from octavo.config import ConfigError, EngineConfig, ModelConfig, OctavoError
from octavo.engine import Engine, expand_params
from octavo.graph_runner import CUDAGraphRunner
from octavo.hf_config import read_model_config
from octavo.hub import resolve_model
from octavo.models.llama import LlamaForCausalLM
from octavo.outputs import CompletionOutput, RequestDelta, refusal
from octavo.progress import ProgressBar, TokenCount
from octavo.request import RequestError, SamplingParams
from octavo.scheduler import Scheduler
from octavo.shapes import TokenIdsOnly, named_shape, random_model
from octavo.tokenizer import Tokenizer
from octavo.weights import load_model

__all__ = ["logger", "RequestOutput", "LLM"]


logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """The text, or None where token ids or a chat were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` answers in order; one with `finish_reason` "error" if the prompt was refused."""

    @property
    def error(self) -> str | None:
        """Why there is no (whole) answer; None if all is well."""
        return next((o.error for o in self.outputs if o.error is not None), None)

    @property
    def text(self) -> str:
        """The first answer's text. Raises `RequestError` with the reason if there is none."""
        if self.error is not None:
            raise RequestError(self.error)
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's token ids."""
        return self.outputs[0].token_ids

    def __getitem__(self, key: str) -> Any:
        if key not in ("text", "token_ids"):
            raise KeyError(key)
        return getattr(self, key)


class LLM:
    """A model ready to answer: `LLM("smollm2-135m").generate(["Hello"])`.

    `model` is a directory (config.json and safetensors), a `.gguf` file, a Hub id, or an
    alias such as "smollm2-135m"; "qwen3-0.6b-shape" has random weights and no tokeniser.
    `options` are the fields of `EngineConfig`. `show_progress` None shows bars on a terminal
    only. Raises `ModelLoadError` or `ConfigError`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        show_progress: bool | None = None,
        **options: Any,
    ) -> None:
        config = _engine_config(options)
        self._engine: Engine | None = None
        self._calls = itertools.count()
        self.show_progress = sys.stderr.isatty() if show_progress is None else show_progress
        shape, eos = named_shape(model), list[int]()
        self.tokenizer: Tokenizer | TokenIdsOnly = TokenIdsOnly()
        if shape is not None:
            if tokenizer is not None:
                raise ConfigError(
                    f"tokenizer={str(tokenizer)!r}: {model} has random weights"
                )
            self.parts = self._assemble(config, shape, partial(random_model, shape))
        else:
            directory = resolve_model(model, logger.info)
            load = partial(self._load, directory)
            self.parts = self._assemble(config, read_model_config(directory), load)
            self.tokenizer = Tokenizer.from_pretrained(tokenizer or directory)
            eos = all_eos_token_ids(directory, self.parts.config, self.tokenizer)
        self._engine = build_engine(config, self.parts, self.tokenizer, eos)

    def _load(
        self, directory: Path, dtype: torch.dtype, device: torch.device
    ) -> LlamaForCausalLM:
        with ProgressBar("loading weights", 1, self.show_progress) as bar:
            return load_model(directory, dtype, device, progress=bar.set)[0]

    def _assemble(
        self,
        config: EngineConfig,
        model: ModelConfig,
        load: Callable[[torch.dtype, torch.device], LlamaForCausalLM],
    ) -> Parts:
        """Decide who computes what, then load: a refusal should come before the long wait."""
        device, size = choose_device(config.device), config.block_size
        native = "torch" not in (config.attention, config.layer_ops)
        dtype = choose_dtype(config.dtype, model.dtype, device, native=native)
        attention = choose_attention(config.attention, model, dtype, device, size)
        layers = choose_layers(config.layer_ops, dtype, device)
        sampler = choose_sampler(config.sampler, dtype, device)
        graphs = choose_graphs(config, attention, sampler, device)
        loop = choose_overlap(config, device)
        runs = layers(load(dtype, device))
        return Parts(runs, model, device, dtype, attention, size, sampler, graphs, loop)

    @property
    def engine(self) -> Engine:
        """The engine underneath; OctavoError after `close`."""
        if self._engine is None:
            raise OctavoError("this LLM is closed; make a new one")
        return self._engine

    @property
    def scheduler(self) -> Scheduler:
        """The engine's scheduler, whose books say how full the KV cache is."""
        return cast(Scheduler, self.engine.scheduler)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        show_progress: bool | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids) together; one `RequestOutput` each, in order.

        A prompt that can't be served gets an output with `error` set; the others are answered.
        `cache_salt` and `priority` as in `Engine.add_request`, for all of the prompts.
        """
        several: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        encoded = [self._encode(prompt) for prompt in several]
        standing = {"cache_salt": cache_salt, "priority": priority}
        return self._answer(encoded, texts, sampling_params, show_progress, standing)

    def _answer(
        self,
        prompts: Sequence[Sequence[int] | RequestError],
        texts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool | None,
        standing: Mapping[str, Any],
    ) -> list[RequestOutput]:
        params = expand_params(sampling_params, len(prompts))
        names = [f"call-{next(self._calls)}-{i}" for i in range(len(prompts))]
        answers: dict[str, list[CompletionOutput]] = {name: [] for name in names}
        count = TokenCount(dict(zip(names, params, strict=True)))
        shown = self.show_progress if show_progress is None else show_progress
        with ProgressBar("generating", count.total, shown, "tokens") as bar:
            for delta in self._deltas(prompts, params, names, standing):
                count.add(delta)
                bar.set(count.done, count.total)
                if delta.finished is not None:
                    answers[delta.request_id].append(delta.finished)
        return [
            RequestOutput(
                name, text, _ids(prompt), sorted(answers[name], key=lambda a: a.index)
            )
            for name, text, prompt in zip(names, texts, prompts, strict=True)
        ]

    def _encode(self, prompt: Any) -> Sequence[int] | RequestError:
        """Token ids, or why there are none: the refusal of one prompt must not stop the others."""
        try:
            return (
                self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            )
        except RequestError as error:
            return error
        except TypeError:
            return RequestError(f"a prompt is text or a list of token ids, not {prompt!r}")

    def _deltas(
        self,
        prompts: Sequence[Sequence[int] | RequestError],
        params: Sequence[SamplingParams],
        names: Sequence[str],
        standing: Mapping[str, Any],
    ) -> Iterator[RequestDelta]:
        """The refusals, then the engine's stream of the other prompts."""
        for prompt, name in zip(prompts, names, strict=True):
            if isinstance(prompt, RequestError):
                yield RequestDelta(name, 0, "", (), refusal(prompt))
        served = [
            (prompt, param, name)
            for prompt, param, name in zip(prompts, params, names, strict=True)
            if not isinstance(prompt, RequestError)
        ]
        yield from self.engine.stream(
            [prompt for prompt, _, _ in served],
            [param for _, param, _ in served],
            [name for _, _, name in served],
            **standing,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        show_progress: bool | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; each is a list of {"role", "content"} messages.

        `template_options` go to the chat template. A conversation that the template refuses gets
        an output with `error` set.
        """
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        encoded = [self._encode_chat(c, template_options) for c in conversations]
        standing = {"cache_salt": cache_salt, "priority": priority}
        texts = [None] * len(encoded)
        return self._answer(encoded, texts, sampling_params, show_progress, standing)

    def _encode_chat(
        self, messages: Any, template_options: Mapping[str, Any]
    ) -> list[int] | RequestError:
        try:
            return self.tokenizer.encode_chat(messages, **template_options)
        except RequestError as error:
            return error

    def stream(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        **standing: Any,
    ) -> Iterator[RequestDelta]:
        """Answer prompts together, piece by piece; arguments as in `Engine.stream`."""
        several: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        return self.engine.stream(several, sampling_params, request_ids, **standing)

    def close(self) -> None:
        """Give model, cache and device memory back. Harmless when done twice."""
        on_gpu = self._engine is not None and self.parts.device.type == "cuda"
        if self._engine is not None and isinstance(self._engine.runner, CUDAGraphRunner):
            self._engine.runner.close()  # recorded steps hold memory that no tensor here names
        self._engine = None
        self.__dict__.pop("parts", None)
        if on_gpu:
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"unknown option {unknown[0]!r}; there are: {', '.join(known)}")
    return EngineConfig(**options)


def _is_single(prompts: Any) -> bool:
    """One prompt (text, or a list of ids) rather than a list of prompts?"""
    return isinstance(prompts, str) or (
        len(prompts) > 0 and hasattr(prompts[0], "__index__")
    )


def _ids(prompt: Sequence[int] | RequestError) -> list[int]:
    return [] if isinstance(prompt, RequestError) else list(prompt)
