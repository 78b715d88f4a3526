"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config import ConfigError, ModelConfig, RopeConfig

__all__ = [
    "rms_norm",
    "add_rms_norm",
    "rope_frequencies",
    "Rotation",
    "RotaryEmbedding",
    "apply_rope",
    "LayerOps",
    "TorchOps",
    "Piece",
    "use_ops",
    "RMSNorm",
    "Linear",
    "MergedLinear",
    "MLP",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension to root mean square 1 and scale it by `weight`.

    x: [..., D], any float dtype; weight: [D]. Returns x's shape and dtype. Half-precision
    input is normalised in float32, rounded, then scaled. Source: Zhang and Sennrich, 2019.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: returns (normed, sum), each like x."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the scale of cos and sin.

    Raises `ConfigError` for a type other than default, linear, llama3, yarn. Sources: Su et
    al. 2021 (RoPE), Peng et al. 2023 (YaRN), Llama 3.1's release (llama3).
    """
    base = _default_frequencies(rope.theta, head_dim)
    if rope.type == "default":
        return base, 1.0
    if rope.type == "linear":
        return base / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3_frequencies(rope, base), 1.0
    if rope.type == "yarn":
        return _yarn_frequencies(rope, head_dim, base), _yarn_scale(rope)
    raise ConfigError(
        f"rope type {rope.type!r}: supported are default, linear, llama3, yarn"
    )


def _default_frequencies(theta: float, head_dim: int) -> Tensor:
    """theta ** (-2i / head_dim) of each pair i, in float32: [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def _llama3_frequencies(rope: RopeConfig, base: Tensor) -> Tensor:
    """Slow pairs divided by the factor, fast ones kept, the ones between blended."""
    wavelength = 2 * math.pi / base
    turns = (rope.original_max_position_embeddings or 0) / wavelength
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / rope.factor + keep * base


def _yarn_pair(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """Number (a real) of the pair that makes `turns` turns in the pretraining context."""
    length = rope.original_max_position_embeddings or 0
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_frequencies(rope: RopeConfig, head_dim: int, base: Tensor) -> Tensor:
    """Blend from kept (fast pairs) to divided (slow pairs) along the pair number."""
    first = _yarn_pair(rope, head_dim, rope.beta_fast)
    last = _yarn_pair(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return base / rope.factor * (1 - keep) + base * keep


def _yarn_scale(rope: RopeConfig) -> float:
    """What cos and sin are multiplied with, from the config or by the paper's rule."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = 0.1 * math.log(rope.factor) if rope.factor > 1 else 0.0
    if rope.mscale and rope.mscale_all_dim:
        return (growth * rope.mscale + 1) / (growth * rope.mscale_all_dim + 1)
    return growth + 1


class Rotation(NamedTuple):
    """cos and signed sin of T tokens, each [T, 1, head_dim], for all heads and layers."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Looks up the rotation of each position; the table is built when first needed."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.max_position = max_position
        self.table = torch.empty(0, 2, head_dim, device="cpu")

    def reserve(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the table cover positions below `length`, in `dtype` on `device`."""
        same = self.table.dtype == dtype and self.table.device == device
        if same and self.table.size(0) >= length:
            return
        self.table = self._build(max(length, 2 * self.table.size(0))).to(device, dtype)

    def _build(self, length: int) -> Tensor:
        """float32 [length, 2, head_dim]: (cos, cos) and (-sin, sin) of every position."""
        frequencies, scale = rope_frequencies(self.rope, self.head_dim)
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T], each >= 0. Returns cos and sin in `dtype`."""
        longest = int(positions.max()) + 1 if positions.is_cpu else self.max_position
        self.reserve(longest, dtype, positions.device)
        rows = self.table.index_select(0, positions)
        return Rotation(rows[:, 0:1], rows[:, 1:2])


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [T, heads, head_dim], pairs (i, i + head_dim / 2); same shape and dtype."""
    swapped = x.roll(x.size(-1) // 2, dims=-1)
    return torch.addcmul(x * rotation.cos, swapped, rotation.sin)


class LayerOps(Protocol):
    """The arithmetic of a layer. All tensors are of the model's dtype, on its device."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]."""
        ...

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of x + residual, x + residual), each like x [..., D]; weight [D]."""
        ...

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """RoPE on x [T, heads, head_dim]."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of each row: [T, 2 * inner] -> [T, inner]."""
        ...


class TorchOps:
    """The plain `LayerOps`: PyTorch's functions, any dtype and device."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `LayerOps.linear`."""
        return F.linear(x, weight, bias)

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `LayerOps.norm`."""
        if residual is None:
            return rms_norm(x, weight, eps), x
        return add_rms_norm(x, residual, weight, eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerOps.rotate`."""
        return apply_rope(x, rotation)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.swiglu`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class Piece(nn.Module):
    """A module that leaves its arithmetic to `ops`."""

    ops: LayerOps = TorchOps()


def use_ops(model: nn.Module, ops: LayerOps) -> None:
    """Let every piece of `model` compute with `ops` from now on."""
    for module in model.modules():
        if isinstance(module, Piece):
            module.ops = ops


class RMSNorm(Piece):
    """RMSNorm with an optional residual addition in front of it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (norm of x + residual, x + residual); all of shape [..., size]."""
        return self.ops.norm(x, residual, self.weight, self.eps)


class Linear(nn.Linear, Piece):
    """PyTorch's linear layer, computed by `ops`."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out]."""
        return self.ops.linear(x, self.weight, self.bias)


class MergedLinear(Piece):
    """Several linear maps of one input, stored as one matrix of shape [sum of sizes, in].

    `parts` maps each checkpoint name (such as "q_proj") to its number of output rows, in
    storage order.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = dict(parts)
        rows = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, sum of sizes]."""
        return self.ops.linear(x, self.weight, self.bias)

    def pieces(self) -> dict[str, Tensor]:
        """Views that a checkpoint's tensors are copied into, such as "q_proj.weight"."""
        views, start = {}, 0
        for part, rows in self.parts.items():
            for kind, parameter in self.named_parameters(recurse=False):
                views[f"{part}.{kind}"] = parameter.detach()[start : start + rows]
            start += rows
        return views


class MLP(Piece):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer, 2020."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias
        )
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        down: Tensor = self.down_proj(self.ops.swiglu(self.gate_up_proj(x)))
        return down
