"""Matrix products: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile.passes.fp8_linear import quantise_rows

from ..checks import BIAS, WEIGHT, WIDTH, Forward, assert_proved, assert_refused

FP8_WEIGHT, FP8_SCALES = quantise_rows(WEIGHT)


def linear_fp8(rows: Tensor, bias: Tensor | None = BIAS) -> Tensor:
    quantised, scales = torch.ops.fxsplit.quantise_rows(rows)
    return torch.ops.fxsplit.linear_fp8(quantised, scales, FP8_WEIGHT, FP8_SCALES, bias, torch.float32)


PROVED: dict[str, Forward] = {
    "linear": lambda y, i: F.linear(y, WEIGHT, BIAS),
    "linear of three dimensions": lambda y, i: F.linear(y.view(-1, 1, WIDTH), WEIGHT),
    "linear with its gelu": lambda y, i: torch.ops.fxsplit.addmm_gelu(BIAS, y, WEIGHT),
    "linear in fp8": lambda y, i: linear_fp8(y) + linear_fp8(y, bias=None),
    "rows quantised": lambda y, i: torch.ops.fxsplit.quantise_rows(y.view(-1, 2, 4))[1],
    "bmm with the tokens as batch": lambda y, i: y.view(-1, 2, 4) @ i["x"].view(-1, 4, 2),
    "bmm with shared matrices": lambda y, i: torch.bmm(y.view(-1, 2, 4).transpose(0, 1), torch.ones(2, 4, 4)),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "tokens as the weight before a gelu": (
        lambda y, i: torch.ops.fxsplit.addmm_gelu(y[:, 0], WEIGHT, y.t()),
        "depends on the tokens",
    ),
    "tokens as the weight in fp8": (
        lambda y, i: torch.ops.fxsplit.linear_fp8(
            FP8_WEIGHT, FP8_SCALES, *torch.ops.fxsplit.quantise_rows(y), None, torch.float32
        ),
        "depends on the tokens",
    ),
    "gram matrix": (lambda y, i: y @ y.t(), "depends on the tokens"),
    "covariance": (lambda y, i: y.t() @ y, "depends on the tokens"),
    "shared times rows": (lambda y, i: WEIGHT @ y.t(), "depends on the tokens"),
    "bias of rows": (lambda y, i: torch.addmm(i["x"], y, WEIGHT), "depends on the tokens"),
    "bmm over tokens": (
        lambda y, i: y.view(-1, 2, 4).permute(1, 0, 2) @ y.view(-1, 2, 4).permute(1, 2, 0),
        "along the token dimension",
    ),
    "bmm that contracts tokens": (
        lambda y, i: torch.bmm(y.t()[None], y[None]),
        "along the token dimension",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
