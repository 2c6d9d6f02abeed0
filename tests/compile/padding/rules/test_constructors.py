"""Tensors made from sizes alone: what is proved, and what is refused."""

import pytest
import torch

from ..checks import Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "zeros and ones of rows": lambda y, i: torch.cat(
        (y, torch.zeros(y.shape[0], 2), torch.ones_like(y)), dim=1
    ),
    "positions": lambda y, i: y + torch.arange(y.shape[0])[:, None],
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "divided by the token count": (lambda y, i: y * (1.0 / y.shape[0]), "computed value"),
    "constants of the token count": (lambda y, i: y + torch.full((8,), y.shape[0]), "computed value"),
    "steps of the token count": (
        lambda y, i: y + torch.arange(0, y.shape[0] * y.shape[0], y.shape[0])[:, None],
        "follows the token count in no way that is known",
    ),
    "positions from the end": (lambda y, i: y + torch.arange(-y.shape[0], 0)[:, None], "start that is not 0"),
    "positions from 5": (lambda y, i: torch.arange(5, y.shape[0] + 5) + y[:, 0], "start that is not 0"),
    "a square of zeros": (
        lambda y, i: y + torch.zeros(y.shape[0], y.shape[0]).sum(1)[:, None],
        "changes with the padding",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
