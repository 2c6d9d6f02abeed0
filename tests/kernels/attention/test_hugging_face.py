from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.errors import UnsupportedTowerError
from fxsplit_encoder.kernels.attention.hugging_face import (
    IMPLEMENTATION,
    hugging_face_attention,
    use_varlen_attention,
)


def test_the_rest_of_a_model_keeps_its_own_attention(make_tower: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = make_tower()
            self.other = nn.Module()
            self.other.config = self.visual.config  # type: ignore[assignment]

    model = Model()
    before = model.visual.config._attn_implementation
    shared = model.visual.config
    use_varlen_attention(model.visual)
    assert before != IMPLEMENTATION
    assert model.visual.config._attn_implementation == IMPLEMENTATION
    assert model.visual.blocks[0].attn.config is model.visual.config
    assert model.other.config is shared
    assert shared._attn_implementation == before


def attention_module(**attributes: Any) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def bhsd(batch: int = 2, heads: int = 3, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, tokens, 8) for _ in range(3))
    return q, k, v


MASK = torch.tensor([[True, False, True, True, False]] * 5).view(1, 1, 5, 5).expand(2, 1, 5, 5)


@pytest.mark.parametrize(
    ("attributes", "given", "expected"),
    [
        ({}, {"scaling": 0.2}, {"scale": 0.2}),
        ({}, {}, {"scale": 8**-0.5}),
        ({}, {"attention_mask": MASK}, {"attn_mask": MASK}),
        ({"is_causal": True}, {}, {"is_causal": True}),
        ({}, {"is_causal": True}, {"is_causal": True}),
        ({"num_key_value_groups": 2}, {}, {"enable_gqa": True}),
    ],
    ids=["scale", "default scale", "mask", "causal module", "causal call", "grouped heads"],
)
def test_without_lengths_every_row_of_the_batch_is_a_sequence(
    attributes: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    q, k, v = bhsd(heads=4)
    if "num_key_value_groups" in attributes:
        k, v = k[:, :2], v[:, :2]
    module = attention_module(**{"is_causal": False, **attributes})
    out, weights = hugging_face_attention(module, q, k, v, **given)
    assert weights is None
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **expected).transpose(1, 2))


@pytest.mark.parametrize(("module_says", "argument"), [(True, None), (False, True)])
def test_packed_attention_refuses_to_be_causal(module_says: bool, argument: bool | None) -> None:
    q, k, v = bhsd(batch=1, tokens=7)
    cu = torch.tensor([0, 7], dtype=torch.int32)
    module = attention_module(is_causal=module_says)
    with pytest.raises(UnsupportedTowerError, match="causal"):
        hugging_face_attention(module, q, k, v, cu_seq_lens_q=cu, is_causal=argument)
