"""Chapter 11's fused kernels, and the model made of them, against the plain layers.

Without a card they run in Triton's interpreter at tiny sizes; `make test-gpu` runs them at
real sizes. The exact answer is the plain layers' in float64.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

REAL = torch.cuda.is_available()
if not REAL:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from octavo import fused, layers  # noqa: E402
from octavo import gemv as gemv_module  # noqa: E402
from octavo.attention import AttentionBackend, TorchAttention  # noqa: E402
from octavo.batch import Batch, DeviceRows, build_batch  # noqa: E402
from octavo.config import ConfigError, ModelConfig, RopeConfig, tiny_config  # noqa: E402
from octavo.fused_model import FusedModel  # noqa: E402
from octavo.gemv import GemvShape, gemv, gemv_shape  # noqa: E402
from octavo.kernels import Tuning  # noqa: E402
from octavo.kv_cache import KVCache  # noqa: E402
from octavo.models import build_model  # noqa: E402
from octavo.models.llama import LlamaForCausalLM  # noqa: E402
from octavo.presets import MODELS  # noqa: E402
from octavo.request import Plan, Request, ScheduledRequest  # noqa: E402
from octavo.triton_attention import TritonAttention  # noqa: E402
from octavo.weights import init_random_weights  # noqa: E402

DEVICE = torch.device("cuda" if REAL else "cpu")
PROBLEM = fused.fused_problem(DEVICE, torch.float32)
needs_triton = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
card = [pytest.mark.gpu, pytest.mark.skipif(not REAL, reason="needs a CUDA card")]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {FP32: 2e-6, FP16: 1.5e-3, BF16: 1e-2 if REAL else 2e-2}
"""Triton's interpreter cuts bfloat16 off where a card rounds."""
by_dtype = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
SMALL = Tuning(tile=16, splits=3, min_keys=16, query_tile=16, key_tile=16)


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Random numbers that are the same in every dtype (they are exact in bfloat16)."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(BF16).to(DEVICE, dtype)


def assert_near(found: Tensor, exact: Tensor, times: float = 1) -> None:
    """Relative error in the Euclidean norm; a NaN anywhere fails too."""
    error = (found.double() - exact).norm() / exact.norm()
    assert error < times * TOLERANCE[found.dtype]


def check_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    wide = draw(tokens, width + 3, dtype=dtype)
    x, residual = (
        wide[:, :width],
        draw(tokens, width, dtype=dtype, seed=1),
    )  # x has a stride
    gain = draw(width, dtype=dtype, seed=2)
    exact = layers.rms_norm(x.double(), gain.double(), 1e-6)
    assert_near(fused.rms_norm(x, gain, 1e-6), exact)
    normed, total = fused.add_rms_norm(x, residual, gain, 1e-6)
    exact, exact_total = layers.add_rms_norm(
        x.double(), residual.double(), gain.double(), 1e-6
    )
    assert_near(total, exact_total)
    assert_near(normed, exact)


def check_silu_mul(tokens: int, inner: int, dtype: torch.dtype) -> None:
    x = draw(tokens, 2 * inner, dtype=dtype)
    assert_near(fused.silu_mul(x), layers.TorchOps().swiglu(x.double()))


def check_rotate_store(
    heads: tuple[int, int], head_dim: int, norms: bool, dtype: torch.dtype, tokens: int = 5
) -> None:
    (num_heads, kv_heads), width = heads, (sum(heads) + heads[1]) * head_dim
    qkv = draw(tokens, width + 8, dtype=dtype)[:, :width]  # as a slice of a wider matrix
    turns = layers.RotaryEmbedding(RopeConfig(), head_dim, 4096)
    positions = torch.arange(tokens, device=DEVICE) * 7 % 4096
    turns.reserve(4096, dtype, DEVICE)
    angles = layers.Rotation(*turns.table[positions].double().split(1, 1))
    slots = torch.randperm(4 * tokens, generator=torch.Generator().manual_seed(0))
    slots = slots[:tokens].to(DEVICE)
    shape = (tokens + 1, 4, kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in "kv"]
    gains = fused.HeadNorms(
        draw(head_dim, dtype=dtype, seed=3), draw(head_dim, dtype=dtype, seed=4), 1e-6
    )
    rotary = fused.Rotary(positions, turns.table)
    mine = fused.rotate_store(qkv, *caches, slots, rotary, gains if norms else None)
    q, k, v = (
        qkv.double()
        .view(tokens, -1, head_dim)
        .split([num_heads, kv_heads, kv_heads], dim=1)
    )
    if norms:
        q = layers.rms_norm(q, gains.q.double(), 1e-6)
        k = layers.rms_norm(k, gains.k.double(), 1e-6)
    assert_near(mine, layers.apply_rope(q, angles))
    for cache, exact in zip(caches, (layers.apply_rope(k, angles), v), strict=True):
        assert_near(cache.flatten(0, 1)[slots], exact)
        untouched = cache.isnan().all(-1).all(-1).sum()
        assert untouched == cache.shape[0] * cache.shape[1] - tokens
    assert torch.equal(caches[1].flatten(0, 1)[slots].double(), v)  # values aren't changed


