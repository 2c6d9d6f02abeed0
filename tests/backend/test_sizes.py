"""Graphs without a token count, of one constant shape or of any batch, are captured at sizes that recur."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.backend import BudgetDispatcher

from .towers import compile_it

Made = Callable[[], list[BudgetDispatcher]]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class ConvNet(nn.Module):
    """Convolutions, batch normalization and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        scale = torch.tensor([0.5, 1.0, 2.0]) * torch.arange(1, 4)  # on the CPU, at each call
        images = images * scale.to(images).unflatten(0, (3, 1, 1))
        return self.head(self.body(self.stem(images)).mean((2, 3))).softmax(-1)


class Attention(nn.Module):
    """A transformer's layer over patches and their mean; eager, or by SDPA over the heads of all images."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.patch = nn.Conv2d(3, 8, 8, stride=8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.eager:
            y = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        return (x + self.out(y.transpose(1, 2).flatten(2))).mean(1)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(image_size=32, patch_size=8, attn_implementation="sdpa", **sizes)
    return ViTModel(config, add_pooling_layer=False)


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, image_size=32))


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinModel

    sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    return SwinModel(SwinConfig(image_size=32, patch_size=4, **sizes))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "convolutions": ConvNet,
    "eager attention": lambda: Attention(eager=True),
    "SDPA": lambda: Attention(eager=False),
}
OF_TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {"ViT": vit, "ConvNeXt": convnext, "Swin": swin}


def params(zoo: dict[str, Callable[[], nn.Module]]) -> list[Any]:
    few = {"convolutions", "SDPA"}
    marks = {name: pytest.mark.exhaustive for name in zoo.keys() - few}
    return [pytest.param(make, id=name, marks=marks.get(name, ())) for name, make in zoo.items()]


def made_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [v for v in output.values() if v is not None]


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


def assert_served(compiled: Any, module: nn.Module, batch: Tensor) -> list[Tensor]:
    got, expected = tensors(compiled(batch)), tensors(module(batch))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.stride() == theirs.stride()
    return got


def counts(made: Made) -> tuple[int, int, int]:
    """Hits, misses and captures of all graphs."""
    return (
        sum(each.hits for each in made()),
        sum(each.misses.total() for each in made()),
        sum(each.num_captured for each in made()),
    )


@torch.no_grad()
@pytest.mark.parametrize("make", params({**SMALL, **OF_TRANSFORMERS}))
def test_batches_that_recur_are_captured_and_weights_followed(
    make: Callable[[], nn.Module], made: Made
) -> None:
    module = made_of(make)
    compiled = compile_it(module)
    served = [assert_served(compiled, module, images(batch)) for batch in (1, 2, 2, 1, 3, 3, 2, 1)]
    kept = [(got, [each.clone() for each in got]) for got in served]
    hits, misses, captures = counts(made)
    assert hits + misses == len(kept)
    assert hits >= 5
    assert captures >= 2
    weight = next(module.parameters())
    weight.mul_(1.5)  # in place
    assert_served(compiled, module, images(1))
    assert counts(made)[:2] == (hits + 1, misses)
    full_name, _ = next(module.named_parameters())
    owner, _, name = full_name.rpartition(".")
    setattr(module.get_submodule(owner), name, nn.Parameter(weight * 0.5, requires_grad=False))
    for batch in (1, 1, 2, 2):
        assert_served(compiled, module, images(batch))
    assert counts(made)[0] > hits + 1
    for outputs, contents in kept:  # the caller's own
        assert all(torch.equal(a, b) for a, b in zip(outputs, contents, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("make", params(SMALL))
def test_inputs_of_other_strides(make: Callable[[], nn.Module]) -> None:
    module = made_of(make)
    compiled = compile_it(module, exact_min_hits=1)
    for _ in range(2):
        for batch in (images(2).to(memory_format=torch.channels_last), images(1).expand(2, -1, -1, -1)):
            assert_served(compiled, module, batch)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["auto", "full", "piecewise", "exact", "breakable"])
def test_every_mode_captures_a_constant_shape(mode: str, made: Made) -> None:
    module = made_of(SMALL["SDPA"])
    compiled = compile_it(module, dynamic=False, mode=mode, debug=True)
    for _ in range(4):
        assert_served(compiled, module, images(1))
    (dispatcher,) = made()
    assert (dispatcher.hits, dispatcher.misses) == (3, {fx.MissReason.NEW_SHAPE: 1})
    ((key, stats),) = fx.stats(compiled).budgets.items()
    assert (key.budget, stats.replays, stats.mode) == (0, 3, "exact")
    (program,) = dispatcher.programs.values()
    captured = program.unpadded.of_size(()).captured[()]
    assert captured.mode == ("piecewise" if mode in ("piecewise", "breakable") else "full")
    dispatcher.clear()
    assert dispatcher.num_captured == 0


@torch.no_grad()
def test_warm_up_captures_the_example_and_counts_nothing(made: Made) -> None:
    module = made_of(ConvNet)
    compiled = compile_it(module)
    assert fx.warmup(compiled, images(2)) == 1
    assert counts(made) == (0, 0, 1)
    assert_served(compiled, module, images(2))
    assert counts(made) == (1, 0, 1)


class VarlenOfOneShape(nn.Module):
    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q = x.view(-1, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, cu_seqlens, 12, 0.5).view(-1, 8) * 2


@torch.no_grad()
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_segments_of_a_constant_shape_are_data(mode: str, made: Made) -> None:
    module = VarlenOfOneShape()
    compiled = compile_it(module, dynamic=False, mode=mode, exact_min_hits=1, debug=True)
    for ends in ([5, 12], [3, 12], [11, 12], [5, 8, 12], [1, 2, 12], [4, 12]):
        x, lengths = torch.randn(12, 8), torch.tensor([0, *ends], dtype=torch.int32)
        torch.testing.assert_close(compiled(x, lengths), module(x, lengths))
    assert counts(made) == (6, 0, 2)


class TwoAttentions(nn.Module):
    """Attends over two numbers of rows, of which neither counts all tokens."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (a, b) = (nn.functional.scaled_dot_product_attention(each, each, each) for each in (x, y))
        return a.sum(0) + b.sum(0)


@torch.no_grad()
def test_attention_over_several_counts_is_captured_by_all_of_them(made: Made) -> None:
    module = TwoAttentions()
    compiled = compile_it(module, dynamic=True)
    for first, second in ((2, 3), (4, 3), (2, 3), (4, 3), (3, 4), (2, 3)):
        x, y = torch.randn(first, 7, 5, 8), torch.randn(second, 7, 5, 8)
        torch.testing.assert_close(compiled(x, y), module(x, y))
    assert counts(made) == (3, 3, 2)


class Noise(ConvNet):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + torch.rand(5)


class SizesOfData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.nonzero().float() * 2).sum(0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "why"), [(Noise, "draws random numbers"), (SizesOfData, "sizes that depend on data")]
)
def test_what_is_never_captured_says_so_once(
    make: Callable[[], nn.Module], why: str, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    module = made_of(make)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), caplog.at_level(logging.WARNING):
        compiled = compile_it(module, exact_min_hits=1)
        for seed in range(3):
            batch = images(1)
            torch.manual_seed(seed)
            expected = module(batch)
            torch.manual_seed(seed)
            torch.testing.assert_close(compiled(batch), expected)
    assert made()[0].misses == {fx.MissReason.UNSUPPORTED_GRAPH: 3}
    (warning,) = [each.getMessage() for each in caplog.records if "never captured" in each.getMessage()]
    assert why in warning
