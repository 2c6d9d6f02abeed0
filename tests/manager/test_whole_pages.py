"""Budgets of whole pages, as DeepSeek-OCR's of 272 tokens: what fills them needs no proof of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import fxsplit_encoder as fx
from fxsplit_encoder.planning.limits import Limits

from . import managers
from .mock_towers import WIDTH, Config, EncoderProtocol, ItemSpec, PathConfig, assert_equal_items

pytestmark = pytest.mark.usefixtures("traced_once")

PAGE = 6
"""Tokens of a page."""


class Pages(EncoderProtocol, nn.Module):
    """Written for vLLM: an item is one page, a row of pixels; as many pages are made as a budget holds. It
    refuses to run on none. Pages are compared with one another, so that no row may be padded.
    """

    def __init__(self, *, declared: bool = False, traceable: bool = True) -> None:
        super().__init__()
        self.declares_padding, self.traceable = declared, traceable
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def get_encoder_cudagraph_config(self) -> Config:
        return Config(["image"], ["pixels"], WIDTH, paths={"default": PathConfig(PAGE)})

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[ItemSpec]:
        return [ItemSpec(PAGE, PAGE, {"default": PAGE}) for _ in mm_kwargs["pixels"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        return {"pixels": mm_kwargs["pixels"][indices]}

    def capture_values(self, budget: int) -> dict[str, Any]:
        return {"pixels": torch.randn(budget // PAGE, PAGE, WIDTH)}

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"pixels": mm_kwargs["pixels"]}

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        if not self.traceable:
            torch._dynamo.graph_break()
        x = self.linear(inputs["pixels"]).reshape(len(inputs["pixels"]), -1, 2, WIDTH // 2).transpose(1, 2)
        y = scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(-1, WIDTH)
        return y - y.mean(0)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        return self.encoder_cudagraph_forward(mm_kwargs)


def captured(model: Any, pages: tuple[int, ...], **settings: Any) -> fx.EncoderCudaGraphManager:
    budgets = tuple(PAGE * n for n in pages)
    return managers.captured(model, token_budgets=budgets, packing="greedy", **{"debug": False, **settings})


def batch(pages: int) -> dict[str, Any]:
    return {"pixels": torch.randn(pages, PAGE, WIDTH, generator=torch.Generator().manual_seed(pages))}


def expected(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    return list(model.encoder_eager_forward(inputs).split(PAGE))


@pytest.mark.parametrize("traceable", [True, False])
def test_pages_that_fill_a_budget_are_replayed_from_the_first_time(traceable: bool) -> None:
    model = Pages(traceable=traceable)
    manager = captured(model, (1, 2, 4), mode="full")
    # Three pages would be followed by padding, which nothing allows.
    assert sorted(manager.budget_graphs["default"]) == [PAGE, 2 * PAGE]
    (dropped,) = [report for report in manager.reports if "budget" in report]
    assert dropped.startswith("path default: budget 24 is dropped: ")
    for pages, hits in ((1, 1), (2, 3), (1, 4)):
        inputs = batch(pages)
        assert len(manager.plan(inputs).batches) == 1
        assert_equal_items(manager.execute(inputs), expected(model, inputs))
        assert manager.stats().hits == hits
    assert manager.stats().padding_fraction == 0
    assert not manager.paths["default"].unpadded.sizes


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_one_page_is_captured_whatever_is_known_of_padding(
    mode: str, traceable: bool, declared: bool
) -> None:
    model = Pages(declared=declared, traceable=traceable)
    manager = captured(model, (1,), mode=mode, debug=True)
    inputs = batch(1)
    assert_equal_items(manager.execute(inputs), expected(model, inputs))
    assert manager.stats().hits == 1


@pytest.mark.parametrize("traceable", [True, False])
def test_a_tower_whose_pages_are_smaller_than_it_says_falls_back(traceable: bool) -> None:
    class Halves(Pages):
        def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[ItemSpec]:
            tokens = mm_kwargs["pixels"].shape[1]
            return [ItemSpec(tokens, tokens, {"default": tokens}) for _ in mm_kwargs["pixels"]]

        def capture_values(self, budget: int) -> dict[str, Any]:
            return {"pixels": torch.randn(2 * budget // PAGE, PAGE // 2, WIDTH)}

    model = Halves(traceable=traceable)
    manager = captured(model, (1,), mode="full")
    inputs = {"pixels": torch.randn(1, PAGE // 2, WIDTH)}
    assert_equal_items(manager.execute(inputs), [model.encoder_eager_forward(inputs)])
    inputs = {"pixels": torch.randn(2, PAGE // 2, WIDTH)}
    assert_equal_items(manager.execute(inputs), list(model.encoder_eager_forward(inputs).split(PAGE // 2)))
    assert manager.stats().hits == 2
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 1}


class OnePageIsSpecial(Pages):
    """A trace takes no size for 1, so that the graph has no such case."""

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = super().encoder_cudagraph_forward(inputs, path)
        return output * 2 if len(inputs["pixels"]) == 1 else output


@pytest.mark.parametrize(("mode", "budgets"), [("full", [2 * PAGE]), ("exact", [])])
def test_a_trace_that_does_not_hold_for_one_page_serves_the_others(mode: str, budgets: list[int]) -> None:
    model = OnePageIsSpecial()
    manager = captured(model, (1, 2), mode=mode, exact_min_hits=1)
    assert sorted(manager.budget_graphs["default"]) == budgets
    for pages, hits in ((1, 0), (2, 2), (1, 2), (2, 4)):
        inputs = batch(pages)
        assert_equal_items(manager.execute(inputs), expected(model, inputs))
        assert manager.stats().hits == hits


def test_which_budgets_whole_tiles_fill() -> None:
    limits = Limits({"a": (6, 12, 24), "b": (6, 12), "c": (4, 6, 12)}, 4, 0, tiles={"a": 6, "c": 6})
    for path, full in {"a": [6, 12], "b": [], "c": [12]}.items():
        assert [b for b in limits.path_budgets[path] if limits.is_always_full(path, b)] == full