USES = ("plain", "norm", "add", "gated", "norm and gated")


def check_gemv(
    vectors: int,
    outputs: int,
    columns: int,
    use: str,
    dtype: torch.dtype,
    shape: GemvShape | None = None,
) -> None:
    rows = 2 * outputs if "gated" in use else outputs
    x = draw(vectors, columns, dtype=dtype)
    weight = draw(rows, columns, dtype=dtype) * 2.0 ** -round(math.log2(columns) / 2)
    gain = draw(columns, dtype=dtype, seed=3)
    start = draw(vectors, outputs, dtype=dtype, seed=4)
    exact = x.double()
    if "norm" in use:
        exact = layers.rms_norm(exact, gain.double(), 1e-5)
    exact = exact @ weight.double().T
    if "gated" in use:
        exact = layers.TorchOps().swiglu(exact)
    into = start.clone() if use == "add" else None
    mine = gemv(
        x, weight, norm=(gain, 1e-5) if "norm" in use else None, gated="gated" in use,
        add_to=into, shape=shape,
    )  # fmt: skip
    if into is not None:
        exact = exact + start.double()
        assert mine is into
    assert_near(mine, exact, times=2)


@needs_triton
@by_dtype
@pytest.mark.parametrize("width", [2, 24, 64, 300])
def test_norm_with_and_without_residual(width: int, dtype: torch.dtype) -> None:
    check_norm(3, width, dtype)


@needs_triton
@by_dtype
@pytest.mark.parametrize("inner", [1, 48, 1500])
def test_swiglu(inner: int, dtype: torch.dtype) -> None:
    check_silu_mul(2, inner, dtype)


@needs_triton
def test_swiglu_of_large_numbers_stays_finite() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -2e4, 1.0, 1.0, 1.0]], device=DEVICE)
    assert fused.silu_mul(gate_up).tolist() == [[0.0, 200.0, 0.0]]


@needs_triton
@by_dtype
@pytest.mark.parametrize("norms", [True, False], ids=["Qwen3", "Llama"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 2), 16), ((3, 1), 20), ((2, 2), 2), ((7, 1), 48)], ids=str
)
def test_rotate_and_store(
    heads: tuple[int, int], head_dim: int, norms: bool, dtype: torch.dtype
) -> None:
    check_rotate_store(heads, head_dim, norms, dtype)


@needs_triton
@by_dtype
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", [GemvShape(4, 32, 1, 1), GemvShape(8, 32, 1, 2)], ids=str)
def test_gemv(shape: GemvShape, use: str, dtype: torch.dtype) -> None:
    check_gemv(2, 9, 90, use, dtype, shape)


@needs_triton
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("vectors", [1, 3])
def test_gemv_with_its_own_choice_of_shape(vectors: int, use: str) -> None:
    check_gemv(vectors, 6, 24, use, FP32)
    check_gemv(vectors, 5, 1100, use, FP32)


@needs_triton
def test_gemv_writes_where_it_is_told() -> None:
    x, weight, room = draw(2, 24), draw(5, 24), torch.zeros(4, 8, device=DEVICE)
    out = room[1:3, :5]
    assert gemv(x, weight, out=out) is out
    assert_near(room[1:3, :5].contiguous(), x.double() @ weight.double().T)
    assert not room[0].any() and not room[3].any() and not room[:, 5:].any()


