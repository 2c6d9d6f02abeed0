"""Inputs for which a tower gives None, and inputs that a batch leaves out, as models written for vLLM do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ReplayError

from .mock_towers import PackedModel, SplitModel, UntraceableModel, Values, alone, assert_equal_items, batch


class Unused:
    """`sequence_lengths` is of use to another attention backend than the model's."""

    given: Any = None
    """What batches give."""

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any, **kwargs: Any) -> Values:
        made = super().prepare_encoder_cudagraph_capture_inputs(*args, **kwargs)  # type: ignore[misc]
        return Values(made.values | {"sequence_lengths": None})

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, **kwargs: Any) -> Values:
        made = super().prepare_encoder_cudagraph_replay_buffers(*args, **kwargs)  # type: ignore[misc]
        return Values(made.values | ({} if self.given == "no key" else {"sequence_lengths": self.given}))

    def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Tensor:
        inputs = dict(inputs)
        assert inputs.pop("sequence_lengths") is None
        output: Tensor = super().encoder_cudagraph_forward(inputs, path)  # type: ignore[misc]
        return output

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        values = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0).values
        return self.encoder_cudagraph_forward({**values, "sequence_lengths": None})


class UnusedSplit(Unused, SplitModel): ...


class UnusedUntraceable(Unused, UntraceableModel): ...


def captured(model: Any, **settings: Any) -> fx.EncoderCudaGraphManager:
    own: dict[str, Any] = {"token_budgets": (4, 8), "max_items_per_batch": 4, "debug": True, **settings}
    manager = fx.EncoderCudaGraphManager(model, fx.EncoderConfig(**own), log_interval=0)
    manager.capture()
    return manager


@pytest.mark.parametrize("make", [UnusedSplit, UnusedUntraceable])
@pytest.mark.parametrize("mode", ["full", "piecewise", "breakable", "exact", "none"])
def test_an_input_that_is_none_is_not_used(make: Any, mode: str) -> None:
    model = make()
    manager = captured(model, mode=mode, exact_min_hits=1)
    for given in (None, "no key"):
        model.given = given
        for lengths in ((3,), (2, 5), (9,)):
            inputs = batch(*lengths)
            assert_equal_items(manager.execute(inputs), alone(model, inputs))
    hits = {"none": 0, "exact": 8}.get(mode, 6)
    assert manager.stats().hits == hits
    for graph in manager.budget_graphs["default"].values():
        assert "sequence_lengths" not in graph.input_buffers


@pytest.mark.parametrize("make", [UnusedSplit, UnusedUntraceable])
def test_what_captures_are_made_without_goes_through_the_eager_forward(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    manager = captured(model, mode="full")
    eager = []
    model.encoder_eager_forward = lambda mm_kwargs, path="default": eager.append(path) or torch.ones(3, 8)
    model.given = torch.tensor([3])
    (output,) = manager.execute(batch(3))
    assert eager == ["default"] and output.eq(1).all()
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 1}
    assert "sequence_lengths: this batch gives a value, and the tower gave None for captures" in caplog.text


def test_an_input_that_is_used_at_some_sizes_only_costs_these_sizes() -> None:
    class Varying(UntraceableModel):
        def prepare_encoder_cudagraph_capture_inputs(self, budget: int, *args: Any, **kwargs: Any) -> Values:
            made = super().prepare_encoder_cudagraph_capture_inputs(budget, *args, **kwargs)
            return Values(made.values | {"extra": None if budget <= 8 else torch.ones(2)})

        def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Tensor:
            return super().encoder_cudagraph_forward({n: v for n, v in inputs.items() if n != "extra"}, path)

    manager = captured(Varying(), mode="full", token_budgets=(4, 8, 16))
    assert sorted(manager.budget_graphs["default"]) == [4, 8]
    assert any("extra is a tensor for 16 tokens and None for another number" in r for r in manager.reports)
    inputs = batch(3, 2)
    assert_equal_items(manager.execute(inputs), alone(PackedModel(), inputs))
    assert manager.stats().hits == 2


class Scaled:
    """Reads a constant, which batches leave out until `given` says what they give."""

    given: Any = "no key"

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any, **kwargs: Any) -> Values:
        made = super().prepare_encoder_cudagraph_capture_inputs(*args, **kwargs)  # type: ignore[misc]
        return Values(made.values | {"scale": torch.tensor([2.0, 3.0])})

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, **kwargs: Any) -> Values:
        made = super().prepare_encoder_cudagraph_replay_buffers(*args, **kwargs)  # type: ignore[misc]
        return Values(made.values | ({} if isinstance(self.given, str) else {"scale": self.given}))

    def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Tensor:
        inputs = dict(inputs)
        scale = inputs.pop("scale")
        output: Tensor = super().encoder_cudagraph_forward(inputs, path)  # type: ignore[misc]
        return output * scale.sum()

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        values = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0).values
        return self.encoder_cudagraph_forward({"scale": torch.tensor([2.0, 3.0]), **values})


class ScaledSplit(Scaled, SplitModel): ...


class ScaledUntraceable(Scaled, UntraceableModel): ...


@pytest.mark.parametrize("make", [ScaledSplit, ScaledUntraceable])
def test_a_constant_may_be_left_out_until_a_batch_gives_it(make: Any) -> None:
    model = make()
    manager = captured(model, mode="full")
    small, large = batch(3), batch(2, 5)
    for inputs in (small, large, small):
        assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().hits == 4
    model.given = torch.tensor([1.0, 0.5])
    assert_equal_items(manager.execute(small), alone(model, small))
    expected = alone(model, small)
    model.given = None  # the tower says that it still holds
    assert_equal_items(manager.execute(small), expected)
    model.given = "no key"
    with pytest.raises(ReplayError, match="scale: the replay needs this buffer and got no value"):
        manager.execute(small)
    # The other budget has never been given one.
    assert_equal_items(manager.execute(large), alone(model, large))


@pytest.mark.parametrize("make", [ScaledSplit, ScaledUntraceable])
def test_what_has_a_row_a_token_is_no_constant(make: Any) -> None:
    model = make()
    manager = captured(model, mode="full")
    prepare = model.prepare_encoder_cudagraph_replay_buffers

    def incomplete(*args: Any, **kwargs: Any) -> Values:
        return Values({name: v for name, v in prepare(*args, **kwargs).values.items() if name != "divisor"})

    model.prepare_encoder_cudagraph_replay_buffers = incomplete
    with pytest.raises(ReplayError, match="divisor: the replay needs this buffer and got no value"):
        manager.execute(batch(3))
