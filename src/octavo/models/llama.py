"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.layers import (
    MLP,
    Linear,
    MergedLinear,
    Piece,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
)

if TYPE_CHECKING:
    from octavo.attention import Attend


__all__ = ["LlamaAttention", "LlamaLayer", "LlamaModel", "LlamaForCausalLM"]


class LlamaAttention(Piece):
    """Grouped-query attention with rotary positions; the cache belongs to `attend`."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        parts = {
            "q_proj": config.q_size,
            "k_proj": config.kv_size,
            "v_proj": config.kv_size,
        }
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.attention_bias)
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.attention_bias)

    def rotate(self, qk: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotate [T, num_heads + num_kv_heads, head_dim] and part it into q and k."""
        turned = self.ops.rotate(qk, rotation)
        q, k = turned.split([self.num_heads, self.num_kv_heads], dim=1)
        return q, k

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        heads = self.qkv_proj(x).view(x.size(0), -1, self.head_dim)
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = self.rotate(qk, rotation)
        seen = attend(self.layer_index, q, k, v)
        out: Tensor = self.o_proj(seen.reshape(x.size(0), -1))
        return out


class LlamaLayer(nn.Module):
    """Norm, attention, norm, MLP, around one residual stream."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden]; returns the layer's output and the residual stream."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, attend)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, layers and final norm."""

    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # nn.Embedding would draw numbers; on "meta" PyTorch loads its compiler for that.
        rows = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(rows)
        layers = [self.layer_class(config, index) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        longest = config.max_position_embeddings
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, longest)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids, positions: int64 [T] -> [T, hidden]."""
        x: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        rotation = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, attend)
        normed: Tensor = self.norm(x, residual)[0]
        return normed


class LlamaForCausalLM(Piece):
    """A Llama-family model over packed tokens. Parameter names are those of checkpoints."""

    model_class: type[LlamaModel] = LlamaModel

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of T packed tokens.

        input_ids, positions: int64 [T]; returns [T, hidden] after the final norm, in the
        model's dtype. `attend` is called once a layer with q, k, v of all T tokens.
        """
        hidden: Tensor = self.model(input_ids, positions, attend)
        return hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [N, hidden] -> [N, vocab_size], in the model's dtype; into `out` if given."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = self.ops.linear(hidden, head.weight, None)
        return logits if out is None else out.copy_(logits)
