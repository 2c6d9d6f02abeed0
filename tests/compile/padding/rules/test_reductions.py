"""Reductions, normalizations and scans: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from ..checks import BIAS, WIDTH, Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "layer norm over features": lambda y, i: F.layer_norm(y, (WIDTH,), BIAS, BIAS),
    "rms norm over features": lambda y, i: F.rms_norm(y, (WIDTH,), BIAS),
    "softmax over features": lambda y, i: y.softmax(-1),
    "log softmax over features": lambda y, i: y.log_softmax(1),
    "cumsum over features": lambda y, i: y.cumsum(1),
    "cumsum over tokens": lambda y, i: y.cumsum(0),
    "cumulated exponentials of tokens": lambda y, i: y.logcumsumexp(0),
    "mean over features": lambda y, i: y - y.mean(1, keepdim=True),
    "sum that drops a dimension": lambda y, i: y.view(-1, 2, 4).sum(1),
    "variance over features": lambda y, i: torch.var_mean(y, 1)[0],
    "vector norm over features": lambda y, i: F.normalize(y, dim=-1),
    "vector norm of order 1 over features": lambda y, i: torch.linalg.vector_norm(y, 1, dim=1),
    "argmax over features": lambda y, i: y.argmax(1),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "layer norm over tokens": (
        lambda y, i: F.layer_norm(y.t().softmax(0).view(1, -1), (y.shape[0] * 8,)),
        "computes with the token count",
    ),
    "softmax over tokens": (lambda y, i: y.softmax(0), "along the token dimension"),
    "softmax over tokens, transposed": (lambda y, i: y.t().softmax(-1), "along the token dimension"),
    "mean over tokens": (lambda y, i: y - y.mean(0), "reduces over tokens"),
    "sum of everything": (lambda y, i: y / y.sum(), "reduces over tokens"),
    "maximum over tokens": (lambda y, i: y.amax(0, keepdim=True) + y, "reduces over tokens"),
    "variance over tokens": (lambda y, i: torch.var_mean(y, 0)[0] + y, "reduces over tokens"),
    "vector norm of order 1 over tokens": (
        lambda y, i: y / torch.linalg.vector_norm(y, 1, dim=0),
        "reduces over tokens",
    ),
    "normalize over tokens": (lambda y, i: F.normalize(y, dim=0), "reduces over tokens"),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
