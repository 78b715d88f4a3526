"""`LLM` as a user holds it, on a tiny checkpoint that lies on disk like any other."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.progress
import torch
from tiny_checkpoint import END, START, VOCAB_SIZE, write_tiny_checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import octavo
import octavo.progress
from octavo import (
    LLM,
    ConfigError,
    EngineConfig,
    ModelLoadError,
    OctavoError,
    RequestError,
    SamplingParams,
)
from octavo.assembly import Limits, Parts, size_pool
from octavo.attention import TorchAttention
from octavo.backends import choose_graphs
from octavo.config import tiny_config
from octavo.diagrams import read_results
from octavo.engine import Engine
from octavo.kernels import triton_problem
from octavo.kv_cache import DeviceMemory, block_bytes
from octavo.layers import TorchOps
from octavo.native import NativeError, can_compile
from octavo.native_attention import NativeAttention
from octavo.native_layers import NativeOps
from octavo.overlap import OverlappedEngine
from octavo.presets import MODELS
from octavo.request import Plan
from octavo.sampler import Sampler
from octavo.triton_attention import TritonAttention

PROBLEM = triton_problem(torch.device("cpu"), torch.float32)
interpreted = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
KERNELS = {
    "dtype": "float32",
    "device": "cpu",
    "attention": "triton",
    "layer_ops": "fused",
    "sampler": "fused",
}
"""The kernels of a card, in Triton's interpreter."""
PROMPTS = ["Good morning.", "An owl 🦉", "x", "The fourth is a good deal longer than that."]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
NEVER = tuple(
    f"{character}, never said" for character in [*map(chr, range(33, 127)), "\ufffd"]
)
"""Stop strings that any text seems about to say."""
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def load(model: Path, **options: Any) -> LLM:
    """float64, so that rounding can't change a token."""
    return LLM(model, **{"dtype": "float64", "seed": 0, "show_progress": False, **options})


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with load(checkpoint) as llm:
        yield llm


def ids_of(llm: LLM, *args: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(*args)]


def record_plans(llm: LLM) -> list[Plan]:
    """A list that grows by each plan the engine carries out from now on."""
    plans, execute = [], llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: plans.append(plan) or execute(plan)
    return plans


def is_empty(llm: LLM) -> bool:
    """Nobody in the engine, every block and every row free."""
    scheduler = llm.scheduler
    scheduler.allocator.check_integrity([])
    idle = not (llm.engine.has_unfinished or scheduler.has_unfinished)
    rows = len(scheduler.queues.free_rows) == scheduler.max_num_seqs
    return (
        idle
        and rows
        and scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks
    )


