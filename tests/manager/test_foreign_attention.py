"""Attention of another library as a splitting op, over (1, tokens, heads, head_dim) as vLLM calls its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention import varlen_attention
from fxsplit_encoder.manager.tower import RowGroups

from . import managers
from .mock_towers import WIDTH, Config, SplitModel, assert_serves, batch

pytestmark = pytest.mark.usefixtures("traced_once")

_library = torch.library.Library("fxsplit_test_foreign", "DEF")
_library.define("packed_attn(Tensor query, Tensor key, Tensor value, Tensor lengths) -> Tensor")
_NAME = "fxsplit_test_foreign::packed_attn"
MOST_ITEMS = 4
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
        lengths = torch.full((MOST_ITEMS + 1,), budget, dtype=torch.int32)
        lengths[0] = 0
        return {"patches": torch.randn(budget, WIDTH), "lengths": lengths}

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        ends = torch.tensor([0, *mm_kwargs["lengths"]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        padded = torch.cat([ends, ends[-1:].expand(MOST_ITEMS + 1 - len(ends))])
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
        assert lengths.tolist()[len(real) :] == [8] * (MOST_ITEMS + 1 - len(real))
    assert manager.stats().hits == 6


def test_sizes_that_do_not_vary_are_shown() -> None:
    class Constant(ForeignAttention):
        def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
            few = self.linear.weight.view(1, 4, 2, WIDTH)
            pooled = torch.ops.fxsplit_test_foreign.packed_attn(few, few, few, torch.tensor([0, 4]))
            return inputs["patches"] + pooled.sum()

    (report,) = captured(Constant()).reports
    assert f"its splitting ops ({_NAME} over (1, 4, 2, {WIDTH})) do not have one size that varies" in report


def test_a_batch_is_no_query_of_ours() -> None:
    query = torch.randn(1, 4, 2, 4)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(InputError, match=r"expected \(tokens, heads, head_dim\), got \(1, 4, 2, 4\); join"):
        torch.ops.fxsplit.varlen_attention(query, query, query, lengths, 4, 1.0)


# --- inputs with a row for a group of patches, as vLLM's Qwen2.5-VL has its order of tokens


GROUP = 4


class OrderedTokens(SplitModel):
    """Two layers over tokens of four patches each, in an order that is an input, and back."""

    group = GROUP

    def get_encoder_cudagraph_config(self) -> Config:
        return Config(["image"], ["patches", "order", "back", "lengths"], WIDTH)

    def inputs_of(self, lengths: list[int], tokens: int) -> dict[str, Tensor]:
        order = torch.arange(tokens).flip(0)
        ends = torch.tensor([0, *lengths]).cumsum(0) * GROUP
        ends = torch.cat([ends, ends[-1:].expand(MOST_ITEMS + 1 - len(ends))])
        return {"order": order, "back": order.argsort(), "lengths": ends.to(torch.int32)}

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        return [fx.EncoderItemSpec(GROUP * n, n) for n in mm_kwargs["lengths"]]

    def capture_values(self, budget: int) -> dict[str, Any]:
        return {"patches": torch.randn(GROUP * budget, WIDTH), **self.inputs_of([budget], budget)}

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        lengths = mm_kwargs["lengths"]
        return {"patches": mm_kwargs["patches"], **self.inputs_of(lengths, sum(lengths))}

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        x = inputs["patches"]
        rows = x.shape[0]
        x = x.reshape(rows // GROUP, GROUP, -1)[inputs["order"]].reshape(rows, -1)
        for _ in range(2):
            q = self.linear(x).view(-1, 2, WIDTH // 2)
            x = x + varlen_attention(q, q, q, inputs["lengths"], rows, 0.5).flatten(1)
        return x.view(-1, GROUP, WIDTH).sum(1)[inputs["back"]]


def grouped(*lengths: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths))
    patches = torch.randn(GROUP * sum(lengths), WIDTH, generator=generator)
    return {"patches": patches, "lengths": list(lengths)}


class TokensByImage(OrderedTokens):
    """Captures are given images of four tokens each, so that an input with a row an image looks like one with
    a row for sixteen patches.
    """

    def inputs_of(self, lengths: list[int], tokens: int) -> dict[str, Tensor]:
        inputs = super().inputs_of(lengths, tokens)
        return {**inputs, "images": torch.arange(float(len(lengths))).add(1)}

    def capture_values(self, budget: int) -> dict[str, Any]:
        inputs = self.inputs_of([4] * (budget // 4), budget)
        return {"patches": torch.randn(GROUP * budget, WIDTH), **inputs}

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        own = {name: value for name, value in inputs.items() if name != "images"}
        scale = inputs["images"].repeat_interleave(4)
        return super().encoder_cudagraph_forward(own) * scale[:, None]

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        values = self.batch_values(mm_kwargs)
        images = values.pop("images")
        scale = images.repeat_interleave(torch.tensor(mm_kwargs["lengths"]))
        return super().encoder_cudagraph_forward(values) * scale[:, None]


def test_a_trace_knows_them_as_a_part_of_the_patches(poisoned_memory: None) -> None:
    model = OrderedTokens()
    manager = managers.captured(model, token_budgets=(4, 8, 12), debug=False)
    assert manager.reports == []
    path = manager.paths["default"]
    assert path.groups.factors == {"order": GROUP, "back": GROUP}
    assert path.program is not None
    assert path.program.program.num_rows_slot is not None  # masks know the rows, however they are written
    for lengths in ((4,), (8,), (3, 5, 4), (12,), (13,)):
        assert_serves(manager, grouped(*lengths))
    assert (manager.stats().hits, manager.stats().items) == (6, 7)


def test_a_proportion_of_captures_that_a_batch_does_not_have_is_encoded_eagerly() -> None:
    model = TokensByImage()
    manager = managers.captured(model, token_budgets=(4, 8, 12), debug=False)
    assert manager.paths["default"].groups.factors["images"] == 4 * GROUP
    for lengths in ((4, 4), (2, 5), (3,)):
        assert_serves(manager, grouped(*lengths))
    assert (manager.stats().hits, manager.stats().items) == (2, 5)


@pytest.mark.parametrize(
    ("rows", "factors"),
    [
        ({"patches": (16, 32), "order": (4, 8)}, {"order": 4}),
        ({"patches": (16, 32), "order": (4, 8), "pairs": (8, 16)}, {"order": 4, "pairs": 2}),
        ({"patches": (16, 32), "order": (4, 9)}, {}),
        ({"patches": (16, 32), "lengths": (8, 8)}, {}),
        ({"patches": (16, 16), "order": (4, 4)}, {}),
        ({"patches": (16, 32), "none": (0, 2)}, {}),
    ],
)
def test_factors_hold_in_every_sample(rows: dict[str, tuple[int, int]], factors: dict[str, int]) -> None:
    samples = [{name: torch.zeros(counts[n], 2) for name, counts in rows.items()} for n in range(2)]
    groups = RowGroups.of([{**sample, "number": torch.tensor(1)} for sample in samples])
    assert groups.factors == factors


def test_what_is_spread_is_gathered_again() -> None:
    groups = RowGroups({"order": 2}, ["patches"])
    values = {"patches": torch.randn(4, 1), "order": torch.tensor([1, 0]), "kept": None}
    spread = groups.spread(values)
    assert spread["kept"] is None
    assert spread["order"].tolist() == [1, 1, 0, 0]
    parts = groups.spread({**values, "order": [torch.tensor([1]), torch.tensor([0])]})["order"]
    assert [part.tolist() for part in parts] == [[1, 1], [0, 0]]
    with pytest.raises(InputError, match=r"order: expected a row for every 2 of 6 patches.*; got 2"):
        groups.spread({**values, "patches": torch.randn(6, 1)})
    gathered = groups.gather({name: value for name, value in spread.items() if value is not None})
    assert torch.equal(gathered["order"], values["order"])
    assert gathered["patches"] is values["patches"]
