"""What several test files share: small engines, a loop with plans in flight, a tiny Llama."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from octavo.block_pool import BlockPool
from octavo.config import EngineConfig, ModelConfig, tiny_config
from octavo.engine import CompletionOutput, Engine, RequestDelta
from octavo.example import CountingRunner, CountingTokenizer, checksum
from octavo.overlap import OverlappedEngine
from octavo.request import Plan, Request, SamplingParams, StepResult
from octavo.scheduler import Scheduler


class LateStep:
    """A step in flight that is carried out when somebody waits for it, as late as can be.

    So nothing can be right because of something the ledger still said when it was launched.
    """

    needs_mask = False

    def __init__(self, runner: CountingRunner, plan: Plan) -> None:
        self.runner, self.plan = runner, plan

    def sample(self) -> None:
        pass

    def result(self) -> StepResult:
        return self.runner.execute(self.plan)


class RecordingRunner(CountingRunner):
    """Keeps the plans it carried out, and fails at the steps it is told to."""

    def __init__(self, block_size: int, next_token: Any = checksum) -> None:
        super().__init__(block_size, next_token)
        self.plans: list[Plan] = []
        self.failures: dict[int, BaseException] = {}

    def execute(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        result = super().execute(plan)
        if (failure := self.failures.pop(plan.step, None)) is not None:
            raise failure  # after the fact: a step behind it may be in flight
        return result

    def submit(self, plan: Plan) -> LateStep:
        """Launch a step (chapter 09)."""
        return LateStep(self, plan)

    def entries_of(self, request_id: str) -> list[Any]:
        """This request's shares of all steps."""
        return [
            e for p in self.plans for e in p.entries if e.request.request_id == request_id
        ]


class Loop:
    """Drives a scheduler by hand, with `depth` plans in flight: 1 plain, 2 one step ahead.

    A plan is carried out as late as possible, right before its result is taken in. So it can't
    be right because of something the ledger still said when it was made.
    """

    def __init__(
        self, scheduler: Scheduler, runner: CountingRunner, depth: int = 1
    ) -> None:
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self.flying: deque[Plan] = deque()

    @property
    def busy(self) -> bool:
        return self.scheduler.has_unfinished or bool(self.flying)

    def submit(self) -> Plan:
        """Plan a step; it is in flight now."""
        self.flying.append(self.scheduler.schedule())
        return self.flying[-1]

    def complete(self) -> Plan:
        """The oldest step in flight comes back."""
        plan = self.flying.popleft()
        self.scheduler.update(plan, self.runner.execute(plan))
        return plan

    def turn(self) -> None:
        """Plan one step and take in those that can't stay in flight."""
        if self.scheduler.has_unfinished:
            self.submit()
        while len(self.flying) >= self.depth or (
            self.flying and not self.scheduler.has_unfinished
        ):
            self.complete()

    def run(self) -> None:
        while self.busy:
            self.turn()


ENGINES: dict[str, type[Engine]] = {"plain": Engine, "overlapped": OverlappedEngine}


def counting_engine(
    kind: str = "plain",
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    seqs: int = 8,
    length: int = 128,
    next_token: Any = checksum,
    **options: Any,
) -> Engine:
    """A scheduler, a pool and a counting model behind an engine; `engine.runner` keeps plans."""
    scheduler = counting_scheduler(num_blocks, block_size, seqs=seqs, length=length)
    runner = RecordingRunner(block_size, next_token)
    return ENGINES[kind](scheduler, runner, CountingTokenizer(), vocab_size=100, **options)


def counting_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    seqs: int = 8,
    length: int = 128,
    tokens: int = 256,
    **options: Any,
) -> Scheduler:
    """A scheduler over a `BlockPool`."""
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        **options,
    )


def request(name: str, prompt: Sequence[int], **params: Any) -> Request:
    """A request for a scheduler; `eos` is a set of ids."""
    eos = frozenset(params.pop("eos", ()))
    return Request(name, list(prompt), SamplingParams(**params), eos)


def continuation(
    prompt: Sequence[int], count: int, next_token: Any = checksum
) -> list[int]:
    """What a counting model says after `prompt`, without any engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def serve(
    engine: Engine, prompts: Sequence[Any], params: Any = None, **fields: Any
) -> list[CompletionOutput]:
    """Stream prompts (n = 1) to the end; the last word on each, in order.

    Checks on the way that the pieces that were streamed are the answers (B66).
    """
    params = params or SamplingParams(**fields)
    deltas = list(engine.stream(prompts, params))
    finished: dict[str, CompletionOutput] = {}
    for delta in deltas:
        assert delta.request_id not in finished, "a word after the last one"
        if delta.finished is not None:
            finished[delta.request_id] = delta.finished
            check_pieces(deltas, delta.request_id, delta.finished)
    names = list(dict.fromkeys(d.request_id for d in deltas))
    return [finished[name] for name in sorted(names, key=int)]


def drain(engine: Engine, most_steps: int = 200) -> Iterator[RequestDelta]:
    """Step until nothing is left; fails where somebody would wait for ever."""
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return
        yield from engine.step()
    raise AssertionError(f"unfinished after {most_steps} steps: somebody waits for ever")


def check_pieces(
    deltas: Iterable[RequestDelta], name: str, answer: CompletionOutput
) -> None:
    """The pieces of an answer, joined, are the answer."""
    mine = [d for d in deltas if (d.request_id, d.index) == (name, answer.index)]
    assert "".join(d.text for d in mine) == answer.text
    assert [i for d in mine for i in d.token_ids] == answer.token_ids


def check_all_returned(engine: Engine) -> None:
    """Nothing is left: no request, no block, no row."""
    for _ in range(3):  # let zombies in flight come back
        engine.step()
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)
    assert not engine.has_unfinished and not scheduler.has_unfinished
    check_scheduler_empty(scheduler)


def check_scheduler_empty(scheduler: Scheduler) -> None:
    """All blocks and all rows are free, and the pool's books agree."""
    scheduler.allocator.check_integrity([])
    assert sorted(scheduler.queues.free_rows) == list(range(scheduler.max_num_seqs))


class NumberTokenizer:
    """Token n is the number n; `special_ids` are left out of the text when asked for."""

    def __init__(self, special_ids: Iterable[int] = (), eos_token_id: int | None = None):
        self.special_ids = frozenset(special_ids)
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else ()
        return "".join(f"{n} " for n in token_ids if n not in hidden)


@functools.cache
def tiny_model(dtype: str = "float64") -> tuple[Any, ModelConfig]:
    """A Llama of two layers with random weights, the same every time."""
    import torch

    from octavo.models import build_model
    from octavo.weights import init_random_weights

    config = tiny_config(max_position_embeddings=512)
    model = build_model(config, getattr(torch, dtype), "cpu")
    init_random_weights(model, seed=0)
    return model, config


def tiny_engine(
    tokenizer: Any = None, eos_token_ids: Sequence[int] = (), **options: Any
) -> Engine:
    """The real engine around the tiny Llama; `options` are fields of `EngineConfig`."""
    import torch

    from octavo.assembly import Parts, build_engine
    from octavo.attention import TorchAttention

    config = EngineConfig(
        **{"dtype": "float64", "max_model_len": 128, "seed": 0, **options}
    )
    model, model_config = tiny_model(config.dtype)
    dtype, device = getattr(torch, config.dtype), torch.device("cpu")
    given = (model, model_config, device, dtype, TorchAttention(), config.block_size)
    parts = Parts(*given, overlap=bool(config.overlap))
    return build_engine(config, parts, tokenizer or NumberTokenizer(), eos_token_ids)