class TestGenerate:
    def test_answers_stand_in_the_order_of_the_prompts(self, llm: LLM) -> None:
        lengths = [24, 3, 12, 7]  # the first is the last to finish
        params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
        outputs = llm.generate(PROMPTS, params)
        assert [output.prompt for output in outputs] == PROMPTS
        assert [len(output.token_ids) for output in outputs] == lengths
        alone = [ids_of(llm, p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]
        assert [output.token_ids for output in outputs] == alone
        assert len({tuple(ids) for ids in alone}) == 4

    def test_a_single_text_or_list_of_ids_is_one_prompt(self, llm: LLM) -> None:
        text = llm.generate("Good morning.", GREEDY)
        ids = llm.generate(text[0].prompt_token_ids, GREEDY)
        assert len(text) == len(ids) == 1
        assert text[0].token_ids == ids[0].token_ids
        assert (text[0].prompt, ids[0].prompt) == ("Good morning.", None)

    def test_texts_and_ids_give_the_same(self, llm: LLM) -> None:
        ids = [llm.tokenizer.encode(text) for text in PROMPTS]
        assert ids_of(llm, ids, GREEDY) == ids_of(llm, PROMPTS, GREEDY)
        assert llm.generate([]) == []

    def test_default_params_are_those_of_sampling_params(self, llm: LLM) -> None:
        [output] = llm.generate("Hello")
        assert len(output.token_ids) == SamplingParams().max_tokens

    def test_each_prompt_has_its_own_params(self, llm: LLM) -> None:
        greedy, seeded = GREEDY, SamplingParams(seed=3, max_tokens=24)
        first, second, third = ids_of(llm, ["Same"] * 3, [greedy, seeded, greedy])
        assert first == third != second
        with pytest.raises(ValueError, match="2 prompts but 3 sampling parameters"):
            llm.generate(["a", "b"], [greedy] * 3)

    def test_n_answers_come_in_order_and_differ(self, llm: LLM) -> None:  # B57
        params = SamplingParams(n=3, seed=1, max_tokens=8)
        first, second = llm.generate(["Hello", "World"], params)
        assert [answer.index for answer in first.outputs] == [0, 1, 2]
        assert len({tuple(answer.token_ids) for answer in first.outputs}) == 3
        assert first.token_ids == first.outputs[0].token_ids
        assert len(second.outputs) == 3
        [again] = llm.generate(["Hello"], params)
        assert [a.token_ids for a in again.outputs] == [a.token_ids for a in first.outputs]

    def test_calls_that_follow_each_other_have_ids_of_their_own(self, llm: LLM) -> None:
        names = [llm.generate("x", GREEDY)[0].request_id for _ in range(2)]
        assert len(set(names)) == 2

    @pytest.mark.parametrize("stop", [(), ("j", "j\ufffd", "\ufffd" * 3), NEVER], ids=len)
    def test_streamed_text_joined_is_the_generated_text(  # B66
        self, llm: LLM, stop: tuple[str, ...]
    ) -> None:
        params = [SamplingParams(seed=i, max_tokens=40, stop=stop) for i in range(4)]
        texts: dict[str, list[str]] = {name: [] for name in "abcd"}
        for delta in llm.stream(PROMPTS, params, list(texts)):
            texts[delta.request_id].append(delta.text)
        expected = llm.generate(PROMPTS, params)
        assert ["".join(pieces) for pieces in texts.values()] == [o.text for o in expected]
        cut_off = [o for o in expected if o.outputs[0].finish_reason == "length"]
        assert [o.text for o in cut_off] == [
            llm.tokenizer.decode(o.token_ids) for o in cut_off
        ]
        assert (len(cut_off) < 4) == (len(stop) == 3)
        assert stop or all(len(pieces) > 20 for pieces in texts.values())

    def test_a_stream_takes_one_text_as_one_prompt(self, llm: LLM) -> None:
        deltas = list(llm.stream("Hello", GREEDY))
        assert len({delta.request_id for delta in deltas}) == 1
        assert deltas[-1].finished is not None
        assert deltas[-1].finished.token_ids == ids_of(llm, "Hello", GREEDY)[0]

    def test_block_size_and_company_change_nothing(
        self, checkpoint: Path, llm: LLM
    ) -> None:
        options = {"block_size": 4, "num_kv_blocks": 24, "max_model_len": 96}
        with load(checkpoint, **options) as tight:
            outputs = tight.generate(PROMPTS, GREEDY)
            assert tight.engine.stats.num_preemptions > 0 and is_empty(tight)
        assert [output.token_ids for output in outputs] == ids_of(llm, PROMPTS, GREEDY)


class TestBadPrompts:
    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ("", "no tokens; give at least one"),
            ([], "no tokens; give at least one"),
            ([VOCAB_SIZE], f"outside the vocabulary .0 to {VOCAB_SIZE - 1}"),
            ([-1], "outside the vocabulary"),
            (["1"], "text or a list of token ids"),
            ([0] * 2048, "shorten it to 2047"),
            ("half an emoji \ud83e", "character 14 of the prompt is half of a surrogate"),
            (None, "text or a list of token ids, not None"),
            (5.5, "text or a list of token ids, not 5.5"),
        ],
        ids=repr,
    )
    def test_a_bad_prompt_is_refused_and_the_others_answered(  # B30, B78
        self, llm: LLM, bad: Any, words: str
    ) -> None:
        before, refused, after = llm.generate(["Good", bad, "Fine"], GREEDY)
        assert [before.token_ids, after.token_ids] == ids_of(llm, ["Good", "Fine"], GREEDY)
        assert before.error is None and after.error is None
        with pytest.raises(RequestError, match=words):
            _ = refused.text
        assert refused.outputs[0].finish_reason == "error" and is_empty(llm)

    def test_two_answers_in_a_pool_that_holds_one_are_both_whole(  # B23, B36
        self, checkpoint: Path
    ) -> None:
        params = SamplingParams(n=2, seed=1, max_tokens=57)
        with load(checkpoint, num_kv_blocks=4, max_model_len=65) as llm:
            [tight] = llm.generate([[1] * 8], params)
            assert llm.engine.stats.num_preemptions > 0 and is_empty(llm)
        with load(checkpoint) as llm:
            [ample] = llm.generate([[1] * 8], params)
        assert [len(answer.token_ids) for answer in tight.outputs] == [57, 57]
        assert [a.token_ids for a in tight.outputs] == [a.token_ids for a in ample.outputs]

    def test_output_reads_as_attribute_and_as_item(self, llm: LLM) -> None:
        output, refused = llm.generate(["Hello", ""], GREEDY)
        assert output["text"] == output.text == output.outputs[0].text != ""
        assert output["token_ids"] == output.token_ids
        with pytest.raises(KeyError):
            output["logprobs"]
        with pytest.raises(RequestError, match="no tokens"):
            refused["text"]
        assert refused.token_ids == [] and refused.prompt_token_ids == []


