"""Parameters of a tensor subclass that wraps others, without memory of its own, as quantized weights are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fxsplit_encoder as fx
from tests.small_tower import FEATURES, SmallAdapter, SmallTower

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


def exchange(inner: Any, source: Any) -> None:
    for layer, other in zip(layers(inner), layers(source), strict=True):
        layer.weight = other.weight


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
            exchange(each, tower(seed))
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
