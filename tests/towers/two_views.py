"""What every tower with two views must do, as tests that the families' test classes inherit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError

from .random_weights import randomize

Crops = tuple[int, int]

batches = st.lists(st.sampled_from([(0, 0), (1, 2), (2, 1), (2, 2), (3, 1)]), max_size=5)


@dataclass
class Family:
    """One tower, how its inputs are made, and an independent answer."""

    wrapped: Any
    make_inputs: Callable[[list[Crops], int], dict[str, Any]]
    """From the (columns, rows) of crops of every image, and a seed."""
    expected: Callable[[dict[str, Any]], list[Tensor]]
    """Every image's embedding."""
    tile: Callable[[Any], Tensor]
    """(tiles, rows, hidden) from the output of the tower's own forward."""
    traced: dict[str, Any] = field(default_factory=dict)
    """The program of each path. Tracing takes seconds; all managers share it."""

    @property
    def budgets(self) -> dict[str, Any]:
        """One to four images, two and six crops."""
        tokens = {path: view.tokens for path, view in self.wrapped.views.items()}
        whole = [n * tokens["global"] for n in (1, 2, 4)]
        return {
            "global": {"token_budgets": whole},
            "local": {"token_budgets": [n * tokens["local"] for n in (2, 6)]},
        }

    def manager(self, **config: Any) -> Any:
        paths = {name: {**own, **config.pop(name, {})} for name, own in self.budgets.items()}
        values: dict[str, Any] = {
            "paths": paths,
            "max_items_per_batch": 4,
            "exact_min_hits": 1,
            "debug": True,
            **config,
        }
        manager = fx.EncoderCudaGraphManager(self.wrapped, fx.EncoderConfig(**values), log_interval=0)
        for name, path in manager.paths.items():
            if name in self.traced and values.get("mode") != "breakable":  # that is of the untouched module
                path.forward.bind(self.traced[name])
        manager.capture()
        self.traced.update(
            {name: program for name, program in manager.programs.items() if program is not None}
        )
        return manager


