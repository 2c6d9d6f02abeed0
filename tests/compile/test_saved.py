"""Programs as JSON and back. Pieces are those of this process, in place of Inductor's."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.compile import saved
from fxsplit_encoder.compile.derived import DerivedParameter, DerivedParameters
from fxsplit_encoder.compile.options import HostOp
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_rows
from fxsplit_encoder.compile.pieces import CompiledPiece
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.compile.saved import restore_program, save_program
from fxsplit_encoder.compile.sizes import Guards, Size, check_arithmetic
from fxsplit_encoder.errors import CompileError, StartFileError
from fxsplit_encoder.manager.tower import named_tensors
from fxsplit_encoder.planning.limits import CaptureKey

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
    """(tower, program, what is saved of it); its pieces are kept here in place of Inductor's cache."""
    tower, bound = compiled
    pieces = {str(step.distinct): step.call for step in bound.program.pieces}
    monkeypatch.setattr(saved, "_piece_keys", lambda program: [(number, "") for number in pieces])
    monkeypatch.setattr(saved, "_load_piece", lambda key, guards: CompiledPiece(lambda a: pieces[key](*a)))
    return tower, bound, json.loads(json.dumps(save_program(bound, named_tensors(tower))))


def program_of(content: Any) -> Any:
    """The saved fields of the program."""
    return content["bound"]["program"]["own"][2]


def restored_derived(kept: Any, *recipes: DerivedParameter) -> tuple[Any, Any]:
    """What is saved of the program with these derived parameters, and those that come back of it."""
    tower, bound, _ = kept
    changed = replace(bound, program=replace(bound.program, derived=DerivedParameters(recipes)))
    content = json.loads(json.dumps(save_program(changed, named_tensors(tower))))
    return content, restore_program(content, named_tensors(tower), CPU).program.derived.recipes


def test_a_program_comes_back(kept: Any) -> None:
    tower, bound, content = kept
    restored = restore_program(content, named_tensors(tower), CPU)
    assert json.loads(json.dumps(save_program(restored, named_tensors(tower)))) == content
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
    tower, bound, _ = kept
    first, *rest = bound.program.steps
    steps = (replace(first, beside=True), *(replace(step, joins=True) for step in rest))
    changed = replace(bound, program=replace(bound.program, steps=steps))
    content = json.loads(json.dumps(save_program(changed, named_tensors(tower))))
    restored = restore_program(content, named_tensors(tower), CPU).program.steps
    assert [(step.beside, step.joins) for step in restored] == [(s.beside, s.joins) for s in steps]
    del program_of(content)["steps"]["tuple"][0]["own"][2]["beside"]  # as an earlier version wrote it
    with pytest.raises(StartFileError, match="expected one that was saved; got KeyError"):
        restore_program(content, named_tensors(tower), CPU)


def test_derived_parameters_come_back_by_name(kept: Any) -> None:
    content, found = restored_derived(
        kept,
        DerivedParameter(1, (0,), functools.partial(pad_rows, rows=12), is_kept=False),
        DerivedParameter(2, (1,), functools.partial(pad_rows, rows=16)),
    )
    assert [(each.slot, each.sources, each.is_kept) for each in found] == [(1, (0,), False), (2, (1,), True)]
    assert [each.make.func for each in found] == [pad_rows, pad_rows]
    assert [each.make.keywords for each in found] == [{"rows": 12}, {"rows": 16}]
    (recipe, _) = program_of(content)["derived"]["derived"]
    for module, name in (("os", "system"), (saved.__name__, "import_module"), (saved.__name__, "_Loader")):
        recipe["make"] = [module, name]
        expected = f"expected a function of fxsplit_encoder; got {re.escape(module)}.{name}"
        with pytest.raises(StartFileError, match=expected):
            restore_program(content, named_tensors(kept[0]), CPU)


@pytest.mark.parametrize("value", [CaptureKey("a", 4, (1, "b")), (1.5, [None, -0.0])])
def test_arguments_of_this_library_come_back(kept: Any, value: Any) -> None:
    recipe = DerivedParameter(1, (0,), functools.partial(pad_rows, rows=value))
    content, (found,) = restored_derived(kept, recipe)
    assert found.make.keywords == {"rows": value}
    assert type(found.make.keywords["rows"]) is type(value)
    (recipe,) = program_of(content)["derived"]["derived"]
    for module, name in (("pathlib", "Path"), (Size.__module__, "Size"), (saved.__name__, "_Loader")):
        recipe["kwargs"] = {"dict": {"rows": {"own": [module, name, {}]}}}
        with pytest.raises(StartFileError, match="no dataclass of fxsplit_encoder"):
            restore_program(content, named_tensors(kept[0]), CPU)


def foreign(tensor: Tensor) -> Tensor:
    return tensor


def test_what_has_no_name_is_not_saved(kept: Any) -> None:
    tower, bound, _ = kept
    program, tensors = bound.program, named_tensors(tower)
    first = program.steps[0]
    cases = [
        (replace(program, constants={0: torch.ones(1)}), "tensors of its own"),
        (replace(program, steps=(replace(first, kind="host", call=HostOp(list)),)), "metadata on the host"),
        (replace(program, steps=(replace(first, args=(object(),)),)), "a object"),
        (replace(program, derived=DerivedParameters([DerivedParameter(0, (), foreign)])), "foreign"),
    ]
    for changed, expected in cases:
        with pytest.raises(CompileError, match=expected):
            save_program(replace(bound, program=changed), tensors)
    with pytest.raises(CompileError, match="no parameter and no buffer"):
        save_program(bound, {})


def test_a_program_for_another_tower_is_refused(kept: Any) -> None:
    tower, _, content = kept
    tensors = named_tensors(tower)
    with pytest.raises(StartFileError, match="parameters: expected linear"):
        restore_program(content, {name: t for name, t in tensors.items() if "weight" not in name}, CPU)
    program = program_of(content)
    forged = (3, {"torch": "load"}, {"function": ["os", "system"]}, [3])
    for name, broken in (*(("outputs", each) for each in forged[1:]), *(("steps", each) for each in forged)):
        before, program[name] = program[name], broken
        with pytest.raises(StartFileError, match="program: expected one that was saved"):
            restore_program(content, tensors, CPU)
        program[name] = before
    for broken in ({}, {**content, "pieces": 3}, {**content, "bound": 3}):
        with pytest.raises(StartFileError, match="program: expected one that was saved"):
            restore_program(broken, tensors, CPU)


@pytest.mark.parametrize(
    "source", ["2 * s0 + s1 // 4", "math.floor(s0 / 2)", "(s0 % 2 == 0) and s1 > 1", "384"]
)
def test_arithmetic_is_restored(source: str) -> None:
    size = Size("shown", source, ("s0", "s1"))
    assert size({"s0": 6, "s1": 9}) == eval(source, {"math": __import__("math"), "s0": 6, "s1": 9})
    assert str(size) == "shown"


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os')",
        "s0.__class__",
        "torch.load",
        "(lambda: 1)()",
        "s9",
        "1 +",
    ],
)
def test_anything_but_arithmetic_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="expected arithmetic"):
        check_arithmetic(source, ["s0"])
    with pytest.raises(ValueError, match="expected names"):
        check_arithmetic("1", ["s0, x=print()"])


def test_guards_hold_within_bounds_and_conditions() -> None:
    guards = Guards({"s0": (2, float("inf"))}, (Size("", "s0 % (s0 // 4) == 0", ("s0",)),))
    assert [guards({"s0": n}) for n in (1, 2, 8, 9)] == [False, False, True, False]
    assert guards({"s1": 1})
