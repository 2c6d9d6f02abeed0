from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.cli.real_towers import REAL_TOWERS, real_tower
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers import wrap


@pytest.mark.parametrize("model", ["kimi-k2.5", "kimi-vl-a3b"])
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


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "millions"),
    [
        ("internvl3-8b", 256, 3584, 304.0),
        ("internvl3-38b", 256, 5120, 5536.5),
        ("llama4", 144, 5120, 851.0),
        ("siglip-so400m-384", 729, 1152, 428.2),
        ("clip-l-336", 576, 1024, 303.5),
        ("dinov2-l-518", 1369, 1024, 304.4),
    ],
)
def test_dense_towers_have_the_published_sizes(name: str, tokens: int, hidden: int, millions: float) -> None:
    wrapped = wrap(real_tower(name, device="meta"), REAL_TOWERS[name].spec)
    parameters = sum(parameter.numel() for parameter in wrapped.tower.parameters())
    assert round(parameters / 1e6, 1) == millions
    with torch.no_grad():
        output: Any = wrapped.encoder_cudagraph_forward(
            {"pixel_values": torch.zeros(2, *wrapped.tile_shape, device="meta")}
        )
    assert output.shape == (2 * tokens, hidden)
    assert (wrapped.tokens_per_tile, wrapped.out_hidden_size) == (tokens, hidden)


def test_random_weights_are_seeded_and_sane() -> None:
    first, same, other = (real_tower("clip-l-336", 1, dtype=torch.bfloat16, seed=s) for s in (0, 0, 1))
    weights = [model.state_dict() for model in (first, same, other)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert not all(torch.equal(tensor, weights[2][name]) for name, tensor in weights[0].items())
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.bfloat16}
    features = wrap(first.float(), REAL_TOWERS["clip-l-336"].spec).encoder_eager_forward(
        {"pixel_values": torch.randn(1, 3, 336, 336)}
    )
    assert 0.3 < features.std() < 3


@pytest.mark.parametrize(("name", "millions"), [("deepseek-ocr", 401), ("step3-vl", 4675), ("step3p7", 1956)])
def test_towers_of_two_views_have_the_published_sizes(name: str, millions: int) -> None:
    tower = real_tower(name, device="meta")
    assert round(sum(parameter.numel() for parameter in tower.parameters()) / 1e6) == millions


def test_a_tower_of_fixed_depth_takes_no_blocks() -> None:
    with pytest.raises(InputError, match="blocks: expected None for deepseek-ocr; got 3"):
        real_tower("deepseek-ocr", 3, "meta")
