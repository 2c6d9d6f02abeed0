"""Branches of graphs on the device: what runs beside changes nothing, whatever takes free memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.compile.passes import DEFAULT_PASSES

from .support import batch, encode, mean_error, poison

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def branched(towers: Any) -> Iterator[fx.EncoderCudaGraphManager]:
    """With graphs for a single segment, whose attention may have a branch of its own."""
    config = fx.EncoderConfig(
        mode="full",
        packing="greedy",
        passes=DEFAULT_PASSES["cuda"],
        token_budgets=(49, 196, 784),
        max_items_per_batch=4,
        max_frames_per_batch=4,
        debug=True,
    )
    manager = fx.EncoderCudaGraphManager(towers[2], config)
    manager.capture()
    yield manager
    manager.clear()


def batches(features: int) -> list[dict[str, Any]]:
    return [
        batch([(1, 14, 14)], [], features),
        batch([(1, 28, 28)], [], features),
        batch([(1, 56, 56)], [], features),
        batch([(1, 54, 56)], [], features),  # ends before the budget does
        batch([(1, 8, 8)] * 3, [], features),
        batch([], [(2, 20, 28)], features),
    ]


def test_every_place_runs_beside(branched: Any) -> None:
    (bound,) = branched.programs.values()
    program = bound.program
    # Of the three mergers of six blocks the last one follows the last attention.
    assert program.pass_report["output_branch"] == 2
    assert sum(step.beside for step in program.pieces) == 2
    assert not branched.reports


@torch.no_grad()
def test_replays_over_poisoned_memory_repeat_themselves(branched: Any, towers: Any) -> None:
    _, reference, wrapped = towers
    torch.manual_seed(0)
    inputs = batches(wrapped.patch_features)
    first = [branched.execute(each) for each in inputs]
    source = random.Random(0)
    for _ in range(100):
        number = source.randrange(len(inputs))
        poison(branched.pool)
        again = branched.execute(inputs[number])
        assert all(torch.equal(a, b) for a, b in zip(again, first[number], strict=True)), number
    for each, output in zip(inputs, first, strict=True):
        assert mean_error(output, encode(reference, each)) < 0.05
    assert branched.stats().hit_rate == 1.0


@torch.no_grad()
def test_a_run_at_its_exact_shape_has_branches_too(branched: Any, towers: Any) -> None:
    _, reference, wrapped = towers
    torch.manual_seed(2)
    passes = DEFAULT_PASSES["cuda"]
    limits = {"max_items_per_batch": 4, "max_frames_per_batch": 4}
    exact = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none", passes=passes, **limits))
    exact.capture()
    inputs = batch([(1, 60, 60)], [], wrapped.patch_features)
    outputs = []
    for _ in range(5):
        outputs.append(exact.execute(inputs))
        poison(branched.pool)
    assert exact.stats().hits == 0
    assert all(torch.equal(output[0], outputs[0][0]) for output in outputs)
    assert mean_error(outputs[0], encode(reference, inputs)) < 0.05
    exact.clear()