@needs_triton
def test_gemv_reads_rows_that_lie_apart() -> None:
    wide, weight = draw(3, 40), draw(5, 24)
    assert_near(gemv(wide[:, 8:32], weight), wide[:, 8:32].double() @ weight.double().T)


@needs_triton
def test_a_row_of_gemv_is_the_same_bits_alone_and_among_others() -> None:
    x, weight = draw(3, 70), draw(9, 70)
    assert torch.equal(gemv(x, weight)[1:2], gemv(x[1:2], weight))


def test_shapes_for_products_that_are_known() -> None:
    """Qwen3-0.6B's and Llama 3.1 8B's, as they measured best or nearly."""
    chosen = {
        (4096, 1024, False): (4, 512, 1, 2),
        (1024, 2048, False): (4, 1024, 4, 2),
        (3072, 1024, True): (2, 512, 1, 2),
        (1024, 3072, False): (4, 1024, 4, 2),
        (151936, 1024, False): (4, 512, 1, 1),
        (6144, 4096, False): (4, 1024, 4, 2),
        (14336, 4096, True): (4, 1024, 4, 1),
        (128256, 4096, False): (4, 1024, 2, 1),
    }
    assert {case: tuple(gemv_shape(*case)) for case in chosen} == chosen


Span = tuple[int, int]
"""(tokens before, tokens now)"""
FEW: list[Span] = [(0, 1), (19, 1)]
MANY: list[Span] = [(8, 1), (12, 1), (0, 5), (9, 6)]


