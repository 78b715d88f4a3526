"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers import Rotation, TorchOps
from octavo.native import build, function

__all__ = ["PRODUCT", "BETWEEN", "multiplies_bfloat16", "NativeOps"]


PRODUCT = r"""
#ifdef __AVX512F__
#define ROWS 4      /* of w: 4 x 6 sums, 4 + 1 operands, of 32 registers */
#define COLUMNS 6   /* rows of x */
#else
#define ROWS 2
#define COLUMNS 4
#endif
#define SPAN 48     /* rows of x that share one reading of w */

static inline __attribute__((always_inline)) void
tile(const float *w, const float *x, long k, long columns, float sums[COLUMNS][ROWS]) {
  vec acc[COLUMNS][ROWS] = {0};
  for (long i = 0; i < k; i += LANES) {
    vec rows[ROWS];
    for (long r = 0; r < ROWS; r++) rows[r] = load_float(w + r * k + i);
    for (long c = 0; c < columns; c++) {
      vec column = load_float(x + c * k + i);
      for (long r = 0; r < ROWS; r++) acc[c][r] += rows[r] * column;
    }
  }
  for (long c = 0; c < columns; c++)
    for (long r = 0; r < ROWS; r++) sums[c][r] = sum(acc[c][r]);
}

static void tile_of(const float *w, const float *x, long k, long columns, float sums[COLUMNS][ROWS]) {
  switch (columns) {  /* a constant number of columns keeps the sums in registers */
    case 1: tile(w, x, k, 1, sums); break;
    case 2: tile(w, x, k, 2, sums); break;
    case 3: tile(w, x, k, 3, sums); break;
#if COLUMNS == 6
    case 4: tile(w, x, k, 4, sums); break;
    case 5: tile(w, x, k, 5, sums); break;
#endif
    default: tile(w, x, k, COLUMNS, sums);
  }
}

static inline void widen(const element *from, float *to, long count) {
  for (long i = 0; i < count; i += LANES) {
    __builtin_prefetch((const char *)(from + i) + 4096);
    *(vec *)(to + i) = load(from + i);
  }
}

/* y [m, n] = x [m, k] times w [n, k] transposed, plus bias [n] unless it is null */
void linear(const element *x, const element *w, const element *bias, element *y, long m, long n, long k) {
  long span = least(m, SPAN);
#pragma omp parallel
  {
    float *xs = aligned_alloc(64, ((span + ROWS) * k * sizeof(float) + 63) / 64 * 64), *ws = xs + span * k;
    for (long first = 0; first < m; first += span) {
      long count = least(m - first, span);
      widen(x + first * k, xs, count * k);
#pragma omp for schedule(static) nowait
      for (long r = 0; r < n; r += ROWS) {
        long rows = least(n - r, ROWS);
        widen(w + r * k, ws, rows * k);
        for (long c = 0; c < count; c += COLUMNS) {
          float sums[COLUMNS][ROWS];
          long columns = least(count - c, COLUMNS);
          tile_of(ws, xs + c * k, k, columns, sums);
          for (long i = 0; i < columns; i++)
            for (long j = 0; j < rows; j++)
              y[(first + c + i) * n + r + j] =
                  narrow(sums[i][j] + (bias ? widened(bias[r + j]) : 0.0f));
        }
      }
    }
    free(xs);
  }
}
"""


