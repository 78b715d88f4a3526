"""Fused kernels against their plain versions; the model that uses them against the plain one."""

from __future__ import annotations

import pytest
import torch
from harness import DEVICE, REAL, TOLERANCE, error, make_case, mend_interpreter

mend_interpreter()

import fused  # noqa: E402
from fused_sampler import FusedSampler, random_noise  # noqa: E402
from kernels import Tuning  # noqa: E402

from octavo import layers  # noqa: E402
from octavo.config import tiny_config  # noqa: E402
from octavo.models import build_model  # noqa: E402
from octavo.request import Request, SamplingParams  # noqa: E402
from octavo.sampler import Sampler, gumbel_noise, random_bits, row_keys  # noqa: E402
from octavo.weights import init_random_weights  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape, dtype=FP32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@by_dtype
@pytest.mark.parametrize("width", [24, 64, 1024] if REAL else [24, 64])
def test_norm_with_and_without_residual(width, dtype):
    x, residual, weight = (
        draw(5, width, dtype=dtype),
        draw(5, width, dtype=dtype, seed=1),
        draw(width, dtype=dtype),
    )
    exact = layers.rms_norm(x.double(), weight.double(), 1e-6)
    assert error(fused.rms_norm(x, weight, 1e-6), exact) < TOLERANCE[dtype]
    normed, total = fused.add_rms_norm(x, residual, weight, 1e-6)
    plain, plain_total = layers.add_rms_norm(x, residual, weight, 1e-6)
    # (the interpreter cuts off where a card rounds)
    assert (
        torch.equal(total, plain_total)
        or not REAL
        and error(total, plain_total) < TOLERANCE[dtype]
    )
    assert error(normed, plain) < TOLERANCE[dtype]


