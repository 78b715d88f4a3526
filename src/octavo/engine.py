"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.collector import resting_collector
from octavo.outputs import Answer, CompletionOutput, RequestDelta, TextCodec, refusal
from octavo.request import (
    Plan,
    Progress,
    Request,
    RequestError,
    Runner,
    SamplingParams,
    SchedulerLike,
    StepResult,
)

__all__ = ["EngineStats", "Engine", "expand_params"]


@dataclass
class EngineStats:
    """Counted since the engine was made."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    """Tokens run through the model, recomputations included."""
    num_cached_tokens: int = 0
    """Tokens that weren't run because a cache had them when their request came in."""
    num_output_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """Takes requests in, runs steps, gives text out.

    `vocab_size` bounds the token ids of prompts. `seed` makes requests without a seed of
    their own repeatable; None draws fresh ones. `clock` returns seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        runner: Runner,
        codec: TextCodec,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.codec = codec
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.clock = clock
        self.stats = EngineStats()
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)
        self._counter = itertools.count()
        self._answers: dict[Request, Answer] = {}
        self._groups: dict[str, list[Request]] = {}
        self._inboxes: dict[str, deque[RequestDelta]] = {}
        self._arrived: deque[Progress] = deque()
        self._unsent: list[RequestDelta] = []

    def step(self) -> list[RequestDelta]:
        """Run one step; returns what it added, answer by answer."""
        plan = self.scheduler.schedule()
        try:
            result = self.runner.execute(plan) if plan.entries else StepResult(())
        except BaseException as error:
            self._give_up(self.scheduler.fail(plan), error)
            raise
        self._count(plan)
        return self._deliver(self.scheduler.update(plan, result))

    def _count(self, plan: Plan) -> None:
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += plan.num_tokens
        self.stats.num_preemptions += len(plan.preempted)
        firsts = (e.request for e in plan.entries if e.joins and e.epoch == 0)
        self.stats.num_cached_tokens += sum(
            request.num_cached_tokens or 0 for request in firsts
        )

    def _deliver(self, progress: Iterable[Progress]) -> list[RequestDelta]:
        self._arrived.extend(progress)
        while self._arrived:
            self._take_in(*self._arrived.popleft())
        deltas, self._unsent = self._unsent, []
        return deltas

    def _take_in(self, request: Request, token_ids: Sequence[int]) -> None:
        """Pass one request's tokens on. If that fails (a broken tokeniser), only its answer ends."""
        if (answer := self._answers.get(request)) is None:
            return
        self.stats.num_output_tokens += len(token_ids)
        try:
            self._post(self._advance(answer, token_ids, self.clock()))
        except BaseException as error:
            self.scheduler.abort(request)
            self._give_up([request], error)
            if not isinstance(error, Exception):
                raise  # an interrupt: the others' tokens stay in `_arrived` until the next step

    def _post(self, delta: RequestDelta) -> None:
        """Send with the next delivery, and to the stream that waits for it, if one does."""
        self._unsent.append(delta)
        if (inbox := self._inboxes.get(delta.request_id)) is not None:
            inbox.append(delta)

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt (text or token ids); returns its id. Raises `RequestError`.

        Requests share cached prefixes only with those of the same `cache_salt`. A lower `priority`
        is served first by a scheduler with `order="priority"`.
        """
        params = sampling_params or SamplingParams()
        name = self._new_id() if request_id is None else request_id
        if name in self._groups:
            raise RequestError(f"request id {name!r} is in use; choose another")
        _check_standing(cache_salt, priority)
        first = Request(name, self._encode(prompt), params, self._eos_for(params))
        first.cache_salt, first.priority = cache_salt, priority
        followers = (
            replace(
                first, token_ids=list(first.token_ids), sample_index=index, leader=first
            )
            for index in range(1, params.n)
        )
        group = [first, *followers]
        self._enqueue(name, group)
        # After the queue has taken them: a refused prompt must not use up a random number.
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        for request in group:
            request.seed = seed
        return name

    def _new_id(self) -> str:
        return next(name for name in map(str, self._counter) if name not in self._groups)

    def _eos_for(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self.eos_token_ids

    def _enqueue(self, name: str, group: list[Request]) -> None:
        """All `n` samples, or none: a refusal of one takes the others back out."""
        try:
            for request in group:
                self.scheduler.add(request)
        except RequestError:
            for request in group:
                self.scheduler.abort(request)
            raise
        now = self.clock()
        self._groups[name] = list(group)
        self._answers.update((r, Answer(r, self.codec, now)) for r in group)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is text or a list of token ids, not {prompt!r}")
        token_ids = self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise RequestError(f"the prompt {prompt!r} has no tokens; give at least one")
        plain = set(map(type, token_ids)) == {int}  # nearly always: then no loop is needed
        if plain and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return token_ids
        for token_id in token_ids:
            if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
                raise RequestError(
                    f"a prompt is text or a list of token ids, not {token_id!r}"
                )
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1});"
                    " was it made by another model's tokeniser?"
                )
        return [int(token_id) for token_id in token_ids]

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands. False if there is none of that id (any more)."""
        group = list(self._groups.get(request_id, ()))
        for request in group:
            self.scheduler.abort(request)
            self._post(self._cut_short(self._answers[request]))
        return bool(group)

    @property
    def has_unfinished(self) -> bool:
        """Is there anything left to run, or to tell?"""
        return bool(self._answers or self._unsent)

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Iterator[RequestDelta]:
        """Serve prompts together and yield each new piece of text as it comes.

        Closing the iterator early aborts what is unfinished. The ids default to "0", "1", ...,
        counted over the engine's life; `cache_salt` and `priority` hold for all of the prompts.
        """
        if isinstance(prompts, str):
            raise TypeError("stream takes a list of prompts; put the one text into a list")
        params = expand_params(sampling_params, len(prompts))
        names = (
            [self._new_id() for _ in prompts] if request_ids is None else list(request_ids)
        )
        if len(names) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(names)} request ids")
        inbox: deque[RequestDelta] = deque()
        standing: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority}
        taken: list[str] = []  # a refused name may belong to somebody else's request
        try:
            for prompt, param, name in zip(prompts, params, names, strict=True):
                if self._submit(prompt, param, name, inbox, **standing):
                    taken.append(name)
            yield from self._drain(taken, inbox)
        finally:
            for name in taken:
                self._inboxes.pop(name, None)
                self.abort(name)
            self._unsent = [d for d in self._unsent if d.request_id not in set(taken)]

    def _submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        name: str,
        inbox: deque[RequestDelta],
        **standing: Any,
    ) -> bool:
        """Queue a prompt, or put its refusal into the inbox and return False."""
        try:
            self.add_request(prompt, params, name, **standing)
        except RequestError as error:
            inbox.append(RequestDelta(name, 0, "", (), refusal(error)))
            return False
        self._inboxes[name] = inbox
        return True

    def _drain(
        self, names: Sequence[str], inbox: deque[RequestDelta]
    ) -> Iterator[RequestDelta]:
        with resting_collector():
            while inbox or any(name in self._groups for name in names):
                if not inbox:
                    others = [d for d in self.step() if d.request_id not in self._inboxes]
                    self._unsent.extend(others)
                while inbox:
                    yield inbox.popleft()

    def _advance(
        self, answer: Answer, token_ids: Sequence[int], now: float
    ) -> RequestDelta:
        request, sent = answer.request, len(answer.pieces)
        before = answer.num_tokens
        answer.push(token_ids, now)
        if request.is_finished:
            answer.close()
        if answer.stops.matched is not None:
            self.scheduler.finish(request, answer.num_tokens, answer.stops.matched)
        kept = token_ids[: answer.num_tokens - before]
        text = "".join(answer.pieces[sent:])
        finished = self._retire(answer, now) if request.is_finished else None
        return RequestDelta(request.request_id, request.sample_index, text, kept, finished)

    def _retire(
        self, answer: Answer, now: float, error: str | None = None
    ) -> CompletionOutput:
        request = answer.request
        del self._answers[request]
        group = self._groups[request.request_id]
        group.remove(request)
        if not group:
            del self._groups[request.request_id]
        return answer.completion(now, error)

    def _give_up(self, requests: Iterable[Request], error: BaseException) -> None:
        """Send the last word on requests whose step broke."""
        for request in requests:
            if (answer := self._answers.get(request)) is not None:
                message = f"a step of this request failed: {type(error).__name__}: {error}"
                self._post(self._cut_short(answer, message))

    def _cut_short(self, answer: Answer, error: str | None = None) -> RequestDelta:
        """The last word on an answer that ends between two tokens, with the text held back."""
        request, sent = answer.request, len(answer.pieces)
        answer.close()
        text = "".join(answer.pieces[sent:])
        finished = self._retire(answer, self.clock(), error)
        return RequestDelta(request.request_id, request.sample_index, text, (), finished)


def _check_standing(cache_salt: object, priority: object) -> None:
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(f"cache_salt={cache_salt!r}: expected None or a non-empty text")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority={priority!r}: expected a whole number")


def expand_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One `SamplingParams` a prompt, from one for all or a list as long as the prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = isinstance(params, Sequence)
    if not listed or not all(isinstance(param, SamplingParams) for param in params):
        raise TypeError(f"sampling parameters are SamplingParams objects, not {params!r}")
    if len(params) != count:
        raise ValueError(
            f"{count} prompts but {len(params)} sampling parameters: give one for all"
        )
    return list(params)
