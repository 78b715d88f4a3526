"""FlashAttention over pages: how it is called, what it refuses, and on a card what it gives.

Without a card the kernels are stand-ins that keep to the documented calls of `flash-attn` 2.8
and of PyTorch's `varlen_attn`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any

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
    REAL_PREFILLS,
    assert_exact,
    make_case,
    run,
)
from torch import Tensor

from octavo import flash_attention
from octavo.attention import CachedAttend, dense_attention
from octavo.config import ConfigError
from octavo.flash_attention import (
    FlashAttention,
    PackageKernels,
    TorchKernels,
    find_kernels,
    flash_problem,
)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PROMPTS = [(17, 17), (5, 5), (30, 30)]
CHUNKS = [(20, 37), (3, 30)]


def keys_of(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, heads, head_dim] from the pages that a table names."""
    return pages[table.long()].flatten(0, 1)[:length]


def ragged(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lengths: list[int], table: Tensor | None
) -> Tensor:
    """One sequence after the other; NaN in rows of q that belong to none."""
    out, begin = torch.full_like(q, float("nan")), int(cu_q[0])
    for i, length in enumerate(lengths):
        first, end = int(cu_q[i]), int(cu_q[i + 1])
        if table is None:  # keys in one piece, which begin where the queries do
            keys, values = (x[begin : begin + length] for x in (k, v))
            begin += length
        else:
            keys, values = (keys_of(x, table[i], length) for x in (k, v))
        out[first:end] = dense_attention(q[first:end], keys, values)
    return out


class Package:
    """The two functions of `flash_attn` that are called."""

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        causal: bool = False,
    ) -> Tensor:
        assert q.shape[1] == 1 and cache_seqlens.dtype == block_table.dtype == torch.int32
        assert len(q) == len(cache_seqlens) == len(block_table)
        every = zip(q, block_table, cache_seqlens.tolist(), strict=True)
        caches = (k_cache, v_cache)
        return torch.stack(
            [dense_attention(a, *(keys_of(c, t, n) for c in caches)) for a, t, n in every]
        )

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        lengths = cu_seqlens_k.diff().tolist()
        assert causal and max(cu_seqlens_q.diff().tolist()) == max_seqlen_q
        assert max(lengths) == max_seqlen_k
        return ragged(q, k, v, cu_seqlens_q, lengths, block_table)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """PyTorch's function, for the arguments that are passed."""
    assert cu_seq_k is not None and enable_gqa
    assert (window_size == (-1, 0)) == (max_q > 1)  # a single query sees all its keys
    assert max_q == max(cu_seq_q.diff().tolist())
    used = cu_seq_k.diff() if seqused_k is None else seqused_k
    lengths = used.tolist()
    assert max(lengths) <= max_k  # splits are cut by it: keys beyond would be lost
    return ragged(query, key, value, cu_seq_q, lengths, block_table)


KERNELS = {"package": PackageKernels(Package()), "torch": TorchKernels(varlen_attn)}


@pytest.fixture(params=KERNELS)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "flash_problem", lambda *_: None)
    monkeypatch.setattr(flash_attention, "find_kernels", lambda: KERNELS[request.param])


@pytest.mark.skipif(REAL, reason="the card takes the real kernels")
@pytest.mark.usefixtures("stand_in")
class TestCalls:
    """The kernels get what their documentation asks for."""

    @pytest.mark.parametrize(
        "lengths",
        [DECODES, PROMPTS, CHUNKS, [*PROMPTS, *CHUNKS], MIXED, [*DECODES, *PROMPTS]],
        ids=["decodes", "prompts", "chunks", "both", "mixed", "decodes and prompts"],
    )
    def test_each_sequence_gets_what_it_would_get_alone(self, lengths: list) -> None:
        case = make_case(lengths, (4, 2), 16, 4, torch.float64)
        assert_exact(FlashAttention(), case)

    def test_what_is_cached_can_be_attended_to_without_storing(self) -> None:
        for lengths in (MIXED, PROMPTS):
            case = make_case(lengths, (4, 2), 16, 4, torch.float64)
            whole = run(FlashAttention(), case)
            step = FlashAttention().bind(case.cache, case.metadata)
            assert isinstance(step, CachedAttend)
            torch.testing.assert_close(step.attend(0, case.q), whole)

    def test_a_step_for_a_graph_reads_lengths_on_the_device_only(self) -> None:
        """Chapter 09's metadata: on the host, and in the sums, every length is 1."""
        case = make_case(DECODES, (4, 2), 16, 4, torch.float64)
        ones = (1,) * len(DECODES)
        case.metadata = replace(
            case.metadata,
            seqlens_k=ones,
            cu_seqlens_k=case.metadata.cu_seqlens_q,
            lengths=case.metadata.cu_seqlens_k.diff(),
        )
        assert FlashAttention().capturable
        assert_exact(FlashAttention(), case)


