from __future__ import annotations

import pytest
import torch

from fxsplit_encoder.models.random import demo_tower, random_inputs
from fxsplit_encoder.models.registry import architecture


@pytest.mark.parametrize("model", ["kimi-vl-a3b", "clip-l-336"])
@torch.no_grad()
def test_a_tower_with_random_weights_is_sane(model: str) -> None:
    tower = demo_tower(1, dtype=torch.bfloat16, model=model)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in tower.buffers() if b.is_floating_point()} <= {torch.float32}
    assert all(parameter.std() > 0.01 for parameter in tower.parameters())
    wrapped = architecture(model).family.wrap(tower.float())
    output = wrapped.encoder_eager_forward(random_inputs(wrapped, [16 if model.startswith("kimi") else 1]))
    assert 0.2 < output.std() < 5


def test_the_same_seed_gives_the_same_weights() -> None:
    first, same, other = (demo_tower(1, seed=seed, model="clip-l-336").state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_random_inputs_have_the_sizes_asked_for() -> None:
    def sizes(model: str, wanted: list[int]) -> list[int]:
        wrapped = architecture(model).family.wrap(demo_tower(1, model=model))
        inputs = random_inputs(wrapped, wanted)
        assert len(wrapped.get_encoder_cudagraph_item_specs(inputs)) == len(wanted)
        return [spec.input_size for spec in wrapped.get_encoder_cudagraph_item_specs(inputs)]

    assert sizes("qwen2-vl-2b", [16, 96, 660]) == [16, 96, 660]
    assert sizes("kimi-vl-a3b", [64, 4]) == [64, 4]
    assert sizes("clip-l-336", [1, 3]) == [1, 3]
    assert sizes("deepseek-ocr", [0, 4, 9]) == [4096, 4096 + 4 * 1600, 4096 + 9 * 1600]
