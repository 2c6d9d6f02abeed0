"""Lookups by index, and attention: what is proved, and what is refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile import BoundProgram, CompileOptions, trace_forward
from fxsplit_encoder.compile.permute import permute_rows

from ..checks import WIDTH, Forward, assert_proved, assert_refused, trace_each

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
    "attention with a bound of its own": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y[:, None], y[:, None], y[:, None], i["cu"], 64, 1.0
    ),
    "a second attention": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y.view(-1, 1, WIDTH), y.view(-1, 1, WIDTH), y.view(-1, 1, WIDTH), i["cu"], y.shape[0], 1.0
    ),
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
    "attention with computed segments": (
        lambda y, i: torch.ops.fxsplit.varlen_attention(
            y[:, None], y[:, None], y[:, None], (i["cu"] * 1).int(), y.shape[0], 1.0
        ),
        "cumulative lengths",
    ),
    "attention with a computed scale": (
        lambda y, i: torch.ops.fxsplit.varlen_attention(
            y[:, None], y[:, None], y[:, None], i["cu"], y.shape[0], 1.0 / y.shape[0]
        ),
        "may hold for few token counts",
    ),
    "attention over merged rows": (
        lambda y, i: torch.ops.fxsplit.varlen_attention(
            y.view(-1, 1, 32), y.view(-1, 1, 32), y.view(-1, 1, 32), i["cu"] // 4, y.shape[0] // 4, 1.0
        ),
        "cumulative lengths",
    ),
}

# Their traces ask for token counts that the others do not need.
ALONE = (
    "attention with a computed scale",
    "attention over merged rows",
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


def test_segments_over_other_rows_than_the_tokens_are_refused() -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        y = inputs["x"].view(-1, 1, 32)
        return torch.ops.fxsplit.varlen_attention(y, y, y, inputs["cu"], y.shape[0], 1.0)

    inputs = {"x": torch.randn(24, WIDTH), "cu": torch.tensor([0, 2, 6], dtype=torch.int32)}
    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    report = trace_forward(forward, inputs, {"x": [0], "cu": [0]}, options).program.padding
    assert "not the token count" in str(report)


def _dense(shape: tuple[int, ...], mask: Callable[[Tensor], Tensor] | None = None) -> BoundProgram:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        q = inputs["x"]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=None if mask is None else mask(q))

    options = CompileOptions(("aten::scaled_dot_product_attention",), "eager")
    return trace_forward(forward, {"x": torch.randn(shape)}, {"x": [0]}, options)


def test_dense_attention_with_images_as_batch_is_proved() -> None:
    assert _dense((3, 2, 5, 4)).program.padding.proved
    assert _dense((3, 2, 5, 4), lambda q: torch.ones(5, 5, dtype=torch.bool)).program.padding.proved
    assert _dense((3, 2, 5, 4), lambda q: q[:, :, :, :1] > 9).program.padding.proved


def test_dense_attention_whose_mask_mixes_images_is_refused() -> None:
    # Query, key and value are one node here: the mask is the second input node, not the fourth.
    report = _dense((3, 2, 5, 4), lambda q: q.softmax(0)[..., :1]).program.padding
    assert not report.proved
