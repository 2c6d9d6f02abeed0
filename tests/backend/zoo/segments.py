"""Cumulative lengths read by more than attention, and attention of other kinds."""

from __future__ import annotations

import torch
from torch import Tensor

from .entries import of
from .placing import attend_packed

varlen_attention = torch.ops.fxsplit.varlen_attention
_OWN, _PACKED = {"layout": "own"}, {"layout": "packed"}


def _segment_of(x: Tensor, cu: Tensor) -> Tensor:
    return torch.searchsorted(cu[1:].contiguous(), torch.arange(x.shape[0], dtype=cu.dtype), right=True)


def _mean_of_segments(x: Tensor, cu: Tensor) -> Tensor:
    segment = _segment_of(x, cu)
    sums = x.new_zeros(cu.shape[0] - 1, 8).index_add(0, segment, x)
    return sums / cu.diff().clamp(min=1)[:, None].to(x.dtype)


def _place_in_segment(x: Tensor, cu: Tensor) -> Tensor:
    places = torch.arange(x.shape[0]) - cu[_segment_of(x, cu)]
    return x + places[:, None].to(x.dtype) / 10


def _attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float = 0.5) -> Tensor:
    q, k, v = (t.reshape(t.shape[0], 2, 4) for t in (q, k, v))
    return varlen_attention(q, k, v, cu, q.shape[0], scale).view(-1, 8)


def _one_segment(x: Tensor) -> Tensor:
    return attend_packed(x, torch.tensor([0, x.shape[0]], dtype=torch.int32))


def _segments_from_lengths(x: Tensor, cu: Tensor) -> Tensor:
    lengths = cu.diff()
    return attend_packed(x, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32))


def _of_windows(x: Tensor) -> Tensor:
    """Segments of 4 tokens, as the count makes them."""
    return attend_packed(x, torch.arange(0, x.shape[0] + 1, 4, dtype=torch.int32))


def _two_attentions(x: Tensor, cu: Tensor) -> Tensor:
    whole = torch.stack([cu[0], cu[-1]])
    return attend_packed(attend_packed(x, cu) + x, whole)


def _quarters(x: Tensor, cu: Tensor) -> Tensor:
    """Attention among the tokens, and among their groups of 4."""
    y = attend_packed(x, cu).view(-1, 4, 8).mean(1)
    return attend_packed(y, torch.tensor([0, y.shape[0]], dtype=torch.int32))


def _cu_changed(x: Tensor, cu: Tensor) -> Tensor:
    y = attend_packed(x, cu)
    cu.add_(1)
    return y


SEGMENTS = {
    "lengths": of(lambda x, cu: (x * 2, cu.diff()), **_PACKED),
    "root of the number of segments": of(lambda x, cu: x * (cu.shape[0] - 1) ** 0.5, **_PACKED),
    "longest segment": of(lambda x, cu: x * cu.diff().max(), **_PACKED),
    "means of segments, given back": of(
        lambda x, cu: x - _mean_of_segments(x, cu)[_segment_of(x, cu)], **_PACKED
    ),
    "place in the segment": of(_place_in_segment, **_PACKED),
    "first of every segment": of(
        lambda x, cu: x[cu[:-1].long().clamp(max=x.shape[0] - 1)], least=1, **_PACKED
    ),
    "ends by the count": of(lambda x, cu: (x, cu / x.shape[0]), least=1, **_PACKED),
    "ends returned in part": of(lambda x, cu: (x + 1, cu[1:]), **_PACKED),
    "ends changed": of(_cu_changed, **_OWN),
    "one segment of all": of(_one_segment, **_OWN),
    "segments from lengths": of(_segments_from_lengths, **_OWN),
    "segments of 4 tokens": of(_of_windows, step=4, **_OWN),
    "segments and the whole": of(_two_attentions, **_OWN),
    "segments of quarters": of(_quarters, step=4, **_OWN),
    "keys of the next token": of(lambda x, cu: _attend(x, x.roll(1, 0), x, cu), **_OWN),
    "logits scaled by the count": of(lambda x, cu: _attend(x, x, x, cu, x.shape[0] ** -0.5), least=1, **_OWN),
}
