"""Packed and dense attention: what is proved, and what is refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile import BoundProgram, CompileOptions, trace_forward

from ..checks import WIDTH, Forward, assert_proved, assert_refused

PROVED: dict[str, Forward] = {
    "attention with a bound of its own": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y[:, None], y[:, None], y[:, None], i["cu"], 64, 1.0
    ),
    "a second attention": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y.view(-1, 1, WIDTH), y.view(-1, 1, WIDTH), y.view(-1, 1, WIDTH), i["cu"], y.shape[0], 1.0
    ),
}

REFUSED: dict[str, tuple[Forward, str]] = {
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


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])


def test_segments_over_other_rows_than_the_tokens_are_not_probed() -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        y = inputs["x"].view(-1, 1, 32)
        return torch.ops.fxsplit.varlen_attention(y, y, y, inputs["cu"], y.shape[0], 1.0)

    inputs = {"x": torch.randn(24, WIDTH), "cu": torch.tensor([0, 2, 6], dtype=torch.int32)}
    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    report = trace_forward(forward, inputs, {"x": [0], "cu": [0]}, options).program.padding
    assert "not the token count" in str(report)
    assert not report.may_probe


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
