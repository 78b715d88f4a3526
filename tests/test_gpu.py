"""The engine on a CUDA card gives what it gives on a CPU. Run with `make test-gpu`."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import transformers
from tiny_checkpoint import write_tiny_checkpoint

from octavo import LLM
from octavo.assembly import Limits, Parts, build_engine, size_pool
from octavo.attention import TorchAttention
from octavo.config import ConfigError, EngineConfig, ModelConfig, tiny_config
from octavo.example import CountingTokenizer
from octavo.models import build_model
from octavo.request import Request, SamplingParams
from octavo.sampler import Sampler, gumbel_noise, random_bits, row_keys
from octavo.weights import init_random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
CUDA = torch.device("cuda")
TEXTS = [f"{letter * (7 * n + 1)} and so on" for n, letter in enumerate("abcdefgh")]
PROMPTS = [[5, 6, 7], [8] * 40, [9], list(range(100, 130)), [3, 1, 4, 1, 5, 9, 2, 6]]


def parts_on(
    device: str,
    dtype: torch.dtype,
    model_config: ModelConfig | None = None,
    block_size: int = 4,
) -> Parts:
    """A tiny Llama with the same random weights on any device."""
    config = model_config or tiny_config(max_position_embeddings=256)
    model = build_model(config, torch.float64, "cpu")
    init_random_weights(model, seed=0)
    model = model.to(dtype).to(device)
    return Parts(model, config, torch.device(device), dtype, TorchAttention(), block_size)


def tokens(parts: Parts, params: SamplingParams, **options: int) -> list[list[int]]:
    config = EngineConfig(
        dtype="float64", seed=0, max_model_len=128, block_size=4, **options
    )
    engine = build_engine(config, parts, CountingTokenizer(), ())
    done = {d.request_id: d.finished for d in engine.stream(PROMPTS, params) if d.finished}
    assert (
        engine.scheduler.allocator.num_free_blocks == engine.scheduler.allocator.num_blocks
    )
    return [done[str(i)].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=1.3, max_tokens=40, seed=3),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.8, max_tokens=40, seed=4),
    ],
    ids=["greedy", "free", "filtered"],
)
def test_the_same_tokens_as_on_the_cpu(params: SamplingParams) -> None:
    on_cpu = tokens(parts_on("cpu", torch.float64), params, num_kv_blocks=200)
    on_gpu = parts_on("cuda", torch.float64)
    assert tokens(on_gpu, params, num_kv_blocks=200) == on_cpu
    assert tokens(on_gpu, params, num_kv_blocks=40) == on_cpu  # with preemptions


def test_random_bits_do_not_depend_on_the_device() -> None:
    keys = torch.tensor([row_keys(seed, 0) for seed in range(4)], dtype=torch.int32)
    places, ids = (
        torch.tensor([0, 7, 40000, 2**20]),
        torch.arange(50000, dtype=torch.int32)[None],
    )
    here = random_bits(keys, places, ids)
    there = random_bits(keys.cuda(), places.cuda(), ids.cuda())
    assert torch.equal(here, there.cpu())
    torch.testing.assert_close(
        gumbel_noise(here), gumbel_noise(there).cpu(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float64(dtype: torch.dtype) -> None:
    from octavo.batch import DeviceRows, build_batch
    from octavo.kv_cache import KVCache
    from octavo.request import Plan, ScheduledRequest

    def hidden(parts: Parts) -> torch.Tensor:
        rows = DeviceRows(2, 128, 4, 40, parts.device)
        cache = KVCache(parts.config, 40, 4, parts.dtype, parts.device)
        entries = [
            ScheduledRequest(Request("a", [1]), 0, 0, 0, 1, True, (0,), True, (7,)),
            ScheduledRequest(
                Request("b", [1]),
                0,
                1,
                0,
                50,
                True,
                tuple(range(3, 16)),
                True,
                tuple(range(50)),
            ),
        ]
        plan = Plan(1, tuple(entries))
        rows.apply(plan)
        batch = build_batch(plan, rows)
        attend = parts.attention.bind(cache, batch.attention)
        with torch.inference_mode():
            return parts.model(batch.input_ids, batch.positions, attend).double().cpu()

    exact, rough = hidden(parts_on("cpu", torch.float64)), hidden(parts_on("cuda", dtype))
    assert (exact - rough).norm() / exact.norm() < 0.02


def test_the_pool_takes_what_the_card_has_left() -> None:
    parts = parts_on("cuda", torch.bfloat16, block_size=16)
    config = EngineConfig(gpu_memory_utilization=0.5, max_model_len=128)
    limits = Limits(256, 4096, 128)
    pool = size_pool(config, parts, limits)
    assert pool.num_tokens == 256 * 128  # no more than all rows at full length could use
    config = EngineConfig(gpu_memory_utilization=1e-6)
    with pytest.raises(ConfigError, match="peak of a step"):
        size_pool(config, parts, limits)


def test_a_released_engine_gives_its_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    parts = parts_on("cuda", torch.float64)
    tokens(parts, SamplingParams(max_tokens=5, seed=1), num_kv_blocks=2000)
    del parts
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_large_vocabulary_is_sampled_whole_on_the_card() -> None:
    sampler, rows = Sampler(64, 150_000, CUDA), torch.arange(64, device=CUDA)
    params = SamplingParams(top_p=0.9)
    sampler.assign([(row, Request("r", [0], params, seed=row)) for row in range(64)])
    logits = torch.randn(64, 150_000, device=CUDA)
    together = sampler(logits, rows, rows)
    alone = [sampler(logits[i : i + 1], one, one) for i, one in enumerate(rows.split(1))]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("loop", ["overlapped", "plain", "eager"])
def test_greedy_text_equals_transformers(tmp_path: Path, loop: str) -> None:
    """Everything that a card has (kernels, graphs, overlap), eight prompts together, float32."""
    checkpoint = write_tiny_checkpoint(tmp_path, num_hidden_layers=4)
    options = {"overlap": loop == "overlapped", "enforce_eager": loop == "eager"}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(checkpoint, dtype="float32", show_progress=False, **options) as llm:
        runner = llm.engine.runner
        assert type(runner.model).__name__ == "FusedModel"
        found = [output.token_ids for output in llm.generate(TEXTS, params)]
        assert (runner.stats.num_graph_steps > 0) == (loop != "eager")
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).double()
    for prompt, ids in zip(prompts, found, strict=True):
        logits = oracle(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert float((best - chosen).max()) < 1e-4  # the same, but for near-ties
