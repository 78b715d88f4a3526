"""Chapter 11's models against `transformers`: the same random weights, the same logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config import ConfigError, RopeConfig, tiny_config
from octavo.hf_config import rope_from_hf
from octavo.layers import RMSNorm, RotaryEmbedding, rms_norm, rope_frequencies
from octavo.models import MODELS, build_model
from octavo.models.llama import LlamaForCausalLM
from octavo.weights import init_random_weights, load_model

transformers = pytest.importorskip("transformers")

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
    },
}
FAMILIES = {
    "llama-plain": ("LlamaConfig", {}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-plain": ("Qwen3Config", {}),
    "qwen3-biases-tied": (
        "Qwen3Config",
        {"attention_bias": True, "tie_word_embeddings": True},
    ),
}
THETA = 50000.0


def dense_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one whole sequence; nothing cached."""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.size(-1) ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def packed_attend(lengths: list[int]) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Dense attention inside each of several sequences packed behind each other."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([dense_attend(layer, *part) for part in parts])

    return attend


def reference_config(family: str, rope: str) -> Any:
    class_name, extra = FAMILIES[family]
    scaling = {"rope_theta": THETA, **ROPES[rope]}
    return getattr(transformers, class_name)(
        vocab_size=97,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,  # 72 / 6 is 12 (B88)
        max_position_embeddings=65536,
        rms_norm_eps=1e-5,
        rope_theta=THETA,  # transformers 4
        **{
            "rope_parameters"
            if int(transformers.__version__.split(".")[0]) > 4
            else "rope_scaling": scaling
        },
        bos_token_id=None,
        eos_token_id=None,
        **{"tie_word_embeddings": False, **extra},
    )


def reference_model(family: str, rope: str, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model whose every parameter is random, biases and norms included."""
    torch.manual_seed(len(family) * 7 + len(rope))
    config = reference_config(family, rope)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa"
    )
    for name, parameter in model.named_parameters():
        spread = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
        parameter.data = spread + (1.0 if name.endswith("norm.weight") else 0.0)
    return model.to(dtype).eval()


@torch.inference_mode()
def both_logits(
    reference: Any, model: LlamaForCausalLM, first_position: int, length: int = 13
) -> tuple[Tensor, Tensor]:
    ids = torch.randint(97, (length,), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(first_position, first_position + length)
    theirs = reference(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    ours = model.compute_logits(model(ids, positions, dense_attend))
    return theirs.logits[0], ours


def relative(theirs: Tensor, ours: Tensor) -> float:
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
    return ((theirs - ours).abs().max() / theirs.abs().max()).item()


@pytest.fixture
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers' RMSNorm works in float32 even in a float64 model; ours follows the model."""

    def forward(self: Any, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed

    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)
    yield


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers_in_float32(
    family: str, rope: str, tmp_path: Path
) -> None:
    """B87, B88, B89, B90, B91: near the start and at positions beyond 8,000 and 60,000."""
    reference = reference_model(family, rope)
    reference.save_pretrained(tmp_path)
    model, config = load_model(tmp_path, torch.float32)
    assert config.head_dim * config.num_heads != config.hidden_size
    assert config.rope.type == ROPES[rope]["rope_type"]
    for first_position in (0, 8190, 60000):
        assert relative(*both_logits(reference, model, first_position)) < 5e-6, (
            first_position
        )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama-biases", "qwen3-biases-tied"])
def test_logits_agree_with_transformers_in_float64(
    family: str, rope: str, tmp_path: Path, float64_norms: None
) -> None:
    reference = reference_model(family, rope, torch.float64)
    reference.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, torch.float64)
    # YaRN divides by 3 in another order than transformers: one float32 rounding of a frequency
    bound = 1e-4 if rope == "yarn-tuned" else 1e-11
    for first_position in (0, 8190):
        assert relative(*both_logits(reference, model, first_position)) < bound


@pytest.mark.parametrize("family", ["llama-biases", "qwen3-plain"])
def test_bfloat16_is_as_close_to_the_truth_as_transformers(
    family: str, tmp_path: Path
) -> None:
    """Norms are taken in float32 and rounded where transformers rounds them."""
    exact = reference_model(family, "default", torch.bfloat16)
    exact.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, torch.bfloat16)
    wide, _ = load_model(tmp_path, torch.float64)
    theirs, ours = both_logits(exact, model, 100)
    truth = both_logits(exact, wide, 100)[1]
    error_theirs, error_ours = (relative(truth, x.double()) for x in (theirs, ours))
    assert error_ours < max(1.5 * error_theirs, 0.01)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("position", [0, 1000, 8000, 60000, 131071])
