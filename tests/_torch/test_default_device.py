"""A default device or dtype of torch changes no value: factories name theirs, traces run without the mode."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import Llama4VisionConfig, Llama4VisionModel, Siglip2VisionConfig, Siglip2VisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.models.prepare import ProcessorSettings
from fxsplit_encoder.models.random import draw_weights, random_inputs
from fxsplit_encoder.models.registry import FAMILIES

from ..models.checkpoints import CHECKPOINTS

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
    parameters = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nn.Parameter"
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (is_of_modules and node in parameters):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
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

# Those that make tensors on the host in ways of their own.
TOWERS = ["qwen3_5", "DeepseekOCRForCausalLM"]
MORE_TOWERS = ["qwen2_5_vl", "glm4v", "kimi_vl", "llama4", "step3p7", "siglip"]
EAGER = {"piece_compiler": "eager"}


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def tower_of(name: str) -> Any:
    settings = {"model_type": name, **CHECKPOINTS[name][0]}
    module = FAMILIES[name].build(settings).requires_grad_(False).eval()
    draw_weights(module, 0)
    return FAMILIES[name].wrap(module)


def budgets_of(tower: Any) -> dict[str, Any]:
    """One of each path, in which the inputs fit."""
    views = getattr(tower, "views", {})
    if len(views) < 2:
        return {"token_budgets": [6 * views["default"].tokens if views else 64]}
    return {"paths": {path: {"token_budgets": [6 * view.tokens]} for path, view in views.items()}}


def sizes_of(tower: Any) -> list[int]:
    return [16, 32] if isinstance(tower, fx.PackedTower) else [2, 4]


@pytest.mark.slow
@each_default
@pytest.mark.parametrize(
    "model", [*TOWERS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_TOWERS)]
)
@torch.no_grad()
def test_a_manager_encodes_the_same(model: str, name: str) -> None:
    tower = tower_of(model)
    inputs = random_inputs(tower, sizes_of(tower))
    plain = fx.EncoderCudaGraphManager(tower_of(model), fx.EncoderConfig(enabled=False), log_interval=0)
    expected = plain.execute(inputs)
    with DEFAULTS[name]():
        manager = fx.EncoderCudaGraphManager(
            tower, fx.EncoderConfig(**EAGER, mode="full", **budgets_of(tower)), log_interval=0
        )
        manager.capture()
        got = manager.execute(inputs)
    assert all(program is not None for program in manager.programs.values())
    assert manager.stats().hits == 2
    assert_close(got, expected)


@pytest.mark.slow
@each_default
@torch.no_grad()
def test_the_backend_computes_the_same(name: str) -> None:
    tower = tower_of("siglip")
    inputs = tower.example_inputs()
    expected = tower(*inputs)
    with DEFAULTS[name]():
        got = torch.compile(tower, backend="encoder_cg", fullgraph=True, options=EAGER)(*inputs)
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


def siglip2() -> tuple[Any, dict[str, Any]]:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Siglip2VisionModel(Siglip2VisionConfig(**sizes, patch_size=4, num_patches=16)).eval()
    shapes = torch.tensor([[4, 4], [2, 8]])
    mask = torch.ones(2, 16, dtype=torch.int64)
    return model, {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


def llama4() -> tuple[Any, dict[str, Any]]:
    config = Llama4VisionConfig(**CHECKPOINTS["llama4"][0]["vision_config"])
    return Llama4VisionModel(config).eval(), {"pixel_values": torch.randn(2, 3, 28, 28)}


@pytest.mark.slow
@each_default
@pytest.mark.parametrize("make", [siglip2, llama4])
@torch.no_grad()
def test_an_accelerated_model_computes_the_same(
    make: Callable[[], tuple[Any, dict[str, Any]]], name: str
) -> None:
    model, inputs = make()
    expected = model(**inputs).last_hidden_state
    with DEFAULTS[name]():
        fx.accelerate(model, fx.EncoderConfig(**EAGER, mode="full", exact_min_hits=1))
        got = [model(**inputs).last_hidden_state for _ in range(2)]
    assert fx.stats(model).hits > 0
    assert_close(got, [expected, expected])


@each_default
@pytest.mark.parametrize(
    "model", ["qwen2_vl", "glm4v", "internvl", "llama4", "DeepseekOCRForCausalLM", "siglip"]
)
def test_pixels_are_prepared_the_same(model: str, name: str) -> None:
    settings = {"model_type": model, **CHECKPOINTS[model][0]}
    image = Image.effect_noise((96, 64), 60).convert("RGB")
    expected = FAMILIES[model].prepare(settings, ProcessorSettings()).image(image).tensors
    with DEFAULTS[name]():
        got = FAMILIES[model].prepare(settings, ProcessorSettings()).image(image).tensors
    torch.testing.assert_close(dict(got), dict(expected), rtol=0, atol=0)
