"""The Triton kernels give what `dense_attention` gives in float64.

Without a card they run in Triton's interpreter at tiny sizes; `make test-gpu` runs them at
real sizes. Pages lie in disorder, and what nobody wrote is NaN.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

REAL = torch.cuda.is_available()
if not REAL:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from octavo import kernels  # noqa: E402
from octavo.attention import dense_attention, store_kv  # noqa: E402
from octavo.batch import AttentionMetadata  # noqa: E402
from octavo.config import ConfigError, ModelConfig, tiny_config  # noqa: E402
from octavo.kernels import TritonAttention, Tuning, query_tiles, triton_problem  # noqa: E402

DEVICE = torch.device("cuda" if REAL else "cpu")
PROBLEM = triton_problem(DEVICE, torch.float32)
needs_triton = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
card = [pytest.mark.gpu, pytest.mark.skipif(not REAL, reason="needs a CUDA card")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 2e-6, FP16: 1.5e-3, BF16: 1e-2}
SMALL = Tuning(tile=16, splits=3, min_keys=16, query_tile=16, key_tile=16)
DECODES = [(1, m) for m in (1, 2, 16, 17, 40)]
MIXED = [*DECODES[::2], (17, 17), (20, 37), (3, 30)]
REAL_DECODES = [(1, m) for m in (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4097)]
REAL_PREFILLS = [(2, 2), (16, 16), (17, 17), (3, 300), (257, 257), (500, 1100), (129, 257)]
REAL_MIXED = [*REAL_DECODES, *REAL_PREFILLS]


@pytest.fixture(autouse=True)
def interpreter_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter holds bfloat16 as its bits and multiplies those: widen first."""
    if REAL or PROBLEM:
        return
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def wide(handle):
        if (
            handle.dtype.scalar is not interpreter.tl.bfloat16
            or handle.data.dtype.kind == "f"
        ):
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, *rest):
        return plain(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@dataclass
class Pages:
    """A `PagedCache` of one layer."""

    k: Tensor
    v: Tensor

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v


@dataclass
class Case:
    """A step: sequences of n new tokens out of m, their keys and values, and where they go."""

    lengths: Sequence[tuple[int, int]]
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    cache: Pages
    metadata: AttentionMetadata

    def packed(self, parts: list[Tensor]) -> Tensor:
        """The step's own tokens, [T, heads, head_dim]."""
        return torch.cat(
            [x[m - n :] for x, (n, m) in zip(parts, self.lengths, strict=True)]
        )

    def expected(self) -> Tensor:
        """float64 [T, num_heads, head_dim], one sequence after the other."""
        queries = self.q.double().split([n for n, _ in self.lengths])
        parts = zip(queries, self.k, self.v, strict=True)
        return torch.cat([dense_attention(q, k.double(), v.double()) for q, k, v in parts])


def make_case(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> Case:
    """Random numbers; `lengths` are (n, m), decodes first. Earlier keys lie in the cache."""
    draw, (num_heads, num_kv_heads) = torch.Generator().manual_seed(0), heads
    counts = [-(-m // block_size) for _, m in lengths]
    reserved = sum(counts) + 3
    tables = torch.randperm(reserved, generator=draw)[: sum(counts)].split(counts)
    shape = (reserved + 1, block_size, num_kv_heads, head_dim)
    cache = [torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"]
    table = torch.full((len(lengths), max(counts)), reserved, dtype=torch.int32)
    own, kv = [], ([], [])
    for row, ((n, m), blocks) in enumerate(zip(lengths, tables, strict=True)):
        table[row, : len(blocks)] = blocks
        places = torch.arange(m)
        slots = blocks[places // block_size] * block_size + places % block_size
        for store, parts in zip(cache, kv, strict=True):
            new = torch.randn(m, num_kv_heads, head_dim, generator=draw).to(dtype)
            store.flatten(0, 1)[slots[: m - n]] = new[: m - n]
            parts.append(new.to(DEVICE))
        own.append(slots[m - n :])
    total = sum(n for n, _ in lengths)
    q = torch.randn(total, num_heads, head_dim, generator=draw).to(dtype)
    pages = Pages(*(x.to(DEVICE) for x in cache))
    metadata = make_metadata(lengths, table, torch.cat(own))
    return Case(lengths, q.to(DEVICE), *kv, pages, metadata)


def make_metadata(
    lengths: Sequence[tuple[int, int]], table: Tensor, slots: Tensor
) -> AttentionMetadata:
    counts, totals = zip(*lengths, strict=True)
    sums = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (counts, totals))
    tensors = (x.to(DEVICE) for x in (*sums, table, slots))
    return AttentionMetadata(sum(n == 1 for n in counts), counts, totals, *tensors)


def run(backend: TritonAttention, case: Case) -> Tensor:
    attend = backend.bind(case.cache, case.metadata)
    return attend(0, case.q, case.packed(case.k), case.packed(case.v))


def assert_exact(backend: TritonAttention, case: Case) -> None:
    """Relative error in the Euclidean norm; a NaN anywhere fails too."""
    exact = case.expected()
    error = (run(backend, case).double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[case.q.dtype]


@needs_triton
@pytest.mark.skipif(REAL, reason="the card takes real sizes")
@pytest.mark.parametrize(
    ("dtype", "block_size", "heads", "head_dim"),
    [
        (FP32, 1, (2, 2), 16),
        (FP32, 4, (4, 2), 20),
        (FP32, 16, (7, 1), 32),
        (FP32, 256, (4, 2), 20),
        (BF16, 1, (7, 1), 32),
        (BF16, 4, (4, 2), 20),
        (BF16, 16, (2, 2), 16),
        (BF16, 256, (8, 1), 16),
        (FP16, 4, (7, 1), 32),
        (FP16, 16, (4, 2), 20),
    ],
    ids=str,
)
def test_every_shape_equals_the_exact_answer(
    dtype: torch.dtype, block_size: int, heads: tuple[int, int], head_dim: int
) -> None:
    assert_exact(
        TritonAttention(SMALL), make_case(MIXED, heads, head_dim, block_size, dtype)
    )


@needs_triton
@pytest.mark.parametrize(
    "merge_here", [True, False], ids=["last to arrive", "second kernel"]
)
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_any_number_of_splits_gives_the_same(splits: int, merge_here: bool) -> None:
    case = make_case(DECODES, (4, 2), 16, 4, FP32)
    backend = TritonAttention(replace(SMALL, splits=splits, merge_here=merge_here))
    assert_exact(backend, case)
    assert not backend.scratch(DEVICE).arrived.any()  # ready for the next launch
    assert_exact(backend, case)


@needs_triton
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("block_size", [12, 48])
def test_tiles_need_not_divide_the_blocks(tile: int, block_size: int) -> None:
    tuning = replace(SMALL, tile=tile, min_keys=tile, key_tile=tile)
    assert_exact(TritonAttention(tuning), make_case(MIXED, (4, 2), 16, block_size, FP32))


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_default_tuning_works(dtype: torch.dtype) -> None:
    assert_exact(TritonAttention(), make_case([(1, 70), (5, 9)], (4, 2), 16, 4, dtype))


def test_scratch_has_room_for_every_share_and_stays_where_it_is() -> None:
    scratch = kernels.Scratch(torch.device("cpu"))
    for programs, group, head_dim in ((8, 1, 64), (8, 16, 16), (20, 1, 16), (2, 2, 2)):
        scratch.reserve(programs, group, head_dim)
        assert scratch.partial.numel() >= programs * group * head_dim
        assert scratch.lse.numel() >= programs * group
        assert scratch.arrived.numel() >= programs and not scratch.arrived.any()
    places = [x.data_ptr() for x in (scratch.partial, scratch.lse, scratch.arrived)]
    scratch.reserve(8, 16, 16)
    assert places == [x.data_ptr() for x in (scratch.partial, scratch.lse, scratch.arrived)]


@needs_triton
def test_write_kv_writes_its_slots_and_no_other() -> None:
    case = make_case(MIXED, (4, 3), 20, 4, BF16)
    k, v = case.packed(case.k), case.packed(case.v)
    wide = torch.cat([k, v], dim=1)  # views of one matrix, as the layers hand them over
    mine = [case.cache.k.clone(), case.cache.v.clone()]
    plain = [case.cache.k.clone(), case.cache.v.clone()]
    kernels.write_kv(wide[:, :3], wide[:, 3:], *mine, case.metadata.slot_mapping)
    store_kv(k, v, *plain, case.metadata.slot_mapping)
    for one, other in zip(mine, plain, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@needs_triton
def test_neighbours_change_no_bit_at_equal_shapes() -> None:
    case, backend = make_case(DECODES, (4, 2), 16, 16, FP32), TritonAttention(SMALL)
    first = run(backend, case)
    case.q[1:], case.k[1:], case.v[1:] = (
        3.0,
        [7 * k for k in case.k[1:]],
        [-v for v in case.v[1:]],
    )
    second = run(backend, case)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


@needs_triton
def test_lengths_given_on_the_device_are_read_instead_of_the_sums() -> None:
    case, backend = make_case(DECODES, (4, 2), 16, 4, FP32), TritonAttention(SMALL)
    exact = run(backend, case)
    lengths = case.metadata.cu_seqlens_k.diff()
    sums = torch.zeros_like(case.metadata.cu_seqlens_k)
    case.metadata = replace(case.metadata, cu_seqlens_k=sums, lengths=lengths)
    assert torch.equal(run(backend, case), exact)


@needs_triton
def test_a_padding_row_of_length_zero_gives_zeros_and_harms_nobody() -> None:
    case, backend = (
        make_case([(1, 40), (1, 17)], (4, 2), 16, 4, FP32),
        TritonAttention(SMALL),
    )
    exact = run(backend, case)
    lengths = torch.tensor([40, 0], dtype=torch.int32, device=DEVICE)
    case.metadata = replace(case.metadata, lengths=lengths)
    found = run(backend, case)
    assert torch.equal(found[0], exact[0]) and not found[1].any()


def tiny_engine_tokens(attention: object, model_config: ModelConfig) -> list[list[int]]:
    """Greedy answers of a tiny float32 Llama whose prompts are cut in chunks."""
    from octavo.assembly import Parts, build_engine
    from octavo.config import EngineConfig
    from octavo.example import CountingTokenizer
    from octavo.models import build_model
    from octavo.request import SamplingParams
    from octavo.weights import init_random_weights

    model = build_model(model_config, torch.float32, "cpu")
    init_random_weights(model, seed=0)
    parts = Parts(model.to(DEVICE), model_config, DEVICE, FP32, attention, 4)
    options = dict(max_model_len=64, num_kv_blocks=16, max_num_batched_tokens=8, seed=0)
    config = EngineConfig(dtype="float32", block_size=4, **options)
    engine = build_engine(config, parts, CountingTokenizer(), ())
    prompts = [[5, 6, 7], list(range(20, 32)), [5, 6, 7, 8, 9]]
    params = SamplingParams(temperature=0, max_tokens=4)
    done = {d.request_id: d.finished for d in engine.stream(prompts, params) if d.finished}
    return [done[str(i)].token_ids for i in range(len(prompts))]


@needs_triton
def test_an_engine_answers_as_with_the_plain_backend() -> None:
    from octavo.attention import TorchAttention

    config = tiny_config(max_position_embeddings=64)
    plain = tiny_engine_tokens(TorchAttention(), config)
    assert tiny_engine_tokens(TritonAttention(SMALL), config) == plain


@needs_triton
def test_float64_is_refused_with_a_way_out() -> None:
    case = make_case([(1, 3)], (2, 2), 16, 4, torch.float64)
    with pytest.raises(ConfigError, match="attention='torch'"):
        TritonAttention().bind(case.cache, case.metadata)


@pytest.mark.parametrize("hidden", [True, False], ids=["no triton", "no card"])
def test_what_is_missing_is_said(hidden: bool) -> None:
    """The module imports without triton; using it says what is missing."""
    if not hidden and find_spec("triton") is None:
        pytest.skip("triton isn't installed")
    code = "import sys, torch\n" + "sys.modules['triton'] = None\n" * hidden
    code += "from octavo.kernels import triton_problem\n"
    code += "print(triton_problem(torch.device('cpu'), torch.float32))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert ("isn't installed" if hidden else "needs a CUDA card") in said.stdout


def test_the_longest_tiles_of_queries_come_first_and_none_is_missing() -> None:
    tiles = query_tiles((1, 5, 40, 33), (9, 5, 60, 33), 1, 16)
    places = [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
    assert sorted(map(tuple, tiles.tolist())) == places
    assert tiles[0].tolist() == [2, 2] and tiles[-1].tolist() == [1, 0]


class TestOnTheCard:
    """Real sizes."""

    pytestmark = card

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("block_size", [1, 4, 16, 256])
    def test_block_and_head_sizes(self, block_size: int, head_dim: int) -> None:
        for lengths in (REAL_DECODES, REAL_MIXED):
            case = make_case(lengths, (16, 8), head_dim, block_size, BF16)
            assert_exact(TritonAttention(), case)

    @pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
    @pytest.mark.parametrize("heads", [(8, 8), (16, 8), (16, 2), (7, 1)], ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128, 80, 256])
    def test_groups_and_dtypes(
        self, head_dim: int, heads: tuple[int, int], dtype: torch.dtype
    ) -> None:
        assert_exact(TritonAttention(), make_case(REAL_MIXED, heads, head_dim, 16, dtype))

    @pytest.mark.parametrize("merge_here", [True, False])
    def test_many_splits_merge_right_every_time(self, merge_here: bool) -> None:
        case = make_case(REAL_DECODES * 4, (16, 8), 128, 16, BF16)
        backend = TritonAttention(Tuning(splits=32, min_keys=64, merge_here=merge_here))
        first, exact = run(backend, case), case.expected()
        assert (first.double() - exact).norm() / exact.norm() < TOLERANCE[BF16]
        for _ in range(200):  # whoever arrives last, the shares are added in the same order
            assert torch.equal(run(backend, case), first)

    def test_a_step_of_decodes_can_be_recorded_in_a_graph(self) -> None:
        case, backend = make_case(REAL_DECODES, (16, 8), 128, 16, BF16), TritonAttention()
        lengths = case.metadata.cu_seqlens_k.diff()
        case.metadata = replace(case.metadata, lengths=lengths)
        exact = run(backend, case)  # compiles, and makes the scratch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(backend, case)
        found.zero_()
        graph.replay()
        assert torch.equal(found, exact)