def test_b90_cos_and_sin_equal_the_reference(rope: str, position: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    reference = LlamaRotaryEmbedding(reference_config("llama-plain", rope))
    positions = torch.tensor([position, position + 1])
    cos, sin = reference(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(from_reference(rope), 32, 1024)(positions, torch.float32)
    signed = torch.cat([-sin[0, :, :16], sin[0, :, 16:]], -1)
    # a frequency may differ in its last bit where yarn divides by 3
    slack = position * 2**-23 if rope == "yarn-tuned" else 0.0
    torch.testing.assert_close(ours.cos[:, 0], cos[0], rtol=0, atol=3e-7 + slack)
    torch.testing.assert_close(ours.sin[:, 0], signed, rtol=0, atol=3e-7 + slack)


def from_reference(rope: str) -> RopeConfig:
    return rope_from_hf({"rope_theta": THETA, "rope_scaling": ROPES[rope]})


def test_b90_scaled_ropes_differ_from_the_default_and_from_each_other() -> None:
    """An ignored scaling would make these equal."""
    seen = {rope: rope_frequencies(from_reference(rope), 32) for rope in ROPES}
    distinct = {(tuple(f.tolist()), scale) for f, scale in seen.values()}
    assert len(distinct) == len(ROPES)


def test_b90_unknown_rope_type_is_refused() -> None:
    odd = RopeConfig()
    object.__setattr__(odd, "type", "spiral")
    with pytest.raises(ConfigError, match="spiral.*default, linear, llama3, yarn"):
        rope_frequencies(odd, 32)


def test_table_grows_without_changing_and_follows_dtype() -> None:
    grown = RotaryEmbedding(RopeConfig(), 8, 16)
    for top in (0, 3, 4, 40, 39, 5000):
        grown(torch.tensor([0, top]), torch.float32)
    at_once = RotaryEmbedding(RopeConfig(), 8, 16)
    positions = torch.tensor([0, 5000, 17, 17])
    expected = at_once(positions, torch.float32)
    assert torch.equal(grown(positions, torch.float32).cos, expected.cos)
    wide = grown(positions, torch.float64)
    assert wide.sin.dtype == torch.float64 and wide.sin.shape == (4, 1, 8)
    assert torch.equal(wide.sin.float(), expected.sin)  # always computed in float32
    assert grown(positions, torch.bfloat16).cos.dtype == torch.bfloat16


def test_off_the_cpu_the_table_has_its_full_length_at_once() -> None:
    """Reading the largest position would make the host wait for the device."""
    rotary = RotaryEmbedding(RopeConfig(), 8, 1000)
    rotation = rotary(torch.zeros(3, dtype=torch.int64, device="meta"), torch.float32)
    assert rotary.table.size(0) == 1000 and rotation.cos.shape == (3, 1, 8)


def test_table_is_built_on_the_cpu_even_inside_a_device_context() -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(RopeConfig(), 8, 16)
        rotary.reserve(4, torch.float32, torch.device("cpu"))
    assert rotary.table.device.type == "cpu" and rotary.table.abs().sum() > 0


@pytest.mark.parametrize("architecture", MODELS)
def test_packed_sequences_do_not_see_each_other(architecture: str) -> None:
    model = build_model(tiny_config(architecture), torch.float64)
    init_random_weights(model, 3)
    lengths = [5, 1, 8]
    ids = torch.randint(256, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) + 10 * n for n in lengths])
    together = model(ids, positions, packed_attend(lengths))
    split = zip(ids.split(lengths), positions.split(lengths), strict=True)
    alone = torch.cat([model(i, p, dense_attend) for i, p in split])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", MODELS)
def test_attend_is_called_once_a_layer_with_heads_of_the_config(architecture: str) -> None:
    config = tiny_config(architecture, num_layers=3)
    model = build_model(config, torch.float32)
    init_random_weights(model, 0)
    calls = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    hidden = model(torch.tensor([1, 2]), torch.tensor([0, 1]), attend)
    assert hidden.shape == (2, 64)
    assert calls == [(i, (2, 4, 32), (2, 2, 32), (2, 2, 32)) for i in range(3)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_build_model_has_the_parameters_of_the_config(dtype: torch.dtype) -> None:
    for architecture in MODELS:
        for tied in (False, True):
            config = tiny_config(
                architecture,
                tie_word_embeddings=tied,
                attention_bias=True,
                mlp_bias=architecture == "LlamaForCausalLM",
            )
            parameters = list(build_model(config, dtype).parameters())
            assert sum(p.numel() for p in parameters) == config.num_parameters
            assert {p.dtype for p in parameters} == {dtype}
            assert not any(p.requires_grad or p.is_meta for p in parameters)


def test_random_weights_depend_on_the_seed_only() -> None:
    config = tiny_config(attention_bias=True)
    models = [build_model(config, dtype) for dtype in (torch.float32, torch.float64)]
    for model in models:
        init_random_weights(model, 5)
    for narrow, wide in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(narrow.double(), wide) and narrow.abs().min() > 0
    init_random_weights(models[0], 6)
    first = next(models[0].parameters())
    assert not torch.equal(first.double(), next(models[1].parameters()))


def test_hidden_states_have_a_sensible_size() -> None:
    model = build_model(tiny_config(num_layers=8), torch.float32)
    init_random_weights(model, 0)
    ids = torch.arange(20)
    logits = model.compute_logits(model(ids, ids, dense_attend))
    assert 0.3 < logits.std() < 3


def test_norm_in_half_precision_rounds_before_the_weight() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), weight * unit)


def test_norm_module_adds_the_residual_first() -> None:
    norm = RMSNorm(16, 1e-5)
    x, residual = torch.randn(2, 16), torch.randn(2, 16)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total)[0]) and torch.equal(norm(x)[1], x)


def test_b101_the_norm_compiles_once_for_all_layers() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(rms_norm, backend=counter, fullgraph=True)
    x = torch.randn(4, 16)
    for _ in range(28):
        norm = RMSNorm(16, 1e-5)
        compiled(x, norm.weight, norm.eps)
    assert counter.frame_count == 1
