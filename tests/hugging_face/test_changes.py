"""A tower that is changed behind its captures: every call gives what the plain model gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason

from .models import MODELS

LLAVA = "llava-next"


def features(tower: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What the model reads of its tower, which is what captures make."""
    layer: torch.Tensor = tower(pixels, output_hidden_states=True).hidden_states[-2]
    return layer


class Pair:
    """A captured model and its plain twin, both with dropout in a block, which is off."""

    def __init__(self, directory: Path) -> None:
        self.model, self.plain = (MODELS[LLAVA].load(directory) for _ in range(2))
        for tower in self.towers:
            mlp = tower.encoder.layers[0].mlp
            mlp.fc2 = nn.Sequential(mlp.fc2, nn.Dropout(0.5).eval())
        self.pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        fx.accelerate(self.model, {"compile": False})

    @property
    def towers(self) -> list[Any]:
        return [model.model.vision_tower for model in (self.model, self.plain)]

    def assert_alike(self) -> torch.Tensor:
        outputs = []
        for tower in self.towers:
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(features(tower, self.pixels.to(tower.dtype)))
        got, expected = outputs
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        return got

    def misses(self) -> set[str]:
        return set(fx.stats(self.model).misses)


@pytest.fixture
def pair(checkpoint: Callable[[str], Path]) -> Pair:
    made = Pair(checkpoint(LLAVA))
    made.assert_alike()
    assert not made.misses()
    return made


def test_modes_are_those_of_each_module_at_each_call(pair: Pair) -> None:
    before = pair.assert_alike()
    for tower in pair.towers:
        tower.encoder.layers[0].mlp.fc2[1].train()
    assert not torch.allclose(pair.assert_alike(), before)
    assert pair.misses() == {MissReason.TRAINING}
    for tower in pair.towers:
        tower.encoder.layers[0].mlp.fc2[1].eval()
    hits = fx.stats(pair.model).hits
    pair.assert_alike()
    assert fx.stats(pair.model).hits > hits


def transpose_in_place(tower: Any) -> None:
    """Square, so that neither its shape nor its address tells."""
    weight = tower.encoder.layers[0].self_attn.out_proj.weight
    weight.data = weight.data.t()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "epsilon": lambda tower: setattr(tower.encoder.layers[0].layer_norm1, "eps", 0.5),
    "scale": lambda tower: setattr(tower.encoder.layers[1].self_attn, "scale", 2.0),
    "function": lambda tower: setattr(tower.encoder.layers[1].mlp, "activation_fn", nn.ReLU()),
    "layer": lambda tower: setattr(tower.encoder.layers[1].mlp, "fc1", nn.Linear(32, 48)),
    "dtype": lambda tower: tower.double(),
    "layout": lambda tower: tower.to(memory_format=torch.channels_last),
    "strides": transpose_in_place,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_reads_is_captured_again(change: str, pair: Pair) -> None:
    for tower in pair.towers:
        torch.manual_seed(0)
        CHANGES[change](tower)
    hits = fx.stats(pair.model).hits
    pair.assert_alike()
    assert fx.stats(pair.model).hits == hits + 1
    assert not pair.misses()


class Halved(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is nn.functional.layer_norm else result


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.addmm.default else result


@pytest.mark.parametrize("mode", [Halved, Doubled])
def test_modes_of_torch_see_every_operation(mode: Any, pair: Pair) -> None:
    before = pair.assert_alike()
    with mode():
        after = pair.assert_alike()
    assert not torch.allclose(before, after)
    assert pair.misses() == {MissReason.FOREIGN_CODE}


def test_operations_are_counted_and_devices_are_no_mode(pair: Pair) -> None:
    counts = []
    for model in (pair.model, pair.plain):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            features(model.model.vision_tower, pair.pixels)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    hits = fx.stats(pair.model).hits
    with torch.device("cpu"):
        pair.assert_alike()
    assert fx.stats(pair.model).hits == hits + 1


@pytest.mark.parametrize("kind", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_for_all_modules_are_called(kind: str, pair: Pair) -> None:
    before, called = pair.assert_alike(), []

    def hook(module: nn.Module, inputs: Any, output: Any = None) -> Any:
        called.append(module)
        if isinstance(module, nn.LayerNorm):
            return (inputs[0] * 2,) if output is None else output * 2

    handle = getattr(modules, kind)(hook)
    try:
        after = pair.assert_alike()
    finally:
        handle.remove()
    assert not torch.allclose(before, after)
    assert {*pair.towers[0].modules()} & {*called}
    assert pair.misses() == {MissReason.FOREIGN_CODE}
    torch.testing.assert_close(pair.assert_alike(), before)


def test_transforms_of_functions(pair: Pair) -> None:
    pixels = pair.pixels.unsqueeze(1)
    results = []
    for tower in pair.towers:
        with torch.no_grad():
            mapped = torch.func.vmap(lambda x, t=tower: features(t, x))(pixels)
        gradient = torch.func.grad(lambda x, t=tower: features(t, x).sum())(pair.pixels)
        with torch.no_grad():
            doubled = {name: weight * 2 for name, weight in tower.named_parameters()}
            called = torch.func.functional_call(
                tower, doubled, (pair.pixels,), {"output_hidden_states": True}
            ).hidden_states[-2]
        results.append((mapped, gradient, called))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    assert MissReason.FOREIGN_CODE in pair.misses()
    pair.assert_alike()


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_weights_that_are_computed(norm: Callable[[nn.Module], nn.Module], pair: Pair) -> None:
    for tower in pair.towers:
        torch.manual_seed(5)
        norm(tower.encoder.layers[1].mlp.fc1)
        tower.eval()
    pair.assert_alike()
    assert pair.misses() == {MissReason.FOREIGN_CODE}
