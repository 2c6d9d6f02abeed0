"""`fxsplit::dense_attention`: a batch through the kernels of packed attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.attention import KernelChooser, dense_attention, op
from fxsplit_encoder.kernels import choosing


@pytest.fixture(autouse=True)
def _fresh_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(op, "_equal_lengths", op._EqualLengths())
    yield


def batch(size: int, tokens: int, *, fused: bool = True) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn(size, tokens, 3, 2, 8)
    parts = [part.transpose(1, 2) for part in qkv.unbind(2)]
    return tuple(parts if fused else [part.contiguous() for part in parts])


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_every_entry_attends_alone(size: int, tokens: int, fused: bool) -> None:
    values = batch(size, tokens, fused=fused)
    result = dense_attention(*values, 0.4)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(*values, scale=0.4))
    assert result.transpose(1, 2).is_contiguous()


def test_what_is_traced_is_what_is_computed() -> None:
    torch.library.opcheck(dense_attention, (*batch(3, 4), 0.5))


def test_a_kernel_may_be_pinned() -> None:
    values = batch(3, 4)
    with choosing(KernelChooser("masked")):
        torch.testing.assert_close(
            dense_attention(*values, 0.5), F.scaled_dot_product_attention(*values, scale=0.5)
        )


def test_lengths_that_a_graph_may_hold_stay_where_they_are() -> None:
    lengths, device = op._equal_lengths, torch.device("cpu")
    first = lengths.of(3, 4, device)
    assert first.tolist() == [0, 4, 8, 12]
    assert lengths.of(2, 4, device).data_ptr() == first.data_ptr()
    larger = lengths.of(9, 4, device)
    assert larger.tolist() == list(range(0, 40, 4))
    assert lengths.of(3, 4, device).data_ptr() == larger.data_ptr() != first.data_ptr()
    assert first.tolist() == [0, 4, 8, 12]
    assert lengths.of(3, 5, device).tolist() == [0, 5, 10, 15]
    made = lengths._made[4, device]
    assert sum(each.shape[0] for each in made) <= 2 * made[-1].shape[0]
