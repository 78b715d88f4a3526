"""Plan step n + 1 while step n runs (chapter 09); the plain loop is `octavo.engine.Engine`."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from octavo.engine import Engine
from octavo.outputs import RequestDelta
from octavo.request import Plan, StepResult

__all__ = ["AsyncRunner", "OverlappedEngine"]


class PendingStep(Protocol):
    """A step in flight."""

    def result(self) -> StepResult: ...


class AsyncRunner(Protocol):
    """A `Runner` that can be left alone with a step."""

    def submit(self, plan: Plan) -> PendingStep: ...
    def execute(self, plan: Plan) -> StepResult: ...


class _Nothing:
    """The step of an empty plan."""

    def result(self) -> StepResult:
        return StepResult(())


class OverlappedEngine(Engine):
    """`Engine` with one step in flight while the next is planned.

    The order on the host is: plan and launch n + 1, then wait for n, update, detokenise. So
    while the host does all that, the card has n + 1 to do. What a result changes (an end, a
    stop string) is seen one step later; `CONTRACT` says what becomes of the step in between.
    """

    runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flying: deque[tuple[Plan, PendingStep]] = deque()

    def step(self) -> list[RequestDelta]:
        """Launch a step if there is one to plan; take in the one before it."""
        if self.scheduler.has_unfinished:
            self._launch()
        while len(self._flying) > 1 or (self._flying and not self.scheduler.has_unfinished):
            plan, pending = self._flying.popleft()
            self._take_back(plan, pending)
        return self._deliver(())

    def _launch(self) -> None:
        plan = self.scheduler.schedule()
        try:
            pending = self.runner.submit(plan) if plan.entries else _Nothing()
        except BaseException as error:
            self._give_up(self.scheduler.fail(plan), error)
            raise
        self._flying.append((plan, pending))

    def _take_back(self, plan: Plan, pending: PendingStep) -> None:
        try:
            result = pending.result()
        except BaseException as error:
            self._give_up(self.scheduler.fail(plan), error)
            raise
        self._count(plan)
        self._arrived.extend(self.scheduler.update(plan, result))
