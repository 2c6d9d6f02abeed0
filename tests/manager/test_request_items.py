"""Requests of items that came before are not read again, and are served as if they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager import request_plans
from fxsplit_encoder.manager.request_plans import ItemReader

GRID = [(1, 4, 6)]


@pytest.fixture
def manager(make_captured: Any) -> Any:
    return make_captured(mode="full", debug=False)


def assert_right(manager: Any, inputs: dict[str, Any]) -> None:
    """Every item of a request is what a manager that has seen nothing, and captured nothing, makes of it."""
    anew = fx.EncoderCudaGraphManager(
        manager.tower, fx.EncoderConfig(mode="none", compile=False), log_interval=0
    )
    for item, expected in zip(manager.execute(inputs), anew.execute(inputs), strict=True):
        torch.testing.assert_close(item, expected, rtol=1e-4, atol=1e-4)


def test_pixels_of_other_kinds_are_still_looked_at(manager: Any, make_batch: Any) -> None:
    inputs = make_batch(GRID)
    pixels = inputs["pixel_values"]
    for _ in range(2):
        assert_right(manager, inputs)
        assert_right(manager, {**inputs, "pixel_values": pixels.double()})
        assert_right(manager, {**inputs, "pixel_values": list(pixels.split(5))})
        for wrong in (pixels[1:], pixels[:, 1:], pixels.bool(), pixels.to("meta"), None, []):
            with pytest.raises(InputError, match="pixel_values"):
                manager.execute({**inputs, "pixel_values": wrong})


@pytest.mark.parametrize("kept", [1, 3])
def test_little_is_kept(manager: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(request_plans, "_KEPT_ITEMS", kept)
    monkeypatch.setattr("fxsplit_encoder.manager.request_plans._KEPT_PLANS", kept)
    read, ask = [], manager.tower.get_encoder_cudagraph_item_specs

    def watched(mm_kwargs: dict[str, Any]) -> Any:
        read.append(mm_kwargs)
        return ask(mm_kwargs)

    monkeypatch.setattr(manager.tower, "get_encoder_cudagraph_item_specs", watched)
    plans: list[Any] = []
    for height in (2, 4, 6, 8, 4, 2):
        inputs = make_batch([(1, height, 2)])
        plans.append(manager.plan(inputs))
        assert manager.plan(inputs) is plans[-1]
    assert len(read) == 6 and plans[-1] is not plans[0] and plans[-2] is not plans[1]
    assert_right(manager, make_batch([(1, 2, 2)]))


def test_what_a_description_fails_at_is_told_by_the_items() -> None:
    class Failing:
        def described_items(self, mm_kwargs: dict[str, Any]) -> object:
            raise AttributeError("no such thing")

        def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
            raise TypeError("no items")

    with pytest.raises(InputError, match="TypeError: no items"):
        ItemReader(Failing()).read({"count": 1})


sides = st.integers(1, 4).map(lambda n: 2 * n)
batches = st.lists(st.tuples(st.integers(1, 2), sides, sides), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(batches, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_whatever_came_before_results_are_those_of_the_tower(
    managers: Any, make_batch: Any, sequence: list[Any], order: Any
) -> None:
    requests = [make_batch(images, seed=number) for number, images in enumerate([*sequence, *sequence])]
    order.shuffle(requests)
    for inputs in requests:
        assert_right(managers["full"], inputs)
