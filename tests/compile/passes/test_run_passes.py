"""The registry, and passes inside whole programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.passes import (
    DEFAULT_PASSES,
    PASSES,
    default_passes,
    expected_width,
    passes_for,
    run_passes,
)
from fxsplit_encoder.config import GRAPH_PASSES
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.products import measured

from ..packed_forwards import SPLITTING_OPS, WIDTH, trace_packed
from .aten_graphs import Mlp, aten_graph, tanh_gelu

CPU = torch.device("cpu")


def options(passes: tuple[str, ...] | None, compiler: Any = "eager") -> CompileOptions:
    return CompileOptions(SPLITTING_OPS, compiler, passes=passes)


def test_the_configuration_knows_every_pass() -> None:
    assert tuple(PASSES) == GRAPH_PASSES
    assert {name for names in DEFAULT_PASSES.values() for name in names} <= PASSES.keys()


def test_every_pass_says_why_it_is_exact() -> None:
    assert all("Exact: " in str(run.__doc__) for run in PASSES.values())


@pytest.mark.parametrize(("width", "stored"), [(64, 64), (72, 80), (80, 80), (88, 96), (8, 8), (120, 128)])
def test_passes_are_expected_to_store_heads_as_wide_heads_does(width: int, stored: int) -> None:
    assert expected_width(width, ("conv_to_linear", "wide_heads"), CPU) == stored
    assert expected_width(width, ("conv_to_linear",), CPU) == width
    assert expected_width(width, None, CPU) == width  # no default there


@pytest.mark.parametrize(
    ("names", "report"),
    [
        (None, {"conv_to_linear": 0}),
        ((), {}),
        (
            ("gelu_epilogue", "pad_mlp_width", "conv_to_linear"),
            {"conv_to_linear": 0, "pad_mlp_width": 1, "gelu_epilogue": 1},
        ),
    ],
)
def test_what_is_asked_for_runs_in_the_order_of_the_registry(names: Any, report: dict[str, int]) -> None:
    mlp, x = Mlp(tanh_gelu), torch.randn(5, 12)
    graph = aten_graph(mlp, x)
    changed = run_passes(graph.module, passes_for(names, CPU))
    assert list(changed.items()) == list(report.items())
    torch.testing.assert_close(graph.run(), mlp(x))


@pytest.mark.parametrize(
    ("capability", "has_quack", "missing"),
    [
        ((8, 0), True, {"decomposed_bias", "measured_activations"}),
        ((9, 0), False, {"measured_activations"}),
        ((9, 0), True, set()),
        ((10, 0), True, {"measured_activations"}),
    ],
)
def test_defaults_on_cuda_depend_on_architecture_and_packages(
    capability: tuple[int, int], has_quack: bool, missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str | None:
        return "0.6.5" if package == "quack-kernels" and has_quack else None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(measured, "package_version", version)
    device = torch.device("cuda", 0)
    assert set(PASSES) - set(default_passes(device)) == missing
    assert set(PASSES) - set(default_passes(device, invariant=True)) == missing | {"measured_activations"}


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no pass is called fuse_all; allowed: folded_adapters, conv_to_linear"
    ):
        passes_for(("fuse_all",), CPU)


def test_the_mask_of_pad_rows_stays_after_the_residual_addition() -> None:
    projection = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    seen: list[list[str]] = []

    def compile_piece(module: Any, values: Any) -> Any:
        seen.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    for names in ((), tuple(PASSES)):
        trace_packed(lambda y, i: projection(y) + i["x"], options=options(names, compile_piece))
    for targets in seen:
        if "aten.masked_fill.Scalar" in targets:
            assert targets.index("aten.add.Tensor") < targets.index("aten.masked_fill.Scalar")
    assert sum("aten.masked_fill.Scalar" in targets for targets in seen) == 2
