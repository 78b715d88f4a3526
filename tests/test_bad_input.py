"""Bad input gets an error that names the cause and what to do, and nothing else is lost.

Requests and settings; what may be wrong with a checkpoint is tested beside its loader.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    check_all_returned,
    continuation,
    counting_engine,
    counting_scheduler,
    request,
    serve,
    tiny_engine,
)
from tiny_checkpoint import write_tiny_checkpoint

from octavo.config import ConfigError, EngineConfig
from octavo.engine import Engine, expand_params
from octavo.request import RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def served_beside(bad: Any, params: Any = GREEDY, engine: Engine | None = None) -> str:
    """The error of a bad prompt between two good ones, which the real engine must answer."""
    engine = engine or tiny_engine()
    first, refused, last = serve(engine, [[5, 6, 7], bad, "8 9"], params)
    alone = [serve(tiny_engine(), [p], GREEDY)[0].token_ids for p in ([5, 6, 7], "8 9")]
    assert [first.token_ids, last.token_ids] == alone
    assert first.error is last.error is None
    check_all_returned(engine)
    assert (refused.finish_reason, refused.token_ids, refused.text) == ("error", [], "")
    return refused.error or ""


# Prompts


@pytest.mark.parametrize(
    "empty", ["", "   ", [], (), np.array([], dtype=np.int64)], ids=repr
)
def test_b78_an_empty_prompt_is_refused_beside_good_ones(empty: Any) -> None:
    assert "has no tokens; give at least one" in served_beside(empty)


@pytest.mark.parametrize("token_id", [256, -1, 2**31, 2**70, -(2**40)])
def test_ids_outside_the_vocabulary_are_refused_beside_good_ones(token_id: int) -> None:
    error = served_beside([1, token_id, 2])
    assert f"token id {token_id} is outside the vocabulary (0 to 255)" in error
    assert "another model's tokeniser?" in error


def test_the_ids_at_the_borders_of_the_vocabulary_are_served() -> None:
    first, last = serve(tiny_engine(), [[0], [255]], GREEDY)
    assert len(first.token_ids) == len(last.token_ids) == 4


@pytest.mark.parametrize(
    "prompt",
    [[True], [1, False], [1.0], [1, float("nan")], ["5"], [""], [None], [[1]]],
    ids=repr,
)
def test_what_is_no_id_is_refused_beside_good_ones(prompt: Any) -> None:
    assert "a prompt is text or a list of token ids, not" in served_beside(prompt)


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"ab", {"a": 1}, Ellipsis], ids=repr)
def test_what_is_no_prompt_at_all_is_refused_beside_good_ones(prompt: Any) -> None:
    assert "a prompt is text or a list of token ids, not" in served_beside(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        (5, 6, 7),
        np.array([5, 6, 7]),
        [np.int32(5), 6, np.uint8(7)],
        range(5, 8),
        iter([5, 6, 7]),
    ],
    ids=lambda p: type(p).__name__,
)
def test_ids_may_come_as_any_sequence_of_whole_numbers(prompt: Any) -> None:
    (answer,) = serve(tiny_engine(), [prompt], GREEDY)
    assert answer.token_ids == serve(tiny_engine(), [[5, 6, 7]], GREEDY)[0].token_ids
    assert all(type(i) is int for i in answer.token_ids)


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_b30_a_prompt_as_long_as_the_model_or_longer_is_refused(excess: int) -> None:
    error = served_beside([1] * (128 + excess))
    assert f"the prompt has {128 + excess} tokens and max_model_len is 128" in error
    assert "shorten it to 127 or fewer" in error


def test_b30_a_prompt_one_shorter_than_the_model_gets_its_one_token() -> None:
    engine = tiny_engine()
    for _ in range(2):
        long, normal = serve(engine, [[1] * 127, [5, 6, 7]], GREEDY)
        assert (len(long.token_ids), long.finish_reason) == (1, "length")
        assert len(normal.token_ids) == 4
    check_all_returned(engine)


def test_an_answer_is_cut_where_the_model_ends() -> None:
    (answer,) = serve(tiny_engine(), [[1] * 120], temperature=0, max_tokens=1000)
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


def test_b23_a_request_that_could_never_fit_says_what_it_needs_and_what_there_is() -> None:
    engine = counting_engine(num_blocks=3)
    big, small = serve(engine, [[1] * 8, [2]], max_tokens=6)
    assert big.finish_reason == "error" and len(small.token_ids) == 6
    assert "13 tokens of prompt and answer need 4 KV blocks of 4 tokens" in big.error
    assert "the pool has 3: it holds at most 12 tokens" in big.error
    assert "lower max_tokens, shorten the prompt or enlarge the KV cache" in big.error
    check_all_returned(engine)


def test_b28_a_request_over_the_budget_of_a_step_says_which_number_to_change() -> None:
    scheduler = counting_scheduler(tokens=16, length=64)
    with pytest.raises(RequestError, match="max_num_batched_tokens is 16; raise it, lower"):
        scheduler.add(request("a", [1] * 10, max_tokens=8))
    assert not scheduler.has_unfinished


# Several prompts, their names and their parameters


def test_a_duplicate_request_id_is_refused_and_its_owner_goes_on() -> None:
    engine = counting_engine()
    owner = engine.stream([[1]], SamplingParams(max_tokens=5), ["x"])
    deltas = [next(owner)]
    second = engine.stream([[2], [3]], SamplingParams(max_tokens=2), ["x", "y"])
    refused = next(second).finished
    assert refused and "request id 'x' is in use; choose another" in (refused.error or "")
    assert [i for d in second if d.request_id == "y" for i in d.token_ids] == continuation(
        [3], 2
    )
    deltas += owner
    assert [i for d in deltas for i in d.token_ids] == continuation([1], 5)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request([1], request_id=engine.add_request([2]))


def test_closing_a_stream_that_was_refused_its_name_leaves_the_owner_alone() -> None:
    engine = counting_engine()
    owner = engine.stream([[1]], SamplingParams(max_tokens=5), ["x"])
    first = next(owner)
    second = engine.stream([[2]], request_ids=["x"])
    next(second)
    second.close()
    rest = list(owner)
    assert [i for d in [first, *rest] for i in d.token_ids] == continuation([1], 5)
    check_all_returned(engine)


def test_a_name_is_free_again_when_its_request_has_ended() -> None:
    engine = counting_engine()
    for _ in range(2):
        (last,) = [d for d in engine.stream([[1]], GREEDY, ["x"]) if d.finished]
        assert len(last.finished.token_ids) == 4


def test_the_same_name_twice_in_one_call_serves_the_first() -> None:
    deltas = list(counting_engine().stream([[1], [2]], GREEDY, ["x", "x"]))
    endings = [d.finished.finish_reason for d in deltas if d.finished]
    assert sorted(endings) == ["error", "length"]
    assert [i for d in deltas for i in d.token_ids] == continuation([1], 4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_parameters_as_prompts_or_one_for_all(count: int) -> None:
    engine = counting_engine()
    with pytest.raises(ValueError, match=f"2 prompts but {count} .*: give one for all"):
        list(engine.stream([[1], [2]], [GREEDY] * count))
    with pytest.raises(ValueError, match=f"2 prompts but {count} request ids"):
        list(engine.stream([[1], [2]], GREEDY, [str(i) for i in range(count)]))
    check_all_returned(engine)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"n": 1}], "h"], ids=repr)
def test_what_is_no_sampling_parameters_is_refused_by_name(params: Any) -> None:
    engine = counting_engine()
    with pytest.raises(TypeError, match="SamplingParams objects, not"):
        list(engine.stream([[1]], params))
    check_all_returned(engine)


def test_one_text_instead_of_a_list_is_not_served_letter_by_letter() -> None:
    with pytest.raises(
        TypeError, match="takes a list of prompts; put the one text into a list"
    ):
        list(counting_engine().stream("12 13", GREEDY))


def test_no_prompts_give_no_answers() -> None:
    assert list(counting_engine().stream([], GREEDY)) == []
    assert expand_params(GREEDY, 0) == []


# Sampling parameters: every field


NONSENSE: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, "2", True, None],
    "temperature": [-0.1, float("nan"), float("inf"), "hot", None, True, 10**400],
    "top_k": [-2, 1.5, "5", None, True],
    "top_p": [0, -0.5, 1.0001, float("nan"), "all", None, True],
    "max_tokens": [0, -5, 2.0, "many", True],
    "stop": ["", ["ok", ""], [5], 5, [None]],
    "stop_token_ids": [[-1], ["5"], [1.0], [True], "12", 5],
    "ignore_eos": ["no", None, 2],
    "seed": [-1, 2**64, 1.5, "x", True],
    "include_stop_str_in_output": ["no", None],
    "skip_special_tokens": ["no", None],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in NONSENSE.items() for v in values], ids=repr
)
def test_a_nonsense_sampling_parameter_is_named_with_what_was_expected(
    field: str, value: Any
) -> None:
    with pytest.raises(RequestError, match=rf"(?s)^{field}=.*: expected ") as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)


def test_no_field_is_left_out_of_the_nonsense() -> None:
    assert set(NONSENSE) == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_p": 1},
        {"max_tokens": None},
        {"stop": None},
        {"stop": []},
        {"stop_token_ids": None},
        {"seed": 0},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_what_looks_odd_but_has_a_meaning_is_taken(params: Any) -> None:
    asked = SamplingParams(**{"max_tokens": 2, **params})
    (answer,) = serve(tiny_engine(max_model_len=16), [[1, 2]], asked)
    assert answer.error is None and answer.token_ids


def test_a_parameter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams(temperatur=0.5)  # type: ignore[call-arg]


# Settings of the engine: every field


COUNTS = [0, -1, 1.5, "8", True]
BAD_SETTINGS: dict[str, list[Any]] = {
    "dtype": ["float8", "half", None, 16],
    "device": ["gpu", "cuda:", "cuda:-1", "cuda:x", None, 0],
    "max_model_len": COUNTS,
    "max_num_seqs": COUNTS,
    "max_num_batched_tokens": COUNTS,
    "block_size": [*COUNTS, None],
    "num_kv_blocks": COUNTS,
    "kv_cache_memory": COUNTS,
    "gpu_memory_utilization": [0, -0.1, 1.1, float("nan"), "most", None, True],
    "attention": ["magic", None, 1],
    "layer_ops": ["magic", None, 1],
    "sampler": ["magic", None, 1],
    "cuda_graphs": ["yes", 1, 0],
    "enforce_eager": ["no", None, 0],
    "overlap": ["auto", 1],
    "prefix_cache": ["trie", None, True],
    "chunked_prefill": ["yes", None, 1],
    "max_chunk_tokens": [0, -1, 2.5, True],
    "scheduling_policy": ["lifo", None],
    "batching": ["static", None],
    "defer_shared_prefix": ["no", None, 0],
    "seed": [-1, 2**64, 1.5, "x", True],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, values in BAD_SETTINGS.items() for v in values],
    ids=repr,
)
def test_a_nonsense_setting_is_named_with_what_to_give(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=.*: give "):
        EngineConfig(**{field: value})


def test_no_setting_is_left_out_of_the_nonsense() -> None:
    assert set(BAD_SETTINGS) == {f.name for f in dataclasses.fields(EngineConfig)}


def test_an_option_that_does_not_exist_is_refused_with_the_list_of_those_that_do() -> None:
    from octavo.llm import LLM

    with pytest.raises(ConfigError, match="'max_seqs'; there are: .*max_num_seqs"):
        LLM("no-such-directory", max_seqs=4)
    with pytest.raises(TypeError, match="max_seqs"):
        EngineConfig(max_seqs=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("smaller", ["max_model_len", "max_num_seqs"])
def test_b28_a_step_too_small_for_what_was_asked_is_refused_at_the_start(
    smaller: str,
) -> None:
    with pytest.raises(ConfigError, match=f"max_num_batched_tokens=8 is below {smaller}=9"):
        EngineConfig(max_num_batched_tokens=8, chunked_prefill=False, **{smaller: 9})


def test_two_sizes_for_one_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="both size the pool of KV blocks: give one"):
        EngineConfig(num_kv_blocks=8, kv_cache_memory=2**20)


def test_b32_a_model_length_that_the_pool_cannot_hold_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match="needs 8 KV blocks .* the pool has 4") as caught:
        tiny_engine(max_model_len=128, num_kv_blocks=4)
    assert "the longest that fits is 65" in str(caught.value)
    assert "Lower max_model_len or give the KV cache more memory" in str(caught.value)


def test_b32_a_model_length_nobody_asked_for_is_lowered_loudly_and_kept_to() -> None:
    with pytest.warns(UserWarning, match="max_model_len is lowered"):
        engine = tiny_engine(max_model_len=None, num_kv_blocks=4)
    long, longest = serve(engine, [[1] * 65, [1] * 64], temperature=0, max_tokens=9)
    assert "max_model_len is 65" in long.error and len(longest.token_ids) == 1


def test_a_model_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model knows positions up to 512"):
        tiny_engine(max_model_len=513)


def test_a_budget_that_holds_no_block_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match="holds no block.*raise kv_cache_memory or lower"):
        tiny_engine(max_model_len=None, kv_cache_memory=1000)


def test_a_step_budget_alone_is_no_contradiction() -> None:
    """Nobody gave max_num_seqs, so nobody should have to lower it."""
    engine = tiny_engine(max_num_batched_tokens=16, max_model_len=16)
    (answer,) = serve(engine, [[1, 2]], GREEDY)
    assert len(answer.token_ids) == 4


# What the command says about it


def test_a_lowered_length_is_one_plain_line_of_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.cli import main

    model = str(write_tiny_checkpoint(tmp_path))
    options = ["--num-kv-blocks", "4", "--device", "cpu", "--attention", "torch"]
    shown = warnings.showwarning
    assert main(["run", model, "-p", "Hi", "--max-tokens", "2", *options]) == 0
    said = [r.getMessage() for r in caplog.records if "max_model_len" in r.getMessage()]
    assert len(said) == 1 and said[0].endswith("max_model_len is lowered to that")
    assert "\n" not in said[0] and caplog.records[0].name == "octavo"
    assert "UserWarning" not in capsys.readouterr().err + caplog.text
    assert warnings.showwarning is shown  # a caller of main gets its own back


@pytest.mark.slow
def test_a_start_that_compiles_several_kernels_says_so_once(tmp_path: Path) -> None:
    code = (
        "import logging, torch\nfrom octavo import native\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "if native.can_compile():\n"
        "    for dtype in (torch.float32, torch.bfloat16):\n"
        "        native.build('element twice(element x) {return x + x;}', dtype)\n"
    )
    environment = {**os.environ, "OCTAVO_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    compiled = len(list(tmp_path.glob("native/*.so")))
    assert done.returncode == 0 and compiled in (0, 3), done.stderr
    assert done.stderr.count("compiling the C kernels") == bool(compiled)
