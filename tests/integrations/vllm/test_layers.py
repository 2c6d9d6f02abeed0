"""vLLM's layers: attention through fxsplit's op, and PyTorch's operations where their kernels are traced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.layers import (
    install_attention,
    install_input_norm,
    install_relative_positions,
    install_rotary,
    noting_bounds,
    split_attention,
    traceable_input_norm,
    traceable_relative_positions,
    traceable_rotary,
)
from fxsplit_encoder.integrations.vllm.plugin import install_layers

from ...kernels.attention.fakes import cumulative
from .fake_vllm import ATTENTION, CUSTOM_OP, FakeAttention, FakeVllm

LENGTHS = [5, 3, 8]
TOKENS = sum(LENGTHS)
COMMON = "vllm.model_executor.layers.rotary_embedding.common"
NORM = "vllm.model_executor.layers.fusion.mm_input_norm.FusedMMInputNorm"
POSITIONS = "vllm.model_executor.models.deepencoder.RelPosAttention"


def layer(heads: int = 4, kv_heads: int = 4) -> Any:
    return split_attention(FakeAttention)(heads, 8, num_kv_heads=kv_heads)


def inputs(batch: int, tokens: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, n, 8, generator=generator) for n in (heads, kv_heads, kv_heads)]


def reference(query: Any, key: Any, value: Any) -> Tensor:
    """(batch, tokens, heads, width) each; every row of the batch attends to itself."""
    groups = query.shape[2] // key.shape[2]
    key, value = (each.repeat_interleave(groups, dim=2) for each in (key, value))
    swapped = (each.transpose(1, 2) for each in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_packed_attention_is_that_of_each_segment(kv_heads: int, flat: bool) -> None:
    q, k, v = inputs(1, TOKENS, 4, kv_heads)
    given = [each.flatten(2) if flat else each for each in (q, k, v)]
    out = layer(4, kv_heads)(*given, cumulative(LENGTHS), torch.tensor(max(LENGTHS)))
    assert out.shape == given[0].shape
    parts = zip(*(each.split(LENGTHS, dim=1) for each in (q, k, v)), strict=True)
    expected = torch.cat([reference(*part) for part in parts], dim=1)
    torch.testing.assert_close(out.view_as(expected), expected)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_batches_attend_row_by_row(kv_heads: int) -> None:
    q, k, v = inputs(3, 7, 4, kv_heads)
    torch.testing.assert_close(layer(4, kv_heads)(q, k, v), reference(q, k, v))


@pytest.mark.parametrize(
    "change", [{"attn_backend": SimpleNamespace(name="FLASHINFER")}, {"fp8_enabled": True}]
)
def test_kernels_with_inputs_of_their_own_stay(change: dict[str, Any]) -> None:
    kept = layer()
    for name, value in change.items():
        setattr(kept, name, value)
    assert kept(*inputs(1, TOKENS, 4, 4), cumulative(LENGTHS)) == "vLLM's own"


def test_a_bound_that_is_the_same_at_every_size_is_known_to_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed, whole, once = layer(), layer(), layer()
    with noting_bounds():
        for tokens in (16, 32):
            given = inputs(1, tokens, 4, 4)
            windowed(*given, cumulative([4] * (tokens // 4)), torch.tensor(4))
            whole(*given, cumulative([tokens]), torch.tensor(tokens))
        once(*inputs(1, 16, 4, 4), cumulative([4] * 4), torch.tensor(4))
    assert [each.segment_bound for each in (windowed, whole, once)] == [4, None, None]
    seen: list[int] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(
        "fxsplit_encoder.integrations.vllm.layers.varlen_attention",
        lambda q, k, v, cu_seqlens, bound, scale: seen.append(bound) or q,
    )
    for each in (windowed, whole):
        each(*inputs(1, 16, 4, 4), cumulative([4] * 4), torch.tensor(4))
    assert seen == [4, 16]


# --- layers of vLLM whose kernels say that they were called


class FakeRotary(nn.Module):
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


class FakeNorm(nn.Module):
    def forward_native(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
        return (pixel_values / 255 - 0.5).to(visual_dtype)

    def forward_cuda(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
        return torch.full(pixel_values.shape, torch.inf, dtype=visual_dtype)

    def forward(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
        return self.forward_cuda(pixel_values, visual_dtype)


class FakePositions(nn.Module):
    def __init__(self, use_triton_attention: bool = False) -> None:
        super().__init__()
        self.use_triton_attention = use_triton_attention

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf) if self.use_triton_attention else x + 1


def rotary_inputs(width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, width, generator=generator).bfloat16()
    angles = torch.randn(5, 4, generator=generator)
    return x, angles.cos().bfloat16(), angles.sin().bfloat16()


def rotary() -> tuple[Any, tuple[Any, ...], Tensor]:
    """A layer, its inputs, and what it makes of them, which is rounded once."""
    given = rotary_inputs()
    expected = FakeRotary.forward_static(*(each.double() for each in given)).float().bfloat16()
    return traceable_rotary(FakeRotary)(), given, expected


def input_norm() -> tuple[Any, tuple[Any, ...], Tensor]:
    given = torch.arange(0, 240, 10, dtype=torch.uint8).view(4, 6), torch.bfloat16
    return traceable_input_norm(FakeNorm)(), given, FakeNorm().forward_native(*given)


def relative_positions() -> tuple[Any, tuple[Any, ...], Tensor]:
    x = torch.randn(3, 4)
    return traceable_relative_positions(FakePositions)(use_triton_attention=True), (x,), x + 1


@pytest.mark.parametrize("make", [rotary, input_norm, relative_positions])
@torch.no_grad()
def test_a_trace_has_pytorchs_operations(make: Callable[[], Any], fresh_dynamo: None) -> None:
    layer, given, expected = make()
    traced = torch.compile(layer, backend="eager", fullgraph=True)(*given)
    assert traced.dtype == expected.dtype
    assert torch.equal(traced, expected)
    assert layer(*given).isinf().all()  # vLLM's kernel where nothing is traced


def test_a_rotary_embedding_of_a_part_of_the_head_stays_vllms(fresh_dynamo: None) -> None:
    traced = torch.compile(traceable_rotary(FakeRotary)(), backend="eager", fullgraph=True)
    assert traced(*rotary_inputs(width=12)).isinf().all()


def test_relative_positions_without_the_kernel_stay_vllms() -> None:
    assert torch.equal(traceable_relative_positions(FakePositions)()(torch.zeros(3)), torch.ones(3))


# --- installed


@pytest.fixture
def registry(vllm: FakeVllm) -> dict[str, Any]:
    custom_op = vllm.module(CUSTOM_OP)
    layers: dict[str, Any] = custom_op.op_registry_oot

    class PluggableLayer:
        @classmethod
        def register_oot(cls, *, name: str) -> Callable[[type], None]:
            return lambda given: layers.update({name: given})

    custom_op.PluggableLayer = PluggableLayer
    return layers


def test_layers_are_installed_once(vllm: FakeVllm, registry: dict[str, Any]) -> None:
    vllm._add(NORM, FakeNorm)
    vllm._add(POSITIONS, FakePositions)
    assert install_layers() is install_layers() is None
    assert hasattr(registry["ApplyRotaryEmb"], "forward_traced")
    assert registry["FusedMMInputNorm"] is traceable_input_norm(FakeNorm)
    assert registry["RelPosAttention"] is traceable_relative_positions(FakePositions)


@pytest.mark.parametrize(
    ("name", "install", "is_said"),
    [
        ("MMEncoderAttention", install_attention, True),
        ("ApplyRotaryEmb", install_rotary, True),
        ("FusedMMInputNorm", install_input_norm, False),
        ("RelPosAttention", install_relative_positions, False),
    ],
)
def test_a_layer_of_another_plugin_stays(
    name: str, install: Callable[[], Any], is_said: bool, vllm: FakeVllm, registry: dict[str, Any]
) -> None:
    vllm._add(NORM, FakeNorm)
    vllm._add(POSITIONS, FakePositions)
    registry[name] = other = type("OfAnother", (), {})
    assert ("OfAnother" in str(install())) == is_said
    assert registry == {name: other}


def test_an_attention_of_other_parameters_stays(vllm: FakeVllm, registry: dict[str, Any]) -> None:
    class Changed(FakeAttention):
        def forward_native(self, query: Any, key: Any, value: Any, metadata: Any) -> Any: ...

    vllm.module(ATTENTION).MMEncoderAttention = Changed
    assert "forward_native takes (query, key, value, metadata)" in str(install_attention())
    assert registry == {}


def test_a_rotary_embedding_of_other_parameters_stays(vllm: FakeVllm, registry: dict[str, Any]) -> None:
    class Changed(FakeRotary):
        def forward_cuda(self, x: Tensor, table: Tensor) -> Tensor: ...  # type: ignore[override]

    vllm.module(COMMON).ApplyRotaryEmb = Changed
    assert "forward_cuda takes (x, table)" in str(install_rotary())
    assert registry == {}


@pytest.mark.parametrize(
    ("install", "path"), [(install_input_norm, NORM), (install_relative_positions, POSITIONS)]
)
def test_a_vllm_without_the_layer_or_with_another_needs_nothing(
    install: Callable[[], None], path: str, vllm: FakeVllm, registry: dict[str, Any]
) -> None:
    install()
    vllm._add(path, nn.Linear)
    install()
    assert registry == {}
