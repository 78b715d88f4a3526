"""A wheel built from a clean checkout runs where no development tool exists."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bookkit import ROOT

DEV_TOOLS = [
    "nbdev",
    "fastcore",
    "execnb",
    "jupytext",
    "nbformat",
    "nbclient",
    "ipykernel",
    "IPython",
    "jupyterlab",
]
DEV_TOOLS += [
    "pytest",
    "hypothesis",
    "ruff",
    "mypy",
    "sphinx",
    "myst_nb",
    "codespell_lib",
    "matplotlib",
    "accelerate",
]
FORBID = f"""
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {DEV_TOOLS}:
            raise ModuleNotFoundError(f"{{name}} is not part of the runtime", name=name)
sys.meta_path.insert(0, Forbid())
"""


def checkout(folder: Path) -> Path:
    """The files that git knows or would add, copied to an empty folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a new environment: the wheel, plus what this one has, less the tools."""
    source = checkout(tmp_path_factory.mktemp("checkout"))
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        "dist",
        ".",
    ]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "zz_runtime.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    (site / "sitecustomize.py").write_text(FORBID, "utf-8")
    return python


def output(python: Path, *args: str) -> str:
    """What a command of the new environment prints; it must succeed."""
    done = subprocess.run(
        [python, *args], cwd=python.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_import_octavo_loads_no_torch(python: Path) -> None:
    code = "import octavo, sys; print(octavo.__file__); print('torch' in sys.modules)"
    where, has_torch = output(python, "-c", code).splitlines()
    assert Path(where).is_relative_to(python.parents[1]) and has_torch == "False"


@pytest.mark.slow
def test_development_tools_are_out_of_reach(python: Path) -> None:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('fastcore') is not None)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert "not part of the runtime" in done.stderr


@pytest.mark.slow
def test_every_module_of_the_wheel_imports_without_them(python: Path) -> None:
    code = (
        "import importlib, octavo, pkgutil\n"
        "for m in pkgutil.walk_packages(octavo.__path__, 'octavo.'):\n"
        "    importlib.import_module(m.name)\n"
    )
    output(python, "-c", code)


@pytest.mark.slow
def test_the_command_explains_itself(python: Path) -> None:
    script = python.parent / "octavo"
    assert script.exists(), "pyproject.toml promises the command `octavo`"
    assert "run" in output(python, str(script), "--help")