def packed(spans: Sequence[Span], device: torch.device, seed: int = 0) -> tuple[Batch, int]:
    """A step of these spans with blocks of 4 in random order; and the number of blocks."""
    generator = torch.Generator().manual_seed(seed)
    held = [-(-sum(span) // 4) for span in spans]
    order = torch.randperm(sum(held), generator=torch.Generator().manual_seed(9))
    entries = []
    for row, ((start, count), blocks) in enumerate(
        zip(spans, order.split(held), strict=True)
    ):
        ids = torch.randint(0, 24, (start + count,), generator=generator).tolist()
        request = Request(str(row), [0])
        entries.append(
            ScheduledRequest(
                request,
                0,
                row,
                start,
                count,
                True,
                tuple(blocks.tolist()),
                True,
                tuple(ids),
            )
        )
    rows = DeviceRows(len(spans), max(map(sum, spans)), 4, sum(held), device)
    rows.apply(plan := Plan(1, tuple(entries)))
    return build_batch(plan, rows), sum(held)


def run(
    model: FusedModel | LlamaForCausalLM,
    backend: AttentionBackend,
    spans: Sequence[Span],
    device: torch.device = DEVICE,
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, vocab_size], and the step's own keys and values in each layer's cache."""
    batch, blocks = packed(spans, device)
    plain = model.plain if isinstance(model, FusedModel) else model
    dtype = plain.model.norm.weight.dtype
    cache = KVCache(model.config, blocks, 4, dtype, device)
    for layer in range(model.config.num_layers):
        for number, pages in enumerate(cache.layer(layer)):
            generator = torch.Generator().manual_seed(2 * layer + number)
            pages.copy_(torch.randn(pages.shape, generator=generator).to(BF16))
    attend = backend.bind(cache, batch.attention)
    with torch.inference_mode():
        hidden = model(batch.input_ids, batch.positions, attend)
        logits, slots = model.compute_logits(hidden), batch.attention.slot_mapping
    stored = [cache.layer(layer) for layer in range(model.config.num_layers)]
    return logits, [pages.flatten(0, 1)[slots] for both in stored for pages in both]


def pair(
    config: ModelConfig, dtype: torch.dtype = FP32
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same random model in float64 on the CPU, and in `dtype` on the device."""
    exact = build_model(config, FP64)
    init_random_weights(exact, seed=0)
    for name, parameter in exact.named_parameters():
        if name.endswith("bias"):
            generator = torch.Generator().manual_seed(len(name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        parameter.copy_(parameter.to(BF16))
    model = build_model(config, dtype, DEVICE)
    model.load_state_dict(exact.state_dict())
    return exact, model


def tiny(family: str, **overrides: object) -> ModelConfig:
    shape = dict(vocab_size=24, hidden_size=32, intermediate_size=24, num_layers=1)
    heads = dict(num_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=64)
    return tiny_config(family, **(shape | heads | overrides))


def check_model(
    config: ModelConfig, backend: AttentionBackend, spans: Sequence[Span], times: float = 1
) -> None:
    exact, model = pair(config)
    expected, stored = run(exact, TorchAttention(), spans, torch.device("cpu"))
    found, mine = run(FusedModel(model), backend, spans)
    for one, other in zip([found, *mine], [expected, *stored], strict=True):
        assert_near(one.cpu(), other, times)


QWEN3, LLAMA = "Qwen3ForCausalLM", "LlamaForCausalLM"


@needs_triton
@pytest.mark.parametrize("spans", [FEW, MANY], ids=["decodes", "mixed"])
@pytest.mark.parametrize("backend", [TritonAttention(SMALL), TorchAttention()], ids=type)
@pytest.mark.parametrize(
    "config",
    [
        tiny(QWEN3),
        tiny(LLAMA, head_dim=20, num_heads=3, num_kv_heads=1),
        tiny(QWEN3, head_dim=12, tie_word_embeddings=True),
    ],
    ids=["Qwen3", "Llama, heads of 20", "Qwen3, tied, heads of 12"],
)
def test_the_model_is_the_plain_one(
    config: ModelConfig, backend: AttentionBackend, spans: list[Span]
) -> None:
    check_model(config, backend, spans)


@needs_triton
@pytest.mark.parametrize("biases", ["attention_bias", "mlp_bias", "both"])
@pytest.mark.parametrize("family", [QWEN3, LLAMA])
def test_models_with_biases(family: str, biases: str) -> None:
    wanted = ("attention_bias", "mlp_bias") if biases == "both" else (biases,)
    config = tiny(family, **dict.fromkeys(wanted, True))
    _, model = pair(config)
    assert FusedModel(model).gemv_rows == 0
    check_model(config, TorchAttention(), FEW)


@needs_triton
def test_several_layers() -> None:
    check_model(tiny(QWEN3, num_layers=3), TorchAttention(), FEW[1:], times=2)


@needs_triton
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_go_where_they_are_wanted(tied: bool, rows: int) -> None:
    exact, model = pair(tiny(QWEN3, tie_word_embeddings=tied))
    hidden, room = draw(rows, 32), torch.full((6, 24), 7.0, device=DEVICE)
    mine = FusedModel(model).compute_logits(hidden, out=room[:rows])
    assert mine.data_ptr() == room.data_ptr() and bool((room[rows:] == 7).all())
    expected = exact.compute_logits(hidden.cpu().double())
    assert_near(room[:rows].cpu(), expected)
    assert torch.equal(FusedModel(model).compute_logits(hidden), mine)


@needs_triton
@pytest.mark.parametrize("spans", [FEW, MANY], ids=["decodes", "mixed"])
def test_neighbours_change_no_bit_at_equal_shapes(spans: list[Span]) -> None:
    """The first sequence keeps its ids; all others get new ones."""
    _, model = pair(tiny(QWEN3))
    fused_model, backend = FusedModel(model), TorchAttention()
    batch, _ = packed(spans, DEVICE)
    other, _ = packed(spans, DEVICE, seed=1)
    ids = torch.cat([batch.input_ids[:1], other.input_ids[1:]])
    logits = []
    for given in (batch.input_ids, ids):
        cache = KVCache(model.config, 40, 4, FP32, DEVICE)
        attend = backend.bind(cache, batch.attention)
        with torch.inference_mode():
            hidden = fused_model(given, batch.positions, attend)
            logits.append(fused_model.compute_logits(hidden))
    assert torch.equal(logits[0][0], logits[1][0])
    assert not torch.equal(logits[0][1:], logits[1][1:])


@needs_triton
def test_up_to_gemv_rows_and_no_further() -> None:
    _, model = pair(tiny(LLAMA))
    calls = []

    def counting(x: Tensor, *args: object, **options: object) -> Tensor:
        calls.append(len(x))
        return gemv(x, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.fused_model.gemv", counting)
        run(FusedModel(model, gemv_rows=2), TorchAttention(), FEW)
        assert calls == [2] * 4  # the head of two rows is the library's
        run(FusedModel(model, gemv_rows=2), TorchAttention(), [*FEW, (3, 1)])
        run(FusedModel(model, gemv_rows=0), TorchAttention(), FEW[:1])
        assert calls == [2] * 4
        run(FusedModel(model), TorchAttention(), FEW[:1])
        assert calls == [2] * 4 + [1] * 5


def test_float64_is_refused_with_a_way_out() -> None:
    model = build_model(tiny(LLAMA), FP64)
    with pytest.raises(ConfigError, match="layer_ops='torch'"):
        FusedModel(model)


class TestOnTheCard:
    """Real sizes."""

    pytestmark = card

    @by_dtype
    @pytest.mark.parametrize("tokens", [1, 7, 300])
    @pytest.mark.parametrize("width", [576, 1024, 4096, 8192])
    def test_norm_and_swiglu(self, width: int, tokens: int, dtype: torch.dtype) -> None:
        check_norm(tokens, width, dtype)
        check_silu_mul(tokens, 3 * width, dtype)

    @by_dtype
    @pytest.mark.parametrize("norms", [True, False])
    @pytest.mark.parametrize(
        ("heads", "head_dim"),
        [((16, 8), 128), ((9, 3), 64), ((32, 8), 128), ((64, 8), 128), ((5, 1), 80)],
        ids=str,
    )
    def test_rotate_and_store(
        self, heads: tuple[int, int], head_dim: int, norms: bool, dtype: torch.dtype
    ) -> None:
        check_rotate_store(heads, head_dim, norms, dtype, tokens=200)

    @pytest.mark.parametrize("use", USES)
    @pytest.mark.parametrize(
        ("outputs", "columns", "dtype"),
        [
            (4096, 1024, BF16),
            (1024, 3072, BF16),
            (4096, 14336, BF16),
            (20000, 1024, BF16),
            (577, 1000, BF16),
            (577, 1000, FP16),
            (577, 1000, FP32),
            (300, 2100, FP32),
        ],
        ids=str,
    )
    def test_gemv(self, outputs: int, columns: int, dtype: torch.dtype, use: str) -> None:
        for vectors in (1, 2, 3):
            check_gemv(vectors, outputs, columns, use, dtype)

    @pytest.mark.parametrize("family", [QWEN3, LLAMA])
    @pytest.mark.parametrize("spans", [[(255, 1)], FEW, [*MANY, (300, 200)]], ids=str)
    def test_the_model(self, spans: list[Span], family: str) -> None:
        wide = dict(num_heads=16, num_kv_heads=8, head_dim=128)
        config = tiny(
            family,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=4,
            max_position_embeddings=1024,
            **wide,
        )
        check_model(config, TritonAttention(), spans, times=10)

    @pytest.mark.parametrize("rows", [1, 2, 3, 8, 200])
    def test_dependent_launches_change_no_bit(
        self, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whole steps in a graph, again and again: a kernel that read too early would show."""
        config = MODELS["qwen3-0.6b"]
        model = build_model(config, BF16, DEVICE)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        fused_model, spans = FusedModel(model), [(100 + row, 1) for row in range(rows)]
        batch, blocks = packed(spans, DEVICE)
        cache = KVCache(config, blocks, 4, BF16, DEVICE)
        attend = TritonAttention().bind(cache, batch.attention)

        def step() -> Tensor:
            hidden = fused_model(batch.input_ids, batch.positions, attend)
            return fused_model.compute_logits(hidden)

        with torch.inference_mode(), monkeypatch.context() as patch:
            for module in (fused, gemv_module):
                patch.setattr(module, "launch_options", lambda device: {"PDL": False})
            patch.setattr("octavo.kernels.launch_options", lambda device: {"PDL": False})
            expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            assert torch.equal(step(), expected)
            with torch.cuda.graph(graph):
                logits = step()
            for _ in range(100):
                logits.zero_()
                graph.replay()
                graph.replay()
                assert torch.equal(logits, expected)
