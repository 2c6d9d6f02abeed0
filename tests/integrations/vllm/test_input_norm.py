"""vLLM's normalization of raw pixels where it is traced."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.layers import install_input_norm, traceable_input_norm
from fxsplit_encoder.integrations.vllm.plugin import install_layers

from .fake_vllm import CUSTOM_OP, FakeVllm

LAYER = "vllm.model_executor.layers.fusion.mm_input_norm.FusedMMInputNorm"


class FakeNorm(nn.Module):
    """vLLM's, whose kernel says that it was called."""

    def forward_native(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
        return (pixel_values / 255 - 0.5).to(visual_dtype)

    def forward_cuda(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
        return torch.full(pixel_values.shape, torch.inf, dtype=visual_dtype)

    def forward(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
        return self.forward_cuda(pixel_values, visual_dtype)


def test_a_trace_has_pytorchs_operations(fresh_dynamo: None) -> None:
    layer = traceable_input_norm(FakeNorm)()
    pixels = torch.arange(0, 240, 10, dtype=torch.uint8).view(4, 6)
    traced = torch.compile(layer, backend="eager", fullgraph=True)(pixels, torch.bfloat16)
    assert traced.dtype == torch.bfloat16
    assert torch.equal(traced, FakeNorm().forward_native(pixels, torch.bfloat16))
    assert layer(pixels, torch.bfloat16).isinf().all()  # vLLM's kernel where nothing is traced


def test_it_is_installed_once_and_not_over_others(vllm: FakeVllm) -> None:
    vllm._add(LAYER, FakeNorm)
    registry = vllm.module(CUSTOM_OP).op_registry_oot
    assert install_layers() is install_layers() is None
    assert registry["FusedMMInputNorm"] is traceable_input_norm(FakeNorm)
    registry["FusedMMInputNorm"] = FakeNorm
    install_input_norm()
    assert registry["FusedMMInputNorm"] is FakeNorm


def test_a_vllm_without_the_layer_or_with_another_needs_nothing(vllm: FakeVllm) -> None:
    registry = vllm.module(CUSTOM_OP).op_registry_oot
    install_input_norm()
    vllm._add(LAYER, nn.Linear)
    install_input_norm()
    assert registry == {}
