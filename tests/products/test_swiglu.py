from __future__ import annotations

import torch
import torch.nn.functional as F

from fxsplit_encoder.products.swiglu import interleaved, swiglu_of_pairs


def test_two_layers_are_one_with_their_rows_in_turn() -> None:
    x, gate, up = torch.randn(5, 16), torch.randn(6, 16), torch.randn(6, 16)
    expected = F.silu(x @ gate.t()) * (x @ up.t())
    torch.testing.assert_close(swiglu_of_pairs(x @ interleaved(gate, up).t()), expected)


def test_rows_of_zeros_give_zeros() -> None:
    x, gate, up = torch.randn(5, 16), torch.randn(6, 16), torch.randn(6, 16)
    weight, bias = interleaved(gate, up, rows=8), interleaved(gate[:, 0], up[:, 0], rows=8)
    assert weight.shape == (16, 16) and bias.shape == (16,)
    result = swiglu_of_pairs(F.linear(x, weight, bias))
    expected = F.silu(F.linear(x, gate, gate[:, 0])) * F.linear(x, up, up[:, 0])
    torch.testing.assert_close(result[:, :6], expected)
    assert not result[:, 6:].any()
