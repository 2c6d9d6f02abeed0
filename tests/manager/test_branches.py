"""Branches inside captured towers: what runs beside changes no result, and nothing reads it too early."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.compile import branches as program_steps
from fxsplit_encoder.compile.build import slots_in

from .test_passes import tower

BRANCHES = ("output_branch",)
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("max_items_per_batch", "max_frames_per_batch"), 2),
    "token_budgets": (4, 16),
    "packing": "greedy",
    "debug": True,
}


def manager_of(passes: tuple[str, ...], mode: str = "full", **changes: Any) -> Any:
    inner = tower(0, depth=3, deepstack_visual_indexes=[0, 1])
    config = fx.EncoderConfig(passes=("conv_to_linear", *passes), mode=mode, **{**SETTINGS, **changes})
    manager = fx.EncoderCudaGraphManager(fx.wrap(inner), config)
    manager.capture()
    return manager


@pytest.fixture(scope="module")
def plain() -> Any:
    return manager_of(())


@pytest.fixture(scope="module")
def full() -> Any:
    return manager_of(BRANCHES)


def test_with_invariant_products_too(plain: Any, make_batch: Callable[..., Any]) -> None:
    """Which come before the marks: a node that takes the place of a marked one would have none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        manager = manager_of(BRANCHES, invariant=True)
        batch = make_batch([(1, 4, 4), (1, 4, 8)])
        torch.testing.assert_close(manager.execute(batch), plain.execute(batch))
    finally:
        torch.set_num_threads(threads)
    report = manager.programs["default"].program.pass_report
    assert report["output_branch"] == 2 and report["fixed_products"] > 0


class TracedBranch:
    """In place of streams: which slots' values are in use beside, and that nobody has let go of them."""

    def __init__(self, device: torch.device, purpose: str) -> None:
        self.held: list[Callable[[], Tensor | None]] = []

    def fork(self) -> None:
        pass

    def join(self) -> None:
        assert all(reference() is not None for reference in self.held)
        self.held.clear()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


@pytest.mark.parametrize("mode", ["full", pytest.param("piecewise", marks=pytest.mark.exhaustive)])
def test_results_are_those_without_branches(
    plain: Any, full: Any, mode: str, make_batch: Callable[..., Any], poisoned_memory: None
) -> None:
    branched = full if mode == "full" else manager_of(BRANCHES, mode)
    (bound,) = branched.programs.values()
    assert bound.program.pass_report == {"conv_to_linear": 1, "output_branch": 2}
    assert bound.program.padding == plain.programs["default"].program.padding
    for grids in ([(1, 4, 6)], [(1, 4, 4), (1, 2, 2)], [(1, 8, 10)], [(1, 2, 2)]):
        batch = make_batch(grids)
        for output, expected in zip(branched.execute(batch), plain.execute(batch), strict=True):
            assert torch.equal(output, expected)
    assert branched.stats().hits == 4  # the third is too large for a budget
    assert not branched.reports


def test_what_runs_beside_is_held_until_it_is_joined(
    plain: Any, full: Any, make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values that a step reads and writes beside are alive when it is joined, behind which its results
    are read.
    """
    steps = full.programs["default"].program.steps
    batch = make_batch([(1, 8, 10)])
    expected = plain.execute(batch)
    seen: list[Any] = []
    monkeypatch.setattr(program_steps, "Branch", TracedBranch)
    original = program_steps.StepBranches._beside

    def noted(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, step, *args, **kwargs)
        values = [value for value in (*args, *result) if isinstance(value, Tensor)]
        self._branch.held += map(weakref.ref, values)
        seen.append(step)
        return result

    monkeypatch.setattr(program_steps.StepBranches, "_beside", noted)
    for output, wanted in zip(full.execute(batch), expected, strict=True):
        assert torch.equal(output, wanted)
    beside = [step for step in steps if step.beside and step.kind == "piece"]
    assert [step.name for step in seen] == [step.name for step in beside]
    written = {slot for step in beside for slot in step.outputs}
    (joining,) = (step for step in steps if step.joins)
    assert written <= set(slots_in(joining.args))
    assert written <= set(joining.frees)
