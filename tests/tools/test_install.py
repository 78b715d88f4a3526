"""Which torch the Makefile's environment gets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import install
from tools.install import torch_commands

from bookkit import ROOT

PYTHON = Path(".venv/bin/python")


def plans(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, cuda: bool, *wanted: str
) -> list[str]:
    """The commands that would be tried, one string a way."""
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(install, "pypi_torch_is_cuda", lambda: cuda)
    monkeypatch.setattr(install, "local_cpu_wheel", lambda python: "torch==9.9+cpu")
    ways = torch_commands(PYTHON, *(wanted or ("", "")))
    return [" && ".join(" ".join(command) for command in way) for way in ways]


def test_a_named_torch_is_the_only_way(monkeypatch: pytest.MonkeyPatch) -> None:
    (way,) = plans(monkeypatch, False, True, "torch==2.13.0", "")
    assert way.endswith("torch==2.13.0") and "--index-url" not in way
    (way,) = plans(monkeypatch, False, True, "", "INDEX")
    assert way.endswith("torch>=2.9 --index-url INDEX")


def test_without_a_card_cpu_builds_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    local, uv, pypi = plans(monkeypatch, False, True)
    assert "--no-index" in local and local.endswith("torch==9.9+cpu")
    assert "--torch-backend cpu" in uv
    assert pypi.endswith("torch>=2.9") and "--no-index" not in pypi


@pytest.mark.parametrize(("gpu", "cuda"), [(True, True), (False, False), (True, False)])
def test_else_pypi_has_the_right_one(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, cuda: bool
) -> None:
    assert len(plans(monkeypatch, gpu, cuda)) == 1


def test_make_alone_explains_every_command() -> None:
    command = ["make", "--no-print-directory"]  # `make test` runs this inside a make
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    line = re.compile(r" *(?:make )?([\w-]+)\b.*?  +(\S.*)")
    told = [match[1] for match in map(line.fullmatch, done.stdout.splitlines()) if match]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"(?m)^(\w[\w-]*)\s*:(?!=)", makefile)
    phony = re.findall(r"(?m)^\.PHONY:(.*)$", makefile)
    assert told == targets
    assert sorted(" ".join(phony).split()) == sorted(targets)


@pytest.mark.slow
def test_jupyter_lab_starts_with_jupytext() -> None:
    python = install.sys.executable
    command = [python, "-m", "jupyter", "server", "extension", "list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "jupytext" in done.stdout + done.stderr
    version = [python, "-m", "jupyterlab", "--version"]
    subprocess.run(version, cwd=ROOT, capture_output=True, check=True)
