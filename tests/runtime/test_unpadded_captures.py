"""Captures at exact shapes: when they are made, what is evicted, and what is never tried twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer
from fxsplit_encoder.capture.forward import CaptureRequest
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import PathCosts
from fxsplit_encoder.planning.plan import MissReason, PathPlan
from fxsplit_encoder.runtime import unpadded
from fxsplit_encoder.runtime.requests import CaptureScope
from fxsplit_encoder.runtime.unpadded import UnpaddedCaptures

from ..capture.bodies import body_calling, request_of

POOL = GraphPool(torch.device("cpu"))
OUTPUT_BYTES = 4


class Forward:
    """Doubles its rows. Counts how often each size was captured; some sizes cannot be."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.failing = failing
        self.requested: list[int] = []

    def request(self, tokens: int, inputs: SharedBuffers) -> CaptureRequest:
        self.requested.append(tokens)
        buffer = inputs.share(StaticBuffer("x", torch.zeros(tokens)))

        def double() -> list[Tensor]:
            if tokens in self.failing:
                raise RuntimeError("not this size")
            return [buffer.tensor * 2]

        return request_of(body_calling(double), tokens, [buffer])


def captures_of(
    forward: Forward,
    threshold: int = 1,
    max_captures: int = 64,
    limit: int | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> UnpaddedCaptures:
    """Captures whose graphs take at most `limit` bytes."""

    def remaining() -> int | None:
        return None if limit is None else limit - shapes.graph_bytes

    config = EncoderConfig(exact_min_hits=threshold)
    shapes = UnpaddedCaptures(forward.request, CaptureScope(config, POOL, remaining, agree))
    shapes.max_captures = max_captures
    return shapes


def replayed(shapes: UnpaddedCaptures, tokens: int) -> Tensor | None:
    """What a capture of this size makes of ones; None: there is no capture."""
    ladder = shapes.of_size(tokens)
    if ladder is None:
        return None
    captured = ladder.captured[tokens]
    captured.load({"x": torch.ones(tokens)}, tokens)
    return captured.replay()[0].clone()


def test_uses_count_by_their_weight() -> None:
    shapes = captures_of(Forward())
    assert [shapes.of_size(5, 0.25) is not None for _ in range(4)] == [False, False, False, True]
    assert all(shapes.of_size(6, 0.0) is None for _ in range(50))


@pytest.mark.parametrize("where", ["request", "measure"])
def test_whatever_a_capture_fails_with_is_remembered_until_clear(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = captures_of(Forward(frozenset({7})))

    def fail(*arguments: Any) -> None:
        raise ValueError("nobody expected this")

    with monkeypatch.context() as patch:
        if where == "request":
            patch.setattr(shapes, "request", fail)
        else:
            patch.setattr(unpadded.BudgetLadder, "capture", fail)
        for _ in range(3):
            assert shapes.of_size(5) is None
            assert shapes.reason(PathPlan(5, None)) is MissReason.NOT_CAPTURED
    assert shapes.refused == {5: "nobody expected this"}
    assert shapes.sizes == [] and shapes.generations == []
    assert shapes.of_size(7) is None and "not this size" in shapes.refused[7]
    assert shapes.of_size(5) is None, "not tried again"
    assert replayed(shapes, 6) is not None
    shapes.clear()
    assert shapes.refused == {} and replayed(shapes, 5) is not None


def test_the_least_recently_used_generation_is_evicted_as_a_whole() -> None:
    shapes = captures_of(Forward(), threshold=1, max_captures=8)  # generations of two
    for tokens in range(1, 9):
        assert replayed(shapes, tokens) is not None
    assert shapes.sizes == [1, 2, 3, 4, 5, 6, 7, 8]
    assert replayed(shapes, 1) is not None  # so that 3 and 4 are the least recent
    before = shapes.graph_bytes
    assert replayed(shapes, 9) is not None
    assert shapes.sizes == [1, 2, 5, 6, 7, 8, 9]
    assert shapes.graph_bytes == before + (9 - 3 - 4) * OUTPUT_BYTES
    assert replayed(shapes, 3) is not None  # captured anew


def test_sglang_omni_973_free_memory_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward()
    shapes = captures_of(forward, threshold=1, max_captures=4)
    assert replayed(shapes, 10) is not None
    monkeypatch.setattr(unpadded, "free_bytes", lambda device: 12 * OUTPUT_BYTES)
    assert replayed(shapes, 12) is not None
    assert shapes.of_size(13) is None  # what is evicted for it is not enough
    assert forward.requested == [10, 12]
    assert shapes.sizes == []
    assert shapes.reason(PathPlan(13, None)) is MissReason.NEW_SHAPE
    monkeypatch.setattr(unpadded, "free_bytes", lambda device: 13 * OUTPUT_BYTES)
    assert replayed(shapes, 13) is not None


def test_ranks_capture_together_or_not_at_all() -> None:
    """Four votes a capture: memory, inputs, the capture, the limit."""
    votes: list[bool] = []
    dissent: set[int] = set()

    def agree(ready: bool) -> bool:
        votes.append(ready)
        return ready and len(votes) not in dissent

    shapes = captures_of(Forward(frozenset({9})), threshold=1, agree=agree)
    assert replayed(shapes, 3) is not None
    assert votes == [True] * 4

    dissent = {len(votes) + 2}  # another rank has no inputs
    assert shapes.of_size(4) is None
    assert shapes.reason(PathPlan(4, None)) is MissReason.NOT_CAPTURED
    dissent = {len(votes) + 3}  # another rank's capture failed
    assert shapes.of_size(5) is None
    assert shapes.reason(PathPlan(5, None)) is MissReason.NOT_CAPTURED
    assert shapes.of_size(9) is None  # this rank's own failed
    assert not votes[-1]
    assert shapes.sizes == [3]

    dissent = {len(votes) + 1, len(votes) + 2}  # another rank has no memory, even without the others
    assert shapes.of_size(6) is None
    assert shapes.reason(PathPlan(6, None)) is MissReason.NEW_SHAPE
    assert shapes.sizes == []
    before = len(votes)
    assert shapes.of_size(4) is None  # what is refused is refused everywhere, without a vote
    assert len(votes) == before


def test_larger_inputs_grow_geometrically_and_older_captures_stay_valid() -> None:
    forward = Forward()
    shapes = captures_of(forward)
    assert replayed(shapes, 4) is not None
    assert replayed(shapes, 5) is not None
    grown = shapes.inputs.num_bytes
    assert grown == (4 + 8) * 4, "the smaller one is held by what was captured over it"
    for tokens in (6, 7, 8):
        assert replayed(shapes, tokens) is not None
    assert shapes.inputs.num_bytes == grown
    for tokens in (4, 5, 6, 7, 8, 4):
        output = replayed(shapes, tokens)
        assert output is not None
        assert torch.equal(output, torch.full((tokens,), 2.0))
    shapes.clear()
    assert shapes.inputs.num_bytes == 0


@pytest.mark.parametrize("threshold", [1, 2])
@given(
    sizes=st.lists(st.integers(1, 12), max_size=60),
    max_captures=st.integers(1, 6),
    limit=st.none() | st.integers(8, 200),
)
@settings(max_examples=60)
def test_sglang_omni_523_limits_hold_and_results_are_right_whatever_comes(
    threshold: int, sizes: list[int], max_captures: int, limit: int | None
) -> None:
    forward = Forward(frozenset({3}))
    shapes = captures_of(forward, threshold=threshold, max_captures=max_captures, limit=limit)
    for number, tokens in enumerate(sizes):
        output = replayed(shapes, tokens)
        if output is not None:
            assert torch.equal(output, torch.full((tokens,), 2.0))
            assert sizes[: number + 1].count(tokens) >= threshold
        assert len(shapes.sizes) <= max_captures
        assert limit is None or shapes.graph_bytes <= limit
        assert shapes.graph_bytes == OUTPUT_BYTES * sum(shapes.sizes)
    assert forward.requested.count(3) <= 1


@pytest.mark.parametrize("gains", [True, False])
def test_a_capture_on_trial_is_kept_or_given_up(gains: bool) -> None:
    shapes = captures_of(Forward())
    assert shapes.of_size(5, on_trial=True) is not None
    assert shapes.on_trial == {5} and not shapes.generations[-1].exact_may_win
    shapes.conclude(5, gains=gains)
    assert (shapes.on_trial, 5 in shapes, 5 in shapes.not_faster) == (set(), gains, not gains)
    assert (shapes.of_size(5, on_trial=True) is not None) is gains
    assert shapes.on_trial == set()
    if not gains:
        assert shapes.reason(PathPlan(5, None)) is MissReason.EXACT_IS_FASTER
        assert shapes.graph_bytes == 0
    evicting = captures_of(Forward(), threshold=1, max_captures=1)
    evicting.of_size(5, on_trial=True)
    evicting.of_size(6)
    assert (evicting.sizes, evicting.on_trial) == ([6], set())
    evicting.conclude(5, gains=gains)
    assert evicting.sizes == [6]


@pytest.mark.parametrize(
    ("planned", "replay_ms", "uses"),
    [
        (PathPlan(96, 128), 3.0, 20),  # 3 - 2.5 ms a use
        (PathPlan(64, 64), 3.0, None),  # no padding, nothing to gain
        (PathPlan(10, 64), 3.0, None),  # no capture is known to be cheaper than the smallest
        (PathPlan(128, None, MissReason.NOT_CAPTURED), 3.0, 5),  # 5 - 3 ms a use
        (PathPlan(128, None, MissReason.UNSUPPORTED_INPUT), 3.0, None),
        (PathPlan(0, 64), 3.0, None),
        (PathPlan(128, None, MissReason.EXACT_IS_FASTER), 5.0, 20),  # no gain is foreseen: a tenth of 5 ms
    ],
)
def test_a_count_is_due_once_it_has_cost_what_its_capture_would(
    planned: PathPlan, replay_ms: float, uses: int | None
) -> None:
    shapes = captures_of(Forward())
    costs = PathCosts(replay={64: 2.0, 128: replay_ms}, exact=((64, 4.0), (128, 5.0)), eager=((64, 9.0),))
    shapes.use_costs(costs, capture_ms=10.0)
    found = [shapes.find(planned, by_cost=True) is not None for _ in range(40)]
    assert found == [uses is not None and number >= uses for number in range(1, 41)]


def test_a_trial_keeps_what_only_a_replay_serves() -> None:
    shapes = captures_of(Forward())
    shapes.on_trial.add(80)

    def refused() -> None:
        raise InputError("only the tower's own forward is left")

    assert shapes.keeps(80, lambda: None, refused)
    assert not shapes.on_trial