class TestChat:
    def test_a_chat_is_what_the_template_writes(self, llm: LLM) -> None:  # B85
        [output] = llm.chat(CHAT, GREEDY)
        text = llm.tokenizer.encode("user Hi")
        assert output.prompt_token_ids == [START, *text, END, START]
        assert output.token_ids == ids_of(llm, [output.prompt_token_ids], GREEDY)[0]
        assert output.prompt is None

    def test_options_go_to_the_template(self, llm: LLM) -> None:
        [output] = llm.chat(CHAT, GREEDY, add_generation_prompt=False)
        assert output.prompt_token_ids[-1] == END

    def test_a_bad_conversation_does_not_stop_the_others(self, llm: LLM) -> None:
        villain = [{"role": "villain", "content": "Ha"}]
        chats = [CHAT, villain, [{"role": "user"}], [], CHAT]
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (5, 6, 7, 8, 9)]
        outputs = llm.chat(chats, params)
        assert [output.error is None for output in outputs] == [
            True,
            False,
            False,
            False,
            True,
        ]
        assert [len(output.token_ids) for output in outputs] == [5, 0, 0, 0, 9]
        errors = [output.error or "" for output in outputs]
        assert "refused messages[0] (role 'villain'): no villains" in errors[1]
        assert "no 'content'" in errors[2] and "at least one message" in errors[3]

    def test_a_base_model_says_that_it_has_no_template(self, tmp_path: Path) -> None:
        with load(write_tiny_checkpoint(tmp_path, chat_template=None)) as llm:
            assert "no chat template" in (llm.chat(CHAT)[0].error or "")
            assert llm.generate("Hi", GREEDY)[0].error is None


@pytest.fixture(scope="module")
def endless(llm: LLM) -> list[int]:
    """What the model says when nothing stops it; no id comes twice among the first six."""
    [ids] = ids_of(llm, "Hello", SamplingParams(seed=5, max_tokens=24))
    assert len(set(ids[:6])) == 6
    return ids


