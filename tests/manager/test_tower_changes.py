"""Captures of a tower whose modules have changed do not serve; `capture` makes them of those there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_map_only

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import random_inputs
from fxsplit_encoder.planning.plan import MissReason
from tests.small_tower import FEATURES, SmallAdapter, SmallTower

CONFIG = fx.EncoderConfig(token_budgets=(4, 16), piece_compiler="eager")
UNCOMPILED = fx.EncoderConfig(token_budgets=(4, 16), compile=False)


def another_layer(tower: Any) -> None:
    layer = copy.deepcopy(tower.blocks[0].mlp.linear_fc1)
    layer.weight.mul_(3.0)
    tower.blocks[0].mlp.linear_fc1 = layer


def adapter(tower: Any) -> None:
    """As peft puts one around a layer, whose weights stay where they are."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(x)
            return result + self.base_layer(torch.tanh(3 * x))

    tower.blocks[0].mlp.linear_fc2 = Adapter(tower.blocks[0].mlp.linear_fc2)


def hook(tower: Any) -> None:
    tower.blocks[0].register_forward_hook(lambda module, inputs, output: output * output)


def make(config: fx.EncoderConfig = CONFIG) -> tuple[fx.EncoderCudaGraphManager, dict[str, Any]]:
    tower = SmallAdapter()
    return fx.EncoderCudaGraphManager(tower, config), random_inputs(tower, [4])


def assert_right(manager: fx.EncoderCudaGraphManager, inputs: dict[str, Any]) -> torch.Tensor:
    (got,) = manager.execute(inputs)
    expected = manager.tower.encoder_eager_forward(inputs)
    torch.testing.assert_close(got, expected.view_as(got), rtol=1e-4, atol=1e-5)
    return got


# Each change is met in one mode, as who looks for changes knows no modes.
@pytest.mark.parametrize(
    ("change", "mode"), [(another_layer, "full"), (hook, "breakable"), (adapter, "piecewise")]
)
@torch.no_grad()
def test_nothing_stale_is_returned_and_captures_can_be_made_anew(
    change: Callable[[Any], None], mode: Any
) -> None:
    manager, inputs = make(CONFIG.replace(mode=mode))
    manager.capture()
    before = assert_right(manager, inputs)
    change(manager.tower.tower)
    for _ in range(2):
        with pytest.raises(fx.TowerChangedError, match=r"modules that were captured; got blocks\.\d"):
            manager.execute(inputs)
    served = manager.stats().hits
    manager.capture()
    after = assert_right(manager, inputs)
    assert not torch.allclose(after, before, rtol=1e-4)
    assert manager.stats().hits == served + 1


@pytest.mark.parametrize("config", [CONFIG, UNCOMPILED])
@torch.no_grad()
def test_a_weight_transposed_at_its_address(config: fx.EncoderConfig) -> None:
    manager, inputs = make(config)
    manager.capture()
    before = assert_right(manager, inputs)
    weight = manager.tower.tower.blocks[0].attn.proj.weight
    weight.data = weight.data.t()
    if config.compile:
        with pytest.raises(fx.WeightsLayoutError, match="strides"):
            manager.execute(inputs)
        manager.clear()
        manager.capture()
    assert not torch.allclose(assert_right(manager, inputs), before, rtol=1e-4)


@torch.no_grad()
def test_a_module_in_training_is_computed_by_the_tower() -> None:
    manager, inputs = make(UNCOMPILED)
    mlp, dropout = manager.tower.tower.blocks[0].mlp, nn.Dropout(0.5)
    mlp.linear_fc2 = nn.Sequential(mlp.linear_fc2, dropout)
    with pytest.raises(fx.InputError, match=r"got blocks\.0\.mlp\.linear_fc2\.1 in training mode"):
        manager.capture()
    dropout.eval()
    manager.capture()
    before = assert_right(manager, inputs)
    dropout.train()
    torch.manual_seed(0)
    (got,) = manager.execute(inputs)
    torch.manual_seed(0)
    assert torch.equal(got, manager.tower.encoder_eager_forward(inputs).view_as(got))
    assert not torch.equal(got, before)
    dropout.eval()
    assert torch.equal(assert_right(manager, inputs), before)
    stats = manager.stats()
    assert (stats.hits, dict(stats.misses)) == (2, {MissReason.TRAINING: 1})


def hooks_for_all_modules() -> Any:
    return modules.register_module_forward_hook(
        lambda module, args, output: 2 * output if isinstance(module, nn.LayerNorm) else None
    )


