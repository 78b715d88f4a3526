"""Chapter 11, The small precise pieces, and the whole engine.

Generated from chapters/11_engine.md; edit there.
"""

from __future__ import annotations

from octavo.kernels import _jit, tl


@_jit
def _load_logits(logits, ids, vocab):
    """As float32, finite or -inf; -inf too behind the vocabulary (B63) and where it is NaN."""
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), 3.4028234e38)


@_jit
def _key(x, SHIFT: tl.constexpr):
    """int64 that is ordered as the float32 is; SHIFT drops bits that the logits lack."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@_jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 that has this key."""
    bits = ((key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@_jit
def _choose(chosen, largest, pivot):
    """List in `chosen` the segments that reach the pivot, in order; returns their number."""
    wanted = (largest >= pivot).to(tl.int32)
    place = tl.cumsum(wanted, 0) - 1
    tl.debug_barrier()  # nobody reads the last list any more
    tl.store(chosen + place, tl.arange(0, largest.shape[0]), mask=wanted > 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@_jit
def _chunk(row, start, count, CHUNK: tl.constexpr, SEGMENT: tl.constexpr):
    """Ids and logits [CHUNK, SEGMENT] of the `count` chosen segments from `start` on."""
    logits, chosen, largest, vocab, peak, heat = row
    place = start + tl.arange(0, CHUNK)
    segment = tl.load(chosen + place, mask=place < count, other=0)
    first = tl.where(place < count, segment * SEGMENT, vocab)
    ids = first[:, None] + tl.arange(0, SEGMENT)[None, :]
    return ids, _load_logits(logits, ids, vocab)


@_jit
def _amount(pivot, row, OF: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr):
    """How much of a row reaches the pivot: segments, tokens, or the tokens' summed weights."""
    logits, chosen, largest, vocab, peak, heat = row
    if OF == "segments":
        amount = tl.sum(tl.where(largest >= pivot, 1.0, 0.0), 0)
    else:
        count = _choose(chosen, largest, pivot)
        total = tl.zeros([CHUNK, SEGMENT], tl.float32)
        for start in range(0, count, CHUNK):
            _, x = _chunk(row, start, count, CHUNK, SEGMENT)
            weight = tl.exp((x - peak) / heat) if OF == "weights" else 1.0
            total += tl.where(x >= pivot, weight, 0.0)
        amount = tl.sum(tl.sum(total, 1), 0)
    return amount


@_jit
def _search(
    low, high, goal, row, OF: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The highest key from `low` to `high` - 1 at which the amount reaches the goal."""
    while high - low > 1:
        middle = (low + high) >> 1
        enough = _amount(_value(middle, SHIFT), row, OF, CHUNK, SEGMENT) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@_jit
def _least_logit(
    top_k, top_p, total, row,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The least logit that both filters let pass; `total` is the weight of all tokens."""
    logits, chosen, largest, vocab, peak, heat = row
    high = _key(peak, SHIFT) + 1
    if top_k < vocab:
        goal, low = top_k.to(tl.float32), _key(peak - float("inf"), SHIFT)
        low = _search(low, high, goal, row, "segments", CHUNK, SEGMENT, SHIFT)
        low = _search(low, high, goal, row, "tokens", CHUNK, SEGMENT, SHIFT)
        total = _amount(_value(low, SHIFT), row, "weights", CHUNK, SEGMENT)
    else:
        rare = 0.5 * (1 - top_p) * total / vocab  # half of it, to be safe from rounding
        low = _key(peak + heat * tl.log(rare), SHIFT)
    if top_p < 1:
        low = _search(low, high, top_p * total, row, "weights", CHUNK, SEGMENT, SHIFT)
    return _value(low, SHIFT)
