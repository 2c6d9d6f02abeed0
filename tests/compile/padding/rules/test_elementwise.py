"""Operations that work entry by entry, and copies: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fxsplit_encoder.compile import BoundProgram

from ..checks import BIAS, WEIGHT, WIDTH, Forward, assert_proved, assert_refused, trace_each

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

# Their traces ask for token counts that the others do not need.
ALONE = (
    "merged rows beside others",
    "shared rows repeated in turn",
)


@pytest.fixture(scope="module")
def programs() -> dict[str, BoundProgram]:
    return trace_each({**PROVED, **{name: forward for name, (forward, _) in REFUSED.items()}}, ALONE)


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str, programs: dict[str, BoundProgram]) -> None:
    assert_proved(programs[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str, programs: dict[str, BoundProgram]) -> None:
    assert_refused(programs[name], REFUSED[name][1])