def assert_items(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [item.shape for item in got] == [item.shape for item in expected]
    for item, wanted in zip(got, expected, strict=True):
        assert wanted.abs().max() > 0.5
        # Both are some 2e-5 from float64 where a page has 4096 patches.
        torch.testing.assert_close(item, wanted.to(item.dtype), rtol=0, atol=1e-4)
        assert item.untyped_storage().nbytes() == item.nbytes


def resize_bicubic(grid_HWC: Tensor, side: int) -> Tensor:
    """Keys' cubic convolution (a = -0.5), widened when shrinking."""
    if side == grid_HWC.shape[0]:
        return grid_HWC
    weights = cubic_weights(grid_HWC.shape[0], side)
    return torch.einsum("ih,jw,hwc->ijc", weights, weights, grid_HWC)


def cubic_weights(old: int, new: int) -> Tensor:
    scale = old / new
    widened = max(scale, 1.0)
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        center = (i + 0.5) * scale
        for j in range(old):
            distance = abs((j + 0.5 - center) / widened)
            if distance < 1:
                weights[i, j] = 1.5 * distance**3 - 2.5 * distance**2 + 1
            elif distance < 2:
                weights[i, j] = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    return weights / weights.sum(1, keepdim=True)


class TwoViewTests:
    """What is each family's own. Inherit, and give the module a fixture `family`."""

    @pytest.fixture(scope="class")
    @classmethod
    def managers(cls, family: Family) -> dict[str, Any]:
        return {mode: family.manager(mode=mode) for mode in ("full", "piecewise")}

    # --- equal to the reference

    @pytest.mark.parametrize(
        "crops",
        [[(0, 0)], [(2, 1)], [(0, 0), (2, 2), (1, 2)], [(3, 3), (0, 0)], [(1, 2)] * 5 + [(0, 0)]],
        ids=str,
    )
    def test_vllm_42224_vllm_46034_images_equal_the_reference(
        self, family: Family, managers: Any, crops: list[Crops]
    ) -> None:
        inputs = family.make_inputs(crops, len(crops))
        assert_items(managers["full"].execute(inputs), family.expected(inputs))

    # --- weights that change

    def test_captures_follow_weights_that_are_loaded_in_place(self, family: Family) -> None:
        """Also the tables that were folded from them."""
        manager = family.manager(mode="full")
        inputs = family.make_inputs([(2, 1), (0, 0)], 6)
        before = manager.execute(inputs)
        weights = {name: tensor.clone() for name, tensor in family.wrapped.tower.state_dict().items()}
        try:
            randomize(family.wrapped.tower, seed=17)
            after = manager.execute(inputs)
            assert_items(after, family.expected(inputs))
            assert (after[0] - before[0]).abs().max() > 0.1
        finally:
            for name, tensor in family.wrapped.tower.state_dict().items():
                tensor.data.copy_(weights[name])  # which leaves no version
        assert_items(manager.execute(inputs), before)
        assert manager.stats().hits == 6

    # --- inputs that do not fit

    def test_tiles_of_another_number_or_size_are_refused(self, family: Family, managers: Any) -> None:
        for path, view in family.wrapped.views.items():
            inputs = family.make_inputs([(2, 1), (1, 2)], 0)
            for wrong in (inputs[view.input_name][1:], inputs[view.input_name][..., 1:], None):
                with pytest.raises(InputError, match=f"{view.input_name}: expected .*{view.shape[-1]}"):
                    managers["full"].execute({**inputs, view.input_name: wrong})
            config = fx.EncoderConfig(paths={path: {"token_budgets": [1]}}, max_items_per_batch=1)
            manager = fx.EncoderCudaGraphManager(family.wrapped, config, log_interval=0)
            manager.paths[path].compile()
            assert f"paths.{path}.token_budgets: 1 has no room for a tile" in manager.reports[-1]

    # --- what the protocol says

    def test_the_module_is_the_tower_seen_from_outside(self, family: Family) -> None:
        wrapped = family.wrapped
        assert wrapped.config is wrapped.tower.config
        (tiles,) = wrapped.example_inputs()
        assert family.tile(wrapped(tiles)).shape[0] == 1
        with pytest.raises(AttributeError):
            wrapped.no_such_attribute  # noqa: B018

    def test_what_is_fixed_about_the_tower(self, family: Family) -> None:
        views = family.wrapped.views
        config = family.wrapped.get_encoder_cudagraph_config()
        low, high = family.wrapped.get_encoder_cudagraph_budget_range(None)
        assert (low, high) == (views["global"].tokens, 8 * low)
        assert config.paths["global"].min_token_budget == views["global"].tokens
        assert config.paths["local"].min_token_budget == views["local"].tokens
        assert (config.paths["global"].allow_zero_tokens, config.paths["local"].allow_zero_tokens) == (
            False,
            True,
        )


class ServedViewTests(TwoViewTests):
    """The ways of two paths through the manager too."""

    @settings(max_examples=4, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(["full", "piecewise"]), st.lists(batches, min_size=2, max_size=2), st.integers(0, 9)
    )
    def test_what_an_earlier_batch_left_behind_is_not_seen(
        self, family: Family, managers: Any, mode: str, sequence: list[list[Crops]], seed: int
    ) -> None:
        for number, crops in enumerate(sequence):
            inputs = family.make_inputs(crops, seed + number)
            assert_items(managers[mode].execute(inputs), family.expected(inputs))

    # --- the four ways in which two paths can be served

    def test_both_views_are_replayed(self, family: Family) -> None:
        manager = family.manager()
        inputs = family.make_inputs([(2, 1), (0, 0), (2, 2)], 2)
        assert_items(manager.execute(inputs), family.expected(inputs))
        (batch,) = manager.plan(inputs).batches
        assert {name: path.result for name, path in batch.paths.items()} == {"global": "hit", "local": "hit"}
        stats = manager.stats()
        assert (stats.hits, stats.misses) == (3, {})
        assert self.replays(family, manager) == {("global", 4): 1, ("local", 6): 1}

    def test_without_crops_their_view_is_skipped(self, family: Family) -> None:
        manager = family.manager()
        inputs = family.make_inputs([(0, 0), (0, 0)], 3)
        assert_items(manager.execute(inputs), family.expected(inputs))
        (batch,) = manager.plan(inputs).batches
        assert batch.paths["local"].result == "skipped"
        assert (manager.stats().hits, manager.stats().misses) == (2, {})
        assert self.replays(family, manager) == {("global", 2): 1}

    def test_a_view_without_captures_runs_beside_a_replay(self, family: Family) -> None:
        """As when memory had no room for the larger of the captures."""
        tokens, size = family.wrapped.views["global"].tokens, family.wrapped.views["global"].shape[-1]
        manager = family.manager(
            **{"global": {"token_budgets": [8 * tokens]}, "max_graph_bytes": 8 * 3 * size * size * 4 - 1}
        )
        assert manager.budget_graphs["global"] == {}
        assert "is dropped" in manager.reports[0]
        inputs = family.make_inputs([(2, 1), (1, 2)], 4)
        assert_items(manager.execute(inputs), family.expected(inputs))
        assert manager.stats().misses == {fx.MissReason.NOT_CAPTURED: 2}
        assert self.replays(family, manager) == {("local", 6): 1}

    def test_both_views_fall_back(self, family: Family) -> None:
        manager = family.manager(**{"global": {"mode": "none"}})
        inputs = family.make_inputs([(3, 3)], 5)
        assert_items(manager.execute(inputs), family.expected(inputs))
        (batch,) = manager.plan(inputs).batches
        assert batch.paths["global"].reason == fx.MissReason.NOT_CAPTURED
        assert batch.paths["local"].reason == fx.MissReason.OVER_LARGEST_BUDGET
        assert (manager.stats().hits, sum(manager.stats().misses.values())) == (0, 1)
        assert self.replays(family, manager) == {}

    @staticmethod
    def replays(family: Family, manager: Any) -> dict[tuple[str, int], int]:
        """(path, tiles of the budget): replays."""
        return {
            (key.path, key.budget // family.wrapped.views[key.path].tokens): counts.replays
            for key, counts in manager.stats().budgets.items()
            if counts.replays
        }

    # --- the trace

    def test_each_view_is_traced_once_for_all_counts(self, family: Family) -> None:
        """As one graph: tracing allows no break, and what does not trace is noted in the reports."""
        manager = family.manager(mode="piecewise")
        assert manager.reports == []
        counters.clear()
        for crops in ([(0, 0)], [(2, 1)], [(3, 3)], [(2, 2)] * 3, [(1, 2)] * 6):
            manager.execute(family.make_inputs(crops, 0))
        assert not counters["stats"]
        assert not counters["graph_break"]
        for program in manager.programs.values():
            assert len(program.program.splits) > 1
