"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.attention import packed_heads

__all__ = [
    "DTYPES",
    "LOG2E",
    "triton_problem",
    "write_kv",
    "dependent_launch",
    "launch_options",
    "Tuning",
    "default_tuning",
    "num_splits",
]


try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # `triton_problem` says so to whoever wants to use a kernel
    triton = tl = gdc_launch_dependents = gdc_wait = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2E = math.log2(math.e)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _jit(kernel: Any) -> Any:
    """`triton.jit` where there is Triton; a table of another width compiles nothing anew."""
    if triton is None:
        return kernel
    return triton.jit(kernel, do_not_specialize=["table_stride"])


@functools.cache
def triton_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels can't run on `device` in `dtype`; None if they can."""
    if triton is None:
        return "Triton isn't installed (pip install triton, on Linux)"
    if dtype not in DTYPES:
        return f"there is no kernel for {dtype}; use float32, bfloat16 or float16"
    if _INTERPRETED:
        return None
    if device.type != "cuda":
        return f"it needs a CUDA card, not {device} (TRITON_INTERPRET=1 is for tests)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton compiles a launcher for each kernel and finds no C compiler; install gcc"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a card of compute capability 8.0 or more"
    return None


@_jit
def _store_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """One program a token: its WIDTH = num_kv_heads * head_dim numbers go to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    keys = tl.load(k + token * k_stride + column, mask=inside)
    values = tl.load(v + token * v_stride + column, mask=inside)
    tl.store(k_cache + slot * WIDTH + column, keys, mask=inside)
    tl.store(v_cache + slot * WIDTH + column, values, mask=inside)


def _padded(size: int) -> int:
    """The power of two that a tile needs for `size`; the matrix unit takes no less than 16."""
    return max(16, 1 << (size - 1).bit_length())


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """`attention.store_kv` as a kernel; tokens of k and v may lie any distance apart."""
    k, v = packed_heads(k), packed_heads(v)
    width = k.shape[1] * k.shape[2]
    _store_kernel[(len(k),)](
        k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0),
        WIDTH=width, PAD=_padded(width), num_warps=4 if width >= 512 else 1,
    )  # fmt: skip


@_jit
def _slots(
    table, start, keys, exists,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """int64 [TILE]: the slots of keys start, start + 1, ... WITHIN: all are in one block."""
    if WITHIN:
        page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        slots = page * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        pages = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slots = pages * BLOCK_SIZE + keys % BLOCK_SIZE
    return slots


@_jit
def _load_tile(
    places, exists, dim, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """A tile of keys or values [TILE, PAD_DIM]; zeros where there are none."""
    if MASKED:
        wanted = exists[:, None] & (dim < HEAD_DIM)[None, :]
        tile = tl.load(places, mask=wanted, other=0.0)
    elif HEAD_DIM == PAD_DIM:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return tile


@_jit
def _scan_keys(
    q, top, total, acc, k_base, v_base, table, first, end, positions, token_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr, MASKED: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, PAD_DIM] over keys first..end-1, TILE at a time.

    top, total [M] and acc [M, PAD_DIM] are the running maximum, sum and weighted values, float32.
    MASKED: leave out keys from `end` on and behind each row's own position [M]. WITHIN: no tile
    crosses a block's border. Source: Milakov and Gimelshein, 2018.
    """
    step = tl.arange(0, TILE)
    dim = tl.arange(0, PAD_DIM)
    for start in range(first, end, TILE):
        keys = start + step
        exists = keys < end
        slots = _slots(table, start, keys, exists, BLOCK_SIZE, TILE, WITHIN)
        offsets = slots[:, None] * token_stride + dim[None, :]
        k = _load_tile(k_base + offsets, exists, dim, HEAD_DIM, PAD_DIM, MASKED)
        v = _load_tile(v_base + offsets, exists, dim, HEAD_DIM, PAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = exists[None, :] & (keys[None, :] <= positions[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


@_jit
def _queries(q, rows, dim, wanted, scale, row_stride):
    """A tile of queries, scaled for `_scan_keys`, in the dtype of the cache."""
    tile = tl.load(q + rows[:, None] * row_stride + dim[None, :], mask=wanted, other=0.0)
    return (tile.to(tl.float32) * scale).to(q.dtype.element_ty)


@_jit
def _nothing(ROWS: tl.constexpr, PAD_DIM: tl.constexpr):
    """Maximum, sum and weighted values before the first key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, PAD_DIM], tl.float32)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """May a kernel on `device` start before the one in front of it has ended?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """For kernels with a PDL argument: a dependent launch where there is such a thing."""
    if dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@dataclass(frozen=True)
class Tuning:
    """Shapes of the kernels' work; the defaults are what measured best on an H200."""

    tile: int = 64
    """Keys a decode program takes at a time."""
    warps: int = 4
    stages: int = 3
    """Tiles under way at once: bytes in flight are what bandwidth is made of."""
    splits: int | None = None
    """Parts of a decode's keys; None: as many as keep the card busy."""
    min_keys: int = 64
    """A split has at least so many."""
    merge_here: bool = True
    """The last program to arrive merges; False: a second kernel does."""
    programs: int = 512
    """Decode programs that keep the card busy."""
    query_tile: int = 128
    key_tile: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 2


def default_tuning(
    dtype: torch.dtype, head_dim: int, decodes: int, new_tokens: float
) -> Tuning:
    """For so many decodes (pairs of sequence and KV head) and new tokens a prompt on average."""
    row = _padded(head_dim) * dtype.itemsize
    if dtype == torch.float32:
        rows = 32 if row <= 512 else 16
        return Tuning(tile=16, query_tile=rows, key_tile=16)
    if row > 256:
        return Tuning(tile=32, stages=4, query_tile=64, key_tile=32)
    query_tile = 64 if new_tokens < 768 else 128
    if 32 <= decodes <= 256:
        return Tuning(tile=16, warps=1, stages=6, min_keys=32, query_tile=query_tile)
    return Tuning(query_tile=query_tile)


def num_splits(num_sequences: int, num_kv_heads: int, tuning: Tuning) -> int:
    """A power of two that makes about `tuning.programs` of them, at most 32."""
    if tuning.splits is not None:
        return tuning.splits
    most = max(1, min(32, tuning.programs // (num_sequences * num_kv_heads)))
    return 1 << (most.bit_length() - 1)
