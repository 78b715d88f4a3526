"""`make test`: every check that CI runs, two at a time, with one line and a time for each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tools.gates import GATES

PYTHON = sys.executable
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Step:
    """One check: its name and its command."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """How a check went."""

    step: Step
    seconds: float
    output: str
    ok: bool

    @property
    def line(self) -> str:
        """The summary line of this check."""
        return f"{'ok' if self.ok else 'FAIL':4} {self.seconds:6.1f} s  {self.step.name}"


def module(*args: str) -> tuple[str, ...]:
    """A command that runs a Python module with this interpreter."""
    return (PYTHON, "-m", *args)


# The long ones first, so that two cores finish together.
STEPS = [
    Step("nbdev_test over all notebooks", module("tools.notebooks")),
    *(
        Step(name, module("tools.gates", name))
        for name in sorted(GATES, key=lambda name: name != "chapters 1..k stand alone")
    ),
    Step("mypy", module("mypy")),
    Step("ruff check", module("ruff", "check", ".")),
    Step("ruff check of the chapters' cells", module("tools.cellstyle", "check")),
    Step("ruff format", module("ruff", "format", "--check", "--quiet", ".")),
]
PYTEST = module(
    "pytest", "-n", "2", "--dist", "loadgroup", "-q", "-m", "not gpu and not soak"
)


def run(step: Step) -> Result:
    """Run one check quietly; print its line, and its output if it failed."""
    start = time.perf_counter()
    env = {**os.environ, **ONE_THREAD}
    done = subprocess.run(step.command, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    result = Result(step, seconds, done.stdout + done.stderr, done.returncode == 0)
    print(result.line if result.ok else f"{result.line}\n{result.output}", flush=True)
    return result


def run_pytest(extra: list[str]) -> Result:
    """Run the tests with their output on the terminal."""
    start = time.perf_counter()
    step = Step("pytest", (*PYTEST, *extra))
    done = subprocess.run(step.command, env={**os.environ, **ONE_THREAD})
    return Result(step, time.perf_counter() - start, "", done.returncode == 0)


def main(argv: list[str] | None = None) -> int:
    """Command line of `python -m tools.check`; arguments go to pytest."""
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, STEPS))
    print("\npytest", flush=True)
    tests = run_pytest(sys.argv[1:] if argv is None else argv)
    print("\nSummary", *(result.line for result in [*results, tests]), sep="\n  ")
    failed = [result.step.name for result in [*results, tests] if not result.ok]
    verdict = f"failed: {', '.join(failed)}" if failed else "every check passed"
    print(f"\n{verdict}, {time.perf_counter() - start:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