BETWEEN = r"""
/* total = x + residual (total is x where residual is null); out = its norm times weight */
void norm(const element *x, const element *residual, const element *weight, element *total,
          element *out, long rows, long size, float eps) {
#pragma omp parallel for if (rows * size > 32768)
  for (long r = 0; r < rows; r++) {
    const element *summed = x + r * size;
    vec squares = {0};
    for (long i = 0; i < size; i += LANES) {
      vec v = load(summed + i);
      if (residual) {
        v = rounded(v + load(residual + r * size + i));
        store(total + r * size + i, v);
      }
      squares += v * v;
    }
    if (residual) summed = total + r * size;
    float scale = 1.0f / sqrtf(sum(squares) / size + eps);
    for (long i = 0; i < size; i += LANES)
      store(out + r * size + i, rounded(load(summed + i) * scale) * load(weight + i));
  }
}

/* pairs (i, i + dim / 2) of every head turned by the token's angles */
void rotate(const element *x, const element *cosines, const element *sines, element *out,
            long tokens, long heads, long dim, long x_stride, long angle_stride) {
  long half = dim / 2;
#pragma omp parallel for if (tokens * heads * dim > 32768)
  for (long t = 0; t < tokens; t++) {
    const element *c = cosines + t * angle_stride, *s = sines + t * angle_stride;
    for (long h = 0; h < heads; h++) {
      const element *in = x + t * x_stride + h * dim;
      element *to = out + (t * heads + h) * dim;
      for (long i = 0; i < half; i += LANES) {
        vec a = load(in + i), b = load(in + half + i);
        store(to + i, rounded(a * load(c + i)) + b * load(s + i));
        store(to + half + i, rounded(b * load(c + half + i)) + a * load(s + half + i));
      }
    }
  }
}

/* silu of the first half of each row, times the second half */
void swiglu(const element *x, element *out, long rows, long size) {
#pragma omp parallel for if (rows * size > 16384)
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < size; i += LANES) {
      vec gate = load(x + 2 * r * size + i), up = load(x + (2 * r + 1) * size + i);
      store(out + r * size + i, rounded(gate / (exponential(-gate) + 1.0f)) * up);
    }
}
"""


def multiplies_bfloat16() -> bool:
    """Does this CPU have instructions for bfloat16 products (AMX or AVX-512 BF16)?"""
    tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, test, lambda: False)() for test in tests)


def _most_rows(dtype: torch.dtype) -> int:
    """Rows up to which our product is the faster one."""
    if dtype is torch.float32:
        return 48
    return 4 if multiplies_bfloat16() else 2**62


class NativeOps:
    """`LayerOps` in C for CPUs, in float32 or bfloat16; sums are float32.

    Raises `NativeError` where the C code can't be compiled.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        library = build(PRODUCT + BETWEEN, dtype)
        self.dtype, self.most_rows, self.plain = dtype, _most_rows(dtype), TorchOps()
        self._linear = function(library, "linear", "ppppnnn")
        self._norm = function(library, "norm", "pppppnnf")
        self._rotate = function(library, "rotate", "ppppnnnnn")
        self._swiglu = function(library, "swiglu", "ppnn")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `LayerOps.linear`."""
        n, k = weight.shape
        if x.size(0) > self.most_rows or not self._takes(x, k):
            return self.plain.linear(x, weight, bias)
        x, out = x.contiguous(), x.new_empty(x.size(0), n)
        added = 0 if bias is None else bias.data_ptr()
        self._linear(x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), len(x), n, k)
        return out

    def _takes(self, x: Tensor, width: int) -> bool:
        return x.dtype is self.dtype and width % 16 == 0

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `LayerOps.norm`."""
        if not self._takes(x, size := x.size(-1)):
            return self.plain.norm(x, residual, weight, eps)
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        total, added = x, 0
        if residual is not None:
            total, added = torch.empty_like(x), residual.data_ptr()
        tensors = x.data_ptr(), added, weight.data_ptr(), total.data_ptr(), out.data_ptr()
        self._norm(*tensors, x.numel() // size, size, eps)
        return out, total

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerOps.rotate`."""
        tokens, heads, dim = x.shape
        if dim % 32 or x.stride(1) != dim or not self._takes(x, dim):
            return self.plain.rotate(x, rotation)
        out, (cos, sin) = torch.empty(x.shape, dtype=x.dtype), rotation
        tensors = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        self._rotate(*tensors, tokens, heads, dim, x.stride(0), cos.stride(0))
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps.swiglu`."""
        if not self._takes(gate_up, size := gate_up.size(-1) // 2):
            return self.plain.swiglu(gate_up)
        out = gate_up.new_empty(gate_up.size(0), size)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), gate_up.size(0), size)
        return out
