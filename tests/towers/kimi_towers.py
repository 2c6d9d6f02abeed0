"""What the tests of the two Kimi towers share: weights that hide no fault, managers, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxsplit_encoder as fx

MODES = ("auto", "full", "piecewise", "none")
BUDGETS = (4, 16, 32)
PATCH = 4


def randomise(module: nn.Module) -> nn.Module:
    """Random weights, biases, norms and positions, none of them faint."""
    generator = torch.Generator().manual_seed(1000)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
            elif "norm" in name:
                parameter.normal_(1.0, 0.1, generator=generator)
            else:
                deviation = 0.5 if "pos_emb" in name else parameter[0].numel() ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
    return module.requires_grad_(False).train(False)


def patches(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(seed))


def make_managers(wrapped: Any) -> dict[str, fx.EncoderCudaGraphManager]:
    """A captured manager in each mode; they share one trace."""
    managers: dict[str, fx.EncoderCudaGraphManager] = {}
    for mode in MODES:
        config = fx.EncoderConfig(
            mode=mode, token_budgets=BUDGETS, max_items_per_batch=4, max_frames_per_batch=8, debug=True
        )
        manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
        path = manager.paths["default"]
        if managers:
            path.forward.bind(next(iter(managers.values())).paths["default"].program)
        manager.capture()
        managers[mode] = manager
    return managers


def assert_same_items(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [item.shape for item in got] == [item.shape for item in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def assert_permuted_batches_give_permuted_items(
    manager: fx.EncoderCudaGraphManager,
    inputs: dict[str, Any],
    order: Sequence[int],
    encode: Callable[..., Any],
) -> None:
    permuted = manager.tower.select_encoder_cudagraph_items(inputs, list(order))
    assert_same_items(manager.execute(permuted), [encode(inputs)[i] for i in order])
