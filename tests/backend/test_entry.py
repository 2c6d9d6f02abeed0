"""The backend as torch.compile sees it: its name, its options, one compilation, warming up, gradients."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxsplit_encoder as fx
from fxsplit_encoder.backend import entry

from ..hugging_face.comparisons import assert_close
from ..small_tower import FEATURES, SmallAdapter, SmallTower
from .towers import Attention, num_weights

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

GRIDS = [
    [(1, 8, 8)],
    [(1, 12, 12), (1, 8, 8)],
    [(1, 6, 10)] * 4,
    [(1, 2, 4)] * 5,
    [(1, 12, 8), (2, 4, 4)],
    [(1, 2, 6)],
    [(1, 20, 20)],
]
BUDGETS = [8, 16, 32, 64]


def patches(grids: list[Any], seed: int = 0) -> tuple[Tensor, Tensor]:
    grid = torch.tensor(grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(1).sum()), 1536, generator=generator), grid


@pytest.mark.slow
def test_the_backend_is_found_by_name_without_an_import() -> None:
    program = """
import sys, torch
assert "encoder_cg" in torch.compiler.list_backends()
assert not any(name.startswith("fxsplit") for name in sys.modules)
torch.compile(torch.nn.Linear(4, 4), backend="encoder_cg")
assert "fxsplit_encoder" in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning:fxsplit_encoder", "-c", program], check=True)


@torch.no_grad()
def test_one_compilation_serves_every_size_and_count(tiny_towers: Any, made: Any, inlined: list[int]) -> None:
    """It has one trace for equal blocks, and no guards of theirs."""
    names: list[str] = []

    def keep(entries: Any) -> list[bool]:
        names.extend(entry.name for entry in entries)
        return [True] * len(entries)

    options = {"mode": "full", "token_budgets": BUDGETS, "debug": True, "guard_filter_fn": keep}
    compiled = torch.compile(tiny_towers.wrapped, backend="encoder_cg", fullgraph=True, options=options)
    for seed, grids in enumerate(GRIDS):
        x, grid = patches(grids, seed)
        assert_close(compiled(x, grid_thw=grid), tiny_towers.reference(x, grid))
    assert counters["stats"]["unique_graphs"] == 1
    (dispatcher,) = made()
    # Only the last, of 100 output tokens, is over the largest budget.
    assert dispatcher.hits == len(GRIDS) - 1
    assert dispatcher.misses == {fx.MissReason.OVER_LARGEST_BUDGET: 1}
    assert dispatcher.num_captured == len(BUDGETS)
    assert inlined == [num_weights(tiny_towers.hugging_face)]
    assert any("patch_embed" in name for name in names)
    assert any("blocks_as_traced" in name for name in names)
    unneeded = ("self.tower._modules['blocks']._modules['", "self.tower.config")
    assert [name for name in names if name.startswith(unneeded)] == []


@torch.no_grad()
def test_warmup_captures_the_whole_ladder(made: Any) -> None:
    tower = SmallTower()
    compiled = torch.compile(SmallAdapter(tower), backend="encoder_cg", options={"token_budgets": [8, 16]})
    assert fx.warmup(compiled) == 2
    (dispatcher,) = made()
    assert dispatcher.num_captured == 2
    x, grid = torch.randn(16, FEATURES), torch.tensor([[1, 4, 4]])
    torch.testing.assert_close(compiled(x, grid), tower(x, grid))
    assert counters["stats"]["unique_graphs"] == 1
    assert (dispatcher.num_captured, dispatcher.hits) == (2, 1)
    # With inputs, given by position or by name, it does the same.
    assert fx.warmup(compiled, x, grid_thw=grid) == 2


def test_warmup_of_an_unknown_module_needs_inputs() -> None:
    compiled = torch.compile(
        Attention(), backend="encoder_cg", dynamic=True, options={"token_budgets": [2, 8]}
    )
    with pytest.raises(fx.InputError, match="warmup: Attention makes no example inputs; pass some"):
        fx.warmup(compiled)
    assert fx.warmup(compiled, torch.randn(3, 5, 8)) == 2
    assert fx.warmup(torch.compile(nn.ReLU(), backend="encoder_cg"), torch.randn(3)) == 1  # at its own size


def test_warming_up_leaves_no_trace_in_later_calls(made: Any) -> None:
    module = Attention()
    compiled = torch.compile(module, backend="encoder_cg", dynamic=True, options={"token_budgets": [2, 8]})
    with pytest.raises(RuntimeError), torch.no_grad():
        fx.warmup(compiled, torch.randn(3, 5, 7))
    with torch.no_grad():
        compiled(torch.randn(3, 5, 8))
    (dispatcher,) = made()
    assert dispatcher.num_captured == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": "full"}, "modes: unknown option; did you mean mode"),
        ({"mode": "fastest"}, "mode: not one of the allowed"),
        ({"config": "missing.yaml"}, "missing.yaml: cannot be read"),
        ({"splitting_ops": ["aten::no_such_op"]}, "splitting_ops: no operator 'aten::no_such_op'"),
        *(
            (option, f"{next(iter(option))}: does not apply behind torch.compile")
            for option in (
                {"packing": "greedy"},
                {"paths": {"global": {"mode": "full"}}},
                {"data_parallel": True},
                {"start_file": "tower.start"},
            )
        ),
        ("reduce-overhead", "mode: torch.compile's modes do not apply to encoder_cg; got 'reduce"),
    ],
)
@torch.no_grad()
def test_bad_options_are_named(options: Any, message: str) -> None:
    given = {"mode": options} if isinstance(options, str) else {"options": options}
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(nn.Linear(4, 4), backend="encoder_cg", **given)(torch.ones(2, 4))
    causes = [caught.value, getattr(caught.value, "inner_exception", None), caught.value.__cause__]
    assert any(isinstance(cause, fx.ConfigError) for cause in causes)


def test_gradients_run_eagerly_with_one_warning(made: Any) -> None:
    module = Attention()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="encoder_cg", dynamic=True)
    x = torch.randn(3, 5, 8)
    with pytest.warns(UserWarning, match="encoder_cg: called with gradients enabled"):
        output = compiled(x)
    torch.testing.assert_close(output, eager(x))
    output.square().sum().backward()
    eager(x).square().sum().backward()
    for got, expected in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(nn.Linear(8, 8), backend="encoder_cg")(x).sum().backward()
    # The same module without gradients is compiled after all.
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))
    assert sum(d.hits for d in made()) == 1


@torch.no_grad()
def test_a_failure_of_ours_warns_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(entry, "compile_graph", fail)
    module = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="compiling it failed: ZeroDivisionError: ours"):
        output = torch.compile(module, backend="encoder_cg")(x)
    assert torch.equal(output, module(x))