@by_dtype
def test_silu_mul(dtype):
    x = draw(3, 2 * 1500, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    assert error(fused.silu_mul(x), torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


GEMV = {
    "plain": {},
    "norm": {"norm": 1},
    "add": {"add": 1},
    "gated": {"norm": 1, "gated": 1},
}


@by_dtype
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("how", GEMV)
@pytest.mark.parametrize(
    ("outputs", "columns"), [(6, 24), (50, 96)] + [(1024, 3072), (4096, 1024)] * REAL
)
def test_gemv(outputs, columns, how, vectors, dtype):
    options = GEMV[how]
    x, weight = draw(vectors, columns, dtype=dtype), draw(outputs, columns, dtype=dtype)
    gain, start = (
        draw(columns, dtype=dtype, seed=3),
        draw(vectors, outputs, dtype=dtype, seed=4),
    )
    exact_x = (
        layers.rms_norm(x.double(), gain.double(), 1e-5)
        if "norm" in options
        else x.double()
    )
    exact = exact_x @ weight.double().T
    if "gated" in options:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    if "add" in options:
        exact = exact + start.double()
    mine = fused.gemv(
        x, weight, norm=(gain, 1e-5) if "norm" in options else None,
        add_to=start.clone() if "add" in options else None, gated="gated" in options,
        shape=None if REAL else fused.GemvShape(4, 32, 1),
    )  # fmt: skip
    assert error(mine, exact) < TOLERANCE[dtype]


LENGTHS = {
    "decodes": [
        (1, m) for m in ((1, 2, 15, 16, 17, 300, 1025) if REAL else (1, 2, 16, 17, 40))
    ],
    "both": [(1, 5), (1, 33), (2, 2), (7, 20), (18, 18)],
}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("norm", [True, False], ids=["Qwen3", "Llama"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("step", LENGTHS)
def test_attention_that_turns_q_and_k_itself(step, block_size, splits, norm, dtype):
    heads, kv_heads, dim = (16, 8, 128) if REAL else (4, 2, 16)
    case = make_case(LENGTHS[step], heads, kv_heads, dim, block_size, dtype)
    config = tiny_config(head_dim=dim, max_position_embeddings=2048)
    rotary = layers.RotaryEmbedding(config.rope, dim, 2048)
    positions = torch.cat([torch.arange(m - n, m) for n, m in LENGTHS[step]]).to(DEVICE)
    turns = rotary(positions, dtype)
    rotary.reserve(2048, dtype, positions.device)
    q_gain, k_gain = (draw(dim, dtype=dtype, seed=s) if norm else None for s in (5, 6))
    raw_k, v = case.packed(case.k).clone(), case.packed(case.v)

    def turned(x, gain):
        x = x.double() if gain is None else layers.rms_norm(x.double(), gain.double(), 1e-6)
        return layers.apply_rope(x, layers.Rotation(*(t.double() for t in turns)))

    exact_q, exact_k = turned(case.q, q_gain), turned(raw_k, k_gain)
    begin, keys = 0, []
    for k, (n, m) in zip(case.k, LENGTHS[step], strict=True):
        keys.append(torch.cat([k[: m - n].double(), exact_k[begin : begin + n]]))
        begin += n
    raw_q, case.q, case.k = case.q, exact_q, keys
    tuning = Tuning(splits=splits, min_keys=16, query_tile=16, key_tile=16, prefill_warps=4)
    attend = fused.FusedAttention(tuning).bind(case.cache, case.metadata)
    given = fused.Rotary(positions, rotary.table, q_gain, k_gain, 1e-6)
    qkv = torch.cat([x.flatten(1) for x in (raw_q, raw_k, v)], 1)
    out = attend.turn_and_attend(0, qkv, given, heads)
    assert error(out, case.expected()) < 2 * TOLERANCE[dtype]
    slots = case.metadata.slot_mapping
    assert error(case.cache.k.flatten(0, 1)[slots], exact_k) < TOLERANCE[dtype]
    assert torch.equal(case.cache.v.flatten(0, 1)[slots], v)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "step",
    [[(1, 5)], [(1, 20), (1, 3), (1, 17), (1, 1)], [(1, 9), (4, 4), (5, 12)]],
    ids=str,
)
def test_the_fused_model_is_the_plain_one(step, bias, family):
    config = tiny_config(
        architecture=family, attention_bias=bias, max_position_embeddings=64
    )
    exact_model = build_model(config, torch.float64, DEVICE)
    init_random_weights(exact_model, seed=0)
    plain = build_model(config, FP32, DEVICE)
    plain.load_state_dict(exact_model.state_dict())
    outputs, caches = [], []
    for model, backend in (
        (exact_model, None),
        (
            plain,
            fused.FusedAttention(
                Tuning(min_keys=16, query_tile=16, key_tile=16, prefill_warps=4)
            ),
        ),
    ):
        dtype = next(plain.parameters()).dtype if backend else torch.float64
        cases = [
            make_case(
                step,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                4,
                dtype,
                seed=i,
                poison=0.0,
            )
            for i in range(config.num_layers)
        ]
        views = [(c.cache.k, c.cache.v) for c in cases]
        if backend is None:
            from octavo.attention import TorchAttention

            first = views  # the same numbers in both: float32's, widened
            for a, b in first:
                a.copy_(a.float()), b.copy_(b.float())
        cache = type("Cache", (), {"layer": lambda self, i, views=views: views[i]})()
        attend = (backend or TorchAttention()).bind(cache, cases[0].metadata)
        ids = torch.arange(sum(n for n, _ in step), device=DEVICE) % config.vocab_size
        positions = torch.cat([torch.arange(m - n, m) for n, m in step]).to(DEVICE)
        runs = fused.FusedModel(model) if backend else model
        with torch.inference_mode():
            hidden = runs(ids, positions, attend)
            outputs.append(runs.compute_logits(hidden))
        caches.append(views)
    assert error(outputs[1], outputs[0]) < 1e-5
    slots = cases[0].metadata.slot_mapping
    for exact, mine in zip(*caches, strict=True):
        for a, b in zip(exact, mine, strict=True):
            assert error(b.flatten(0, 1)[slots], a.flatten(0, 1)[slots]) < 1e-5


def test_the_random_bits_are_the_samplers():
    keys = torch.tensor([row_keys(s, 1) for s in (0, 7, 2**63)], dtype=torch.int32)
    places = torch.tensor([1, 4097, 2**20])
    bits, noise = random_noise(keys.to(DEVICE), places.to(DEVICE), 5000)
    plain = random_bits(keys, places, torch.arange(5000, dtype=torch.int32)[None])
    assert torch.equal(bits.cpu(), plain)
    torch.testing.assert_close(
        noise.cpu(), gumbel_noise(plain.clone()), rtol=2e-6, atol=2e-5 if REAL else 1e-6
    )


def test_noise_stays_finite_at_both_ends():
    """The smallest and the largest uniform numbers: found among many draws, none is infinite."""
    keys = torch.tensor([row_keys(s, 0) for s in range(16)], dtype=torch.int32).to(DEVICE)
    places = torch.arange(16).to(DEVICE)
    bits, noise = random_noise(keys, places, 2**16 if REAL else 2**13)
    assert noise.isfinite().all() and noise.max() < 23 and noise.min() > -3
    order = (bits & 0x7FFFFFFF).flatten().argsort()
    assert (noise.flatten()[order].diff() <= 2e-5).all()  # more uniform, less noise


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_fused_sampler_picks_what_the_plain_one_picks(dtype):
    vocab = 20_000 if REAL else 5000
    mine, plain = FusedSampler(8, vocab, DEVICE), Sampler(8, vocab, DEVICE)
    kinds = [
        {"temperature": 0},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.9},
        {"temperature": 2.0},
    ]
    for row in range(8):
        request = Request("r", [0], SamplingParams(**kinds[row % 5]), seed=row)
        mine.assign(row, request)
        plain.assign(row, request)
    rows = [3, 1, 0, 7, 2, 4, 6]
    logits = draw(7, vocab + 24, dtype=dtype) * 3
    logits[:, vocab:] = 100.0  # padding of the head
    positions = torch.arange(7, device=DEVICE) * 1000
    assert torch.equal(mine(logits, rows, positions), plain(logits, rows, positions))


def test_sampled_tokens_go_where_the_next_step_reads_them():
    sampler = FusedSampler(4, 100, DEVICE)
    for row in range(4):
        sampler.assign(row, Request("r", [0], SamplingParams(), seed=row))
    rows, positions = (
        torch.tensor([2, 0], device=DEVICE),
        torch.tensor([5, 1], device=DEVICE),
    )
    ids = torch.zeros(4, 9, dtype=torch.int32, device=DEVICE)
    tokens = sampler.free_sample(draw(2, 100), rows, positions, ids)
    assert ids[rows, positions].tolist() == tokens.tolist() and int((ids != 0).sum()) <= 2
