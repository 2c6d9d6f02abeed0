"""vLLM's attention with relative positions where it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.layers import (
    install_relative_positions,
    traceable_relative_positions,
)
from fxsplit_encoder.integrations.vllm.plugin import install_layers

from .fake_vllm import CUSTOM_OP, FakeVllm

LAYER = "vllm.model_executor.models.deepencoder.RelPosAttention"


class FakeLayer(nn.Module):
    """vLLM's, whose kernel says that it was called."""

    def __init__(self, width: int, use_triton_attention: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.use_triton_attention = use_triton_attention

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf) if self.use_triton_attention else self.proj(x)


def add_layer(vllm: FakeVllm, layer: type) -> dict[str, Any]:
    """Into the package; returns its registry."""
    custom_op = vllm.module(CUSTOM_OP)
    registry: dict[str, Any] = custom_op.op_registry_oot

    class PluggableLayer:
        @classmethod
        def register_oot(cls, *, name: str) -> Callable[[type], None]:
            return lambda given: registry.update({name: given})

    custom_op.PluggableLayer = PluggableLayer
    vllm._add(LAYER, layer)
    return registry


def test_a_trace_has_pytorchs_operations(fresh_dynamo: None) -> None:
    traceable = traceable_relative_positions(FakeLayer)
    layer, x = traceable(4, use_triton_attention=True), torch.randn(3, 4)
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(traced(x), layer.proj(x))
        assert layer(x).isinf().all()  # vLLM's kernel where nothing is traced
        assert torch.equal(traceable(4)(x).isinf(), torch.zeros(3, 4, dtype=torch.bool))


def test_it_is_installed_once_and_not_over_others(vllm: FakeVllm) -> None:
    registry = add_layer(vllm, FakeLayer)
    assert install_layers() is install_layers() is None
    assert registry["RelPosAttention"] is traceable_relative_positions(FakeLayer)
    registry["RelPosAttention"] = FakeLayer
    install_relative_positions()
    assert registry["RelPosAttention"] is FakeLayer


def test_a_vllm_without_the_kernel_needs_nothing(vllm: FakeVllm) -> None:
    install_relative_positions()  # without the layer
    assert "RelPosAttention" not in add_layer(vllm, nn.Linear)
    install_relative_positions()
    assert "RelPosAttention" not in vllm.module(CUSTOM_OP).op_registry_oot
