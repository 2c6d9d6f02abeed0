"""vLLM's own model classes behind the plugin, against their own `embed_multimodal`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fxsplit_encoder import EncoderConfig
from fxsplit_encoder.compile.passes import DEFAULT_PASSES
from fxsplit_encoder.integrations.vllm.adapter import VllmEncoderManager, make_adapter
from fxsplit_encoder.integrations.vllm.layers import (
    install_relative_positions,
    split_attention,
    traceable_input_norm,
    traceable_rotary,
)
from fxsplit_encoder.integrations.vllm.settings import DEFAULTS
from tests.vllm import engine
from tests.vllm.tiny import TINY, VERSION, Tiny

CPU = torch.device("cpu")


@dataclass
class Served:
    """A model and the manager that vLLM's runner would have."""

    tiny: Tiny
    vllm_config: Any
    model: Any
    manager: VllmEncoderManager

    def compare(self, modality: str, sizes: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What both make of a batch, item by item: (ours, the model's own)."""
        batch = self.tiny.inputs(modality, sizes)
        with torch.inference_mode():
            expected = self.model.embed_multimodal(**copy.copy(batch))
            got = self.manager.execute(batch)
        assert got is not None
        assert len(got) == len(sizes)
        assert [item.shape for item in got] == [item.shape for item in expected]
        return list(zip(got, expected, strict=True))

    @property
    def hits(self) -> tuple[int, int]:
        """Items that captures served, and all."""
        stats = self.manager.get_cumulative_stats()
        return stats["graph_hits"], stats["graph_hits"] + stats["graph_misses"]


AS_IT_IS = DEFAULTS
# Rewritten as on a GPU.
COMPILED = EncoderConfig(piece_compiler="eager", passes=DEFAULT_PASSES["cuda"])


def serve(tiny: Tiny, settings: EncoderConfig) -> Iterator[Served]:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    compilation = {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": list(tiny.budgets),
        "encoder_cudagraph_max_vision_items_per_batch": tiny.items,
        "encoder_cudagraph_max_frames_per_batch": tiny.frames,
    }
    adapter = make_adapter(EncoderCudaGraphManager, settings)
    with pytest.MonkeyPatch.context() as patch, tiny.small():
        if settings.compile:
            patch.setitem(op_registry_oot, "MMEncoderAttention", split_attention(MMEncoderAttention))
            patch.setitem(op_registry_oot, "ApplyRotaryEmb", rotary_of_a_gpu())
            install_relative_positions()
            patch.setitem(op_registry_oot, "FusedMMInputNorm", input_norm_of_a_gpu())
        config = engine.engine_config(tiny.config, tiny.processor, compilation_config=compilation)
        model = engine.build(config)
        tiny.adjust(model)
        with torch.inference_mode(), engine.as_a_gpu_captures():
            manager = adapter(vllm_config=config, device=CPU, dtype=torch.float32, model=model)
            manager.capture(graph_pool=None)
        assert manager.manager is not None
        assert manager.is_captured()
        yield Served(tiny, config, model, manager)
        manager.clear()


def rotary_of_a_gpu() -> type:
    """The plugin's, which on a CPU too is what a trace on a GPU sees."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    class RotaryOfGpu(traceable_rotary(ApplyRotaryEmb)):  # type: ignore[misc]
        def forward_cpu(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            forward = self.forward_traced if torch.compiler.is_compiling() else self.forward_native
            return forward(x, cos, sin)

    return RotaryOfGpu


def input_norm_of_a_gpu() -> type:
    """The same of raw pixels."""
    from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

    class InputNormOfGpu(traceable_input_norm(FusedMMInputNorm)):  # type: ignore[misc]
        def forward_cpu(self, pixel_values: torch.Tensor, visual_dtype: torch.dtype) -> torch.Tensor:
            compiles = torch.compiler.is_compiling()
            forward = self.forward_cuda if compiles else self.forward_native
            return forward(pixel_values, visual_dtype)

    return InputNormOfGpu


def of_this_version(name: str) -> Tiny:
    tiny = TINY[name]
    if VERSION < tiny.since:
        pytest.skip(f"vLLM captures {name} from {'.'.join(map(str, tiny.since))} on")
    return tiny


@pytest.fixture(params=TINY, scope="module")
def as_it_is(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Captured without compiling, with vLLM's attention."""
    yield from serve(of_this_version(request.param), AS_IT_IS)


@pytest.fixture(params=TINY, scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Compiled, with this library's attention."""
    yield from serve(of_this_version(request.param), COMPILED)


def batches(tiny: Tiny) -> list[tuple[str, list[Any]]]:
    return [*((tiny.modality, sizes) for sizes in tiny.images), *(("video", sizes) for sizes in tiny.videos)]


def test_captures_serve_what_fits_with_no_difference(as_it_is: Served) -> None:
    for modality, sizes in batches(as_it_is.tiny):
        hits, items = as_it_is.hits
        for got, expected in as_it_is.compare(modality, sizes):
            difference = float((got - expected).abs().max())
            assert difference <= as_it_is.tiny.rounding, (modality, sizes, difference)
        assert as_it_is.hits == (hits + len(sizes), items + len(sizes))


def test_what_does_not_fit_is_encoded_all_the_same(as_it_is: Served) -> None:
    for modality, sizes in as_it_is.tiny.eager:
        if as_it_is.tiny.eager_by_vllm:
            with torch.inference_mode():
                assert as_it_is.manager.execute(as_it_is.tiny.inputs(modality, sizes)) is None
            continue
        for got, expected in as_it_is.compare(modality, sizes):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_compiled_towers_split_and_pad(compiled: Served) -> None:
    manager = compiled.manager.manager
    assert manager is not None
    if compiled.tiny.not_compiled:
        assert compiled.tiny.not_compiled in " ".join(manager.reports)
    else:
        for path in manager.paths_by_key.values():
            assert path.program is not None, manager.reports
            assert path.program.program.splits
            assert path.captured
    for modality, sizes in batches(compiled.tiny):
        for got, expected in compiled.compare(modality, sizes):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    hits, items = compiled.hits
    assert hits > items / 2


@pytest.mark.skipif((0, 33) > VERSION, reason="has no kernel for it")
def test_relative_positions_are_traced_without_the_kernel() -> None:
    install_relative_positions()
    from vllm.model_executor.models.deepencoder import RelPosAttention

    layer: Any = RelPosAttention(32, 2, use_rel_pos=True, use_triton_attention=True, input_size=(4, 4))
    assert layer.use_triton_attention  # outside of a trace
    x = torch.randn(1, 4, 4, 32)
    with torch.no_grad():
        traced = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(traced, layer(x))  # on a CPU without it too
