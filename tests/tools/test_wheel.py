"""A wheel built from a clean checkout runs where only what it declares can be imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import (
    Distribution,
    distribution,
    distributions,
    packages_distributions,
)
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tiny_checkpoint import write_tiny_checkpoint

from bookkit import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

# Out of reach even where a dependency asks for one: torch's CUDA builds bring triton along, its
# other builds don't.
REFUSED = frozenset({"triton", "nbdev", "fastcore", "execnb", "jupytext"})
PROMPT = "Hello"
NUM_TOKENS = 12


class Installed(NamedTuple):
    """An environment that holds the wheel and what it declares."""

    root: Path
    runtime: dict[str, Distribution]

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    def output(self, *command: str | Path) -> str:
        """What a command prints here; it must succeed."""
        env = clean_environ()
        done = subprocess.run(
            command, cwd=self.root, env=env, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def clean_environ() -> dict[str, str]:
    """This process's variables, less those that lead Python or pip to other packages."""
    mine = ("PYTHON", "PIP_", "_PIP_", "VIRTUAL_ENV", "TRITON_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}


def build_wheel(folder: Path) -> Path:
    """The wheel of the last commit's files, without anything else that lies around here."""
    archive = folder / "head.zip"
    command = ["git", "archive", "--format", "zip", "--output", str(archive), "HEAD"]
    subprocess.run(command, cwd=ROOT, check=True)
    shutil.unpack_archive(archive, folder / "source")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    done = subprocess.run(
        [*build, str(folder), str(folder / "source")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(dist: Distribution, extra: str) -> Iterator[tuple[str, str]]:
    """What a distribution declares for this machine: pairs of a name and an extra, or ""."""
    for wanted in map(Requirement, dist.requires or ()):
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            name = canonicalize_name(wanted.name)
            yield from ((name, each) for each in {"", *wanted.extras})


def declared(wheel: Distribution) -> dict[str, Distribution]:
    """The distributions that `wheel` declares, those that they declare, and so on."""
    found: dict[str, Distribution] = {}
    waiting, seen = [(wheel, "")], set()
    while waiting:
        for wanted in requirements(*waiting.pop()):
            if wanted not in seen and wanted[0] not in REFUSED:
                seen.add(wanted)
                found[wanted[0]] = distribution(wanted[0])
                waiting.append((found[wanted[0]], wanted[1]))
    return found


def files_by_top(dist: Distribution) -> dict[str, list[str]]:
    """A distribution's files by the folder or file of site-packages where they lie."""
    assert dist.files, f"{dist.name} keeps no list of its files"
    tops: dict[str, list[str]] = {}
    for file in dist.files:
        if ".." not in file.parts:  # commands and manuals lie outside
            tops.setdefault(file.parts[0], []).append(str(file))
    return tops


def link(dists: Iterable[Distribution], site: Path) -> None:
    """Put links to these distributions, and to none of their neighbours, into `site`."""
    listed = [dist for dist in distributions() if dist.files]
    owners = Counter(top for dist in listed for top in files_by_top(dist))
    for dist in dists:
        for top, files in files_by_top(dist).items():
            for name in (
                [top] if owners[top] == 1 else files
            ):  # a shared folder: file by file
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).symlink_to(str(dist.locate_file(name)))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A new environment with the wheel, and links to what the wheel declares."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, env=clean_environ(), check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (octavo,) = distributions(path=[str(site)])
    runtime = declared(octavo)
    link(runtime.values(), site)
    return Installed(venv, runtime)


def test_import_octavo_loads_no_torch(installed: Installed) -> None:
    code = "import octavo, sys; print(octavo.__file__); print('torch' in sys.modules)"
    where, has_torch = installed.output(installed.python, "-c", code).splitlines()
    assert Path(where).is_relative_to(installed.root) and has_torch == "False"


def test_nothing_undeclared_can_be_imported(installed: Installed) -> None:
    owners = packages_distributions()
    allowed = {"octavo", *installed.runtime}
    others = {
        name
        for name, dists in owners.items()
        if allowed.isdisjoint(map(canonicalize_name, dists)) and name.isidentifier()
    }
    names = sorted((others | REFUSED) - sys.stdlib_module_names)
    code = (
        "import json, sys\n"
        "from importlib import metadata, util\n"
        "names = [d.name for d in metadata.distributions()]\n"
        "print(json.dumps([names, [n for n in sys.argv[1:] if util.find_spec(n)]]))"
    )
    dists, found = json.loads(installed.output(installed.python, "-c", code, *names))
    assert found == []
    assert sorted(map(canonicalize_name, dists)) == sorted(allowed)
    assert {"torch", "numpy"} <= allowed and not {"matplotlib", "pytest"} & allowed


def test_every_module_of_the_wheel_imports(installed: Installed) -> None:
    code = (
        "import importlib, octavo, pkgutil\n"
        "for m in pkgutil.walk_packages(octavo.__path__, 'octavo.'):\n"
        "    print(importlib.import_module(m.name).__name__)\n"
    )
    imported = installed.output(installed.python, "-c", code).split()
    assert {"octavo.llm", "octavo.cli", "octavo.models.llama"} <= set(imported)


def test_type_checkers_may_read_its_annotations(installed: Installed) -> None:
    code = "import octavo, pathlib; print(pathlib.Path(octavo.__file__).with_name('py.typed').exists())"
    assert installed.output(installed.python, "-c", code).strip() == "True"


def test_the_command_answers(installed: Installed, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    length = ("--max-tokens", str(NUM_TOKENS), "--ignore-eos")
    args = ("-p", PROMPT, "--raw", "--temperature", "0", *length, "--dtype", "float64")
    text = installed.output(
        installed.root / "bin" / "octavo", "run", checkpoint, *args, "--device", "cpu"
    )
    assert text.strip() and text == greedy_text(checkpoint) + "\n"


def greedy_text(checkpoint: Path) -> str:
    """What transformers, in this environment, says after the prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).double()
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    answer = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    return str(tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True))
