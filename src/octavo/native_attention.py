"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention import Attend, PagedCache, attend_span, packed_heads, prefill_spans
from octavo.batch import AttentionMetadata
from octavo.native import NativeError, build, function

__all__ = ["SOURCE", "NativeAttention"]


SOURCE = r"""
typedef struct {
  const element *keys, *values;
  const int32_t *table;  /* the request's block ids */
  long length, block_size, token_stride, dim;
} context;
#define MOST_HEADS 8  /* query heads that one walk serves */

/* Both walks know how many heads they serve when they are compiled: sums stay in registers. */
static inline __attribute__((always_inline)) void
score(const context *c, const float *q, float *scores, long width, long heads) {
  for (long b = 0, t = 0; t < c->length; b++) {
    const element *key = c->keys + c->table[b] * c->block_size * c->token_stride;
    for (long end = least(t + c->block_size, c->length); t < end; t++, key += c->token_stride) {
      vec dots[MOST_HEADS] = {0};
      for (long i = 0; i < c->dim; i += LANES)
        for (long g = 0; g < heads; g++) dots[g] += load(key + i) * load_float(q + g * c->dim + i);
      for (long g = 0; g < heads; g++) scores[g * width + t] = sum(dots[g]);
    }
  }
}

static float soften(float *scores, long length) {  /* scores to weights; returns their sum */
  float top = scores[0], total = 0;
  for (long t = 1; t < length; t++) top = scores[t] > top ? scores[t] : top;
  for (long t = 0; t < length; t += LANES)  /* the row has room for a whole last vector */
    *(vec *)(scores + t) = exponential(load_float(scores + t) - top);
  for (long t = 0; t < length; t++) total += scores[t];
  return total;
}

static inline __attribute__((always_inline)) void
mix(const context *c, const float *weights, long width, const float *totals, element *out, long heads) {
  for (long i = 0; i < c->dim; i += LANES) {
    vec sums[MOST_HEADS] = {0};
    for (long b = 0, t = 0; t < c->length; b++) {
      const element *value = c->values + c->table[b] * c->block_size * c->token_stride + i;
      for (long end = least(t + c->block_size, c->length); t < end; t++, value += c->token_stride)
        for (long g = 0; g < heads; g++) sums[g] += weights[g * width + t] * load(value);
    }
    for (long g = 0; g < heads; g++) store(out + g * c->dim + i, sums[g] / totals[g]);
  }
}

static inline __attribute__((always_inline)) void
attend(const context *c, const element *q, element *out, float scale, float *scratch, long width, long heads) {
  float *queries = scratch, *scores = scratch + heads * c->dim, totals[MOST_HEADS];
  for (long i = 0; i < heads * c->dim; i += LANES) *(vec *)(queries + i) = load(q + i) * scale;
  score(c, queries, scores, width, heads);
  for (long g = 0; g < heads; g++) totals[g] = soften(scores + g * width, c->length);
  mix(c, scores, width, totals, out, heads);
}

#define CASE(n) case n: attend(c, q, out, scale, scratch, width, n); break;
static void attend_some(const context *c, const element *q, element *out, float scale,
                        float *scratch, long width, long heads) {
  switch (heads) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

void decode(const element *q, const element *k_cache, const element *v_cache, element *out,
            const int32_t *tables, const int32_t *lengths, long num_seqs, long table_width,
            long block_size, long num_heads, long num_kv_heads, long dim, long q_stride, float scale) {
  long longest = 0, group = num_heads / num_kv_heads;
  for (long s = 0; s < num_seqs; s++) longest = lengths[s] > longest ? lengths[s] : longest;
  long width = (longest + LANES - 1) / LANES * LANES;
#pragma omp parallel if (num_seqs * longest > 64)
  {
    float *scratch = malloc(MOST_HEADS * (dim + width) * sizeof(float));
#pragma omp for collapse(2) schedule(dynamic)
    for (long s = 0; s < num_seqs; s++)
      for (long h = 0; h < num_kv_heads; h++) {
        context c = {k_cache + h * dim, v_cache + h * dim, tables + s * table_width,
                     lengths[s], block_size, num_kv_heads * dim, dim};
        for (long g = 0; g < group; g += MOST_HEADS) {
          long head = h * group + g;
          attend_some(&c, q + s * q_stride + head * dim, out + (s * num_heads + head) * dim, scale,
                      scratch, width, least(group - g, MOST_HEADS));
        }
      }
    free(scratch);
  }
}

void store_kv(const element *k, const element *v, element *k_cache, element *v_cache,
              const int64_t *slots, long num_tokens, long size, long k_stride, long v_stride) {
  for (long t = 0; t < num_tokens; t++) {
    memcpy(k_cache + slots[t] * size, k + t * k_stride, size * sizeof(element));
    memcpy(v_cache + slots[t] * size, v + t * v_stride, size * sizeof(element));
  }
}
"""


class NativeAttention:
    """An `AttentionBackend` for CPUs: decodes read the pages in place, in C.

    float32 and bfloat16, head sizes that are multiples of 16, any block size. Raises
    `NativeError` where the C code can't be compiled. Computes in float32.
    """

    capturable = False

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        if head_dim % 16:
            raise NativeError(f"head_dim={head_dim} isn't a multiple of 16")
        library = build(SOURCE, dtype)
        self.dtype = dtype
        self.decode = function(library, "decode", "ppppppnnnnnnnf")
        self.store = function(library, "store_kv", "pppppnnnn")

    def bind(self, cache: PagedCache, metadata: AttentionMetadata) -> Attend:
        """See `AttentionBackend.bind`."""
        return _NativeStep(self, cache, metadata)


class _NativeStep:
    """One step of `NativeAttention`."""

    def __init__(
        self, kernels: NativeAttention, cache: PagedCache, metadata: AttentionMetadata
    ) -> None:
        self.kernels, self.cache = kernels, cache
        self.num_decodes = metadata.num_decodes
        self.slots = metadata.slot_mapping
        self.tables = metadata.block_table
        self.lengths = torch.tensor(metadata.seqlens_k, dtype=torch.int32)
        block_size = cache.layer(0)[0].shape[1]
        self.prefills = list(prefill_spans(metadata, block_size))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.cache.layer(layer)
        if q.dtype is not self.kernels.dtype or k_cache.dtype is not q.dtype:
            raise NativeError(f"compiled for {self.kernels.dtype}, called with {q.dtype}")
        q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
        self._store(k, v, k_cache, v_cache)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.num_decodes:
            self._decode(q, k_cache, v_cache, out)
        for part in self.prefills:
            keys, values = part.context(k, v, k_cache, v_cache)
            queries, keys, values = (x.float() for x in (q[part.tokens], keys, values))
            out[part.tokens] = attend_span(queries, keys, values, part.mask).to(out.dtype)
        return out

    def _store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        tensors = (k, v, k_cache, v_cache, self.slots)
        size = k.size(1) * k.size(2)
        self.kernels.store(
            *(x.data_ptr() for x in tensors), len(k), size, k.stride(0), v.stride(0)
        )

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        tensors = (q, k_cache, v_cache, out, self.tables, self.lengths)
        sizes = (self.num_decodes, self.tables.size(1), block_size, q.size(1), num_kv_heads)
        scale = head_dim**-0.5
        self.kernels.decode(
            *(x.data_ptr() for x in tensors), *sizes, head_dim, q.stride(0), scale
        )
