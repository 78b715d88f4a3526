"""Make the virtual environment that the Makefile's commands run in. Standard library only.

On PyPI the torch wheel for Linux on x86-64 is a CUDA build of several gigabytes. On such a
machine without an NVIDIA card this looks for a CPU build first: a wheel that pip finds
without an index (a local wheelhouse), then PyTorch's own CPU wheels by way of uv, and only
then PyPI's. TORCH names a requirement (torch==2.13.0), TORCH_INDEX an index to take it from.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TORCH = "torch>=2.9"
NEWEST_PIP_TALK = ["-qq", "--no-input", "--disable-pip-version-check"]
HAS_TORCH = "import torch, sys; v = torch.__version__.split('.'); sys.exit((int(v[0]), int(v[1])) < (2, 9))"
BIG = (
    "no CPU build of torch found: taking PyPI's, which carries CUDA (gigabytes). To avoid it,\n"
    "  stop here and run again with TORCH_INDEX=<address of PyTorch's CPU wheel index>"
)


def say(text: str) -> None:
    """One line for the person who waits."""
    print(f"octavo: {text}", flush=True)


def has_nvidia_gpu() -> bool:
    """Is there an NVIDIA card that a CUDA build could use?"""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def pypi_torch_is_cuda() -> bool:
    """Does PyPI serve a CUDA build to this machine?"""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def make_venv(venv: Path) -> Path:
    """Create the environment unless it is there; return its python."""
    if sys.version_info < (3, 11):  # noqa: UP036  (the python3 of the machine runs this)
        sys.exit(f"octavo needs Python 3.11 or newer; this is {platform.python_version()}")
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"creating {venv} with Python {platform.python_version()}")
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)])
        if made.returncode:
            sys.exit("octavo: python3 -m venv failed; on Debian: apt install python3-venv")
    return python


def pip(python: Path, *args: str) -> list[str]:
    """The command line of a quiet pip install."""
    return [str(python), "-m", "pip", "install", *NEWEST_PIP_TALK, *args]


def torch_commands(python: Path, wanted: str, index: str) -> Iterator[list[list[str]]]:
    """Ways to get torch, best first; each is a list of commands that must all succeed."""
    if wanted or index:
        yield [pip(python, wanted or TORCH, *(["--index-url", index] if index else []))]
        return
    if pypi_torch_is_cuda() and not has_nvidia_gpu():
        yield [pip(python, "--no-index", "--no-deps", f"{local_cpu_wheel(python)}")]
        uv = [str(python), "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        yield [pip(python, "uv"), [*uv, "--torch-backend", "cpu", TORCH]]
        say(BIG)
    yield [pip(python, TORCH)]


def local_cpu_wheel(python: Path) -> str:
    """A requirement that only a CPU wheel known to pip without an index can meet."""
    command = [*pip(python, "--no-index", "--no-deps", "--dry-run", TORCH)]
    command.remove("-qq")
    found = subprocess.run(command, capture_output=True, text=True).stdout
    names = [word for word in found.split() if word.startswith("torch-")]
    version = names[-1].removeprefix("torch-") if names else ""
    return f"torch=={version}" if version.endswith("+cpu") else "torch==0+cpu"


def install_torch(python: Path, wanted: str, index: str) -> None:
    """Install torch unless a fitting one is there."""
    if (
        not wanted
        and subprocess.run([python, "-c", HAS_TORCH], capture_output=True).returncode == 0
    ):
        return
    say("installing torch, this takes a minute")
    problem = ""
    for commands in torch_commands(python, wanted, index):
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            problem = done.stderr
            if done.returncode:
                break
        else:
            return
    sys.exit(f"octavo: torch could not be installed:\n{problem}")


def install_package(python: Path, extra: str) -> None:
    """Install the package in place, with the development tools if asked for."""
    what = "the package and the development tools" if extra else "the package"
    say(f"installing {what}, this takes a minute")
    done = subprocess.run(pip(python, "--editable", f".[{extra}]" if extra else "."))
    if done.returncode:
        sys.exit("octavo: pip failed (see above)")


def main(argv: list[str] | None = None) -> None:
    """Command line of `python3 -m tools.install`."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.install", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--extra", default="", help="dev, or nothing for the runtime alone")
    parser.add_argument("--torch", default="", help="a requirement such as torch==2.13.0")
    parser.add_argument("--torch-index", default="", help="an index to take torch from")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    python = make_venv(args.venv)
    install_torch(python, args.torch, args.torch_index)
    install_package(python, args.extra)
    (args.venv / f".stamp-{args.extra or 'runtime'}").touch()
    (args.venv / ".stamp-runtime").touch()
    say(f"{args.venv} is ready after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
