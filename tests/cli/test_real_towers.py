from __future__ import annotations

import pytest
import torch

from fxsplit_encoder.cli.real_towers import REAL_TOWERS, real_tower
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers import wrap


@pytest.mark.parametrize("model", REAL_TOWERS)
@torch.no_grad()
def test_a_real_tower_is_sane_at_one_block(model: str) -> None:
    tower = real_tower(model, 1, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in tower.buffers()} <= {torch.float32}
    assert all(parameter.std() > 0.01 for parameter in tower.parameters())
    wrapped = wrap(tower)
    output = wrapped.packed_output(wrapped(*wrapped.example_inputs()))
    assert output.shape == (64, wrapped.out_hidden_size)
    assert 0.2 < output.float().std() < 5


def test_a_real_tower_has_its_own_depth_and_a_known_name() -> None:
    with pytest.raises(InputError, match=r"tower: expected one of kimi-k2\.5, kimi-vl-a3b.*; got 'gpt'"):
        real_tower("gpt")
    with pytest.raises(InputError, match="blocks: expected 1 to 27 for kimi-vl-a3b; got 28"):
        real_tower("kimi-vl-a3b", 28)
