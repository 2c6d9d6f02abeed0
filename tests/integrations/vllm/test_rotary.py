"""vLLM's rotary embedding where it is traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.layers import install_rotary, traceable_rotary

from .fake_vllm import CUSTOM_OP, FakeVllm

COMMON = "vllm.model_executor.layers.rotary_embedding.common"


class FakeRotary(nn.Module):
    """vLLM's, whose kernel says that it was called."""

    is_neox_style = True

    @staticmethod
    def forward_static(
        x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> Tensor:
        wide = x.float() if enable_fp32_compute else x
        cos, sin = (each.unsqueeze(-2).to(wide.dtype) for each in (cos, sin))
        one, two = torch.chunk(wide, 2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)

    def forward_cuda(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.forward_cuda(x, cos, sin)


def inputs(width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, width, generator=generator).bfloat16()
    angles = torch.randn(5, 4, generator=generator)
    return x, angles.cos().bfloat16(), angles.sin().bfloat16()


def test_a_trace_has_pytorchs_operations_and_rounds_once(fresh_dynamo: None) -> None:
    rotary = traceable_rotary(FakeRotary)()
    x, cos, sin = inputs()
    traced = torch.compile(rotary, backend="eager", fullgraph=True)(x, cos, sin)
    expected = FakeRotary.forward_static(x.double(), cos.double(), sin.double())
    assert traced.dtype == torch.bfloat16
    assert torch.equal(traced, expected.float().bfloat16())
    assert rotary(x, cos, sin).isinf().all()  # vLLM's kernel where nothing is traced


def test_an_embedding_of_a_part_of_the_head_stays_vllms(fresh_dynamo: None) -> None:
    rotary = traceable_rotary(FakeRotary)()
    assert torch.compile(rotary, backend="eager", fullgraph=True)(*inputs(width=12)).isinf().all()


def test_it_is_installed_once_and_not_over_others(vllm: FakeVllm) -> None:
    registry = vllm.module(CUSTOM_OP).op_registry_oot
    assert install_rotary() is install_rotary() is None
    assert hasattr(registry["ApplyRotaryEmb"], "forward_traced")
    registry["ApplyRotaryEmb"] = type("OfAnother", (), {})
    assert "OfAnother" in str(install_rotary())


def test_an_embedding_of_other_parameters_stays(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(FakeRotary):
        def forward_cuda(self, x: Tensor, table: Tensor) -> Tensor: ...  # type: ignore[override]

    monkeypatch.setattr(vllm.module(COMMON), "ApplyRotaryEmb", Changed)
    assert "forward_cuda takes (x, table)" in str(install_rotary())
    assert vllm.module(CUSTOM_OP).op_registry_oot == {}