@pytest.mark.parametrize(
    ("device", "dtype", "block_size", "head_dim", "says"),
    [
        (CUDA, BF16, 16, 128, "a block_size that is a multiple of 256, not 16"),
        (CUDA, BF16, 384, 128, "a block_size that is a multiple of 256, not 384"),
        (CUDA, FP32, 256, 128, "bfloat16 or float16, not torch.float32"),
        (CUDA, FP16, 512, 60, "a head_dim that is a multiple of 8, at most 256, not 60"),
        (CUDA, FP16, 512, 264, "a head_dim that is a multiple of 8, at most 256, not 264"),
        (CPU, BF16, 256, 128, "a CUDA card, not cpu"),
    ],
)
def test_what_it_cannot_do_is_said(
    device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int, says: str
) -> None:
    assert says in str(flash_problem(device, dtype, block_size, head_dim))


def test_binding_a_cache_of_small_blocks_says_the_way_out() -> None:
    """B99: page sizes are multiples of 256."""
    case = make_case([(1, 3)], (2, 2), 16, 4, BF16)
    with pytest.raises(ConfigError, match="multiple of 256, not 4.*attention='triton'"):
        FlashAttention().bind(case.cache, case.metadata)


class TestFinding:
    """The package, else PyTorch's own copy, else a reason (B96)."""

    @pytest.fixture
    def modules(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What an import gives, by name: a module or an exception."""
        found: dict[str, Any] = {}

        def import_module(name: str) -> Any:
            if isinstance(module := found[name], Exception):
                raise module
            return module

        monkeypatch.setattr(flash_attention.importlib, "import_module", import_module)
        return found

    def test_the_package_comes_first(self, modules: dict[str, Any]) -> None:
        modules["flash_attn"] = Package()
        assert isinstance(find_kernels.__wrapped__(), PackageKernels)

    @pytest.mark.parametrize("error", [ImportError("none"), OSError("undefined symbol")])
    def test_then_pytorch(self, modules: dict[str, Any], error: Exception) -> None:
        modules["flash_attn"] = error
        modules["torch.nn.attention.varlen"] = type("m", (), {"varlen_attn": varlen_attn})
        assert isinstance(find_kernels.__wrapped__(), TorchKernels)

    @pytest.mark.parametrize("older", [ImportError("no such module"), lambda q, k, v: q])
    def test_then_a_reason(self, modules: dict[str, Any], older: Any) -> None:
        modules["flash_attn"] = ImportError("No module named 'flash_attn'")
        module = type("m", (), {"varlen_attn": staticmethod(older)})
        modules["torch.nn.attention.varlen"] = (
            older if isinstance(older, Exception) else module
        )
        reason = find_kernels.__wrapped__()
        assert "No module named 'flash_attn'" in reason and "torch 2.12" in reason


def test_pytorch_takes_the_arguments_that_are_passed() -> None:
    try:
        real = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        pytest.skip("this PyTorch has no varlen_attn")
    theirs = inspect.signature(real).parameters
    if "block_table" not in theirs:
        pytest.skip("this PyTorch's varlen_attn reads no pages")
    for name, ours in inspect.signature(varlen_attn).parameters.items():
        assert theirs[name].kind is ours.kind


class TestOnTheCard:
    """Real sizes, through the package or PyTorch."""

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(
            not REAL or flash_problem(DEVICE, BF16, 256, 128) is not None,
            reason="needs a CUDA card and FlashAttention",
        ),
    ]

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("heads", [(8, 8), (16, 8), (7, 1)], ids=str)
    @pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
    def test_every_shape_equals_the_exact_answer(
        self, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
    ) -> None:
        for lengths in (REAL_MIXED, REAL_DECODES, REAL_PREFILLS, [(300, 300), (70, 70)]):
            assert_exact(FlashAttention(), make_case(lengths, heads, head_dim, 256, dtype))

    def test_larger_pages(self) -> None:
        assert_exact(FlashAttention(), make_case(REAL_MIXED, (16, 8), 128, 512, BF16))

    def test_what_is_cached_can_be_attended_to_without_storing(self) -> None:
        for lengths in (REAL_MIXED, [(300, 300), (70, 70)]):
            case = make_case(lengths, (16, 8), 128, 256, BF16)
            whole = run(FlashAttention(), case).double()
            step = FlashAttention().bind(case.cache, case.metadata)
            assert isinstance(step, CachedAttend)
            error = (step.attend(0, case.q).double() - whole).norm() / whole.norm()
            assert error < 1e-2

    def test_a_step_of_decodes_can_be_recorded_in_a_graph(self) -> None:
        """Lengths may grow after the recording; on the host they stand still."""
        case = make_case(REAL_DECODES, (16, 8), 128, 256, BF16)
        lengths = case.metadata.cu_seqlens_k.diff()
        kept = lengths.clone()
        case.metadata = replace(
            case.metadata, lengths=lengths, seqlens_k=(1,) * len(REAL_DECODES)
        )
        exact = run(FlashAttention(), case)
        lengths.fill_(1)
        run(FlashAttention(), case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(FlashAttention(), case)
        lengths.copy_(kept)
        graph.replay()
        error = (found.double() - exact.double()).norm() / exact.double().norm()
        assert error < 1e-2
