"""What the analysis refuses whatever the rules say, and what it reports."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile import BoundProgram, CompileOptions, trace_forward

from ..packed_forwards import WIDTH, trace_packed
from .checks import WEIGHT, Forward, assert_refused, trace_each

REFUSED: dict[str, tuple[Forward, str]] = {
    "maximum with its index": (lambda y, i: y.max(0)[0] + y, "no padding rule"),
    "rows gathered": (lambda y, i: y.gather(0, i["index"][:, None]), "no padding rule"),
    "rows scattered": (lambda y, i: torch.zeros_like(y).index_add(0, i["index"], y), "no padding rule"),
    "sort": (lambda y, i: y.sort(0)[0], "no padding rule"),
    "topk": (lambda y, i: y.topk(2, 0)[0] + y[:, None], "no padding rule"),
    "multiplied by the token count": (lambda y, i: y * y.shape[0], "token count"),
    "filled with the token count": (lambda y, i: y + torch.full_like(y, y.shape[0]), "token count"),
    "multiplied by steps of the token count": (lambda y, i: y * (1 + y.shape[0] // 64), "token count"),
    "multiplied by a power of the token count": (lambda y, i: y * y.shape[0] ** 0.1, "computed value"),
    "sum of copies beyond every sample": (
        lambda y, i: y + torch.ones(1).expand(y.shape[0] // 5000 + 1, 1).sum(),
        "in no way that is known",
    ),
    "column chosen by the token count": (lambda y, i: y[:, : y.shape[0] // 4].sum(1), "token count"),
    "relative positions": (lambda y, i: torch.arange(y.shape[0])[:, None] / y.shape[0] + y, "token count"),
    "multiplied by the number of segments": (lambda y, i: y * i["cu"].shape[0], "number of segments"),
    "cumulative lengths read": (lambda y, i: y + i["cu"].max(), "cumulative lengths"),
    "random numbers": (lambda y, i: y + torch.rand_like(y), "random"),
    "random numbers without an input": (lambda y, i: y + torch.rand(WIDTH), "random"),
}


# Their traces hold for few token counts, or draw random numbers, which no graph leaves out.
ALONE = (
    "multiplied by a power of the token count",
    "random numbers",
    "random numbers without an input",
)

REFUTED: dict[str, tuple[Forward, bool]] = {
    "softmax": (lambda y, i: y.softmax(0), True),
    "flip": (lambda y, i: y.flip(0), True),
    "token count": (REFUSED["multiplied by the token count"][0], True),
    "cut": (lambda y, i: y[1:], True),
    "no rule": (lambda y, i: y.sort(1)[0], False),
    "undecided size": (REFUSED["sum of copies beyond every sample"][0], False),
}

MAY_GROW: dict[str, tuple[Forward, bool]] = {
    "attention alone": (lambda y, i: y * 2, True),
    "mixed rows": (lambda y, i: y - y.mean(0), True),
    "a length": (lambda y, i: y + i["cu"][0], False),
    "their number": (lambda y, i: y * i["cu"].shape[0], False),
    "lengths, after a mixed row": (lambda y, i: y.softmax(0) + i["cu"].diff().float().mean(), False),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, BoundProgram]:
    examples = {**REFUSED, **REFUTED, **MAY_GROW}
    return trace_each({name: forward for name, (forward, _) in examples.items()}, ALONE)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_is_asked_about_is_refused(name: str, programs: dict[str, BoundProgram]) -> None:
    assert_refused(programs[name], REFUSED[name][1])


def test_only_the_node_that_mixes_rows_is_reported() -> None:
    report = trace_packed(lambda y, i: (F.gelu(y.softmax(0)) * 2).softmax(1)).program.padding
    assert len(report.reasons) == 1
    assert "softmax" in report.reasons[0][0]


def test_a_mixed_tensor_does_not_spoil_the_rest() -> None:
    report = trace_packed(lambda y, i: y.softmax(0) + y.flip(0)).program.padding
    assert [reason.split()[0] for _, reason in report.reasons] == ["_softmax", "flip"]


@pytest.mark.parametrize("name", REFUTED)
def test_what_is_refuted_differs_from_what_is_not_known(name: str, programs: dict[str, BoundProgram]) -> None:
    report = programs[name].program.padding
    assert not report.proved
    assert report.refuted is REFUTED[name][1]


def test_the_report_names_the_line_of_code_and_counts_nodes() -> None:
    def subtract_mean(y: Tensor, i: Mapping[str, Tensor]) -> Tensor:
        return y - y.mean(0)

    report = trace_packed(subtract_mean).program.padding
    assert report.source.endswith("in subtract_mean: return y - y.mean(0)")
    assert "test_analysis.py:" in report.source
    assert report.num_nodes > 2
    assert trace_packed(lambda y, i: y * 2).program.padding.source == ""


@pytest.mark.parametrize("name", MAY_GROW)
def test_segments_may_grow_where_only_attention_reads_them(
    name: str, programs: dict[str, BoundProgram]
) -> None:
    assert programs[name].program.padding.segments_may_grow is MAY_GROW[name][1]


def test_an_input_with_two_token_dimensions_is_refused() -> None:
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
    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    report = trace_forward(forward, inputs, {}, options).program.padding
    assert "symbolic" in str(report)
