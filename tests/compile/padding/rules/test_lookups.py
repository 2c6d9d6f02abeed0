"""Lookups by index: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fxsplit_encoder.compile.permute import permute_rows

from ...packed_forwards import trace_packed
from ..checks import WIDTH, Forward, assert_proved, assert_refused

TABLE = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)

PROVED: dict[str, Forward] = {
    "embedding lookup": lambda y, i: y + F.embedding(i["index"], TABLE),
    "table lookup": lambda y, i: y + TABLE[i["index"]],
    "table lookup by two indices": lambda y, i: y + TABLE[i["index"], i["index"]][:, None],
    "index_select of a table": lambda y, i: y + TABLE.index_select(0, i["index"]),
    "rows permuted": lambda y, i: permute_rows(y, i["index"]) + i["x"],
    "rows permuted twice": lambda y, i: permute_rows(permute_rows(y, i["index"]) * 2, i["index"]),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "rows gathered by index": (lambda y, i: y[i["index"]], "depends on the tokens"),
    "rows selected by index": (lambda y, i: y.index_select(0, i["index"]), "depends on the tokens"),
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
