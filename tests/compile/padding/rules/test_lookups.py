"""Lookups by index: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fxsplit_encoder.compile.permute import permute_rows

from ...packed_forwards import trace_packed
from ..checks import WIDTH, Forward, assert_proved, assert_refused

FEATURES = torch.tensor([3, 0, 2])
TABLE = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)

PROVED: dict[str, Forward] = {
    "embedding lookup": lambda y, i: y + F.embedding(i["index"], TABLE),
    "table lookup": lambda y, i: y + TABLE[i["index"]],
    "table lookup by two indices": lambda y, i: y + TABLE[i["index"], i["index"]][:, None],
    "index_select of a table": lambda y, i: y + TABLE.index_select(0, i["index"]),
    "features chosen": lambda y, i: y[:, FEATURES] * 2,
    "features chosen on two dimensions": lambda y, i: y.view(-1, 2, 4)[:, FEATURES % 2, FEATURES],
    "features chosen before the tokens": lambda y, i: (
        y.view(-1, 2, 4).permute(1, 2, 0)[FEATURES % 2, FEATURES].t()
    ),
    "features chosen on both sides": lambda y, i: (
        y.view(-1, 2, 4).transpose(0, 1)[FEATURES % 2, :, FEATURES].t()
    ),
    "features selected": lambda y, i: y.index_select(1, FEATURES),
    "rows permuted": lambda y, i: permute_rows(y, i["index"]) + i["x"],
    "rows permuted twice": lambda y, i: permute_rows(permute_rows(y, i["index"]) * 2, i["index"]),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "rows gathered by index": (lambda y, i: y[i["index"]], "gathers tokens"),
    "rows selected by index": (lambda y, i: y.index_select(0, i["index"]), "gathers tokens"),
    "rows chosen": (lambda y, i: y[FEATURES].sum(0) + y, "gathers tokens"),
    "features chosen by each row": (
        lambda y, i: y.view(-1, 2, 4).permute(1, 0, 2)[(y[:, 0] > 0).long()].sum(0)[:, :4] + y[:, :4],
        "by indices of its own",
    ),
    "rows permuted by a computed order": (lambda y, i: permute_rows(y, i["index"] * 1), "as it is"),
    "rows permuted by their positions": (lambda y, i: permute_rows(y, torch.arange(y.shape[0])), "as it is"),
    "features gathered by index": (
        lambda y, i: y[:, :5] + TABLE[:, i["index"]].t()[:, :5],
        "not one lookup a row",
    ),
    "lookup by computed index": (lambda y, i: y + TABLE[i["index"] - 1], "out of range"),
    "embedding of computed index": (lambda y, i: y + F.embedding(i["index"] * 2 % 5, TABLE), "out of range"),
    "lookup by position": (lambda y, i: y + TABLE.repeat(9, 1)[torch.arange(y.shape[0])], "out of range"),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])


@pytest.mark.parametrize(
    "name",
    [
        "lookup by computed index",
        "embedding of computed index",
        "lookup by position",
        "rows permuted by a computed order",
    ],
)
def test_a_lookup_that_may_leave_its_table_is_not_probed(name: str) -> None:
    forward, _ = REFUSED[name]
    assert not trace_packed(forward).program.padding.may_probe
