"""Attention kernels against `dense_attention` in float64.

Without a card they run in Triton's interpreter, at tiny sizes:
    PYTHONPATH=src:scratch/gpu pytest scratch/gpu/test_gpu_kernels.py
"""

from __future__ import annotations

import pytest
import torch
from harness import DEVICE, REAL, TOLERANCE, error, make_case, mend_interpreter

mend_interpreter()

import kernels  # noqa: E402
from kernels import TritonAttention, Tuning  # noqa: E402

from octavo.attention import TorchAttention, store_kv  # noqa: E402
from octavo.config import ConfigError  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
HEADS = [(4, 4), (4, 2), (7, 1), (16, 8)] if REAL else [(2, 2), (4, 2), (7, 1)]
HEAD_DIMS = [64, 128, 80, 256] if REAL else [16, 20]
BLOCK_SIZES = [1, 4, 16, 256]

if REAL:
    DECODES = [(1, m) for m in (1, 2, 15, 16, 17, 255, 256, 257, 1000, 4097)]
    PREFILLS = [
        (2, 2),
        (16, 16),
        (17, 17),
        (3, 300),
        (257, 257),
        (500, 1100),
        (129, 128 + 129),
    ]
    SMALL = Tuning()
else:
    DECODES = [(1, m) for m in (1, 2, 16, 17, 40)]
    PREFILLS = [(2, 2), (17, 17), (3, 30), (20, 37)]
    SMALL = Tuning(min_keys=16, splits=3, query_tile=16, key_tile=16)
STEPS = {"decodes": DECODES, "prefills": PREFILLS, "both": DECODES[::2] + PREFILLS[1::2]}


def run(backend, case, layer: int = 0):
    attend = backend.bind(case.cache, case.metadata)
    return attend(layer, case.q, case.packed(case.k), case.packed(case.v))


def backends():
    yield "torch", TorchAttention()
    yield "triton", TritonAttention(None if REAL else SMALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_every_shape_equals_the_exact_answer(name, head_dim, heads, block_size, dtype):
    if not REAL and (dtype is FP16) == (block_size == 4):
        pytest.skip("half of them are enough for the interpreter")
    if REAL and block_size != 16 and (dtype is not BF16 or head_dim not in (64, 128)):
        pytest.skip("every kernel is compiled anew: what is unusual twice is left out")
    backend = dict(backends())[name]
    poison = (
        float("nan") if name == "triton" else 0.0
    )  # `torch` clears blocks as it begins them
    for step in ("both",) if not REAL else STEPS:
        case = make_case(STEPS[step], *heads, head_dim, block_size, dtype, poison=poison)
        exact = case.expected()
        assert error(run(backend, case), exact) < TOLERANCE[dtype], step


@pytest.mark.parametrize(
    "merge_here", [True, False], ids=["last to arrive", "second kernel"]
)
@pytest.mark.parametrize("splits", [1, 2, 3, 8] if not REAL else [1, 2, 3, 8, 32])
def test_any_number_of_splits_gives_the_same(splits, merge_here):
    case = make_case(DECODES, 4, 2, HEAD_DIMS[0], 4, BF16)
    tuning = Tuning(splits=splits, merge_here=merge_here, min_keys=16)
    backend = TritonAttention(tuning)
    for _ in range(3 if REAL else 1):
        assert error(run(backend, case), case.expected()) < TOLERANCE[BF16]
    assert not backend.scratch(DEVICE).arrived.any()  # ready for the next launch


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("block_size", [4, 12, 16, 48])
def test_tiles_that_do_not_divide_the_blocks(tile, block_size):
    case = make_case(STEPS["both"], 4, 2, 64 if REAL else 16, block_size, FP16)
    tuning = Tuning(
        tile=tile,
        splits=2,
        min_keys=tile,
        query_tile=16,
        key_tile=tile,
        stages=4,
        prefill_warps=4,
    )
    assert error(run(TritonAttention(tuning), case), case.expected()) < TOLERANCE[FP16]


def test_store_writes_its_slots_and_no_other():
    case = make_case(STEPS["both"], 4, 3, 20, 4, BF16)
    k, v = case.packed(case.k), case.packed(case.v)
    wide = torch.cat([k, v], dim=1)  # views of one matrix, as the layers hand them over
    mine, plain = case.cache.k.clone(), case.cache.k.clone()
    slots = case.metadata.slot_mapping
    kernels.store_kv(wide[:, :3], wide[:, 3:], mine, case.cache.v, slots)
    store_kv(k, v, plain, case.cache.v.clone(), slots)
    assert torch.equal(mine.view(torch.int16), plain.view(torch.int16))
    assert torch.equal(case.cache.v.flatten(0, 1)[slots], v)


def test_neighbours_change_no_bit_at_equal_shapes():
    case = make_case(DECODES, 4, 2, HEAD_DIMS[0], 16, BF16)
    backend = TritonAttention(SMALL)
    first = run(backend, case)
    case.q[1:], case.k[1:], case.v[1:] = 3.0, [k * 7 for k in case.k[1:]], case.v[1:]
    assert torch.equal(first[0], run(backend, case)[0])


def test_float64_is_refused_with_a_way_out():
    case = make_case([(1, 3)], 2, 2, 16, 4, torch.float64)
    with pytest.raises(ConfigError, match="attention='torch'"):
        TritonAttention().bind(case.cache, case.metadata)


def test_the_longest_tiles_of_queries_come_first_and_none_is_missing():
    seqlens_q, seqlens_k = (1, 5, 40, 33), (9, 5, 60, 33)
    tiles = kernels.query_tiles(seqlens_q, seqlens_k, 1, 16)
    assert sorted(map(tuple, tiles.tolist())) == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert tiles[0].tolist() == [2, 2]


def flash_backend():
    try:
        from flash import FlashAttentionBackend

        return FlashAttentionBackend()
    except (ImportError, ConfigError) as reason:
        pytest.skip(f"no flash-attn: {reason}")


@pytest.mark.skipif(not REAL, reason="needs a card")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("step", STEPS)
def test_flash_attention_equals_the_exact_answer(step, head_dim, heads, dtype):
    case = make_case(STEPS[step], *heads, head_dim, 256, dtype)
    assert error(run(flash_backend(), case), case.expected()) < TOLERANCE[dtype]


@pytest.mark.skipif(not REAL, reason="needs a card")
def test_flash_attention_wants_large_blocks():
    case = make_case([(1, 3)], 2, 2, 64, 16, BF16)
    with pytest.raises(ConfigError, match="multiple of 256"):
        flash_backend().bind(case.cache, case.metadata)
