"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.config import ConfigError, ModelConfig
from octavo.models import build_model
from octavo.models.llama import LlamaForCausalLM
from octavo.presets import MODELS
from octavo.request import RequestError
from octavo.weights import init_random_weights

__all__ = ["SUFFIX", "named_shape", "random_model", "TokenIdsOnly"]


SUFFIX = "-shape"


def named_shape(model: str | Path) -> ModelConfig | None:
    """The preset that "qwen3-0.6b-shape" names; None for what isn't called a shape.

    ConfigError with the list of shapes for one that isn't there.
    """
    name = str(model)
    if not name.endswith(SUFFIX) or "/" in name or Path(name).exists():
        return None
    preset = MODELS.get(name.removesuffix(SUFFIX))
    if preset is None:
        known = ", ".join(key + SUFFIX for key in MODELS)
        raise ConfigError(f"model={name!r}: no such shape; there are {known}")
    return preset


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LlamaForCausalLM:
    """A model of this shape whose weights are drawn on `device` from `seed`."""
    model = build_model(config, dtype, device)
    init_random_weights(model, seed, device)
    return model


class TokenIdsOnly:
    """A codec for a model without a tokeniser: it refuses text and writes none."""

    vocab_size: int = 0
    eos_token_id: int | None = None
    bos_token_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """Always a `RequestError`."""
        raise RequestError(
            "this model has no tokeniser; give prompts as lists of token ids"
        )

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        """Always a `RequestError`."""
        return self.encode("")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Nothing, whatever the ids."""
        return ""
