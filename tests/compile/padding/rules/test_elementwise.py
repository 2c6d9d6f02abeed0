"""Operations that work entry by entry: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from ..checks import BIAS, WIDTH, Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "nothing": lambda y, i: y,
    "pointwise of rows": lambda y, i: F.gelu(y) * y.sigmoid() + i["x"],
    "pointwise with weights": lambda y, i: y * BIAS + 1,
    "where with a mask of rows": lambda y, i: torch.where(i["index"][:, None] > 1, y, 0.0),
    "masked fill of rows": lambda y, i: y.masked_fill(i["x"] > 0, 1.0),
    "conversion": lambda y, i: y.to(torch.float64).float(),
    "complex numbers": lambda y, i: torch.view_as_real(torch.view_as_complex(y.view(-1, 4, 2)) * 1j),
    "triangle of features": lambda y, i: y.view(-1, 2, 4).triu(1) * 2,
    "integers divided": lambda y, i: y * (i["index"] // 2)[:, None],
    "merged rows beside others": lambda y, i: y.view(-1, 4 * WIDTH).relu().view(-1, WIDTH) + i["x"],
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "every row with every row": (lambda y, i: (y[:, :1] - y[:, 0]).sum(1), "differ"),
    "triangle of rows": (lambda y, i: y.tril(), "their place among the tokens"),
    "integers divided by those of the tokens": (
        lambda y, i: y * (7 // (i["index"] + 1))[:, None],
        "may be 0 in pad rows",
    ),
    "every row with every row by positions": (
        lambda y, i: (y[:, :1] - torch.arange(y.shape[0])).sum(1),
        "differ",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
