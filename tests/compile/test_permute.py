import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.compile.rewriting import permute_rows


@given(st.permutations(range(7)), st.sampled_from([(), (3,), (2, 3)]))
def test_rows_come_in_the_order_asked_for(order: list[int], trailing: tuple[int, ...]) -> None:
    rows = torch.randn(7, *trailing)
    index = torch.tensor(order)
    result = permute_rows(rows, index)
    assert torch.equal(result, rows[index])
    assert result.data_ptr() != rows.data_ptr()
    assert torch.equal(permute_rows(result, index.argsort()), rows)


def test_an_order_of_other_rows_is_refused() -> None:
    with pytest.raises(RuntimeError, match="permute_rows: 3 rows and a permutation of 2"):
        permute_rows(torch.ones(3, 2), torch.tensor([1, 0]))


def test_the_op_is_what_it_declares() -> None:
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(permute_rows, (rows, torch.tensor([3, 1, 4, 0, 2])))


@pytest.mark.parametrize("order", [[2, 0, 1, 3], [1, 1, 0, 3]])
def test_gradients_go_back_to_their_rows(order: list[int]) -> None:
    rows, index = torch.randn(4, 3, requires_grad=True), torch.tensor(order)
    factor = torch.randn(4, 3)
    (gradient,) = torch.autograd.grad((permute_rows(rows, index) * factor).sum(), rows)
    (expected,) = torch.autograd.grad((rows[index] * factor).sum(), rows)
    torch.testing.assert_close(gradient, expected)
