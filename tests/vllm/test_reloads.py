"""New weights by vLLM's own reloading, into an encoder that is captured with padded weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fxsplit_encoder import EncoderConfig
from tests.vllm.test_classes import Served, serve
from tests.vllm.tiny import TINY, VISION, WIDTH

MLP_WIDTH, WIDTH_OF_TILES = 120, 128
"""Of the MLPs of the tower, and of the padded ones."""


def padded(name: str) -> Any:
    tiny = TINY[name]
    vision = {**tiny.config["vision_config"], "intermediate_size": MLP_WIDTH}
    return dataclasses.replace(tiny, config={**tiny.config, "vision_config": vision})


def reload(served: Served, weights: dict[str, torch.Tensor]) -> None:
    """What vLLM's `reload_weights` does, whose place is another in each version."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    config = served.vllm_config
    with set_current_vllm_config(config), torch.inference_mode():
        initialize_layerwise_reload(served.model)
        served.model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(served.model, config.model_config)


@pytest.mark.parametrize(("name", "parts"), [("Qwen3-VL", 1), ("Qwen2.5-VL", 2)])
def test_captures_use_what_vllm_reloads(name: str, parts: int) -> None:
    # Qwen2.5-VL's first layer of an MLP has two parts: the gates and what they gate.
    settings = EncoderConfig(piece_compiler="eager", passes=("pad_mlp_width",))
    for served in serve(padded(name), settings):
        manager = served.manager.manager
        assert manager is not None
        program = manager.paths["default"].program
        assert program is not None
        assert program.program.derived.recipes
        padded_weights = (parts + 1) * WIDTH_OF_TILES * WIDTH + parts * WIDTH_OF_TILES
        programs = (path.program for path in manager.paths_by_key.values())
        kept = sum(program.program.derived.num_bytes for program in programs if program is not None)
        assert kept == 4 * VISION["depth"] * padded_weights
        addresses = [parameter.data_ptr() for parameter in served.model.parameters()]
        before = served.compare("image", [(1, 8, 8)])
        new = {
            name: (torch.randn_like(value) * 0.1 if "mlp" in name else value.clone())
            for name, value in served.model.named_parameters()
        }
        reload(served, new)
        after = served.compare("image", [(1, 8, 8)])
        assert [parameter.data_ptr() for parameter in served.model.parameters()] == addresses
        for (got, expected), (old, _) in zip(after, before, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
            assert not torch.allclose(got, old, rtol=0.01)
        assert served.hits == (2, 2)
