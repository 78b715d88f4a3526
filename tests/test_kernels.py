"""The Triton kernels give what `dense_attention` gives in float64.

Without a card they run in Triton's interpreter at tiny sizes; `make test-gpu` runs them at
real sizes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from attention_cases import (
    BF16,
    DECODES,
    DEVICE,
    FP16,
    FP32,
    MIXED,
    REAL,
    REAL_DECODES,
    REAL_MIXED,
    TOLERANCE,
    Case,
    assert_exact,
    make_case,
    run,
)

from octavo import decode_kernels, kernels
from octavo.attention import AttentionBackend, CachedAttend, TorchAttention, store_kv
from octavo.config import ConfigError, ModelConfig, tiny_config
from octavo.kernels import Tuning, default_tuning, num_splits, triton_problem
from octavo.prefill_kernels import query_tiles
from octavo.triton_attention import TritonAttention

PROBLEM = triton_problem(DEVICE, torch.float32)
needs_triton = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
card = [pytest.mark.gpu, pytest.mark.skipif(not REAL, reason="needs a CUDA card")]
SMALL = Tuning(tile=16, splits=3, min_keys=16, query_tile=16, key_tile=16)


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
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 1), (16, 1)], ids=str)
def test_parts_are_merged_in_as_many_rounds_as_it_takes(heads: tuple[int, int]) -> None:
    """Eleven parts, of which 16, 4, 2 or 1 are asked for at once; and a request of one part."""
    case = make_case([(1, 170), (1, 9)], heads, 16, 4, FP32)
    assert_exact(TritonAttention(replace(SMALL, splits=16)), case)


@needs_triton
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("block_size", [12, 48])
def test_tiles_need_not_divide_the_blocks(tile: int, block_size: int) -> None:
    tuning = replace(SMALL, tile=tile, min_keys=tile, key_tile=tile)
    assert_exact(TritonAttention(tuning), make_case(MIXED, (4, 2), 16, block_size, FP32))


@needs_triton
@pytest.mark.parametrize("num_decodes", [1, 16])  # 2 and 32 pairs with a KV head
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_the_default_tunings_work(dtype: torch.dtype, num_decodes: int) -> None:
    lengths = [(1, 70), *[(1, 3)] * (num_decodes - 1), (5, 9)]
    assert_exact(TritonAttention(), make_case(lengths, (4, 2), 16, 4, dtype))


def test_the_default_tuning_follows_the_batch() -> None:
    def decode(pairs: int) -> tuple[int, int, int]:
        tuning = default_tuning(BF16, 128, pairs, 0)
        return tuning.tile, tuning.warps, tuning.stages

    assert decode(31) == decode(257) == (64, 4, 3)
    assert decode(32) == decode(256) == (16, 1, 6)
    queries = [default_tuning(BF16, 128, 1, mean).query_tile for mean in (767, 768)]
    assert queries == [64, 128]


@pytest.mark.parametrize("pairs", [1, 8, 100, 5000])
def test_splits_are_a_power_of_two_and_not_more_than_keep_the_card_busy(pairs: int) -> None:
    splits = num_splits(pairs, 1, Tuning())
    assert splits & (splits - 1) == 0 and 1 <= splits <= 32
    assert splits * pairs <= max(512, pairs)


def test_scratch_has_room_for_every_share_and_stays_where_it_is() -> None:
    scratch = decode_kernels.Scratch(torch.device("cpu"))
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


def changed_neighbours(case: Case, keep: int) -> Case:
    """The same shapes with other numbers, earlier keys included, for all sequences but one."""
    counts = [n for n, _ in case.lengths]
    begin = sum(counts[:keep])
    own = slice(begin, begin + counts[keep])
    q = 3 - 2 * case.q
    q[own] = case.q[own]
    k, v = ([7 * x for x in parts] for parts in (case.k, case.v))
    k[keep], v[keep] = case.k[keep], case.v[keep]
    table = case.metadata.block_table[keep]
    pages = replace(case.cache, k=-5 * case.cache.k, v=2 - case.cache.v)
    for new, old in ((pages.k, case.cache.k), (pages.v, case.cache.v)):
        new[table.long()] = old[table.long()]
    return replace(case, q=q, k=k, v=v, cache=pages)


def assert_neighbours_change_no_bit(backend: AttentionBackend, case: Case) -> None:
    """B62: what the others are decides nothing; at equal shapes a row's bits stay."""
    before = replace(case.cache, k=case.cache.k.clone(), v=case.cache.v.clone())
    outputs = run(backend, replace(case, cache=before)).split([n for n, _ in case.lengths])
    for keep in range(len(case.lengths)):
        found = run(backend, changed_neighbours(case, keep))
        parts = found.split([n for n, _ in case.lengths])
        same = [torch.equal(a, b) for a, b in zip(parts, outputs, strict=True)]
        assert same == [index == keep for index in range(len(same))]


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("merge_here", [True, False])
def test_neighbours_change_no_bit_at_equal_shapes(
    dtype: torch.dtype, merge_here: bool
) -> None:
    backend = TritonAttention(replace(SMALL, merge_here=merge_here))
    lengths = [(1, 2), (1, 40), (1, 17), (17, 17), (3, 30)]
    assert_neighbours_change_no_bit(backend, make_case(lengths, (4, 2), 16, 4, dtype))


