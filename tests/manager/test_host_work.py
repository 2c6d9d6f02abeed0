"""What the host does for a request: times cannot be pinned on any machine, but what is done can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxsplit_encoder as fx
from fxsplit_encoder.capture import forward
from fxsplit_encoder.manager import lifecycle
from fxsplit_encoder.towers import packed

from ..instructions import instructions, python_calls
from .mock_towers import PackedModel, batch

aten = torch.ops.aten

NUM_INPUTS = 5
"""Patches, positions, taps and their weights, cumulative lengths."""


class CountedOps(TorchDispatchMode):
    """Counts the tensor ops that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def manager(make_captured: Any) -> Iterator[Any]:
    """A manager whose replays do nothing, so that what runs is the host's work around them."""
    made = make_captured(mode="full", debug=False)
    for path in made.paths_by_key.values():
        for captured in path.captured.values():
            (captured.for_one_segment or captured).capture.replay = lambda: None
    return made


@pytest.fixture
def computed(tiny_towers: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the tower computes host metadata."""
    counts: Counter[str] = Counter()
    for name in ("metadata", "cumulative_lengths"):
        real = getattr(tiny_towers.wrapped, name)

        def counted(grids: Any, name: str = name, real: Any = real) -> Any:
            counts[name] += 1
            return real(grids)

        monkeypatch.setattr(tiny_towers.wrapped, name, counted)
    return counts


def ops_of(manager: Any, inputs: dict[str, Any]) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch, CountedOps() as counted:
        patch.setattr(lifecycle, "foreign_around", lambda: None)  # which would find the mode that counts
        manager.execute(inputs)
    return counted.counts


def test_an_image_that_fills_its_budget_costs_one_copy_an_input_and_one_of_its_own(
    manager: Any, make_batch: Any
) -> None:
    inputs = make_batch([(1, 8, 8)], seed=1)
    manager.execute(inputs)
    manager.execute(make_batch([(1, 4, 16)]))
    # The item is cut out of the output, and copied.
    expected = {"copy_": NUM_INPUTS, "slice": 1, "clone": 1}
    assert ops_of(manager, inputs) == expected
    # What the buffers hold of the same size is not copied to them again.
    assert ops_of(manager, make_batch([(1, 8, 8)], seed=2)) == expected | {"copy_": 1}


def test_a_smaller_image_cuts_buffers_and_clears_what_a_larger_one_left(
    manager: Any, make_batch: Any
) -> None:
    small, other = make_batch([(1, 6, 8)]), make_batch([(1, 8, 6)])  # 12 of 16 tokens
    manager.execute(other)
    manager.execute(small)
    by_row = NUM_INPUTS - 1  # cumulative lengths are replaced as a whole
    expected = {"copy_": NUM_INPUTS, "slice": by_row + 1, "clone": 1}
    assert ops_of(manager, other) == expected
    manager.execute(make_batch([(1, 8, 8)]))
    # The number of real rows is another.
    assert ops_of(manager, small) == expected | {"slice": 2 * by_row + 1, "zero_": by_row, "fill_": 1}


def test_metadata_of_a_size_that_came_before_is_not_computed_again(
    manager: Any, tiny_towers: Any, make_batch: Any, computed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests before this one may have had such sizes.
    monkeypatch.setattr(tiny_towers.wrapped, "_kept_metadata", {})
    monkeypatch.setattr(tiny_towers.wrapped, "_kept_patches", 0)
    grids = [(1, 10, 4), (1, 4, 10)]
    manager.execute(make_batch(grids, seed=1))
    assert computed == {"metadata": 1, "cumulative_lengths": 1}
    pad, padded = forward.pad_cu_seqlens, list[Any]()
    monkeypatch.setattr(forward, "pad_cu_seqlens", lambda *given: padded.append(pad(*given)) or padded[-1])
    for seed in range(3):
        manager.execute(make_batch(grids, seed=seed))
    assert computed == {"metadata": 1, "cumulative_lengths": 1}
    assert not padded, "what is in the buffer is not padded again"
    manager.execute(make_batch(grids[::-1]))
    assert computed == {"metadata": 2, "cumulative_lengths": 2}


def test_metadata_of_many_sizes_is_forgotten_the_least_recently_used_first(
    tiny_towers: Any, make_batch: Any, computed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = tiny_towers.wrapped
    monkeypatch.setattr(tower, "_kept_metadata", {})
    monkeypatch.setattr(tower, "_kept_patches", 0)
    monkeypatch.setattr(packed, "_KEPT_PATCHES", 20)
    monkeypatch.setattr(packed, "_MOST_PATCHES", 24)
    first, second, third, large = ([(1, 2, 2 * n)] for n in (1, 2, 3, 7))
    for grids, misses in ((first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4)):
        tower.prepare_encoder_cudagraph_replay_buffers(make_batch(grids), 0, 0)
        assert computed["metadata"] == misses, grids
    for misses in (5, 6):
        tower.prepare_encoder_cudagraph_replay_buffers(make_batch(large), 0, 0)
        assert computed["metadata"] == misses


def test_a_replay_of_a_towers_own_code_takes_few_instructions() -> None:
    """vLLM's runners call its manager once a step. At commit fe59b6c they were 3666 of Python 3.11's, without
    the 49 of the assertions of `PackedModel`."""
    config = fx.EncoderConfig(token_budgets=(4, 8, 16), max_items_per_batch=4, compile=False)
    manager = fx.EncoderCudaGraphManager(PackedModel(), config, log_interval=0)
    manager.capture()
    for captured in manager.paths["default"].captured.values():
        captured.capture.segments[:] = []
    with torch.inference_mode():
        manager.execute(batch(3))
        assert instructions(lambda: manager.execute(batch(3))) < 2975 + 49


def test_an_image_of_grids_that_came_before_takes_few_calls(manager: Any, make_batch: Any) -> None:
    """At commit 3052296 they were 192 with Python 3.11; later versions inline some of them."""
    inputs = make_batch([(1, 8, 8)])
    with torch.inference_mode():
        for _ in range(3):
            manager.execute(inputs)
        assert python_calls(lambda: manager.execute(inputs)) < 95
