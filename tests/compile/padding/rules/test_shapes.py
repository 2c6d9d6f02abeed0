"""Views, parts of tensors, and tensors made from sizes: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fxsplit_encoder.compile import BoundProgram

from ..checks import BIAS, WEIGHT, WIDTH, Forward, assert_proved, assert_refused, trace_each

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
    "features cut and joined": lambda y, i: torch.cat((-y[:, 4:], y[:, :4]), dim=-1),
    "chunks of features": lambda y, i: torch.stack(y.chunk(2, dim=1), dim=1).unbind(1)[0],
    "one feature": lambda y, i: y[:, 3],
    "stack before the tokens": lambda y, i: torch.stack((y, i["x"])).sum(0),
    "features padded": lambda y, i: F.pad(y, (1, 2)),
    "zeros and ones of rows": lambda y, i: torch.cat(
        (y, torch.zeros(y.shape[0], 2), torch.ones_like(y)), dim=1
    ),
    "positions": lambda y, i: y + torch.arange(y.shape[0])[:, None],
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
    "appending rows": (lambda y, i: torch.cat((y, y)), "appends along the token dimension"),
    "prepending a row": (lambda y, i: torch.cat((BIAS[None], y)), "appends along the token dimension"),
    "cutting the first row off": (lambda y, i: y[1:], "cuts the token dimension"),
    "cutting the last row off": (lambda y, i: y[:-1], "cuts the token dimension"),
    "every other row": (lambda y, i: y[::2], "cuts the token dimension"),
    "the last row": (lambda y, i: y + y[-1], "takes one token"),
    "the first row": (lambda y, i: y + y[0], "takes one token"),
    "halves of the rows": (lambda y, i: torch.cat(y.split(4)), "cuts the token dimension"),
    "tokens padded": (lambda y, i: F.pad(y, (0, 0, 1, 0)), "pads the token dimension"),
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

# Their traces ask for token counts that the others do not need.
ALONE = (
    "spatial merge",
    "spatial merge and back",
    "tokens made inner",
    "halves of the rows",
    "steps of the token count",
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
