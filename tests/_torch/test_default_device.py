"""A default device or dtype of torch changes no value: factories name theirs, traces run without the mode."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx

from ..towers import tiny_towers
from ..towers.conformance import make_case

PACKAGE = Path(fx.__file__).parent

# What torch gives the default device. A module's parameters are made there, as those of `torch.nn` are.
MADE = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)
FLOATS = ("empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros")


def unplaced(path: Path) -> Iterator[str]:
    is_of_modules = path.is_relative_to(PACKAGE / "models" / "encoders")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [
        (node, node.func.value.id, node.func.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
    ]
    parameters = {
        argument
        for node, owner, name in named
        if (owner, name) == ("nn", "Parameter")
        for argument in node.args
    }
    for node, owner, name in named:
        if is_of_modules and node in parameters:
            continue
        if owner != "torch" or name not in MADE:
            continue
        given = {keyword.arg for keyword in node.keywords}
        if None not in given and ("device" not in given or (name in FLOATS and "dtype" not in given)):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_factory_names_its_device_and_dtype() -> None:
    assert [line for path in sorted(PACKAGE.rglob("*.py")) for line in unplaced(path)] == []


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def defaults(device: contextlib.AbstractContextManager[object], dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "meta, bfloat16": lambda: defaults(default_device("meta"), torch.bfloat16),
    "with meta, float64": lambda: defaults(torch.device("meta"), torch.float64),
}
each_default = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if "with" in name else ()) for name in DEFAULTS],
)

# Traces cost seconds, and mode `breakable` has none; both make a batch's tensors in the same ways.
MODES = [*(("breakable", tower) for tower in tiny_towers.TINY), ("full", "Qwen3_5VisionModel")]


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@each_default
@pytest.mark.parametrize(("mode", "model"), MODES)
@torch.no_grad()
def test_a_manager_encodes_the_same(model: str, mode: str, name: str) -> None:
    case = make_case(model)
    inputs, expected = case.inputs.make(case.images), [case.alone(image) for image in case.images]
    with DEFAULTS[name]():
        manager = case.manager_in(mode)
        got = manager.execute(inputs)
    assert all(program is not None for program in manager.programs.values()) == (mode == "full")
    assert manager.stats().hits == len(case.images)
    assert_close(got, expected)


@each_default
@torch.no_grad()
def test_recorded_calls_compute_the_same(name: str) -> None:
    module, rows = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(4, 8)
    expected = module(rows)
    with DEFAULTS[name]():
        fast = fx.BreakableCUDAGraphWrapper(module)
        got = [fast(rows) for _ in range(2)]
    assert_close(got, [expected, expected])
