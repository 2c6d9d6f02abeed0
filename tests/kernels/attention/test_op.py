import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.kernels.attention import dense_attention, op, varlen_attention

from .fakes import reference

CU = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
ROWS = 9


def qkv(requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, 2, 8, requires_grad=requires_grad) for _ in range(3)]


def by_segment(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    return reference(q, k, v, cu.diff().tolist(), scale).to(q.dtype)


def test_the_op_is_registered_under_its_name() -> None:
    assert torch.ops.fxsplit.varlen_attention.default is varlen_attention
    assert str(varlen_attention._schema) == (
        "fxsplit::varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, "
        "SymInt max_seqlen, float scale) -> Tensor"
    )


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_torch_finds_the_registration_sound(requires_grad: bool, strided: bool) -> None:
    q, k, v = qkv(requires_grad)
    if strided:
        q, k, v = torch.randn(ROWS, 3, 2, 8, requires_grad=requires_grad).unbind(1)
    torch.library.opcheck(varlen_attention, (q, k, v, CU, ROWS, 0.3))
    if not requires_grad and not strided:
        torch.library.opcheck(dense_attention, (*batch(3, 4), 0.5))


def test_gradients_are_those_of_attention_a_segment_at_a_time() -> None:
    ours, theirs = qkv(requires_grad=True), qkv(requires_grad=True)
    weights = torch.randn(ROWS, 2, 8)
    (varlen_attention(*ours, CU, ROWS, 0.3) * weights).sum().backward()
    (by_segment(*theirs, CU, 0.3) * weights).sum().backward()
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.grad is not None and expected.grad is not None
        torch.testing.assert_close(mine.grad, expected.grad)


# --- a batch through the kernels of packed attention


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


def test_lengths_that_a_graph_may_hold_stay_where_they_are() -> None:
    lengths, device = op.EqualLengths(), torch.device("cpu")
    first = lengths.of(3, 4, device)
    assert first.tolist() == [0, 4, 8, 12]
    assert lengths.of(2, 4, device).data_ptr() == first.data_ptr()
    larger = lengths.of(9, 4, device)
    assert larger.tolist() == list(range(0, 40, 4))
    assert lengths.of(3, 4, device).data_ptr() == larger.data_ptr() != first.data_ptr()
    assert first.tolist() == [0, 4, 8, 12]
    assert lengths.of(3, 5, device).tolist() == [0, 5, 10, 15]
    made = lengths.made[4, device]
    assert sum(each.shape[0] for each in made) <= 2 * made[-1].shape[0]
