"""Graph runner and overlapped loop against the plain engine; the contract on the real loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import DEVICE, REAL, mend_interpreter

mend_interpreter()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import graphs as graphs_module  # noqa: E402
import helpers  # noqa: E402
import standins  # noqa: E402
from fused import FusedAttention, FusedModel  # noqa: E402
from fused_sampler import FusedSampler  # noqa: E402
from graphs import (  # noqa: E402
    DecodeGraphs,
    DecodeInputs,
    GraphRunner,
    RunningRows,
    ladder,
    prepare_decode,
    prepare_decode_plain,
)
from kernels import Tuning  # noqa: E402
from overlap import OverlappedEngine  # noqa: E402

from octavo.attention import TorchAttention  # noqa: E402
from octavo.batch import DeviceRows  # noqa: E402
from octavo.block_pool import BlockPool  # noqa: E402
from octavo.config import tiny_config  # noqa: E402
from octavo.engine import Engine  # noqa: E402
from octavo.example import CountingTokenizer  # noqa: E402
from octavo.kv_cache import KVCache  # noqa: E402
from octavo.model_runner import ModelRunner  # noqa: E402
from octavo.models import build_model  # noqa: E402
from octavo.request import SamplingParams  # noqa: E402
from octavo.sampler import Sampler  # noqa: E402
from octavo.scheduler import Scheduler  # noqa: E402
from octavo.weights import init_random_weights  # noqa: E402

SEQS, LENGTH = (24, 256)
if not REAL:
    graphs_module.prepare_decode = prepare_decode_plain  # see standins.py


def model_of(family: str):
    config = tiny_config(architecture=family, max_position_embeddings=256)
    model = build_model(config, torch.float32, "cpu")
    init_random_weights(model, seed=0)
    return model.to(DEVICE), config


def engine_of(kind: str, family="Qwen3ForCausalLM", blocks=200, block_size=4, eos=()):
    """plain: TorchAttention and the plain runner; the others: graphs, both loops."""
    model, config = model_of(family)
    cache = KVCache(config, blocks, block_size, torch.float32, DEVICE)
    scheduler = Scheduler(
        BlockPool(blocks, block_size),
        max_num_seqs=SEQS,
        max_num_batched_tokens=LENGTH,
        max_model_len=LENGTH,
    )
    if kind == "plain":
        rows = DeviceRows(SEQS, LENGTH, block_size, blocks, DEVICE)
        sampler = Sampler(SEQS, config.vocab_size, DEVICE)
        runner = ModelRunner(model, sampler, cache, TorchAttention(), rows)
    else:
        runner = graph_runner(model, config, cache, blocks, block_size)
    engine_class = OverlappedEngine if kind == "overlapped" else Engine
    return engine_class(
        scheduler,
        runner,
        CountingTokenizer(),
        vocab_size=config.vocab_size,
        eos_token_ids=eos,
        seed=0,
    )


def graph_runner(model, config, cache, blocks, block_size):
    tuning = Tuning(tile=16, min_keys=16, query_tile=16, key_tile=16)
    rows = RunningRows(SEQS, LENGTH, block_size, blocks, DEVICE)
    if REAL:
        sampler = FusedSampler(SEQS + 1, config.vocab_size, DEVICE)
        fused, attention = FusedModel(model), FusedAttention(tuning)
    else:
        sampler = standins.PlainFreeSampler(SEQS + 1, config.vocab_size, DEVICE)
        fused, attention = standins.PlainModel(model), standins.ReadingAttention()
    graphs = DecodeGraphs(
        fused, sampler, cache, attention, rows, ladder(SEQS), torch.float32
    )
    graphs.capture()
    return GraphRunner(fused, sampler, cache, attention, rows, graphs)


PROMPTS = [[5, 6, 7], [8] * 9, [9], list(range(20, 31)), [3, 1, 4, 1, 5, 9, 2, 6]] * 4
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=1.3, max_tokens=11, seed=3),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, max_tokens=5, seed=4),
    SamplingParams(temperature=0.7, max_tokens=12, seed=5),
    SamplingParams(temperature=0, max_tokens=3),
] * 4


def tokens_of(engine) -> list[list[int]]:
    names = [f"{engine.stats.num_steps}/{i}" for i in range(len(PROMPTS))]
    deltas = engine.stream(PROMPTS, PARAMS, names)
    done = {d.request_id: d.finished for d in deltas if d.finished}
    assert (
        engine.scheduler.allocator.num_free_blocks == engine.scheduler.allocator.num_blocks
    )
    return [done[name].token_ids for name in names]


@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_graphs_and_overlap_give_the_tokens_of_the_plain_engine(family):
    expected = tokens_of(engine_of("plain", family))
    for kind in ("graphs", "overlapped"):
        engine = engine_of(kind, family)
        assert tokens_of(engine) == expected, kind
        assert engine.runner.stats.num_graph_steps > 5
        assert tokens_of(engine) == expected, "rows and blocks are used again"


@pytest.mark.parametrize("kind", ["graphs", "overlapped"])
def test_with_preemptions_and_another_block_size_too(kind):
    expected = tokens_of(engine_of("plain"))
    tight = engine_of(kind, blocks=30)
    assert tokens_of(tight) == expected
    assert tight.stats.num_preemptions > 0
    assert tokens_of(engine_of(kind, blocks=30, block_size=16)) == expected


def test_an_end_of_text_in_flight_drops_what_follows():
    plain = engine_of("plain")
    free = tokens_of(plain)
    eos = [free[1][2], free[3][4]]
    for kind in ("plain", "graphs", "overlapped"):
        ended = tokens_of(engine_of(kind, eos=eos))
        if kind == "plain":
            expected = ended
        assert ended == expected


def test_b42_poison_in_the_reserved_block_reaches_nobody():
    clean, poisoned = engine_of("graphs"), engine_of("graphs")
    for layer in range(2):
        for cache in poisoned.runner.cache.layer(layer):
            cache[-1] = float("nan")
    prompts = PROMPTS[:3]
    answers = [
        [d.token_ids for d in e.stream(prompts, PARAMS[0])] for e in (clean, poisoned)
    ]
    assert answers[0] == answers[1]


def test_b45_the_ladder_covers_every_batch():
    for most in (1, 3, 17, 64, 100, 256, 300):
        sizes = ladder(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))


def test_prepared_inputs_and_what_moves_on():
    rows = RunningRows(5, 60, 4, 99, DEVICE)
    rows.token_ids.random_(0, 1000)
    rows.block_table[:5].random_(0, 90)
    rows.positions[:5] = torch.tensor([0, 3, 4, 31, 58])
    before = rows.positions.clone()
    filled = []
    for prepare in (prepare_decode, prepare_decode_plain):
        rows.positions.copy_(before)
        inputs = DecodeInputs.make(4, 15, rows.padding_row, DEVICE)
        inputs.rows[:3] = torch.tensor([4, 0, 2])
        prepare(inputs, rows)
        filled.append((inputs, rows.positions.clone()))
    (mine, moved), (plain, plainly) = filled
    assert torch.equal(moved, plainly) and moved.tolist() == [1, 3, 5, 31, 59, 0]
    for name in ("ids", "positions", "next_positions", "lengths", "slots"):
        assert torch.equal(getattr(mine, name), getattr(plain, name)), name
    for i, length in enumerate(mine.lengths.tolist()):
        used = -(-length // 4)
        assert torch.equal(mine.table[i, :used], plain.table[i, :used])
    assert mine.slots[3] == 99 * 4  # the padding row writes to the reserved block


# The contract, on the real loop: the counting runner works only when its result is asked for.


class _Late:
    def __init__(self, runner, plan):
        self.runner, self.plan = runner, plan

    def result(self):
        return self.runner.execute(self.plan)


helpers.RecordingRunner.submit = lambda self, plan: _Late(self, plan)
helpers.ENGINES["overlapped"] = OverlappedEngine

from test_contract import *  # noqa: E402, F403
