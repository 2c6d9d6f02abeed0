"""Operations that repeat what they are given: what is proved, and what is refused."""

import pytest
import torch

from ..checks import BIAS, WEIGHT, WIDTH, Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "a class token": lambda y, i: torch.cat(
        (BIAS.expand(y.shape[0], 1, WIDTH), y.view(-1, 1, WIDTH) * 2), dim=1
    ),
    "a shared row repeated": lambda y, i: y + BIAS.repeat(y.shape[0], 1),
    "shared rows repeated in turn": lambda y, i: y + WEIGHT[:4].repeat(y.shape[0] // 4, 1),
    "windows of features": lambda y, i: y.unfold(1, 3, 2).sum(2),
    "features repeated": lambda y, i: y.repeat(1, 3),
    "a new dimension repeated": lambda y, i: y.repeat(2, 1, 1).sum(0),
    "expand of features": lambda y, i: y[:, None, :].expand(-1, 3, -1) * 2,
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "rows repeated": (lambda y, i: y.repeat(2, 1), "repeats the token dimension"),
    "rows repeated by their count": (
        lambda y, i: y.repeat(1, y.shape[0]).sum(1),
        "changes with the padding too",
    ),
    "windows of rows": (lambda y, i: y.unfold(0, 2, 2).sum(2), "along the token dimension"),
    "a square by expansion": (
        lambda y, i: y[:, :1].expand(-1, y.shape[0]).sum(1),
        "changes with the padding",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