@pytest.mark.parametrize("around", [hooks_for_all_modules, lambda: torch.autocast("cpu", torch.bfloat16)])
@torch.no_grad()
def test_what_is_around_a_call_is_around_the_towers_own_forward(around: Any) -> None:
    manager, inputs = make(UNCOMPILED)
    reason = MissReason.FOREIGN_CODE
    if around is not hooks_for_all_modules:
        reason = MissReason.AUTOCAST
        with (
            around(),
            pytest.raises(fx.InputError, match="captures would keep its casts; call this outside of it"),
        ):
            manager.capture()
    manager.capture()
    before = assert_right(manager, inputs)
    with around():
        assert not torch.allclose(assert_right(manager, inputs).float(), before)
    assert torch.equal(assert_right(manager, inputs), before)
    stats = manager.stats()
    assert (stats.hits, dict(stats.misses)) == (2, {reason: 1})


@pytest.mark.parametrize("before", ["compile", "capture and clear"])
@torch.no_grad()
def test_what_is_captured_is_the_tower_as_it_is_then(before: str) -> None:
    manager, inputs = make()
    if before == "compile":
        manager.compile()
    else:
        manager.capture()
        manager.clear()
    adapter(manager.tower.tower)
    manager.capture()
    assert_right(manager, inputs)
    assert manager.stats().hits == 1


@torch.no_grad()
def test_with_time_between_looks_a_change_is_seen_at_the_next() -> None:
    manager, inputs = make(UNCOMPILED.replace(weight_check_seconds=3600.0))
    manager.capture()
    assert_right(manager, inputs)
    hook(manager.tower.tower)
    manager.execute(inputs)
    manager.check_weights()
    for _ in range(2):
        with pytest.raises(fx.TowerChangedError):
            manager.execute(inputs)


# --- parameters of a tensor subclass that wraps others, without memory of its own, as quantized weights are


GRID = torch.tensor([[1, 4, 6]])


class Quantized(Tensor):
    """Whole numbers, times a tensor or a number."""

    values: Tensor
    scale: Tensor
    factor: float

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, factor: float) -> Quantized:
        made: Any = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values, made.scale, made.factor = values, scale, factor
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.factor

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], factor: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["values"], inner["scale"], factor)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            (made,) = args
            return Quantized(made.values, made.scale, made.factor)
        args, kwargs = tree_map_only(Quantized, cls.plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Quantized({tuple(self.shape)})"

    def plain(self) -> Tensor:
        return self.values.float() * self.scale * self.factor


def tower(seed: int, factor: float = 1.0) -> Any:
    made = SmallTower(seed)
    for layer in layers(made):
        scale = layer.weight.abs().amax().reshape(1) / 127
        weight = Quantized((layer.weight / scale).round().to(torch.int8), scale, factor)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return made


def layers(inner: Any) -> list[Any]:
    return [m for n, m in inner.named_modules() if isinstance(m, nn.Linear) and ".mlp." in n]


@pytest.fixture
def pixels() -> Tensor:
    return torch.randn(24, FEATURES, generator=torch.Generator().manual_seed(0))


def make_encode(inner: Any, pixels: Tensor, *, compiles: bool) -> Any:
    settings: dict[str, Any] = {"piece_compiler": "eager", "token_budgets": (8,), "mode": "full"}
    wrapped = SmallAdapter(inner)
    if compiles:
        module = torch.compile(wrapped, backend="encoder_cg", options=settings)
        return lambda: module(pixels, GRID)
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(**settings))
    manager.capture()
    inputs = {"pixel_values": pixels, "image_grid_thw": GRID}
    return lambda: manager.execute(inputs)[0]


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_exchanged_parameters_are_those_of_the_next_call(pixels: Tensor, compiles: bool) -> None:
    torch._dynamo.reset()
    inner, reference = tower(0), tower(0)
    encode = make_encode(inner, pixels, compiles=compiles)
    for seed in (0, 3):
        for each in (inner, reference):
            for layer, other in zip(layers(each), layers(tower(seed)), strict=True):
                layer.weight = other.weight
        torch.testing.assert_close(encode(), reference(pixels, GRID), rtol=1e-4, atol=1e-5)
    for weight in (layer.weight for each in (inner, reference) for layer in layers(each)):
        weight.values.neg_()
    torch.testing.assert_close(encode(), reference(pixels, GRID), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_constants_of_a_wrapper_are_compiled_again(pixels: Tensor) -> None:
    inner, reference = tower(0), tower(0)
    encode = make_encode(inner, pixels, compiles=False)
    encode()
    for each in (inner, reference):
        for layer in layers(each):
            weight = layer.weight
            layer.weight = nn.Parameter(Quantized(weight.values, weight.scale, 2.0), requires_grad=False)
    with pytest.raises(fx.WeightsLayoutError, match=r"linear_fc1\.weight with the constants of its subclass"):
        encode()
