"""A tiny Llama with a byte-level tokeniser and a chat template, as files like any model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
    "{{ '<|start|>' + m.role + ' ' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>' }}{% endif %}"
)
VOCAB_SIZE = 258  # a token for each byte and two special ones
START, END = 256, 257


def byte_tokenizer(
    chat_template: str | None = TEMPLATE, eos_token_id: int | None = None
) -> transformers.PreTrainedTokenizerFast:
    """Every byte is a token; nothing is merged, so text is cut inside characters too."""
    letters = sorted(ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    eos = None if eos_token_id is None else backend.id_to_token(eos_token_id)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    made.chat_template = chat_template
    return made


def write_tiny_checkpoint(
    directory: Path,
    *,
    chat_template: str | None = TEMPLATE,
    tokenizer_eos: int | None = None,
    config_eos: int | list[int] | None = None,
    generation_eos: int | list[int] | None = None,
    **config: Any,
) -> Path:
    """Save the model (always the same weights, float32) and its tokeniser; returns `directory`."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    settings = transformers.LlamaConfig(
        **fields | config, bos_token_id=None, eos_token_id=config_eos
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(directory)
    byte_tokenizer(chat_template, tokenizer_eos).save_pretrained(directory)
    generation = {} if generation_eos is None else {"eos_token_id": generation_eos}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
