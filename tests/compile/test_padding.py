"""The proof of row independence: each rule both ways, then random programs against padded runs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.compile import BoundProgram, CompileOptions, Frame, trace_forward
from fxsplit_encoder.compile.passes.fp8_linear import quantise_rows
from fxsplit_encoder.compile.permute import permute_rows
from fxsplit_encoder.errors import CompileError

WIDTH = 8
Forward = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
Trace = Callable[..., BoundProgram]

torch.manual_seed(0)
WEIGHT = torch.randn(WIDTH, WIDTH)
BIAS = torch.randn(WIDTH)
TABLE = torch.randn(5, WIDTH)
KERNEL_1D = torch.randn(3, 2, 3)
KERNEL_TOKENS = torch.randn(WIDTH, WIDTH, 3)
IMAGES = torch.randn(2, 4, 4)
FP8_WEIGHT, FP8_SCALES = quantise_rows(WEIGHT)


def linear_fp8(rows: Tensor, bias: Tensor | None = BIAS) -> Tensor:
    quantised, scales = torch.ops.fxsplit.quantise_rows(rows)
    return torch.ops.fxsplit.linear_fp8(quantised, scales, FP8_WEIGHT, FP8_SCALES, bias, torch.float32)


PROVED: dict[str, Forward] = {
    "nothing": lambda y, i: y,
    "linear": lambda y, i: F.linear(y, WEIGHT, BIAS),
    "linear of three dimensions": lambda y, i: F.linear(y.view(-1, 1, WIDTH), WEIGHT),
    "linear with its gelu": lambda y, i: torch.ops.fxsplit.addmm_gelu(BIAS, y, WEIGHT),
    "linear in fp8": lambda y, i: linear_fp8(y) + linear_fp8(y, bias=None),
    "rows quantised": lambda y, i: torch.ops.fxsplit.quantise_rows(y.view(-1, 2, 4))[1],
    "layer norm over features": lambda y, i: F.layer_norm(y, (WIDTH,), BIAS, BIAS),
    "rms norm over features": lambda y, i: F.rms_norm(y, (WIDTH,), BIAS),
    "group norm of every row": lambda y, i: F.group_norm(y, 2, BIAS, BIAS),
    "softmax over features": lambda y, i: y.softmax(-1),
    "log softmax over features": lambda y, i: y.log_softmax(1),
    "cumsum over features": lambda y, i: y.cumsum(1),
    "mean over features": lambda y, i: y - y.mean(1, keepdim=True),
    "sum that drops a dimension": lambda y, i: y.view(-1, 2, 4).sum(1),
    "variance over features": lambda y, i: torch.var_mean(y, 1)[0],
    "vector norm over features": lambda y, i: F.normalize(y, dim=-1),
    "vector norm of order 1 over features": lambda y, i: torch.linalg.vector_norm(y, 1, dim=1),
    "argmax over features": lambda y, i: y.argmax(1),
    "pointwise of rows": lambda y, i: F.gelu(y) * y.sigmoid() + i["x"],
    "pointwise with weights": lambda y, i: y * BIAS + 1,
    "where with a mask of rows": lambda y, i: torch.where(i["index"][:, None] > 1, y, 0.0),
    "masked fill of rows": lambda y, i: y.masked_fill(i["x"] > 0, 1.0),
    "conversion": lambda y, i: y.to(torch.float64).float(),
    "embedding lookup": lambda y, i: y + F.embedding(i["index"], TABLE),
    "table lookup": lambda y, i: y + TABLE[i["index"]],
    "table lookup by two indices": lambda y, i: y + TABLE[i["index"], i["index"]][:, None],
    "index_select of a table": lambda y, i: y + TABLE.index_select(0, i["index"]),
    "rows permuted": lambda y, i: permute_rows(y, i["index"]) + i["x"],
    "rows permuted twice": lambda y, i: permute_rows(permute_rows(y, i["index"]) * 2, i["index"]),
    "split heads": lambda y, i: y.view(-1, 2, 4).transpose(1, 2),
    "heads before tokens and back": lambda y, i: (
        y.view(-1, 2, 4).transpose(0, 1).transpose(0, 1).reshape(-1, WIDTH)
    ),
    "tokens last": lambda y, i: y.t().softmax(0),
    "leading dimension of one": lambda y, i: y.unsqueeze(0).softmax(-1).squeeze(0),
    "permute": lambda y, i: y.view(-1, 2, 4).permute(2, 0, 1) * 2,
    "spatial merge": lambda y, i: F.layer_norm(y.view(-1, 4 * WIDTH), (4 * WIDTH,)),
    "spatial merge and back": lambda y, i: y.view(-1, 4 * WIDTH).relu().view(-1, WIDTH) + y,
    "features cut and joined": lambda y, i: torch.cat((-y[:, 4:], y[:, :4]), dim=-1),
    "chunks of features": lambda y, i: torch.stack(y.chunk(2, dim=1), dim=1).unbind(1)[0],
    "features reversed": lambda y, i: y.view(-1, 2, 4).flip(-1, 1),
    "one feature": lambda y, i: y[:, 3],
    "stack before the tokens": lambda y, i: torch.stack((y, i["x"])).sum(0),
    "a class token": lambda y, i: torch.cat(
        (BIAS.expand(y.shape[0], 1, WIDTH), y.view(-1, 1, WIDTH) * 2), dim=1
    ),
    "a shared row repeated": lambda y, i: y + BIAS.repeat(y.shape[0], 1),
    "shared rows repeated in turn": lambda y, i: y + WEIGHT[:4].repeat(y.shape[0] // 4, 1),
    "features repeated": lambda y, i: y.repeat(1, 3),
    "a new dimension repeated": lambda y, i: y.repeat(2, 1, 1).sum(0),
    "unfolded patches": lambda y, i: F.unfold(y.view(-1, 2, 2, 2), 2) * 2,
    "expand of features": lambda y, i: y[:, None, :].expand(-1, 3, -1) * 2,
    "features padded": lambda y, i: F.pad(y, (1, 2)),
    "features convolved": lambda y, i: F.conv1d(y.view(-1, 2, 4), KERNEL_1D, padding=1),
    "patch convolution": lambda y, i: F.conv2d(y.view(-1, 2, 2, 2), torch.ones(3, 2, 2, 2), stride=2),
    "pooling of features": lambda y, i: F.avg_pool2d(y.view(-1, 2, 2, 2), 2),
    "merged rows beside others": lambda y, i: y.view(-1, 4 * WIDTH).relu().view(-1, WIDTH) + i["x"],
    "bmm with the tokens as batch": lambda y, i: y.view(-1, 2, 4) @ i["x"].view(-1, 4, 2),
    "bmm with shared matrices": lambda y, i: torch.bmm(y.view(-1, 2, 4).transpose(0, 1), torch.ones(2, 4, 4)),
    "zeros and ones of rows": lambda y, i: torch.cat(
        (y, torch.zeros(y.shape[0], 2), torch.ones_like(y)), dim=1
    ),
    "positions": lambda y, i: y + torch.arange(y.shape[0])[:, None],
    "complex numbers": lambda y, i: torch.view_as_real(torch.view_as_complex(y.view(-1, 4, 2)) * 1j),
    "attention with a bound of its own": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y[:, None], y[:, None], y[:, None], i["cu"], 64, 1.0
    ),
    "a second attention": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y.view(-1, 1, WIDTH), y.view(-1, 1, WIDTH), y.view(-1, 1, WIDTH), i["cu"], y.shape[0], 1.0
    ),
}

# What is refused, and a word of the reason.
REFUSED: dict[str, tuple[Forward, str]] = {
    "layer norm over tokens": (
        lambda y, i: F.layer_norm(y.t().softmax(0).view(1, -1), (y.shape[0] * 8,)),
        "joins",
    ),
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
    "softmax over tokens": (lambda y, i: y.softmax(0), "along the token dimension"),
    "softmax over tokens, transposed": (lambda y, i: y.t().softmax(-1), "along the token dimension"),
    "cumsum over tokens": (lambda y, i: y.cumsum(0), "along the token dimension"),
    "mean over tokens": (lambda y, i: y - y.mean(0), "reduces over tokens"),
    "sum of everything": (lambda y, i: y / y.sum(), "reduces over tokens"),
    "maximum over tokens": (lambda y, i: y.amax(0, keepdim=True) + y, "reduces over tokens"),
    "maximum with its index": (lambda y, i: y.max(0)[0] + y, "no padding rule"),
    "variance over tokens": (lambda y, i: torch.var_mean(y, 0)[0] + y, "reduces over tokens"),
    "vector norm of order 1 over tokens": (
        lambda y, i: y / torch.linalg.vector_norm(y, 1, dim=0),
        "reduces over tokens",
    ),
    "normalize over tokens": (lambda y, i: F.normalize(y, dim=0), "reduces over tokens"),
    "appending rows": (lambda y, i: torch.cat((y, y)), "appends along the token dimension"),
    "prepending a row": (lambda y, i: torch.cat((BIAS[None], y)), "appends along the token dimension"),
    "rows repeated": (lambda y, i: y.repeat(2, 1), "repeats the token dimension"),
    "rows repeated by their count": (
        lambda y, i: y.repeat(1, y.shape[0]).sum(1),
        "changes with the padding too",
    ),
    "unfolding over tokens": (
        lambda y, i: F.unfold(y[None, None], (2, 1)),
        "along the token dimension",
    ),
    "cutting the first row off": (lambda y, i: y[1:], "cuts the token dimension"),
    "cutting the last row off": (lambda y, i: y[:-1], "cuts the token dimension"),
    "every other row": (lambda y, i: y[::2], "cuts the token dimension"),
    "the last row": (lambda y, i: y + y[-1], "takes one token"),
    "the first row": (lambda y, i: y + y[0], "takes one token"),
    "halves of the rows": (lambda y, i: torch.cat(y.split(4)), "cuts the token dimension"),
    "rows gathered by index": (lambda y, i: y[i["index"]], "depends on the tokens"),
    "rows selected by index": (lambda y, i: y.index_select(0, i["index"]), "depends on the tokens"),
    "rows permuted by a computed order": (lambda y, i: permute_rows(y, i["index"] * 1), "as it is"),
    "rows permuted by their positions": (lambda y, i: permute_rows(y, torch.arange(y.shape[0])), "as it is"),
    "rows gathered": (lambda y, i: y.gather(0, i["index"][:, None]), "no padding rule"),
    "rows scattered": (lambda y, i: torch.zeros_like(y).index_add(0, i["index"], y), "no padding rule"),
    "features gathered by index": (
        lambda y, i: y[:, :5] + TABLE[:, i["index"]].t()[:, :5],
        "not one lookup a row",
    ),
    "lookup by computed index": (lambda y, i: y + TABLE[i["index"] - 1], "out of range"),
    "embedding of computed index": (lambda y, i: y + F.embedding(i["index"] * 2 % 5, TABLE), "out of range"),
    "lookup by position": (lambda y, i: y + TABLE.repeat(9, 1)[torch.arange(y.shape[0])], "out of range"),
    "flip": (lambda y, i: y.flip(0), "reverses the tokens"),
    "flip of tokens and features": (lambda y, i: y.flip(1, -2), "reverses the tokens"),
    "roll": (lambda y, i: y.roll(1, 0), "no padding rule"),
    "sort": (lambda y, i: y.sort(0)[0], "no padding rule"),
    "topk": (lambda y, i: y.topk(2, 0)[0] + y[:, None], "no padding rule"),
    "multiplied by the token count": (lambda y, i: y * y.shape[0], "token count"),
    "divided by the token count": (lambda y, i: y * (1.0 / y.shape[0]), "computed value"),
    "filled with the token count": (lambda y, i: y + torch.full_like(y, y.shape[0]), "token count"),
    "constants of the token count": (lambda y, i: y + torch.full((8,), y.shape[0]), "computed value"),
    "column chosen by the token count": (lambda y, i: y[:, : y.shape[0] // 4].sum(1), "token count"),
    "steps of the token count": (
        lambda y, i: y + torch.arange(0, y.shape[0] * y.shape[0], y.shape[0])[:, None],
        "computed steps",
    ),
    "positions from the end": (lambda y, i: y + torch.arange(-y.shape[0], 0)[:, None], "start that is not 0"),
    "positions from 5": (lambda y, i: torch.arange(5, y.shape[0] + 5) + y[:, 0], "start that is not 0"),
    "relative positions": (lambda y, i: torch.arange(y.shape[0])[:, None] / y.shape[0] + y, "token count"),
    "multiplied by the number of segments": (lambda y, i: y * i["cu"].shape[0], "number of segments"),
    "cumulative lengths read": (lambda y, i: y + i["cu"].max(), "cumulative lengths"),
    "heads joined with tokens": (
        lambda y, i: y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4),
        "joins tokens",
    ),
    "tokens made inner": (lambda y, i: y.view(4, -1, WIDTH), "joins tokens"),
    "every row with every row": (lambda y, i: (y[:, :1] - y[:, 0]).sum(1), "differ"),
    "every row with every row by positions": (
        lambda y, i: (y[:, :1] - torch.arange(y.shape[0])).sum(1),
        "differ",
    ),
    "a square of zeros": (
        lambda y, i: y + torch.zeros(y.shape[0], y.shape[0]).sum(1)[:, None],
        "changes with the padding",
    ),
    "a square by expansion": (
        lambda y, i: y[:, :1].expand(-1, y.shape[0]).sum(1),
        "changes with the padding",
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
    "convolution over tokens": (
        lambda y, i: F.conv1d(y.t()[None], KERNEL_TOKENS, padding=1),
        "along the token dimension",
    ),
    "pooling over tokens": (lambda y, i: F.avg_pool2d(y[None, None], (1, 2)), "along the token dimension"),
    "tokens padded": (lambda y, i: F.pad(y, (0, 0, 1, 0)), "pads the token dimension"),
    "group norm over tokens": (lambda y, i: F.group_norm(y.t()[None], 2), "along the token dimension"),
    "random numbers": (lambda y, i: y + torch.rand_like(y), "random"),
    "random numbers without an input": (lambda y, i: y + torch.rand(WIDTH), "random"),
    "triangle": (lambda y, i: y.tril(), "no padding rule"),
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
        "holds for",
    ),
    "attention over merged rows": (
        lambda y, i: torch.ops.fxsplit.varlen_attention(
            y.view(-1, 1, 32), y.view(-1, 1, 32), y.view(-1, 1, 32), i["cu"] // 4, y.shape[0] // 4, 1.0
        ),
        "cumulative lengths",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved_and_stay_as_they_are_when_padded(
    name: str, trace: Trace, inputs: Any
) -> None:
    bound = trace(PROVED[name])
    assert bound.program.padding.proved, str(bound.program.padding)
    assert bound.program.padding.may_probe
    for poison in (float("nan"), 7.0):
        assert_real_rows_unchanged(bound, inputs(8), 20, poison)


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused_with_the_reason(name: str, trace: Trace) -> None:
    forward, reason = REFUSED[name]
    report = trace(forward).program.padding
    assert not report.proved
    assert reason in str(report)
    assert str(report).startswith(report.reasons[0][0])


def test_only_the_node_that_mixes_rows_is_reported(trace: Trace) -> None:
    report = trace(lambda y, i: (F.gelu(y.softmax(0)) * 2).softmax(1)).program.padding
    assert len(report.reasons) == 1
    assert "softmax" in report.reasons[0][0]


def test_a_mixed_tensor_does_not_spoil_the_rest(trace: Trace) -> None:
    report = trace(lambda y, i: y.softmax(0) + y.flip(0)).program.padding
    assert [reason.split()[0] for _, reason in report.reasons] == ["_softmax", "flip"]


@pytest.mark.parametrize(
    "name",
    [
        "lookup by computed index",
        "embedding of computed index",
        "lookup by position",
        "rows permuted by a computed order",
    ],
)
def test_a_lookup_that_may_leave_its_table_is_not_probed(name: str, trace: Trace) -> None:
    assert not trace(REFUSED[name][0]).program.padding.may_probe


@pytest.mark.parametrize("name", ["softmax over tokens", "flip", "multiplied by the token count"])
def test_what_is_merely_not_proved_may_be_probed(name: str, trace: Trace) -> None:
    assert trace(REFUSED[name][0]).program.padding.may_probe


def test_segments_over_other_rows_than_the_tokens_are_not_probed() -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        y = inputs["x"].view(-1, 1, 32)
        return torch.ops.fxsplit.varlen_attention(y, y, y, inputs["cu"], y.shape[0], 1.0)

    inputs = {"x": torch.randn(24, WIDTH), "cu": torch.tensor([0, 2, 6], dtype=torch.int32)}
    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    report = trace_forward(forward, inputs, {"x": [0], "cu": [0]}, options).program.padding
    assert "not the token count" in str(report)
    assert not report.may_probe


def test_an_input_with_two_token_dimensions_is_refused(trace: Trace) -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        q = inputs["x"].view(-1, 2, 4)
        y = torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], q.shape[0], 1.0)
        return y.view(-1, WIDTH) + (inputs["mask"] * 2).sum(1, keepdim=True)

    inputs = {
        "x": torch.randn(12, WIDTH),
        "cu": torch.tensor([0, 12], dtype=torch.int32),
        "mask": torch.ones(12, 12),
    }

    def tied(values: dict[str, Tensor]) -> Tensor:
        torch._check(values["mask"].shape[0] == values["x"].shape[0])
        torch._check(values["mask"].shape[1] == values["x"].shape[0])
        return forward(values)

    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    bound = trace_forward(tied, inputs, {"x": [0], "cu": [0], "mask": [0, 1]}, options)
    assert "changes with the padding" in str(bound.program.padding)


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


def test_an_operation_of_another_library_goes_by_no_rule_of_aten(trace: Trace) -> None:
    library = torch.library.Library("fxsplit_test_rules", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.define("mm(Tensor x, Tensor y) -> Tensor")
    library.impl("mm", lambda x, y: x.flip(0) + y[0], "CompositeExplicitAutograd")
    torch.library.register_fake("fxsplit_test_rules::mm", lambda x, y: torch.empty_like(x), lib=library)
    report = trace(lambda y, i: torch.ops.fxsplit_test_rules.mm(y, WEIGHT)).program.padding
    assert "no padding rule for fxsplit_test_rules::mm" in str(report)


def test_a_graph_without_symbolic_tokens_is_refused() -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        q = inputs["x"].view(12, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], 12, 1.0)

    inputs = {"x": torch.randn(12, WIDTH), "cu": torch.tensor([0, 12], dtype=torch.int32)}
    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    report = trace_forward(forward, inputs, {}, options).program.padding
    assert "symbolic" in str(report)


# --- soundness: random programs


def assert_real_rows_unchanged(
    bound: BoundProgram, inputs: dict[str, Tensor], rows: int, poison: float
) -> None:
    """Runs the program exactly and padded to `rows` rows of poison, and compares what both have."""
    program = bound.program
    exact = program.begin(bound.arguments(inputs))
    assert program.token_symbol is not None
    padded = Frame(list(exact.slots), {**exact.symbols, program.token_symbol: rows})
    for entry in program.region_inputs:
        value = exact.slots[entry.slot]
        if entry.is_segments:
            tail = torch.tensor([(int(value[-1]) + rows) // 2, rows], dtype=torch.int32)
            padded.slots[entry.slot] = torch.cat((value, tail))
        elif entry.token_dim is not None:
            size = entry.info.shape[entry.token_dim](padded.symbols)
            shape = list(value.shape)
            shape[entry.token_dim] = size - shape[entry.token_dim]
            filler = value.new_full(shape, poison if value.is_floating_point() else 0)
            padded.slots[entry.slot] = torch.cat((value, filler), dim=entry.token_dim)
    if program.num_rows_slot is not None:
        # Without the masks, whose zeros would hide the poison.
        padded.slots[program.num_rows_slot] = torch.tensor(rows)
    with torch.no_grad():
        (expected,), (got,) = program.finish(exact), program.finish(padded)
    real = got[tuple(slice(0, n) for n in expected.shape)]
    torch.testing.assert_close(real, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


_dims = st.integers(0, 3)
_UNARY: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "transpose": lambda x, a, b: x.transpose(a, b),
    "unsqueeze": lambda x, a, b: x.unsqueeze(a),
    "squeeze": lambda x, a, b: x.squeeze(a),
    "flatten": lambda x, a, b: x.flatten(a, a + 1),
    "halve": lambda x, a, b: x.unflatten(a, (-1, 2)),
    "double": lambda x, a, b: x.unflatten(a, (2, -1)),
    "merge": lambda x, a, b: x.reshape(-1, 4 * x.shape[-1]),
    "reshape": lambda x, a, b: x.reshape(-1, 4),
    "expand": lambda x, a, b: x.unsqueeze(a).expand(*x.shape[:a], 3, *x.shape[a:]),
    "contiguous": lambda x, a, b: x.contiguous(),
    "softmax": lambda x, a, b: x.softmax(a),
    "cumsum": lambda x, a, b: x.cumsum(a),
    "sum": lambda x, a, b: x.sum(a, keepdim=b > 1),
    "mean of two": lambda x, a, b: x.mean((a, b)),
    "amax": lambda x, a, b: x.amax(a, keepdim=b > 1),
    "var": lambda x, a, b: x.var(a, keepdim=b > 1),
    "norm": lambda x, a, b: torch.linalg.vector_norm(x, b, dim=a, keepdim=True),
    "layer norm": lambda x, a, b: F.layer_norm(x, x.shape[a:]),
    "argmax": lambda x, a, b: x.argmax(a).float(),
    "flip": lambda x, a, b: x.flip(a),
    "roll": lambda x, a, b: x.roll(1, a),
    "first": lambda x, a, b: x.select(a, 0),
    "last": lambda x, a, b: x.select(a, -1),
    "without first": lambda x, a, b: x.narrow(a, 1, x.shape[a] - 1),
    "cut": lambda x, a, b: torch.cat((x.select(a, 0).unsqueeze(a), x), a),
    "doubled": lambda x, a, b: torch.cat((x, x.tanh()), a),
    "stacked": lambda x, a, b: torch.stack((x, x.tanh()), a),
    "half": lambda x, a, b: x.chunk(2, a)[b % 2],
    "pad": lambda x, a, b: F.pad(x, [0, 0] * a + [b, 1]),
    "gelu": lambda x, a, b: F.gelu(x),
    "repeat": lambda x, a, b: x.repeat([2 if d == a else 1 for d in range(x.dim())]),
    "shared repeat": lambda x, a, b: x + torch.ones(x.shape[b]).repeat(x.shape[a], 1),
    "class token": lambda x, a, b: torch.cat(
        (torch.ones(x.shape[-1]).expand(*x.shape[:a], 1, *x.shape[a + 1 : -1], x.shape[-1]), x), a
    ),
    "sort": lambda x, a, b: x.sort(a)[0],
    "tril": lambda x, a, b: x.tril(),
    "gram": lambda x, a, b: x @ x.transpose(-1, -2),
    "cross": lambda x, a, b: x.transpose(-1, -2) @ x,
    "scale by size": lambda x, a, b: x * x.shape[a],
    "divide by size": lambda x, a, b: x / x.shape[a],
    "add positions": lambda x, a, b: x + torch.arange(x.shape[a]),
    "add inner positions": lambda x, a, b: x + torch.arange(x.shape[a])[:, None],
    "where positions": lambda x, a, b: torch.where(torch.arange(x.shape[a]) > b, x, 0.0),
    "outer": lambda x, a, b: x.unsqueeze(-1) * x.unsqueeze(-2),
    "shared product": lambda x, a, b: x @ torch.ones(x.shape[-1], 4),
    "shared product on the left": lambda x, a, b: torch.ones(4, x.shape[-2]) @ x,
    "group norm": lambda x, a, b: F.group_norm(x, 1),
    "convolution": lambda x, a, b: F.conv1d(x, torch.ones(2, x.shape[1], 3), padding=1),
    "pooling": lambda x, a, b: F.avg_pool2d(x, 2),
    "upsampling": lambda x, a, b: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "spread": lambda x, a, b: x + torch.zeros(x.shape[a], x.shape[b]),
    "dense attention": lambda x, a, b: F.scaled_dot_product_attention(x, x, x),
    "truncated": lambda x, a, b: x[..., : x.shape[a] // 2],
    "mask": lambda x, a, b: x.masked_fill(x.select(a, 0).unsqueeze(a) > 0, 1.0),
    "new full": lambda x, a, b: x + x.new_full((x.shape[a],), 2.0),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add of last": lambda x, y: x + y.transpose(0, -1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "matmul": lambda x, y: x @ y,
    "matmul transposed": lambda x, y: x @ y.transpose(-1, -2),
    "lookup": lambda x, y: y[x.argmax(-1)],
    "cat": lambda x, y: torch.cat((x, y), -1),
    "cat first": lambda x, y: torch.cat((x, y), 0),
    "maximum": lambda x, y: torch.maximum(x, y.unsqueeze(1)),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
}
# Where the token dimension is when a random program starts.
_LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda y: y,
    lambda y: y.t(),
    lambda y: y.view(-1, 2, 4),
    lambda y: y.view(-1, 2, 4).transpose(0, 1),
    lambda y: y.view(-1, 2, 4).permute(1, 2, 0),
    lambda y: y.unsqueeze(0),
    lambda y: y.view(-1, 4 * WIDTH),
]
Step = tuple[str, int, int]
_MOVES = ("transpose", "unsqueeze", "squeeze", "flatten", "halve", "double", "reshape", "expand")
_ALONG = ("softmax", "cumsum", "sum", "mean of two", "amax", "var", "norm", "argmax", "layer norm")
_OTHERS = sorted({*_UNARY, *_BINARY} - {*_MOVES, *_ALONG})
_steps = st.tuples(st.one_of(*map(st.sampled_from, (_MOVES, _ALONG, _OTHERS))), _dims, _dims)


def _interpret(layout: int, steps: list[Step], y: Tensor, x: Tensor) -> list[Tensor]:
    values = [_LAYOUTS[layout](x), _LAYOUTS[layout](y)]
    for name, a, b in steps:
        if name in _UNARY:
            values.append(_UNARY[name](values[-1], a, b))
        else:
            values.append(_BINARY[name](values[-1], values[a % len(values)]))
    return values


def _runnable(layout: int, steps: list[Step]) -> list[Step]:
    """The steps without those that fail in eager at one of two sizes, or make a tensor too large."""
    kept: list[Step] = []
    for step in steps:
        try:
            for tokens in (8, 12, 20):
                last = _interpret(
                    layout, [*kept, step], torch.randn(tokens, WIDTH), torch.randn(tokens, WIDTH)
                )[-1]
                if last.numel() > 20_000 or last.numel() == 0 or last.dim() == 0:
                    raise RuntimeError("size")
        except (RuntimeError, IndexError, ValueError):
            continue
        kept.append(step)
    return kept


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(st.integers(0, len(_LAYOUTS) - 1), st.lists(_steps, min_size=2, max_size=6))
def test_whatever_is_proved_may_be_padded(trace: Trace, inputs: Any, layout: int, steps: list[Step]) -> None:
    steps = _runnable(layout, steps)[:4]
    try:
        bound = trace(lambda y, i: _interpret(layout, steps, y, i["x"])[-1] * 1)
    except CompileError:
        event("specialised")
        return
    if not bound.program.padding.proved:
        event("refused")
        return
    event("proved")
    for poison in (float("nan"), 0.0, 50.0):
        assert_real_rows_unchanged(bound, inputs(8), 20, poison)
