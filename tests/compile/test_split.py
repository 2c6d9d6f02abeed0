from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile import BoundProgram, CompileOptions, trace_forward
from fxsplit_encoder.compile.splitting_ops import splitting_targets
from fxsplit_encoder.errors import CompileError, ConfigError


def test_a_configured_name_stands_for_all_overloads() -> None:
    targets = splitting_targets(["fxsplit::varlen_attention"])
    assert targets == {torch.ops.fxsplit.varlen_attention.default, torch.ops.fxsplit.varlen_attention.out}


def test_dense_attention_stands_for_its_kernels_too() -> None:
    targets = splitting_targets(["aten::scaled_dot_product_attention"])
    assert torch.ops.aten.scaled_dot_product_attention.default in targets
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in targets
    assert torch.ops.aten._scaled_dot_product_efficient_attention.default in targets
    assert torch.ops.aten.mm.default not in targets


@pytest.mark.parametrize("name", ["fxsplit::no_such_op", "nowhere::mm", "mm", "aten.mm"])
def test_an_unknown_splitting_op_is_named(name: str, trace: Any) -> None:
    with pytest.raises(ConfigError, match=f"splitting_ops: no operator '{name}'"):
        splitting_targets([name])
    with pytest.raises(ConfigError, match=f"splitting_ops: no operator '{name}'"):
        trace(lambda y, i: y, options=CompileOptions(("fxsplit::varlen_attention", name), "eager"))


def test_any_op_may_split(trace: Any, inputs: Any) -> None:
    options = CompileOptions(("fxsplit::varlen_attention", "aten::gelu"), "eager")
    bound = trace(lambda y, i: F.gelu(y).view(-1, 1, 8) + 1, options=options)
    assert [step.name.split("_")[0] for step in bound.program.splits] == ["varlen", "gelu"]
    plain = trace(lambda y, i: F.gelu(y).view(-1, 1, 8) + 1)
    torch.testing.assert_close(bound(inputs(9)), plain(inputs(9)))


class ClipLikeBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def dense() -> tuple[nn.Module, BoundProgram]:
    torch.manual_seed(0)
    model = nn.Sequential(*(ClipLikeBlock(16) for _ in range(3))).eval()
    options = CompileOptions(("fxsplit::varlen_attention", "aten::scaled_dot_product_attention"), "eager")
    example = {"pixels": torch.randn(3, 5, 16)}
    return model, trace_forward(lambda inputs: model(inputs["pixels"]), example, {"pixels": [0]}, options)


def test_dense_attention_splits_a_module_that_nobody_adapted(dense: Any) -> None:
    model, bound = dense
    program = bound.program
    assert [step.kind for step in program.steps] == ["piece", "split"] * 3 + ["piece"]
    assert program.num_distinct == 3
    assert program.padding.proved, str(program.padding)
    assert program.token_symbol is not None
    for images in (2, 3, 7):
        pixels = torch.randn(images, 5, 16)
        with torch.no_grad():
            torch.testing.assert_close(bound({"pixels": pixels}), model(pixels))
        assert bound.tokens({"pixels": pixels}) == images


def over_one_sequence(inputs: dict[str, Tensor]) -> Tensor:
    q = inputs["x"].view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(-1, 8) + inputs["x"]


def test_a_batch_of_one_is_no_token_count() -> None:
    options = CompileOptions(("aten::scaled_dot_product_attention",), "eager")
    bound = trace_forward(over_one_sequence, {"x": torch.randn(12, 8)}, {"x": [0]}, options)
    assert [step.kind for step in bound.program.steps] == ["piece", "split", "piece"]
    assert bound.tokens({"x": torch.randn(9, 8)}) == 9
    assert not bound.program.padding.proved  # every row attends to all others
    torch.testing.assert_close(bound({"x": (x := torch.randn(9, 8))}), over_one_sequence({"x": x}))


def test_two_sequences_of_different_lengths_tell_nothing() -> None:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        return torch.cat([over_one_sequence({"x": inputs[name]}) for name in ("x", "y")])

    examples = {"x": torch.randn(12, 8), "y": torch.randn(7, 8)}
    options = CompileOptions(("aten::scaled_dot_product_attention",), "eager")
    program = trace_forward(forward, examples, {"x": [0], "y": [0]}, options).program
    assert program.token_symbol is None
    assert program.tokens_unknown.startswith("its splitting ops (aten::_scaled_dot_product_flash_attention")
    assert program.tokens_unknown.endswith("do not have one size that varies, which would count its tokens")


def test_results_that_nobody_reads_get_no_slot(dense: Any) -> None:
    _, bound = dense
    for step in bound.program.splits:
        assert not step.returns_tensor
        assert step.outputs[0] >= 0
        assert set(step.outputs[1:]) == {-1}


@pytest.mark.parametrize(
    "forward",
    [
        lambda y, i: y[: int(i["index"].max())],
        lambda y, i: y if y.sum() > 0 else -y,
        lambda y, i: y + y[y[:, 0] > 0].shape[0],
    ],
    ids=["computed slice", "branch", "computed size"],
)
def test_a_graph_whose_sizes_or_branches_depend_on_data_is_refused(forward: Any, trace: Any) -> None:
    with pytest.raises(
        CompileError, match=r"does not trace as one graph|on the host|no input of the graph determines"
    ):
        trace(forward)


@pytest.mark.parametrize(
    "forward",
    [lambda y, i: y * y.sum().item(), lambda y, i: y[y[:, 0] > 0].sum(0) + y],
    ids=["item", "boolean index"],
)
def test_data_that_stays_within_a_piece_is_served_but_never_padded(
    forward: Any, trace: Any, inputs: Any
) -> None:
    bound = trace(forward)
    assert not bound.program.padding.proved
    attention = trace(lambda y, i: y * 1)
    for rows in (9, 16):
        expected = forward(attention(inputs(rows)), inputs(rows))
        torch.testing.assert_close(bound(inputs(rows)), expected)


def test_a_number_read_from_a_tensor_is_refused_where_tracing_allows_it(trace: Any) -> None:
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(CompileError, match="reads a tensor's value on the host"),
    ):
        trace(lambda y, i: y * i["index"].max().item())


def test_attention_over_different_counts_is_refused(trace: Any) -> None:
    def forward(y: Tensor, i: dict[str, Tensor]) -> Tensor:
        table = torch.ones(6, 2, 4)
        cu = torch.tensor([0, 6], dtype=torch.int32)
        return y + torch.ops.fxsplit.varlen_attention(table, table, table, cu, 6, 1.0).sum()

    with pytest.raises(CompileError, match="different token counts"):
        trace(forward)
