"""vLLM's attention layer through this library's op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxsplit_encoder.integrations.vllm.layers import (
    install_attention,
    noting_bounds,
    split_attention,
)

from .fake_vllm import ATTENTION, CUSTOM_OP, FakeAttention, FakeVllm

LENGTHS = [5, 3, 8]
TOKENS = sum(LENGTHS)


def layer(heads: int = 4, kv_heads: int = 4) -> Any:
    return split_attention(FakeAttention)(heads, 8, num_kv_heads=kv_heads)


def inputs(batch: int, tokens: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, n, 8, generator=generator) for n in (heads, kv_heads, kv_heads)]


def reference(query: Any, key: Any, value: Any) -> torch.Tensor:
    """(batch, tokens, heads, width) each; every row of the batch attends to itself."""
    groups = query.shape[2] // key.shape[2]
    key, value = (each.repeat_interleave(groups, dim=2) for each in (key, value))
    swapped = (each.transpose(1, 2) for each in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


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


def test_another_plugins_attention_stays(vllm: FakeVllm) -> None:
    registry = vllm.module(CUSTOM_OP).op_registry_oot
    registry["MMEncoderAttention"] = other = type("OfAnother", (), {})
    assert "OfAnother" in str(install_attention())
    assert registry == {"MMEncoderAttention": other}


def test_an_attention_of_other_parameters_stays(vllm: FakeVllm) -> None:
    class Changed(FakeAttention):
        def forward_native(self, query: Any, key: Any, value: Any, metadata: Any) -> Any: ...

    vllm.module(ATTENTION).MMEncoderAttention = Changed
    assert "forward_native takes (query, key, value, metadata)" in str(install_attention())
    assert vllm.module(CUSTOM_OP).op_registry_oot == {}
