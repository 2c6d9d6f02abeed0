from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.attention import attend, attend_out
from fxsplit_encoder.attention.kernels import _attend_masked, supports_flash

HEADS, HEAD_DIM = 3, 8


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def fused_qkv(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value as strided views of one projection, as towers make them."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(rows, 3, HEADS, HEAD_DIM, generator=generator, dtype=dtype)
    return list(fused.unbind(1))


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Softmax attention in float64, one query row at a time."""
    q, k, v = (x.double() for x in (q, k, v))
    rows = []
    start = 0
    for length in lengths:
        for row in range(start, start + length):
            logits = torch.einsum("hd,khd->hk", q[row], k[start : start + length]) * scale
            weights = torch.exp(logits - logits.amax(1, keepdim=True))
            weights = weights / weights.sum(1, keepdim=True)
            rows.append(torch.einsum("hk,khd->hd", weights, v[start : start + length]))
        start += length
    return torch.stack(rows) if rows else q[:0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([0.1, 0.35, 1.0]))
def test_each_segment_attends_within_itself(lengths: list[int], scale: float) -> None:
    rows = sum(lengths)
    q, k, v = fused_qkv(rows, seed=rows)
    expected = reference(q, k, v, lengths, scale)
    for result in (
        attend(q, k, v, cumulative(lengths), rows, scale),
        _attend_masked(q, k, v, cumulative(lengths), scale),
    ):
        assert result.is_contiguous()
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["by segment", "masked"])
def test_segments_do_not_see_one_another(kernel: str) -> None:
    lengths = [3, 4, 2]
    q, k, v = fused_qkv(9)
    other_k, other_v = k.clone(), v.clone()
    other_k[3:7] += 100
    other_v[3:7] = float("nan")

    def run(k: Tensor, v: Tensor) -> Tensor:
        if kernel == "masked":
            return _attend_masked(q, k, v, cumulative(lengths), 0.5)
        return attend(q, k, v, cumulative(lengths), 9, 0.5)

    before, after = run(k, v), run(other_k, other_v)
    if kernel == "by segment":
        assert torch.equal(before[[0, 1, 2, 7, 8]], after[[0, 1, 2, 7, 8]])
    else:
        # Dense attention multiplies masked values by 0: finite values are ignored, NaN is not.
        after = run(other_k, torch.where(other_v.isnan(), 1e3, other_v))
        torch.testing.assert_close(before[[0, 1, 2, 7, 8]], after[[0, 1, 2, 7, 8]])
    assert not torch.equal(before[3:7], after[3:7])


def test_masked_attention_takes_rows_behind_the_last_segment() -> None:
    q, k, v = fused_qkv(10)
    result = _attend_masked(q, k, v, cumulative([3, 4]), 0.5)
    torch.testing.assert_close(result[:7].double(), reference(q, k, v, [3, 4], 0.5), rtol=1e-5, atol=1e-6)
    assert result.isfinite().all()


def test_lengths_padded_with_empty_segments_change_nothing() -> None:
    q, k, v = fused_qkv(7)
    padded = torch.tensor([0, 3, 7, 7, 7, 7], dtype=torch.int32)
    torch.testing.assert_close(
        attend(q, k, v, padded, 7, 0.5), attend(q, k, v, cumulative([3, 4]), 7, 0.5), rtol=0, atol=0
    )
    torch.testing.assert_close(
        _attend_masked(q, k, v, padded, 0.5), attend(q, k, v, padded, 7, 0.5), rtol=1e-5, atol=1e-6
    )


def test_the_out_variant_writes_the_rows_of_the_query_only() -> None:
    q, k, v = fused_qkv(7)
    out = torch.full((12, HEADS, HEAD_DIM), 5.0)
    assert attend_out(q, k, v, cumulative([3, 4]), 7, 0.5, out) is out
    torch.testing.assert_close(out[:7], attend(q, k, v, cumulative([3, 4]), 7, 0.5), rtol=0, atol=0)
    assert (out[7:] == 5.0).all()


def test_the_out_variant_writes_a_buffer_of_the_exact_size() -> None:
    q, k, v = fused_qkv(7)
    out = torch.full((7, HEADS, HEAD_DIM), 5.0)
    assert attend_out(q, k, v, cumulative([7]), 7, 0.5, out) is out
    torch.testing.assert_close(out.double(), reference(q, k, v, [7], 0.5), rtol=1e-5, atol=1e-6)


def test_the_out_variant_refuses_a_buffer_that_is_too_small() -> None:
    q, k, v = fused_qkv(7)
    with pytest.raises(RuntimeError):
        attend_out(q, k, v, cumulative([7]), 7, 0.5, torch.zeros(6, HEADS, HEAD_DIM))


def test_sixteen_bit_values_stay_in_their_dtype() -> None:
    q, k, v = fused_qkv(6, dtype=torch.bfloat16)
    result = attend(q, k, v, cumulative([2, 4]), 6, 0.5)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), reference(q, k, v, [2, 4], 0.5), rtol=2e-2, atol=2e-2)


def test_flash_is_for_cuda_only() -> None:
    assert not supports_flash(torch.zeros(4, HEADS, HEAD_DIM, dtype=torch.bfloat16))
