"""Both forms of a rotary embedding give the same cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxsplit_encoder.towers.rotary import cosines_and_sines, gives_angles

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01])


class Angles(nn.Module):
    def forward(self, position_ids: Tensor) -> Tensor:
        return (position_ids.unsqueeze(-1) * FREQUENCIES).flatten(1)


class CosinesAndSines(nn.Module):
    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[:, :, None] * FREQUENCIES).flatten(1).repeat(1, 2)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def test_both_forms_are_told_apart_and_agree() -> None:
    hidden, positions = torch.zeros(4, 12), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    old, new = Angles(), CosinesAndSines()
    assert gives_angles(old)
    assert not gives_angles(new)
    for got, expected in zip(
        cosines_and_sines(old, hidden, positions, from_angles=True),
        cosines_and_sines(new, hidden, positions, from_angles=False),
        strict=True,
    ):
        assert got.shape == (4, 12)
        torch.testing.assert_close(got, expected)
