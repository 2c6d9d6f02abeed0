"""Views and reorderings of dimensions: what is proved, and what is refused."""

import pytest
import torch.nn.functional as F

from ..checks import WEIGHT, WIDTH, Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "split heads": lambda y, i: y.view(-1, 2, 4).transpose(1, 2),
    "heads before tokens and back": lambda y, i: (
        y.view(-1, 2, 4).transpose(0, 1).transpose(0, 1).reshape(-1, WIDTH)
    ),
    "tokens last": lambda y, i: y.t().softmax(0),
    "leading dimension of one": lambda y, i: y.unsqueeze(0).softmax(-1).squeeze(0),
    "permute": lambda y, i: y.view(-1, 2, 4).permute(2, 0, 1) * 2,
    "spatial merge": lambda y, i: F.layer_norm(y.view(-1, 4 * WIDTH), (4 * WIDTH,)),
    "spatial merge and back": lambda y, i: y.view(-1, 4 * WIDTH).relu().view(-1, WIDTH) + y,
    "features rolled": lambda y, i: y.view(-1, 2, 4).roll((1, -1), (1, 2)),
    "tokens joined with heads and taken apart": lambda y, i: (
        F.layer_norm(F.gelu(y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4)) @ WEIGHT[:4, :4], (4,))
        .view(2, -1, 4)
        .transpose(0, 1)
    ),
    "tokens joined twice": lambda y, i: (
        y.view(-1, 2, 2, 2).permute(1, 2, 0, 3).reshape(-1, 2).tanh().view(2, -1, 2).view(2, 2, -1, 2)
    ),
    "features reversed": lambda y, i: y.view(-1, 2, 4).flip(-1, 1),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "heads joined with tokens": (
        lambda y, i: y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4),
        "leave the graph joined with an outer dimension",
    ),
    "heads joined with tokens, beside others": (
        lambda y, i: y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4) * y.view(-1, 4),
        "token dimensions differ",
    ),
    "a scan over tokens joined with heads": (
        lambda y, i: y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4).cumsum(0).view(2, -1, 4),
        "joined with an outer dimension",
    ),
    "tokens made inner": (lambda y, i: y.view(4, -1, WIDTH), "joins tokens"),
    "roll": (lambda y, i: y.roll(1, 0), "moves the tokens"),
    "roll of everything": (lambda y, i: y.roll(1), "moves the tokens"),
    "flip": (lambda y, i: y.flip(0), "reverses the tokens"),
    "flip of tokens and features": (lambda y, i: y.flip(1, -2), "reverses the tokens"),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
