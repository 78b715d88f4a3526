"""Chapter 09, CUDA graphs and overlapped scheduling.

Generated from chapters/09_cuda_graphs.md; edit there.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from octavo.engine import Engine
from octavo.model_runner import PendingStep
from octavo.outputs import RequestDelta, TextCodec
from octavo.request import Plan, SchedulerLike, StepResult

__all__ = ["AsyncRunner", "OverlappedEngine"]


class AsyncRunner(Protocol):
    """A `Runner` that can be left alone with a step."""

    def submit(self, plan: Plan) -> PendingStep:
        """Launch a step and return without waiting for it."""
        ...

    def execute(self, plan: Plan) -> StepResult: ...


class _Idle:
    """The step of an empty plan."""

    needs_mask = False

    def sample(self) -> None:
        pass

    def result(self) -> StepResult:
        return StepResult(())


class _Broken(_Idle):
    """A step that couldn't be launched; who asks for its result gets the error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def result(self) -> StepResult:
        raise self.error


class OverlappedEngine(Engine):
    """`Engine` with a step in flight while the next one is planned and launched.

    What a step brings (an end, a stop string) is seen a step later than in the plain loop.
    """

    runner: AsyncRunner

    def __init__(
        self,
        scheduler: SchedulerLike,
        runner: AsyncRunner,
        codec: TextCodec,
        **options: Any,
    ) -> None:
        super().__init__(scheduler, runner, codec, **options)
        self._flying: deque[tuple[Plan, PendingStep]] = deque()

    def step(self) -> list[RequestDelta]:
        """Launch the next step if there is one, and take in the one before it."""
        if self.scheduler.has_unfinished:
            self._launch()
        while self._must_land():
            self._take_in_step()
        self._sample_oldest()
        return self._deliver(())

    def _launch(self) -> None:
        self._sample_oldest()  # has happened already, unless the last step broke
        plan = self.scheduler.schedule()
        try:
            pending = self.runner.submit(plan) if plan.entries else _Idle()
        except BaseException as error:
            pending = _Broken(error)
        self._flying.append((plan, pending))

    def _must_land(self) -> bool:
        """Has a step to be waited for before anything else is done?"""
        if not self._flying:
            return False
        broken = isinstance(self._flying[-1][1], _Broken)
        return len(self._flying) > 1 or broken or not self.scheduler.has_unfinished

    def _take_in_step(self) -> None:
        plan, pending = self._flying.popleft()
        try:
            result = pending.result()
        except BaseException as error:
            self._give_up(self.scheduler.fail(plan), error)
            raise
        self._count(plan)
        self._arrived.extend(self.scheduler.update(plan, result))

    def _sample_oldest(self) -> None:
        """Every token before the oldest step in flight is known: masks can be made."""
        if not self._flying:
            return
        plan, pending = self._flying[0]
        try:
            pending.sample()
        except BaseException as error:
            self._flying.popleft()
            self._give_up(self.scheduler.fail(plan), error)
            raise
