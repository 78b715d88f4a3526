"""Chapter 02, The life of a request.

Generated from chapters/02_request_lifecycle.md; edit there.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from octavo.config import OctavoError

__all__ = [
    "RequestError",
    "SamplingParams",
    "RequestStatus",
    "FinishReason",
    "TokenMask",
    "Request",
    "ScheduledRequest",
    "Plan",
    "StepResult",
    "Progress",
    "BlockAllocator",
    "PrefixCache",
    "PrefillPolicy",
    "Runner",
    "SchedulerLike",
]


class RequestError(OctavoError, ValueError):
    """A request that can't be served as it is; the message says why and what to change."""


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value!r}: expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A list of something as a tuple; None, which other engines take, is an empty one."""
    _check(value is None or isinstance(value, Iterable), name, value, "a list")
    return tuple(value or ())


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops; names and meanings as in vLLM.

    Raises `RequestError` for values that make no sense.
    """

    n: int = 1
    """Number of independent answers to the one prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities sum to at least this; 1 keeps all."""
    max_tokens: int | None = 256
    """Most tokens to generate; None: as many as the model's length allows."""
    stop: str | Sequence[str] | None = ()
    """Text that ends the answer; it is cut off unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] | None = ()
    """Token ids that end the answer, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (`stop_token_ids` still count)."""
    seed: int | None = None
    """Makes the answer repeatable; None draws a fresh one."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave tokens such as `<|im_end|>` out of the text."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        self._check_sampling()
        self._check_stopping()

    def _check_sampling(self) -> None:
        t, p = self.temperature, self.top_p
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "a whole number from 1")
        hot = _is_number(t) and 0 <= t <= sys.float_info.max  # NaN fails both
        _check(hot, "temperature", t, "a finite number from 0 (0 is greedy)")
        _check(
            _is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "0 (off) or more"
        )
        _check(
            _is_number(p) and 0 < p <= 1,
            "top_p",
            p,
            "a number above 0 and up to 1 (1 is off)",
        )
        seeded = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**64)
        _check(seeded, "seed", self.seed, "None or a whole number from 0 below 2**64")

    def _check_stopping(self) -> None:
        m = self.max_tokens
        _check(
            m is None or (_is_int(m) and m >= 1),
            "max_tokens",
            m,
            "None or a whole number from 1",
        )
        texts = all(isinstance(s, str) and s for s in self.stop or ())
        _check(texts, "stop", self.stop, "non-empty strings")
        ids = all(_is_int(i) and i >= 0 for i in self.stop_token_ids or ())
        _check(ids, "stop_token_ids", self.stop_token_ids, "token ids from 0")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _check(isinstance(value, bool), name, value, "True or False")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class RequestStatus(enum.Enum):
    """Where a request stands; preempted requests wait too, but have tokens of their own."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's length was reached."""
    ABORT = "abort"
    """Somebody asked for it to end."""
    ERROR = "error"
    """The step that held it failed, or it was refused."""


class TokenMask(Protocol):
    """A rule about the next token, such as a grammar: it needs to know all that came before."""

    def __call__(self, token_ids: Sequence[int]) -> Any:
        """bool [vocab_size], an array or a tensor: the tokens that may follow these ids."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """One sequence on its way through the engine. `eq=False`: two requests are never the same.

    Who may change which number is fixed: `Scheduler.schedule` books, `Scheduler.update` fills in.
    """

    request_id: str
    token_ids: list[int]
    """Prompt, then output; only tokens whose ids the host knows."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    """Resolved seed of the request's random numbers, 0 <= seed < 2**64."""
    sample_index: int = 0
    """Which of the `n` answers this is."""
    cache_salt: str | None = None
    """Only requests with the same salt may use each other's cached blocks."""
    priority: int = 0
    """Lower runs first, where the scheduler goes by priority."""
    leader: Request | None = field(default=None, repr=False)
    """The first of the `n` answers to one prompt; None for itself."""
    token_mask: TokenMask | None = field(default=None, repr=False)
    """Which tokens may come next; None: all."""

    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    """Prompt and output at most; the scheduler lowers it to `max_model_len`."""
    end_token_ids: frozenset[int] = field(default=frozenset(), init=False)
    """Every id that ends it, the model's and the user's; put together by the scheduler."""
    num_inflight_tokens: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)
    """Prefix hits at the first admission; None until then."""
    num_written_tokens: int = field(default=0, init=False)
    """Tokens in whole blocks whose keys and values have come back from a step."""
    num_preemptions: int = field(default=0, init=False)

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    """The id or the string that ended it, where one did."""

    arrival: int = field(default=0, init=False)
    """Place in the order of arrival, given by the scheduler."""
    row: int | None = field(default=None, init=False)
    """Its row in the persistent device tensors while it runs."""
    block_table: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False, repr=False)
    """Digests of its first whole blocks, kept here by a cache that finds blocks by digest."""
    epoch: int = field(default=0, init=False)
    """Goes up at a preemption: what an older plan says about blocks no longer holds."""
    last_step: int = field(default=0, init=False)
    """Number of the last planned step that holds this request."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        limit = self.sampling_params.max_tokens
        self.max_total_tokens = self.num_prompt_tokens + limit if limit else 2**62

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def work_left(self) -> int:
        """Tokens to run through the model before (and including) the one that samples next.

        1 is a decode, whatever brought the request there; more is a prompt, a chunk of one,
        or a recomputation after a preemption.
        """
        return len(self.token_ids) + self.num_inflight_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Has it ended, for whatever reason?"""
        return self.status is RequestStatus.FINISHED


