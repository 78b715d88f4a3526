"""`make test` itself, and the style of the chapters' cells."""

from __future__ import annotations

import pytest

from tools import cellstyle, check
from tools.book import build
from tools.check import Step, module
from tools.layout import Book

from bookkit import edit

GOOD = Step("good", module("platform"))
BAD = Step("bad", module("no_such_module"))


@pytest.mark.parametrize(
    ("steps", "tests", "code", "verdict"),
    [
        ([GOOD], GOOD, 0, "every check passed"),
        ([BAD, GOOD], GOOD, 1, "failed: bad,"),
        ([GOOD], BAD, 1, "failed: pytest,"),
    ],
)
def test_one_failure_fails_the_run_and_the_rest_still_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: list[Step],
    tests: Step,
    code: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(check, "STEPS", steps)
    monkeypatch.setattr(check, "PYTEST", tests.command)
    assert check.main([]) == code
    printed = capsys.readouterr().out
    assert verdict in printed
    assert ("No module named no_such_module" in printed) is (BAD in steps)
    assert printed.count(" s  good") == 2 * steps.count(GOOD)


def test_cells_are_formatted_in_the_text_itself(built: Book) -> None:
    assert cellstyle.problems(built) == []
    text = (built.chapters_dir / "01_boxes.md").read_text("utf-8")
    edit(built, "return self.size * times", "return self.size*times")
    edit(built, "assert Box(2).double() == 4", "assert Box( 2 ).double()==4")
    assert "cells not formatted" in "".join(cellstyle.problems(built))
    assert cellstyle.format_chapter(built, built.chapters()[0]) == text


def test_unused_and_undefined_names_in_cells_are_found(built: Book) -> None:
    edit(built, "assert Box(2)", "import json\n\nassert Crate(2)")
    build(built)
    found = "".join(cellstyle.problems(built))
    assert "F401" in found and "F821" in found
