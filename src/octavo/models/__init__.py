"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import torch

from octavo.config import ConfigError, ModelConfig
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM

__all__ = ["MODELS", "build_model"]


MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """The model of `config`, its parameters of `dtype` on `device` *not written yet*.

    Raises `ConfigError` for an architecture that isn't in `MODELS`.
    """
    if config.architecture not in MODELS:
        supported = ", ".join(MODELS)
        raise ConfigError(
            f"architecture {config.architecture!r}: supported are {supported}"
        )
    with torch.device("meta"):
        model = MODELS[config.architecture](config)
    for module in model.modules():  # `to_empty` does this too, and loads PyTorch's compiler
        for name, given in module.named_parameters(recurse=False):
            real = torch.empty(given.shape, dtype=dtype, device=device)
            setattr(module, name, torch.nn.Parameter(real, requires_grad=False))
    return model.eval()
