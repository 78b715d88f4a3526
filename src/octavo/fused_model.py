"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention import Attend, CachedAttend
from octavo.config import ConfigError
from octavo.fused import (
    HeadNorms,
    Rotary,
    fused_problem,
    rms_norm,
    rotate_store,
    silu_mul,
)
from octavo.gemv import gemv
from octavo.layers import Rotation
from octavo.models.llama import LlamaForCausalLM, LlamaLayer

__all__ = ["GEMV_ROWS", "StepInputs", "FusedLayer", "FusedModel"]


GEMV_ROWS = 3
"""Tokens up to which our products beat cuBLAS with its norms and SwiGLU apart."""


class StepInputs(NamedTuple):
    """What all layers of a step share."""

    attend: Attend
    cached: CachedAttend | None
    """`attend` again, if it can read keys and values back from the cache."""
    rotary: Rotary
    few: bool
    """Few enough tokens for `gemv`?"""

    def rotation(self) -> Rotation:
        """The angles as the plain layers take them."""
        rows = self.rotary.table.index_select(0, self.rotary.positions)
        return Rotation(rows[:, 0:1], rows[:, 1:2])


class FusedLayer:
    """One layer's tensors and its forward pass."""

    def __init__(self, layer: LlamaLayer, index: int) -> None:
        self.index, self.plain, mlp = index, layer.self_attn, layer.mlp
        self.qkv, self.out = self.plain.qkv_proj, self.plain.o_proj
        self.gate_up, self.down = mlp.gate_up_proj, mlp.down_proj
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self.norm1, self.norm2 = (first.weight, first.eps), (second.weight, second.eps)
        q, k = (getattr(self.plain, name, None) for name in ("q_norm", "k_norm"))
        self.heads = HeadNorms(q.weight, k.weight, q.eps) if q and k else None

    def __call__(self, stream: Tensor, step: StepInputs) -> Tensor:
        """Add the layer's part to `stream` [T, hidden], in place."""
        return self._few(stream, step) if step.few else self._many(stream, step)

    def _few(self, stream: Tensor, step: StepInputs) -> Tensor:
        """Norms, SwiGLU and the residual are inside the products."""
        seen = self._attend(gemv(stream, self.qkv.weight, norm=self.norm1), step)
        gemv(seen, self.out.weight, add_to=stream)
        inner = gemv(stream, self.gate_up.weight, norm=self.norm2, gated=True)
        return gemv(inner, self.down.weight, add_to=stream)

    def _many(self, stream: Tensor, step: StepInputs) -> Tensor:
        """cuBLAS's products, which add to the residual stream themselves."""
        x = rms_norm(stream, *self.norm1)
        seen = self._attend(F.linear(x, self.qkv.weight, self.qkv.bias), step)
        _add_product(stream, seen, self.out.weight, self.out.bias)
        x = rms_norm(stream, *self.norm2)
        inner = silu_mul(F.linear(x, self.gate_up.weight, self.gate_up.bias))
        return _add_product(stream, inner, self.down.weight, self.down.bias)

    def _attend(self, qkv: Tensor, step: StepInputs) -> Tensor:
        """[T, (heads + 2 kv_heads) * head_dim] as projected to [T, heads * head_dim]."""
        if (cached := step.cached) is None:
            return self._attend_plainly(qkv, step)
        slots, caches = cached.metadata.slot_mapping, cached.cache.layer(self.index)
        q = rotate_store(qkv, *caches, slots, step.rotary, self.heads)
        return cached.attend(self.index, q).flatten(1)

    def _attend_plainly(self, qkv: Tensor, step: StepInputs) -> Tensor:
        """As `LlamaAttention` does it."""
        num_heads, num_kv_heads = self.plain.num_heads, self.plain.num_kv_heads
        heads = qkv.view(len(qkv), -1, self.plain.head_dim)
        qk, v = heads.split([num_heads + num_kv_heads, num_kv_heads], 1)
        q, k = self.plain.rotate(qk, step.rotation())
        return step.attend(self.index, q, k, v).flatten(1)


def _add_product(stream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """stream += x @ weight.T + bias"""
    stream.addmm_(x, weight.T)
    return stream if bias is None else stream.add_(bias)


class FusedModel:
    """A Llama or Qwen3 in fewer kernels, on the tensors of `plain`: a `CausalModel`.

    Takes any `Attend`, a `CachedAttend` with fewer kernels. Up to `gemv_rows` tokens go through
    `gemv`, unless there are biases. Raises `ConfigError` where the kernels can't run.
    """

    def __init__(self, plain: LlamaForCausalLM, gemv_rows: int = GEMV_ROWS) -> None:
        weight = plain.model.norm.weight
        if problem := fused_problem(weight.device, weight.dtype):
            raise ConfigError(f"layer_ops='fused': {problem}; layer_ops='torch' runs")
        self.plain, self.config = plain, plain.config
        biases = self.config.attention_bias or self.config.mlp_bias
        self.gemv_rows = 0 if biases else gemv_rows
        layers = cast(Iterable[LlamaLayer], plain.model.layers)
        self.layers = [FusedLayer(layer, index) for index, layer in enumerate(layers)]

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `CausalModel`: [T, hidden] after the final norm."""
        model = self.plain.model
        stream = F.embedding(input_ids, model.embed_tokens.weight)
        angles, few = model.rotary, len(stream) <= self.gemv_rows
        angles.reserve(angles.max_position, stream.dtype, stream.device)
        cached = attend if isinstance(attend, CachedAttend) else None
        step = StepInputs(attend, cached, Rotary(positions, angles.table), few)
        for layer in self.layers:
            stream = layer(stream, step)
        return rms_norm(stream, model.norm.weight, model.norm.eps)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `CausalModel`: [N, hidden] to [N, vocab_size], written to `out` if given."""
        plain = self.plain
        head = plain.model.embed_tokens if plain.lm_head is None else plain.lm_head
        if len(hidden) <= min(self.gemv_rows, 1):  # a wide matrix suits cuBLAS from 2 on
            return gemv(hidden, head.weight, out=out)
        return torch.matmul(hidden, head.weight.T, out=out)