@needs_triton
def test_what_is_cached_can_be_attended_to_without_storing() -> None:
    """Chapter 11's layers write keys themselves: the step's `attend` is the rest."""
    case, backend = make_case(MIXED, (4, 2), 16, 4, FP32), TritonAttention(SMALL)
    whole = run(backend, case)  # which has stored
    step = backend.bind(case.cache, case.metadata)
    assert isinstance(step, CachedAttend) and torch.equal(step.attend(0, case.q), whole)
    plain = TorchAttention()
    assert backend.capturable and not plain.capturable
    assert not isinstance(plain.bind(case.cache, case.metadata), CachedAttend)


@needs_triton
def test_lengths_given_on_the_device_are_read_instead_of_the_sums() -> None:
    case, backend = make_case(DECODES, (4, 2), 16, 4, FP32), TritonAttention(SMALL)
    exact = run(backend, case)
    lengths = case.metadata.cu_seqlens_k.diff()
    sums = torch.zeros_like(case.metadata.cu_seqlens_k)
    ones = tuple(1 for _ in DECODES)  # as in chapter 09's graphs
    case.metadata = replace(
        case.metadata, cu_seqlens_k=sums, seqlens_k=ones, lengths=lengths
    )
    assert torch.equal(run(backend, case), exact)


@needs_triton
def test_a_padding_row_of_length_zero_gives_zeros_and_harms_nobody() -> None:
    """B42."""
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


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_INTERPRETED", False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    said = triton_problem.__wrapped__(torch.device("cuda"), torch.bfloat16)
    assert said is not None and "install gcc" in said


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

    @pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
    def test_neighbours_change_no_bit(self, dtype: torch.dtype) -> None:
        for lengths in (REAL_MIXED, REAL_DECODES, REAL_DECODES[-2:]):
            case = make_case(lengths, (16, 8), 128, 16, dtype)
            assert_neighbours_change_no_bit(TritonAttention(), case)

    @pytest.mark.parametrize("num_decodes", [1, 3, 4, 5, 32, 33])
    def test_every_default_tuning(self, num_decodes: int) -> None:
        lengths = [(1, 100 + 37 * i) for i in range(num_decodes)]
        for prompts in ([], [(800, 900)], [(40, 40)]):
            case = make_case([*lengths, *prompts], (16, 8), 128, 16, BF16)
            assert_exact(TritonAttention(), case)

    def test_a_table_of_another_width_compiles_nothing_anew(self) -> None:
        """Widths that are multiples of 16 would otherwise have a kernel of their own."""
        backend = TritonAttention()
        sizes = []
        for longest in (16 * 15, 16 * 16, 16 * 17, 16 * 32):
            case = make_case([(1, longest), (20, 20)], (16, 8), 128, 16, BF16)
            run(backend, case)
            caches = decode_kernels._decode_kernel.device_caches.values()
            sizes.append(sum(len(cache[0]) for cache in caches))
        assert len(set(sizes)) == 1
