"""Compile every kernel for sm_90 without a card: registers, spills, shared memory.

    PYTHONPATH=src:scratch/gpu python scratch/gpu/compile_check.py [module ...]

A kernel's launch is caught, its arguments (CPU tensors) are turned into a signature, and
Triton and ptxas do the rest. What the interpreter accepts and the compiler doesn't shows here.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/triton_cache_check")

import re  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Compiled(Exception):
    """Raised instead of a launch."""


def signature(kernel: Any, args: tuple, kwargs: dict) -> tuple[dict, dict, dict]:
    """What the JIT would specialise on: types, constants, divisibility by 16."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    types, constants, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value, fixed = given[name], kernel.params[index].is_constexpr
        if fixed or value is None or (isinstance(value, int) and value == 1):
            types[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            types[name] = "fp32"
    return types, constants, attrs


def report(name: str, kernel: Any, args: tuple, kwargs: dict) -> None:
    """Compile one launch and print what it takes."""
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    types, constants, attrs = signature(kernel, args, kwargs)
    source = ASTSource(kernel, types, constants, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = os.path.join(
            os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump"
        )
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    regs, stack, local = found.groups() if found else ("?", "?", "?")
    ptx = built.asm["ptx"]
    notes = [w for w in ("wgmma", "mma.sync", "cp.async.cg", "griddepcontrol") if w in ptx]
    print(
        f"{name:44s} regs {regs:>3s} stack {stack:>4s} local {local:>3s} "
        f"shared {built.metadata.shared / 1024:6.1f} KiB  {' '.join(notes)}",
        flush=True,
    )


class Catcher:
    """Stands in for a kernel: compiles its launch, runs nothing."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.kernel, self.label = name, kernel, ""

    def __getitem__(self, grid: Any) -> Callable:
        def launch(*args: Any, **kwargs: Any) -> None:
            report(f"{self.name} {self.label}", self.kernel, args, dict(kwargs))

        return launch


def catch(module: Any) -> list[Catcher]:
    """Replace a module's kernels (names that end in _kernel)."""
    found = []
    for name in [n for n in vars(module) if n.endswith("_kernel")]:
        catcher = Catcher(name.strip("_"), getattr(module, name))
        setattr(module, name, catcher)
        found.append(catcher)
    return found


def label(catchers: list[Catcher], text: str) -> None:
    for catcher in catchers:
        catcher.label = text


def check_attention() -> None:
    """Store, decode, prefill over dtypes, head and block sizes."""
    import harness
    import kernels

    catchers = catch(kernels)
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (64, 128, 80, 256):
            for block in (16, 256, 4, 1):
                if (head_dim != 128 or dtype is torch.float32) and block not in (16, 4):
                    continue
                label(catchers, f"{str(dtype)[6:]} d{head_dim} b{block}")
                case = harness.make_case(
                    [(1, 9), (1, 40), (70, 90)],
                    16,
                    8,
                    head_dim,
                    block,
                    dtype,
                    device=torch.device("cpu"),
                )
                attend = kernels.TritonAttention().bind(case.cache, case.metadata)
                attend(0, case.q, case.packed(case.k), case.packed(case.v))


CHECKS: dict[str, Callable[[], None]] = {"attention": check_attention}

if __name__ == "__main__":
    try:
        import compile_check_more

        CHECKS |= compile_check_more.checks(catch, label)
    except ImportError:
        pass
    for name in sys.argv[1:] or CHECKS:
        print(f"-- {name}")
        CHECKS[name]()
