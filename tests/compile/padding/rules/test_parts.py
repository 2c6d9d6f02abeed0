"""Cutting tensors apart and joining them: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from ..checks import BIAS, Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "features cut and joined": lambda y, i: torch.cat((-y[:, 4:], y[:, :4]), dim=-1),
    "chunks of features": lambda y, i: torch.stack(y.chunk(2, dim=1), dim=1).unbind(1)[0],
    "one feature": lambda y, i: y[:, 3],
    "stack before the tokens": lambda y, i: torch.stack((y, i["x"])).sum(0),
    "features padded": lambda y, i: F.pad(y, (1, 2)),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "appending rows": (lambda y, i: torch.cat((y, y)), "appends along the token dimension"),
    "prepending a row": (lambda y, i: torch.cat((BIAS[None], y)), "appends along the token dimension"),
    "cutting the first row off": (lambda y, i: y[1:], "cuts the token dimension"),
    "cutting the last row off": (lambda y, i: y[:-1], "cuts the token dimension"),
    "every other row": (lambda y, i: y[::2], "cuts the token dimension"),
    "the last row": (lambda y, i: y + y[-1], "takes one token"),
    "the first row": (lambda y, i: y + y[0], "takes one token"),
    "halves of the rows": (lambda y, i: torch.cat(y.split(4)), "cuts the token dimension"),
    "tokens padded": (lambda y, i: F.pad(y, (0, 0, 1, 0)), "pads the token dimension"),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
