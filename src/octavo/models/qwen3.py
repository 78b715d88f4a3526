"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from torch import Tensor

from octavo.config import ModelConfig
from octavo.layers import RMSNorm, Rotation
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer, LlamaModel

__all__ = ["Qwen3Attention", "Qwen3Layer", "Qwen3Model", "Qwen3ForCausalLM"]


class Qwen3Attention(LlamaAttention):
    """Llama's attention with an RMSNorm on every query and key head."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def rotate(self, qk: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Normalise each head of [T, num_heads + num_kv_heads, head_dim], rotate, part."""
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        q, k = self.q_norm(q)[0], self.k_norm(k)[0]
        return self.ops.rotate(q, rotation), self.ops.rotate(k, rotation)


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    layer_class = Qwen3Layer


class Qwen3ForCausalLM(LlamaForCausalLM):
    """A dense Qwen3 model over packed tokens."""

    model_class = Qwen3Model