class ScheduledRequest(NamedTuple):
    """One request's share of a step: positions `start` to `start + count - 1`."""

    request: Request
    epoch: int
    row: int
    start: int
    """Tokens computed before this step."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which has no use here
    samples: bool
    """Does it reach the request's last token, so that a new one is sampled?"""
    new_block_ids: tuple[int, ...]
    """Blocks appended to its block table by this step; of a request that joins, the whole
    table, with the blocks that were found in a cache."""
    joins: bool
    """First step on this row: `new_token_ids` and the sampling parameters are to be set up.
    A cache hit joins at a `start` above 0."""
    new_token_ids: tuple[int, ...] = ()
    """All tokens of a request that joins, else empty: the device has the others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step runs. Decodes (`count == 1`) come first."""

    step: int
    entries: tuple[ScheduledRequest, ...] = ()
    preempted: tuple[Request, ...] = ()
    released_rows: tuple[int, ...] = ()
    released_blocks: tuple[int, ...] = ()
    """Rows and blocks given back since the plan before."""

    @property
    def num_tokens(self) -> int:
        """Tokens that run through the model in this step."""
        return sum(entry.count for entry in self.entries)


class StepResult(NamedTuple):
    """What came back: for each entry of the plan the sampled ids (empty where none was due)."""

    token_ids: Sequence[Sequence[int]]


Progress = tuple[Request, Sequence[int]]
"""A request that moved in a step, and the output tokens it gained.

A plain tuple, since a step makes one for everybody who decodes and nobody keeps it.
"""


class BlockAllocator(Protocol):
    """Hands out the blocks that hold keys and values (chapters 03 and 04 write two)."""

    block_size: int
    num_blocks: int

    @property
    def num_free_blocks(self) -> int: ...
    def allocate(self, count: int) -> list[int]:
        """`count` block ids; the caller has checked `num_free_blocks`."""
        ...

    def free(self, block_ids: Iterable[int]) -> None:
        """Give up one reference to each."""
        ...


class PrefixCache(BlockAllocator, Protocol):
    """An allocator that finds blocks again by what is in them (chapter 05 writes three).

    Only whole blocks are found. `num_free_blocks` counts what `allocate` could hand out: free
    blocks, and those that are merely *cached*, kept for their content and used by nobody.
    """

    @property
    def num_cached_blocks(self) -> int: ...
    def match(self, request: Request) -> list[int]:
        """Blocks of the longest known prefix of `request.token_ids`; changes nothing.

        At most (num_tokens - 1) // block_size: the last token must run to be sampled from.
        """
        ...

    def share(self, block_ids: Sequence[int]) -> None:
        """One more reader for each; cached ones are in use again, with their content."""
        ...

    def num_revived(self, block_ids: Sequence[int]) -> int:
        """How many of them are cached now and would leave `num_free_blocks` when shared."""
        ...

    def publish(self, request: Request, start: int, end: int) -> None:
        """Positions `start` to `end - 1` are written: the blocks they filled may be found."""
        ...

    def clear(self) -> None:
        """Forget all content; blocks in use stay in use, but nobody finds them."""
        ...


class PrefillPolicy(Protocol):
    """How much of a prompt may run in one step."""

    def take(self, work_left: int, budget: int) -> int:
        """Tokens to run now, 0 to wait; at most `min(work_left, budget)`."""
        ...


class Runner(Protocol):
    """Carries out a plan (chapter 07)."""

    def execute(self, plan: Plan) -> StepResult: ...


class SchedulerLike(Protocol):
    """Decides what runs (chapter 03)."""

    def add(self, request: Request) -> None: ...
    def schedule(self) -> Plan: ...
    def update(self, plan: Plan, result: StepResult) -> list[Progress]: ...
    def fail(self, plan: Plan) -> list[Request]: ...
    def finish(
        self, request: Request, num_output_tokens: int, stop_reason: str
    ) -> None: ...
    def abort(self, request: Request) -> None: ...
    @property
    def has_unfinished(self) -> bool: ...