class TestEndOfSequence:
    """Three files may name the ids that end a text; all of them count (B77)."""

    @pytest.mark.parametrize(
        ("places", "end"),
        [
            ({"generation_eos": 1}, 1),
            ({"generation_eos": [4, 2]}, 2),
            ({"config_eos": 3}, 3),
            ({"config_eos": [5, 4]}, 4),
            ({"tokenizer_eos": 5}, 5),
            ({"generation_eos": [4, 5], "config_eos": 3, "tokenizer_eos": 2}, 2),
        ],
        ids=repr,
    )
    def test_the_union_of_all_places_counts(
        self, tmp_path: Path, endless: list[int], places: dict[str, Any], end: int
    ) -> None:
        def name(at: int | list[int]) -> Any:
            return [endless[i] for i in at] if isinstance(at, list) else endless[at]

        model = write_tiny_checkpoint(tmp_path, **{k: name(at) for k, at in places.items()})
        with load(model) as llm:
            params = SamplingParams(seed=5, max_tokens=24)
            [output] = llm.generate("Hello", params)
            [ignoring] = llm.generate("Hello", dataclasses.replace(params, ignore_eos=True))
        assert output.token_ids == endless[: end + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert ignoring.token_ids == endless

    def test_ignoring_them_still_heeds_stop_ids(self, llm: LLM, endless: list[int]) -> None:
        params = SamplingParams(seed=5, ignore_eos=True, stop_token_ids=[endless[2]])
        assert ids_of(llm, "Hello", params) == [endless[:3]]


class TestClosing:
    def test_closing_frees_the_model(self, checkpoint: Path) -> None:  # B52
        llm = load(checkpoint)
        llm.generate(PROMPTS, GREEDY)
        runner = llm.engine.runner
        alive = [weakref.ref(x) for x in (llm.parts.model, runner.cache, runner.rows)]
        del runner
        llm.close()
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3
        llm.close()  # harmless

    @pytest.mark.parametrize("call", ["generate", "chat", "stream", "engine", "scheduler"])
    def test_a_closed_llm_says_so(self, checkpoint: Path, call: str) -> None:
        with load(checkpoint) as llm:
            pass
        arguments = {"generate": ("Hi",), "chat": (CHAT,), "stream": (["Hi"],)}
        with pytest.raises(OctavoError, match="closed; make a new one"):
            used = getattr(llm, call)
            list(used(*arguments[call]))

    def test_an_error_inside_with_closes_too(self, checkpoint: Path) -> None:
        with pytest.raises(ZeroDivisionError), load(checkpoint) as llm:
            _ = 1 / 0
        with pytest.raises(OctavoError, match="closed"):
            _ = llm.engine

    @pytest.mark.parametrize("place", ["execute", "decode"])
    def test_an_interrupt_leaves_a_usable_engine(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        with load(checkpoint, max_num_seqs=2) as llm:  # two run, two wait
            expected = ids_of(llm, PROMPTS, GREEDY)
            owner = llm.engine.runner if place == "execute" else llm.tokenizer
            original, calls = getattr(owner, place), []

            def interrupt(*args: Any, **kwargs: Any) -> Any:
                calls.append(args)
                if len(calls) == 20:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
            assert len(calls) == 20 and is_empty(llm)
            assert ids_of(llm, PROMPTS, GREEDY) == expected

    def test_leaving_a_stream_leaves_nothing_behind(self, llm: LLM) -> None:  # B79
        stream = llm.stream(PROMPTS, SamplingParams(max_tokens=None, ignore_eos=True))
        for _ in range(9):
            next(stream)
        assert len(llm.scheduler.running) == 4
        stream.close()
        assert is_empty(llm)


class TestShapes:
    """`LLM("NAME-shape")`: random weights, token ids in and out."""

    @pytest.fixture
    def shape(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(MODELS, "toy", tiny_config())
        return "toy-shape"

    def test_it_answers_ids_and_refuses_text(self, shape: str) -> None:
        with load(shape, device="cpu") as llm:
            ids, text = (
                llm.generate([[1, 2, 3]], GREEDY)[0],
                llm.generate(["Hi"], GREEDY)[0],
            )
            talk = llm.chat(CHAT, GREEDY)[0]
        assert len(ids.token_ids) == 24 and ids.text == ""
        for refused in (text, talk):
            assert "give prompts as lists of token ids" in (refused.error or "")

    def test_a_tokeniser_for_random_weights_is_refused(self, shape: str) -> None:
        with pytest.raises(
            ConfigError, match="tokenizer='x': toy-shape has random weights"
        ):
            load(shape, device="cpu", tokenizer="x")

    def test_the_same_weights_every_time(self, shape: str) -> None:
        answers = []
        for _ in range(2):
            with load(shape, device="cpu") as llm:
                answers.append(ids_of(llm, [[5, 6], [7]], GREEDY))
        assert answers[0] == answers[1]

    def test_records_of_another_model_are_left_out(self, tmp_path: Path) -> None:
        records = [
            {"name": "a", "median": n, "config": {"model": f"{n}-shape"}} for n in (1, 2)
        ]
        (tmp_path / "x.json").write_text(json.dumps(records))
        for n in (1, 2):
            assert read_results(tmp_path, f"{n}-shape")["a"]["median"] == n


class TestOptions:
    """Every field of `EngineConfig`: each test fails if its field is ignored (B38)."""

    def test_each_field_has_a_test_here(self) -> None:
        fields = {field.name for field in dataclasses.fields(EngineConfig)}
        assert {name for name in fields if not hasattr(self, f"test_{name}")} == set()

    def test_unknown_options_are_named(self, checkpoint: Path) -> None:
        with pytest.raises(
            ConfigError, match="'max_seqs'; there are: dtype, .* max_num_seqs"
        ):
            LLM(checkpoint, max_seqs=3)

    @pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "auto"])
    def test_dtype(self, checkpoint: Path, dtype: str) -> None:
        expected = getattr(torch, "float32" if dtype == "auto" else dtype)
        with LLM(checkpoint, dtype=dtype, show_progress=False) as llm:
            cached = llm.engine.runner.cache.layer(0)[0].dtype
            weights = {weight.dtype for weight in llm.parts.model.parameters()}
            assert weights == {cached} == {llm.parts.dtype} == {expected}
            assert len(ids_of(llm, "Hi", GREEDY)[0]) == 24

    def test_device(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="CUDA devices; use device='cpu'"):
            LLM(checkpoint, device="cuda:99")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with load(checkpoint, device="cpu") as llm:  # "auto" would take the card
            assert {weight.device.type for weight in llm.parts.model.parameters()} == {
                "cpu"
            }

    def test_max_model_len(self, checkpoint: Path) -> None:
        with load(checkpoint, max_model_len=20) as llm:
            params = SamplingParams(max_tokens=None, temperature=0)
            outputs = llm.generate([[1] * 12, [1] * 19, [1] * 20], params)
        assert [len(output.token_ids) for output in outputs] == [8, 1, 0]
        assert "max_model_len is 20" in (outputs[2].error or "")
        with pytest.raises(ConfigError, match="positions up to 2048"):
            load(checkpoint, max_model_len=2049)

    def test_max_num_seqs(self, checkpoint: Path) -> None:
        with load(checkpoint, max_num_seqs=3) as llm:
            plans = record_plans(llm)
            llm.generate(PROMPTS * 2, GREEDY)
        assert max(len(plan.entries) for plan in plans) == 3

    def test_max_num_batched_tokens(self, checkpoint: Path) -> None:
        options = {"max_model_len": 40, "max_num_seqs": 8, "max_num_batched_tokens": 40}
        with load(checkpoint, **options) as llm:
            plans = record_plans(llm)
            llm.generate([[1] * 15] * 4, GREEDY)
        assert [plan.num_tokens for plan in plans[:2]] == [40, 2 + 20]
        assert max(plan.num_tokens for plan in plans) == 40

    def test_chunked_prefill(self, checkpoint: Path) -> None:
        options = {"max_model_len": 40, "max_num_seqs": 8, "max_num_batched_tokens": 40}
        with load(checkpoint, chunked_prefill=False, **options) as llm:
            plans = record_plans(llm)
            llm.generate([[1] * 15] * 4, GREEDY)
        assert [plan.num_tokens for plan in plans[:2]] == [30, 2 + 30]
        with load(checkpoint, max_model_len=90, max_num_batched_tokens=40) as llm:
            assert len(llm.generate([[1] * 80], GREEDY)[0].token_ids) == 10  # in pieces

    def test_max_chunk_tokens(self, checkpoint: Path) -> None:
        with load(checkpoint, max_chunk_tokens=7) as llm:
            plans = record_plans(llm)
            llm.generate([[1] * 15] * 4, GREEDY)
        assert [entry.count for entry in plans[0].entries] == [7] * 4
        assert max(entry.count for plan in plans for entry in plan.entries) == 7

    @pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
    def test_prefix_cache(self, checkpoint: Path, prefix_cache: str) -> None:
        with load(checkpoint, prefix_cache=prefix_cache) as llm:
            llm.generate([[1] * 40], GREEDY)
            [again] = llm.generate([[1] * 40], GREEDY)
        found = again.outputs[0].metrics.num_cached_tokens
        assert found == (0 if prefix_cache == "none" else 32)

    def test_a_salt_keeps_callers_apart(self, checkpoint: Path) -> None:
        def cached(outputs: list[Any]) -> int:
            return outputs[0].outputs[0].metrics.num_cached_tokens

        with load(checkpoint) as llm:
            said = [{"role": "user", "content": "Hello there. " * 12}]
            for ask in (
                lambda salt: llm.generate([[1] * 40], GREEDY, cache_salt=salt),
                lambda salt: llm.chat(said, GREEDY, cache_salt=salt),
            ):
                found = [cached(ask(salt)) > 0 for salt in ("a", "b", "a", None, None)]
                assert found == [False, False, True, False, True]

    def test_a_priority_reaches_the_scheduler(self, checkpoint: Path) -> None:
        with load(checkpoint, scheduling_policy="priority") as llm:
            plans = record_plans(llm)
            llm.generate([[1, 2]], GREEDY, priority=7)
            llm.chat(CHAT, GREEDY, priority=8)
            list(llm.stream([[3, 4]], GREEDY, priority=9))
        seen = dict.fromkeys(e.request.priority for plan in plans for e in plan.entries)
        assert list(seen) == [7, 8, 9]

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_scheduling_policy(self, checkpoint: Path, policy: str) -> None:
        with load(checkpoint, scheduling_policy=policy, max_num_seqs=1) as llm:
            llm.engine.add_request([1, 2], GREEDY, "patient", priority=5)
            llm.engine.add_request([3, 4], GREEDY, "urgent", priority=0)
            first = llm.engine.step()[0].request_id
        assert first == ("urgent" if policy == "priority" else "patient")

    @pytest.mark.parametrize("batching", ["decode-first", "prefill-first"])
    def test_batching(self, checkpoint: Path, batching: str) -> None:
        with load(checkpoint, batching=batching) as llm:
            plans = record_plans(llm)
            for name in ("first", "second"):
                llm.engine.add_request([1, 2, 3], GREEDY, name)
                llm.engine.step()
        counts = [entry.count for entry in plans[1].entries]
        assert counts == ([1, 3] if batching == "decode-first" else [3])

    @pytest.mark.parametrize("wait", [True, False])
    def test_defer_shared_prefix(self, checkpoint: Path, wait: bool) -> None:
        with load(checkpoint, defer_shared_prefix=wait) as llm:
            plans = record_plans(llm)
            llm.generate([[1] * 40] * 2, GREEDY)
        assert len(plans[0].entries) == (1 if wait else 2)
        assert [e.count for e in plans[1].entries] == ([1, 8] if wait else [1, 1])

    def test_block_size(self, checkpoint: Path) -> None:
        with load(checkpoint, block_size=5) as llm:
            llm.generate([[1] * 12], SamplingParams(max_tokens=9, temperature=0))
            assert llm.engine.runner.cache.layer(0)[0].shape[1] == 5
            assert llm.scheduler.max_used_blocks == 4  # 20 tokens with keys and values

    def test_num_kv_blocks(self, checkpoint: Path) -> None:
        with load(checkpoint, num_kv_blocks=7, max_model_len=100) as llm:
            assert llm.scheduler.allocator.num_blocks == 7
            assert len(llm.engine.runner.cache.layer(0)[0]) == 7 + 1  # one for padding
            outputs = llm.generate([[1] * 40] * 3, GREEDY)
            assert llm.engine.stats.num_preemptions > 0
            assert llm.scheduler.max_used_blocks <= 7
        assert len({tuple(output.token_ids) for output in outputs}) == 1

    def test_kv_cache_memory(self, checkpoint: Path) -> None:
        config = octavo.hf_config.read_model_config(checkpoint)
        budget = 11 * block_bytes(config, 16, "float64") + 1
        with load(checkpoint, kv_cache_memory=budget, max_model_len=100) as llm:
            assert llm.scheduler.allocator.num_blocks == 10
            assert llm.engine.runner.cache.num_bytes <= budget

    def test_gpu_memory_utilization(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a card of 1,000 blocks that somebody else has a tenth of."""
        model = tiny_config()
        per_block = block_bytes(model, 16, "float32")
        memory = DeviceMemory(
            1000 * per_block, 100 * per_block, 60 * per_block, 40 * per_block
        )
        monkeypatch.setattr(Parts, "runner", lambda *args: None)
        monkeypatch.setattr("octavo.assembly.measure_peak", lambda *args: 0)
        monkeypatch.setattr("octavo.assembly.read_device_memory", lambda *args: memory)
        cuda = torch.device("cuda")
        parts = Parts(None, model, cuda, torch.float32, TorchAttention(), 16)
        for share, blocks in ((0.9, 699), (0.5, 299)):
            config = EngineConfig(gpu_memory_utilization=share)
            limits = Limits.settle(config, model, cuda)
            assert size_pool(config, parts, limits).num_blocks == blocks

    def test_attention(self, checkpoint: Path) -> None:
        with load(checkpoint, attention="torch") as llm:
            assert isinstance(llm.engine.runner.attention, TorchAttention)
        with pytest.raises(ConfigError, match="attention='magic'"):
            load(checkpoint, attention="magic")

        if can_compile():
            with load(checkpoint, attention="native", dtype="float32") as llm:
                assert isinstance(llm.engine.runner.attention, NativeAttention)
                assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)
        with pytest.raises(NativeError, match="float64"):
            load(checkpoint, attention="native")
        with pytest.raises(ConfigError, match="attention='flash': "):
            load(checkpoint, attention="flash", block_size=256)

    def test_layer_ops(self, checkpoint: Path) -> None:
        answers = []
        for name, kind in (("torch", TorchOps), ("native", NativeOps)):
            if name == "native" and not can_compile():
                continue
            with load(checkpoint, layer_ops=name, dtype="float32") as llm:
                assert isinstance(llm.parts.model.model.layers[0].mlp.ops, kind)
                answers.append(ids_of(llm, PROMPTS, GREEDY))
        assert all(answer == answers[0] for answer in answers)
        with pytest.raises(NativeError, match="float64"):
            load(checkpoint, layer_ops="native")

        with pytest.raises(ConfigError, match="layer_ops='fused': .*float64"):
            load(checkpoint, layer_ops="fused")

    def test_sampler(self, checkpoint: Path) -> None:
        with load(checkpoint, sampler="torch") as llm:
            assert type(llm.engine.runner.sampler) is Sampler
        with pytest.raises(ConfigError, match="sampler='fused': .*float64"):
            load(checkpoint, sampler="fused")

    @interpreted
    def test_kernels_by_name_say_what_pytorch_says(self, checkpoint: Path) -> None:
        params = SamplingParams(temperature=0, max_tokens=3)
        with load(checkpoint, dtype="float32", attention="torch") as llm:
            expected = ids_of(llm, PROMPTS[:2], params)
        with load(checkpoint, **KERNELS) as llm:
            assert type(llm.engine.runner.sampler).__name__ == "FusedSampler"
            assert type(llm.parts.model).__name__ == "FusedModel"
            assert ids_of(llm, PROMPTS[:2], params) == expected
        with load(checkpoint, **{**KERNELS, "attention": "torch"}) as llm:
            assert type(llm.parts.model).__name__ == "FusedModel"
            assert ids_of(llm, PROMPTS[:2], params) == expected

    @interpreted
    def test_cuda_graphs(self, checkpoint: Path) -> None:
        params = SamplingParams(temperature=0, max_tokens=3)
        for wanted in (True, False):
            with load(checkpoint, cuda_graphs=wanted, max_num_seqs=2, **KERNELS) as llm:
                ids_of(llm, PROMPTS[:2], params)
                assert (llm.engine.runner.stats.num_graph_steps > 0) == wanted
        with pytest.raises(ConfigError, match="cuda_graphs=True: .* attention='triton'"):
            load(checkpoint, cuda_graphs=True, attention="torch")

    def test_enforce_eager(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match="enforce_eager=True: give one of them"):
            load(checkpoint, cuda_graphs=True, enforce_eager=True)
        on_card = torch.device("cuda")
        for eager in (False, True):
            config, backend = EngineConfig(enforce_eager=eager), TritonAttention()
            assert choose_graphs(config, backend, "fused", on_card) == (not eager)

    def test_overlap(self, checkpoint: Path) -> None:
        answers = []
        for wanted in (False, True):
            with load(checkpoint, overlap=wanted) as llm:
                assert isinstance(llm.engine, OverlappedEngine) == wanted
                answers.append(ids_of(llm, PROMPTS, GREEDY))
        assert answers[0] == answers[1]

    def test_seed(self, checkpoint: Path) -> None:  # B58
        def draw(seed: int | None) -> list[list[int]]:
            with load(checkpoint, seed=seed) as llm:
                return ids_of(llm, ["Same", "Same"], SamplingParams(max_tokens=8))

        assert draw(7) == draw(7) != draw(8)
        assert draw(None) != draw(None)
        first, second = draw(7)
        assert first != second


class TestLimits:
    """What isn't given follows from what is."""

    def test_a_pool_too_small_for_the_model_lowers_the_length_loudly(  # B32
        self, checkpoint: Path
    ) -> None:
        words = (
            "max_model_len=2048 .* the longest that fits is 65: max_model_len is lowered"
        )
        with pytest.warns(UserWarning, match=words):
            llm = load(checkpoint, num_kv_blocks=4)
        with llm:
            outputs = llm.generate([[1] * 40, [1] * 65], SamplingParams(max_tokens=None))
        assert len(outputs[0].token_ids) == 25
        assert "max_model_len is 65" in (outputs[1].error or "")

    def test_a_length_asked_for_is_refused_with_the_sum(
        self, checkpoint: Path
    ) -> None:  # B32
        with pytest.raises(
            ConfigError, match="needs 5 KV blocks .* the pool has 4 .* is 65"
        ):
            load(checkpoint, num_kv_blocks=4, max_model_len=66)

    def test_a_token_budget_below_the_model_lowers_the_length_loudly(  # B28
        self, checkpoint: Path
    ) -> None:
        with pytest.warns(UserWarning, match="max_model_len is lowered from 2048"):
            llm = load(checkpoint, max_num_batched_tokens=20, chunked_prefill=False)
        with llm:  # `max_num_seqs` follows too: nobody asked for more
            outputs = llm.generate([[1] * 12, [1] * 20], SamplingParams(max_tokens=None))
        assert len(outputs[0].token_ids) == 8 and outputs[1].error is not None

    def test_defaults_are_quiet(self, checkpoint: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            load(checkpoint).close()


class TestLoading:
    def test_importing_octavo_loads_no_torch(self) -> None:
        code = (
            "import sys, octavo; print(octavo.SamplingParams().n, 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "1 False\n", done.stderr

    def test_names_that_do_not_exist_are_attribute_errors(self) -> None:
        assert octavo.RequestOutput is octavo.llm.RequestOutput
        with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
            _ = octavo.LLMs

    def test_what_is_no_checkpoint_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="doesn't exist"):
            LLM(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"config\.json"):
            LLM(tmp_path)

    def test_a_tokenizer_may_come_from_elsewhere(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        model = write_tiny_checkpoint(tmp_path / "model")
        for file in model.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ModelLoadError, match="no tokeniser in"):
            load(model)
        with load(model, tokenizer=checkpoint) as llm:
            assert llm.generate("Hi", GREEDY)[0].error is None


class TestProgress:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """rich draws bars on what it takes for a terminal."""
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")

    def test_bars_are_drawn_when_asked_for(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with load(checkpoint, show_progress=True) as llm:
            assert "loading weights" in capsys.readouterr().err
            llm.generate("Hi", GREEDY)
            assert "generating" in capsys.readouterr().err
            llm.generate("Hi", GREEDY, show_progress=False)
            assert capsys.readouterr().err == ""

    def test_the_bar_of_answers_counts_tokens(
        self,
        checkpoint: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Three answers of one length end in one step; the bar has moved before."""
        step = Engine.step
        monkeypatch.setattr(Engine, "step", lambda self: time.sleep(0.03) or step(self))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        with load(checkpoint, show_progress=True) as llm:
            llm.generate(["Hi", "Ho", b""] + PROMPTS[:1], params)
        err = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().err)
        places = [int(done) for done in re.findall(r"(\d+)/72 tokens", err)]
        assert len(set(places)) > 3 and places == sorted(places) and places[-1] == 72

    def test_a_bar_is_not_moved_oftener_than_it_is_drawn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moves: list[float] = []
        update = rich.progress.Progress.update

        def spy(self: Any, *args: Any, **fields: Any) -> None:
            moves.append(fields["completed"])
            update(self, *args, **fields)

        monkeypatch.setattr(rich.progress.Progress, "update", spy)
        now = itertools.count()
        clock = SimpleNamespace(monotonic=lambda: next(now) / 1000)
        monkeypatch.setattr(octavo.progress, "time", clock)
        with octavo.progress.ProgressBar("generating", 999, True, "tokens") as bar:
            for done in range(1, 1000):
                bar.set(done, 999)
        assert moves[0] == 1 and moves[-1] == 999 and len(moves) == 11

    def test_none_are_drawn_into_a_pipe(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with load(checkpoint, show_progress=None) as llm:
            llm.generate("Hi", GREEDY)
            llm.chat(CHAT, GREEDY)
            assert capsys.readouterr() == ("", "")
            llm.chat(CHAT, GREEDY, show_progress=True)
            out, err = capsys.readouterr()
            assert out == "" and "generating" in err

    def test_a_terminal_gets_them_unasked(
        self,
        checkpoint: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with load(checkpoint, show_progress=None) as llm:
            llm.generate("Hi", GREEDY)
        err = capsys.readouterr().err
        assert "loading weights" in err and "generating" in err
