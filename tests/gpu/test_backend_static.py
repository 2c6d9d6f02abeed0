"""Graphs without a token count behind torch.compile, with real graphs: replays, values, weights, strides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import rms_error

from ..backend.test_sizes import OF_TRANSFORMERS, SMALL, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision", "fresh_dynamo")]

ZOO = [pytest.param(make, id=name) for name, make in {**SMALL, **OF_TRANSFORMERS}.items()]


def made_of(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The module in bfloat16, and the same in float32."""
    torch.manual_seed(0)
    module = make().eval().requires_grad_(False).to("cuda", torch.bfloat16)
    return module, copy.deepcopy(module).float()


def assert_within_eagers_error(compiled: Any, module: nn.Module, exact: nn.Module, *batches: Tensor) -> None:
    """Over all batches together: a module that returns a few numbers has errors that vary."""
    ours, theirs, expected = [], [], []
    for batch in batches:
        ours.append([each.clone() for each in tensors(compiled(batch))])
        theirs.append(tensors(module(batch)))
        expected.append(tensors(exact(batch.float())))
    for got, plain, wanted in zip(
        *(zip(*each, strict=True) for each in (ours, theirs, expected)), strict=True
    ):
        assert [each.shape for each in got] == [each.shape for each in plain]
        assert rms_error([*got], [*wanted]) <= 1.2 * rms_error([*plain], [*wanted]) + 1e-3


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32, device="cuda").bfloat16()


@torch.no_grad()
@pytest.mark.parametrize("make", ZOO)
def test_every_batch_that_recurs_is_replayed(make: Callable[[], nn.Module]) -> None:
    """In mode exact every size that recurs is captured, whatever it gains."""
    module, exact = made_of(make)
    compiled = torch.compile(module, backend="encoder_cg", options={"mode": "exact"})
    batches = (1, 2, 2, 1, 3, 3, 2, 1)
    assert_within_eagers_error(compiled, module, exact, *map(images, batches))
    stats = fx.stats(compiled)
    assert stats.hits >= 5
    assert stats.hits + sum(stats.misses.values()) == len(batches)
    assert sum(each.replays for each in stats.budgets.values()) == stats.hits
    for parameter, other in zip(module.parameters(), exact.parameters(), strict=True):
        parameter.mul_(0.75)  # in place
        other.copy_(parameter)
    assert_within_eagers_error(compiled, module, exact, images(2))
    assert fx.stats(compiled).hits == stats.hits + 1


@torch.no_grad()
@pytest.mark.parametrize("make", ZOO[:3])
def test_inputs_in_other_strides_are_replayed(make: Callable[[], nn.Module]) -> None:
    module, exact = made_of(make)
    options = {"mode": "full", "exact_min_hits": 1}
    compiled = torch.compile(module, backend="encoder_cg", dynamic=False, options=options)
    for _ in range(2):
        for batch in (images(2), images(2).to(memory_format=torch.channels_last), images(4)[::2]):
            assert_within_eagers_error(compiled, module, exact, batch)
    assert fx.stats(compiled).hits == 6


@torch.no_grad()
def test_replaced_weights_are_captured_again() -> None:
    module, exact = made_of(SMALL["convolutions"])
    compiled = torch.compile(module, backend="encoder_cg", dynamic=False, options={"mode": "full"})
    for scale in (1.0, 0.5):
        module.head.weight = nn.Parameter(module.head.weight * scale, requires_grad=False)
        exact.head.weight.copy_(module.head.weight)
        for _ in range(3):
            assert_within_eagers_error(compiled, module, exact, images(1))
    assert fx.stats(compiled).hits == 4
