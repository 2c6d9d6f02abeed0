"""Calls that are proved to keep rows independent, calls that are refused, and what is reported of them."""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fxsplit_encoder.compile.build import build_program
from fxsplit_encoder.compile.padding import PaddingReport, capture_refusal
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.compile.rewriting import permute_rows
from fxsplit_encoder.compile.trace import trace_forward

from ..packed_forwards import EAGER, WIDTH, attend, packed_inputs, trace_packed, trace_with
from ..passes.aten_graphs import aten_graph

Forward = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From what attention returns, a row per token, and the inputs of `packed_forwards`."""

WEIGHT, BIAS = torch.linspace(-1, 1, WIDTH**2).view(WIDTH, WIDTH), torch.linspace(-1, 1, WIDTH)
KERNEL_TOKENS = torch.linspace(-1, 1, 3 * WIDTH**2).view(WIDTH, WIDTH, 3)
FEATURES = torch.tensor([3, 0, 2])
TABLE = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)

# The fuzzer beside this file calls every rule; here are compositions, and what users are told.
PROVED: dict[str, Forward] = {
    # operations that work entry by entry, and copies
    "where with a mask of rows": lambda y, i: torch.where(i["index"][:, None] > 1, y, 0.0),
    "complex numbers": lambda y, i: torch.view_as_real(torch.view_as_complex(y.view(-1, 4, 2)) * 1j),
    "a class token": lambda y, i: torch.cat(
        (BIAS.expand(y.shape[0], 1, WIDTH), y.view(-1, 1, WIDTH) * 2), dim=1
    ),
    "shared rows repeated in turn": lambda y, i: y + WEIGHT[:4].repeat(y.shape[0] // 4, 1),
    # views, parts of tensors, and tensors made from sizes
    "spatial merge and back": lambda y, i: y.view(-1, 4 * WIDTH).relu().view(-1, WIDTH) + y,
    "tokens joined with heads and taken apart": lambda y, i: (
        F.layer_norm(F.gelu(y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4)) @ WEIGHT[:4, :4], (4,))
        .view(2, -1, 4)
        .transpose(0, 1)
    ),
    "features cut and joined": lambda y, i: torch.cat((-y[:, 4:], y[:, :4]), dim=-1),
    "positions": lambda y, i: y + torch.arange(y.shape[0])[:, None],
    # products, reductions, normalizations, convolution and pooling
    "linear by a measured kernel": lambda y, i: (
        torch.ops.fxsplit.linear(y, WEIGHT, BIAS, "gelu")
        + torch.ops.fxsplit.linear(y, WEIGHT, None, "gelu_tanh")
    ),
    "bmm with the tokens as batch": lambda y, i: y.view(-1, 2, 4) @ i["x"].view(-1, 4, 2),
    "cumsum over tokens": lambda y, i: y.cumsum(0),
    "group norm of every row": lambda y, i: F.group_norm(y, 2, BIAS, BIAS),
    "patch convolution": lambda y, i: F.conv2d(y.view(-1, 2, 2, 2), torch.ones(3, 2, 2, 2), stride=2),
    # lookups by index, and attention
    "features chosen on both sides": lambda y, i: (
        y.view(-1, 2, 4).transpose(0, 1)[FEATURES % 2, :, FEATURES].t()
    ),
    "rows permuted twice": lambda y, i: permute_rows(permute_rows(y, i["index"]) * 2, i["index"]),
    "attention with a bound of its own": lambda y, i: torch.ops.fxsplit.varlen_attention(
        y[:, None], y[:, None], y[:, None], i["cu"], 64, 1.0
    ),
}

REFUSED: dict[str, tuple[Forward, str]] = {
    # operations that work entry by entry, and copies
    "every row with every row": (lambda y, i: (y[:, :1] - y[:, 0]).sum(1), "differ"),
    "triangle of rows": (lambda y, i: y.tril(), "their place among the tokens"),
    "integers divided by those of the tokens": (
        lambda y, i: y * (7 // (i["index"] + 1))[:, None],
        "may be 0 in pad rows",
    ),
    "rows repeated": (lambda y, i: y.repeat(2, 1), "repeats the token dimension"),
    # views, parts of tensors, and tensors made from sizes
    "heads joined with tokens": (
        lambda y, i: y.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4),
        "leave the graph joined with an outer dimension",
    ),
    "tokens made inner": (lambda y, i: y.view(4, -1, WIDTH), "joins tokens"),
    "cutting the first row off": (lambda y, i: y[1:], "cuts the token dimension"),
    "the last row": (lambda y, i: y + y[-1], "takes one token"),
    "divided by the token count": (lambda y, i: y * torch.full((1,), 1.0 / y.shape[0]), "computed value"),
    "positions from the end": (lambda y, i: y + torch.arange(-y.shape[0], 0)[:, None], "start that is not 0"),
    "a square of zeros": (
        lambda y, i: y + torch.zeros(y.shape[0], y.shape[0]).sum(1)[:, None],
        "changes with the padding",
    ),
    # products, reductions, normalizations, convolution and pooling
    "tokens as the weight of a measured product": (
        lambda y, i: torch.ops.fxsplit.linear(WEIGHT, y, None, "gelu"),
        "depends on the tokens",
    ),
    "bias of rows": (lambda y, i: torch.addmm(i["x"], y, WEIGHT), "depends on the tokens"),
    "bmm over tokens": (
        lambda y, i: y.view(-1, 2, 4).permute(1, 0, 2) @ y.view(-1, 2, 4).permute(1, 2, 0),
        "along the token dimension",
    ),
    "layer norm over tokens": (
        lambda y, i: F.layer_norm(y.t().softmax(0).view(1, -1), (y.shape[0] * 8,)),
        "computes with the token count",
    ),
    "mean over tokens": (lambda y, i: y - y.mean(0), "reduces over tokens"),
    "convolution over tokens": (
        lambda y, i: F.conv1d(y.t()[None], KERNEL_TOKENS, padding=1),
        "along the token dimension",
    ),
    # lookups by index, and attention
    "rows gathered by index": (lambda y, i: y[i["index"]], "gathers tokens"),
    "features chosen by each row": (
        lambda y, i: y.view(-1, 2, 4).permute(1, 0, 2)[(y[:, 0] > 0).long()].sum(0)[:, :4] + y[:, :4],
        "by indices of its own",
    ),
    "rows permuted by a computed order": (lambda y, i: permute_rows(y, i["index"] * 1), "as it is"),
    "features gathered by index": (
        lambda y, i: y[:, :5] + TABLE[:, i["index"]].t()[:, :5],
        "not one lookup a row",
    ),
    "lookup by computed index": (lambda y, i: y + TABLE[i["index"] - 1], "out of range"),
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
    # what is refused whatever the rules say
    "rows scattered": (lambda y, i: torch.zeros_like(y).index_add(0, i["index"], y), "no padding rule"),
    "multiplied by the token count": (lambda y, i: y * y.shape[0], "token count"),
    "sum of copies beyond every sample": (
        lambda y, i: y + torch.ones(1).expand(y.shape[0] // 5000 + 1, 1).sum(),
        "in no way that is known",
    ),
    "column chosen by the token count": (lambda y, i: y[:, : y.shape[0] // 4].sum(1), "token count"),
    "multiplied by the number of segments": (lambda y, i: y * i["cu"].shape[0], "number of segments"),
    "cumulative lengths read": (lambda y, i: y + i["cu"].max(), "cumulative lengths"),
    "random numbers": (lambda y, i: y + torch.rand_like(y), "random"),
}

MAY_GROW: dict[str, tuple[Forward, bool]] = {
    "attention alone": (lambda y, i: y * 2, True),
    "mixed rows": (lambda y, i: y - y.mean(0), True),
    "a length": (lambda y, i: y + i["cu"][0], False),
    "their number": (lambda y, i: y * i["cu"].shape[0], False),
    "lengths, after a mixed row": (lambda y, i: y.softmax(0) + i["cu"].diff().float().mean(), False),
}


def report_of(forward: Forward) -> PaddingReport:
    """Of a graph that is traced without Dynamo, which takes far longer than the proof."""
    inputs = packed_inputs(12)

    def call(*values: Tensor) -> Tensor:
        named = dict(zip(inputs, values, strict=True))
        return forward(attend(named["x"], named["cu"]), named)

    return build_program(aten_graph(call, *inputs.values()).module, (), EAGER).padding


def test_work_on_several_gpus_is_never_captured() -> None:
    with FakeTensorMode():
        values = [torch.empty(4, device=device) for device in ("cpu", "cuda:0", "cuda:1")]
    nodes = [fx.Graph().placeholder("x") for _ in values]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    assert capture_refusal(nodes[:2]) == ""
    assert capture_refusal(nodes) == "it computes on several devices: cuda:0, cuda:1"


@pytest.mark.parametrize("forward", PROVED.values(), ids=PROVED)
def test_independent_rows_are_proved(forward: Forward) -> None:
    report = report_of(forward)
    assert report.proved, str(report)


@pytest.mark.parametrize(("forward", "reason"), REFUSED.values(), ids=REFUSED)
def test_dependent_rows_are_refused(forward: Forward, reason: str) -> None:
    report = report_of(forward)
    assert not report.proved and reason in str(report)
    assert str(report).startswith(report.reasons[0][0])


def test_segments_over_other_rows_than_the_tokens_are_refused() -> None:
    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        y = inputs["x"].view(-1, 1, 32)
        return torch.ops.fxsplit.varlen_attention(y, y, y, inputs["cu"], y.shape[0], 1.0)

    inputs = {"x": torch.randn(24, WIDTH), "cu": torch.tensor([0, 2, 6], dtype=torch.int32)}
    assert "not the token count" in str(trace_with(forward, inputs).program.padding)


def _dense(shape: tuple[int, ...], mask: Callable[[Tensor], Tensor] | None = None) -> BoundProgram:
    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        q = inputs["x"]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=None if mask is None else mask(q))

    return trace_with(forward, {"x": torch.randn(shape)})


def test_dense_attention_with_images_as_batch_is_proved() -> None:
    assert _dense((3, 2, 5, 4)).program.padding.proved
    assert _dense((3, 2, 5, 4), lambda q: torch.ones(5, 5, dtype=torch.bool)).program.padding.proved
    assert _dense((3, 2, 5, 4), lambda q: q[:, :, :, :1] > 9).program.padding.proved


def test_dense_attention_whose_mask_mixes_images_is_refused() -> None:
    # Query, key and value are one node here: the mask is the second input node, not the fourth.
    report = _dense((3, 2, 5, 4), lambda q: q.softmax(0)[..., :1]).program.padding
    assert not report.proved


def test_only_the_nodes_that_mix_rows_are_reported() -> None:
    report = trace_packed(lambda y, i: (F.gelu(y.softmax(0)) * 2).softmax(1) + y.flip(0)).program.padding
    assert [reason.split()[0] for _, reason in report.reasons] == ["_softmax", "flip"]


def test_the_report_names_the_line_of_code_and_counts_nodes() -> None:
    def subtract_mean(y: Tensor, i: Mapping[str, Tensor]) -> Tensor:
        return y - y.mean(0)

    report = trace_packed(subtract_mean).program.padding
    assert report.source.endswith("in subtract_mean: return y - y.mean(0)")
    assert "test_rules.py:" in report.source
    assert report.num_nodes > 2
    assert trace_packed(lambda y, i: y * 2).program.padding.source == ""


@pytest.mark.parametrize(("forward", "may_grow"), MAY_GROW.values(), ids=MAY_GROW)
def test_segments_may_grow_where_only_attention_reads_them(forward: Forward, may_grow: bool) -> None:
    assert report_of(forward).segments_may_grow is may_grow


def test_an_input_with_two_token_dimensions_is_refused() -> None:
    inputs = {
        "x": torch.randn(12, WIDTH),
        "cu": torch.tensor([0, 12], dtype=torch.int32),
        "mask": torch.ones(12, 12),
    }

    def forward(values: dict[str, Tensor]) -> Tensor:
        torch._check(values["mask"].shape[0] == values["x"].shape[0])
        torch._check(values["mask"].shape[1] == values["x"].shape[0])
        return attend(values["x"], values["cu"]) + (values["mask"] * 2).sum(1, keepdim=True)

    bound = trace_forward(forward, inputs, {"x": [0], "cu": [0], "mask": [0, 1]}, EAGER)
    assert "changes with the padding" in str(bound.program.padding)


def test_an_operation_of_another_library_goes_by_no_rule_of_aten() -> None:
    library = torch.library.Library("fxsplit_test_rules", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.define("mm(Tensor x, Tensor y) -> Tensor")
    library.impl("mm", lambda x, y: x.flip(0) + y[0], "CompositeExplicitAutograd")
    torch.library.register_fake("fxsplit_test_rules::mm", lambda x, y: torch.empty_like(x), lib=library)
    report = trace_packed(lambda y, i: torch.ops.fxsplit_test_rules.mm(y, WEIGHT)).program.padding
    assert "no padding rule for fxsplit_test_rules::mm" in str(report)


def test_a_graph_without_symbolic_tokens_is_refused() -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        q = inputs["x"].view(12, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], 12, 1.0)

    inputs = {"x": torch.randn(12, WIDTH), "cu": torch.tensor([0, 12], dtype=torch.int32)}
    report = trace_forward(forward, inputs, {}, EAGER).program.padding
    assert "symbolic" in str(report)
