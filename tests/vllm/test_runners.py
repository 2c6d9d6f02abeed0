"""Batches through the code of vLLM's runners that calls a manager."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchFeature

from fxsplit_encoder.integrations.vllm.adapter import make_adapter
from fxsplit_encoder.integrations.vllm.settings import DEFAULTS
from tests.vllm import engine
from tests.vllm.tiny import TINY

CPU = torch.device("cpu")
TINY_QWEN = TINY["Qwen3-VL"]
IMAGES = [(1, 8, 8), (1, 4, 8), (1, 2, 4)]
VIDEOS = [(2, 8, 8), (3, 8, 4)]


def runner(model: Any, manager: Any) -> Any:
    """That of the second generation, as far as it encodes."""
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    return EncoderRunner(model, 64, 64, EncoderCache(), torch.float32, CPU, cudagraph_manager=manager)


def scheduled() -> list[tuple[str, Any]]:
    """Images and videos by turns, as requests bring them."""
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems

    inputs = {**TINY_QWEN.inputs("image", IMAGES), **TINY_QWEN.inputs("video", VIDEOS)}
    fields = _create_qwen2vl_field_factory(2)(inputs)
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields)
    images, videos = list(items["image"]), list(items["video"])
    return [
        ("image", images[0]),
        ("video", videos[0]),
        *(("image", i) for i in images[1:]),
        ("video", videos[1]),
    ]


def test_the_runner_of_the_second_generation() -> None:
    """Without settings: everything about captures is inferred."""
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    config = engine.engine_config(TINY_QWEN.config, compilation_config={"cudagraph_mm_encoder": True})
    model = engine.build(config)
    TINY_QWEN.adjust(model)
    manager = make_adapter(EncoderCudaGraphManager, DEFAULTS)(config, CPU, torch.float32, model)
    ours, plain = runner(model, manager), runner(model, None)
    with torch.inference_mode():
        before = ours.execute_mm_encoder(scheduled())
        assert manager.get_cumulative_stats()["graph_hits"] == 0
        manager.capture(graph_pool=None)
        after = ours.execute_mm_encoder(scheduled())
        expected = plain.execute_mm_encoder(scheduled())
    assert manager.get_cumulative_stats()["graph_hits"] == 5
    for outputs in (before, after):
        for got, own in zip(outputs, expected, strict=True):
            assert torch.equal(got, own)
    ours.clear()
    assert not manager.is_captured()
