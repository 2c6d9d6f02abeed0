from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile.options import CompileOptions, splitting_targets
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.errors import CompileError, ConfigError

from .blocks.block_towers import Dense
from .packed_forwards import EAGER, WIDTH, packed_inputs, trace_packed, trace_with


def test_dense_attention_stands_for_its_kernels_too() -> None:
    targets = splitting_targets(["aten::scaled_dot_product_attention"])
    assert torch.ops.aten.scaled_dot_product_attention.default in targets
    assert torch.ops.aten._scaled_dot_product_efficient_attention.default in targets
    assert torch.ops.aten.mm.default not in targets


@pytest.mark.parametrize("name", ["fxsplit::no_such_op", "nowhere::mm", "mm"])
def test_an_unknown_splitting_op_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"splitting_ops: no operator '{name}'"):
        splitting_targets([name])
    with pytest.raises(ConfigError, match=f"splitting_ops: no operator '{name}'"):
        trace_packed(lambda y, i: y, options=CompileOptions(("fxsplit::varlen_attention", name), "eager"))


def test_any_op_may_split() -> None:
    options = CompileOptions(("fxsplit::varlen_attention", "aten::gelu"), "eager")
    bound = trace_packed(lambda y, i: F.gelu(y).view(-1, 1, 8) + 1, options=options)
    assert [step.name.split("_")[0] for step in bound.program.splits] == ["varlen", "gelu"]
    plain = trace_packed(lambda y, i: F.gelu(y).view(-1, 1, 8) + 1)
    torch.testing.assert_close(bound(packed_inputs(9)), plain(packed_inputs(9)))


@pytest.fixture(scope="module")
def dense() -> tuple[Dense, BoundProgram]:
    model = Dense()
    return model, trace_with(model, {"x": torch.randn(3, 5, WIDTH)})


def test_dense_attention_splits_a_module_that_nobody_adapted(dense: Any) -> None:
    model, bound = dense
    program = bound.program
    assert [step.kind for step in program.steps] == ["piece", "split"] * 3 + ["piece"]
    assert program.num_distinct == 3
    assert program.padding.proved, str(program.padding)
    assert program.token_symbol is not None
    for images in (2, 3, 7):
        tiles = {"x": torch.randn(images, 5, WIDTH)}
        torch.testing.assert_close(bound(tiles), model(tiles))
        assert bound.tokens(tiles) == images


def over_one_sequence(x: Tensor) -> Tensor:
    q = x.view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(-1, 8) + x


def test_a_batch_of_one_is_no_token_count() -> None:
    bound = trace_with(lambda inputs: over_one_sequence(inputs["x"]), {"x": torch.randn(12, 8)})
    assert [step.kind for step in bound.program.steps] == ["piece", "split", "piece"]
    x = torch.randn(9, 8)
    assert bound.tokens({"x": x}) == 9
    assert not bound.program.padding.proved  # every row attends to all others
    torch.testing.assert_close(bound({"x": x}), over_one_sequence(x))


def test_two_sequences_of_different_lengths_tell_nothing() -> None:
    examples = {"x": torch.randn(12, 8), "y": torch.randn(7, 8)}

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([*map(over_one_sequence, inputs.values())])

    assert trace_with(forward, examples).program.token_symbol is None
    reason = r"its splitting ops \(aten::_scaled_dot_product_flash_attention.* do not have one size"
    with pytest.raises(CompileError, match=reason):
        trace_with(forward, examples, replace(EAGER, requires_tokens=True))


@pytest.mark.parametrize(
    "forward",
    [
        lambda y, i: y[: int(i["index"].max())],
        lambda y, i: y if y.sum() > 0 else -y,
        lambda y, i: y + y[y[:, 0] > 0].shape[0],
    ],
    ids=["computed slice", "branch", "computed size"],
)
def test_a_graph_whose_sizes_or_branches_depend_on_data_is_refused(forward: Any) -> None:
    with pytest.raises(
        CompileError, match=r"does not trace as one graph|on the host|no input of the graph determines"
    ):
        trace_packed(forward)


@pytest.mark.parametrize(
    "forward",
    [lambda y, i: y * y.sum().item(), lambda y, i: y[y[:, 0] > 0].sum(0) + y],
    ids=["item", "boolean index"],
)
def test_data_that_stays_within_a_piece_is_served_but_never_padded(forward: Any) -> None:
    bound = trace_packed(forward)
    assert not bound.program.padding.proved
    attention = trace_packed(lambda y, i: y * 1)
    for rows in (9, 16):
        expected = forward(attention(packed_inputs(rows)), packed_inputs(rows))
        torch.testing.assert_close(bound(packed_inputs(rows)), expected)


def test_a_number_read_from_a_tensor_is_refused_where_tracing_allows_it() -> None:
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(CompileError, match="reads a tensor's value on the host"),
    ):
        trace_packed(lambda y, i: y * i["index"].max().item())


def test_attention_over_different_counts_is_refused() -> None:
    def forward(y: Tensor, i: dict[str, Tensor]) -> Tensor:
        table = torch.ones(6, 2, 4)
        cu = torch.tensor([0, 6], dtype=torch.int32)
        return y + torch.ops.fxsplit.varlen_attention(table, table, table, cu, 6, 1.0).sum()

    with pytest.raises(CompileError, match="different token counts"):
        trace_packed(forward, options=replace(EAGER, requires_tokens=True))
