"""Programs are saved and restored. Pieces are those of this process, in place of Inductor's."""

from __future__ import annotations

import base64
import functools
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.compile import saved
from fxsplit_encoder.compile.derived import DerivedParameters, Recipe
from fxsplit_encoder.compile.options import HostOp
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_rows
from fxsplit_encoder.compile.pieces import CompiledPiece
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.compile.saved import restore_program, save_program
from fxsplit_encoder.compile.sizes import Size, all_hold
from fxsplit_encoder.errors import CompileError, StartFileError
from fxsplit_encoder.manager.tower import named_tensors

from ..manager.mock_towers import SplitModel

CPU = torch.device("cpu")
CONFIG = fx.EncoderConfig(token_budgets=(4, 16), max_items_per_batch=4)


@pytest.fixture(scope="module")
def compiled() -> tuple[SplitModel, BoundProgram]:
    tower = SplitModel()
    manager = fx.EncoderCudaGraphManager(tower, CONFIG)
    manager.compile()
    bound = manager.programs["default"]
    assert bound is not None
    return tower, bound


@pytest.fixture
def kept(compiled: tuple[SplitModel, BoundProgram], monkeypatch: pytest.MonkeyPatch) -> Any:
    """(tower, program); its pieces are kept here in place of Inductor's cache."""
    tower, bound = compiled
    pieces = {str(step.distinct): step.call for step in bound.program.pieces}
    monkeypatch.setattr(saved, "_key_of", lambda step: (str(step.distinct), ""))
    monkeypatch.setattr(saved, "_load_piece", lambda key, guards: CompiledPiece(lambda a: pieces[key](*a)))
    return tower, bound


def again(kept: Any, **changes: Any) -> BoundProgram:
    """The program with these changes, saved and restored."""
    tower, bound = kept
    changed = replace(bound, program=replace(bound.program, **changes))
    return restore_program(save_program(changed, named_tensors(tower)), named_tensors(tower), CPU)


def test_a_program_comes_back(kept: Any) -> None:
    tower, bound = kept
    restored = again(kept)
    calls = [step.call for step in restored.program.pieces]
    assert len({*calls}) == bound.program.num_distinct, "pieces share compilations"
    assert [step.call for step in restored.program.splits] == [step.call for step in bound.program.splits]
    assert all(a is b for a, b in zip(restored.fixed, bound.fixed, strict=True))
    for tokens in (2, 4, 7, 16):
        inputs = tower.prepare_encoder_cudagraph_capture_inputs(tokens, 4, 0, CPU, torch.float32).values
        torch.testing.assert_close(restored(inputs), bound(inputs), rtol=0, atol=0)
        symbols = bound.symbols(inputs)
        assert restored.symbols(inputs) == symbols
        assert restored.program.accepts(symbols) == bound.program.accepts(symbols)
        assert restored.program.may_be_captured(symbols) == bound.program.may_be_captured(symbols)


def test_what_runs_beside_comes_back(kept: Any) -> None:
    first, *rest = kept[1].program.steps
    steps = (replace(first, beside=True), *(replace(step, joins=True) for step in rest))
    restored = again(kept, steps=steps).program.steps
    assert [(step.beside, step.joins) for step in restored] == [(s.beside, s.joins) for s in steps]


def test_derived_parameters_come_back_by_name(kept: Any) -> None:
    recipe = Recipe(functools.partial(pad_rows, rows=12), (0, Recipe(pad_rows, (1,))))
    found = again(kept, derived=DerivedParameters({2: recipe})).program.derived.recipes[2]
    assert found.sources == recipe.sources
    make: Any = found.make
    assert (make.func, make.keywords) == (pad_rows, {"rows": 12})


def test_what_has_no_name_is_not_saved(kept: Any) -> None:
    tower, bound = kept
    program, tensors = bound.program, named_tensors(tower)
    first = program.steps[0]
    unnamed = DerivedParameters({0: Recipe(lambda tensor: tensor, ())})
    cases = [
        (replace(program, constants={0: torch.ones(1)}), "tensors of its own"),
        (replace(program, steps=(replace(first, kind="host", call=HostOp(list)),)), "metadata on the host"),
        (replace(program, derived=unnamed), "an object that has no name"),
    ]
    for changed, expected in cases:
        with pytest.raises(CompileError, match=expected):
            save_program(replace(bound, program=changed), tensors)
    with pytest.raises(CompileError, match="no parameter and no buffer"):
        save_program(bound, {})


def test_a_program_for_another_tower_is_refused(kept: Any) -> None:
    tower, bound = kept
    tensors = named_tensors(tower)
    content = save_program(bound, tensors)
    with pytest.raises(StartFileError, match="parameters: expected linear"):
        restore_program(content, {name: t for name, t in tensors.items() if "weight" not in name}, CPU)
    other = base64.b64encode(pickle.dumps(3)).decode()
    for broken in ("", content[:-40], "no program", other):
        with pytest.raises(StartFileError, match="program: expected one that was saved"):
            restore_program(broken, tensors, CPU)


@pytest.mark.parametrize(
    "source", ["2 * s0 + s1 // 4", "math.floor(s0 / 2)", "(s0 % 2 == 0) and s1 > 1", "384"]
)
def test_arithmetic_is_restored(source: str) -> None:
    size = pickle.loads(pickle.dumps(Size("shown", source, ("s0", "s1"))))
    assert size({"s0": 6, "s1": 9}) == eval(source, {"math": __import__("math"), "s0": 6, "s1": 9})
    assert str(size) == "shown"


def test_conditions_hold_of_symbols_that_have_values() -> None:
    conditions = [Size("", "s0 % (s0 // 4) == 0", ("s0",))]
    assert [all_hold(conditions, {"s0": n}) for n in (2, 8, 9)] == [False, True, False]
    assert all_hold(conditions, {"s1": 1})
