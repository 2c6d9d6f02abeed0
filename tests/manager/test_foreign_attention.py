"""Attention of another library as a splitting op, over (1, tokens, heads, head_dim) as vLLM calls its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from . import managers
from .mock_towers import WIDTH, Config, SplitModel, assert_serves, batch

pytestmark = pytest.mark.usefixtures("traced_once")

_library = torch.library.Library("fxsplit_test_foreign", "DEF")
_library.define("packed_attn(Tensor query, Tensor key, Tensor value, Tensor lengths) -> Tensor")
_NAME = "fxsplit_test_foreign::packed_attn"
_MOST_ITEMS = 4
captured = functools.partial(
    managers.captured, mode="auto", token_budgets=(4, 8), splitting_ops=(_NAME,), debug=False
)


def _attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """As fast kernels do: rows outside every segment stay as the memory was, here NaN, and are read."""
    segment = torch.searchsorted(lengths[1:].contiguous(), torch.arange(query.shape[1]), right=True)
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key)
    weights = logits.masked_fill(segment[:, None] != segment[None, :], float("-inf")).softmax(-1)
    out = torch.full_like(query, float("nan"))
    out[:, : lengths[-1]] = torch.einsum("bhqk,bkhd->bqhd", weights, value)[:, : lengths[-1]]
    return out


_library.impl("packed_attn", _attend, "CPU")
torch.library.register_fake("fxsplit_test_foreign::packed_attn", lambda q, k, v, _: q * 1, lib=_library)


class ForeignAttention(SplitModel):
    """Two layers, so that what attention leaves in pad rows would reach real ones."""

    pads = True
    """Whether lengths are as many as those of a capture."""

    def get_encoder_cudagraph_config(self) -> Config:
        return Config(["image"], ["patches", "lengths"], WIDTH)

    def capture_values(self, budget: int) -> dict[str, Any]:
        lengths = torch.full((_MOST_ITEMS + 1,), budget, dtype=torch.int32)
        lengths[0] = 0
        return {"patches": torch.randn(budget, WIDTH), "lengths": lengths}

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        ends = torch.tensor([0, *mm_kwargs["lengths"]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        padded = torch.cat([ends, ends[-1:].expand(_MOST_ITEMS + 1 - len(ends))])
        return {"patches": mm_kwargs["patches"], "lengths": padded if self.pads else ends}

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        x = inputs["patches"]
        for _ in range(2):
            q = self.linear(x).view(1, -1, 2, WIDTH // 2)
            y = torch.ops.fxsplit_test_foreign.packed_attn(q, q, q, inputs["lengths"])
            x = x + y.reshape(-1, WIDTH)
        return x


@pytest.mark.parametrize(("mode", "breaks"), [("piecewise", 2), ("full", 0)])
def test_it_splits_over_a_batch_of_one_sequence(mode: str, breaks: int, poisoned_memory: None) -> None:
    model = ForeignAttention()
    manager = captured(model, mode=mode, debug=True)
    program = manager.programs["default"]
    assert program is not None
    assert [step.kind for step in program.program.steps] == ["piece", "split"] * 2 + ["piece"]
    assert {graph.graph.num_eager_breaks for graph in manager.budget_graphs["default"].values()} == {breaks}  # type: ignore[attr-defined]
    for lengths in ((3,), (2, 5), (1, 1), (3, 1, 2), (2, 7)):
        assert_serves(manager, batch(*lengths))
    assert manager.stats().hits == 10
    assert manager.stats().padding_fraction > 0
    assert manager.reports == []


def test_lengths_that_another_attention_reads_never_fall(poisoned_memory: None) -> None:
    """Where the tower leaves it to the manager to make as many as a capture has, and says not how."""
    model = ForeignAttention()
    model.pads = False
    manager = captured(model, splitting_ops=("fxsplit::varlen_attention",))
    (report,) = manager.reports
    assert "it has no splitting op, so nothing tells which of its sizes counts tokens" in report
    assert f"(fxsplit::varlen_attention) is in its graph; {_NAME} in its graph could be listed" in report
    lengths = manager.budget_graphs["default"][8].input_buffers["lengths"]
    for real in ((2, 6), (8,), (1, 2, 5)):  # full, since nothing masks what this attention leaves in pad rows
        assert_serves(manager, batch(*real))
        assert lengths.tolist()[len(real) :] == [8] * (_MOST_ITEMS + 1 - len(real))
    assert manager.stats().hits == 6


def test_sizes_that_do_not_vary_are_shown() -> None:
    class Constant(ForeignAttention):
        def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
            few = self.linear.weight.view(1, 4, 2, WIDTH)
            pooled = torch.ops.fxsplit_test_foreign.packed_attn(few, few, few, torch.tensor([0, 4]))
            return inputs["patches"] + pooled.sum()

    (report,) = captured(Constant()).reports
    assert f"its splitting ops ({_NAME} over (1, 4, 2, {WIDTH})) do not have one size that varies" in report
