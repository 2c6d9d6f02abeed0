"""Models of transformers with captured towers on a GPU: CUDA graphs, where the CPU's tests have stand-ins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason
from tests.hugging_face.comparisons import assert_close, assert_same_bits, generated
from tests.hugging_face.conftest import config_of
from tests.hugging_face.models import MODELS
from tests.hugging_face.test_models import num_captures, num_traces, requests

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

_QUICKER = {MissReason.EAGER_IS_FASTER, MissReason.EXACT_IS_FASTER}


def on_gpu(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_on_a_gpu(name: str, tmp_path: Path) -> None:
    """The model's own tokens and features from CUDA graphs; nothing is made after the warm-up."""
    tiny = MODELS[name]
    tiny.make(tmp_path)
    model, reference = (tiny.load(tmp_path).cuda() for _ in range(2))
    fx.accelerate(model, config_of(tiny))
    assert fx.warmup(model) > 0
    traces, captures = num_traces(), num_captures(model)
    for request, inputs in requests(tiny).items():
        given = on_gpu(inputs)
        assert torch.equal(generated(model, given), generated(reference, given)), request
    features = [tiny.features(each, on_gpu(tiny.image_inputs(tiny.images))) for each in (model, reference)]
    assert_close(*features, tolerance=1e-4)
    stats = fx.stats(model)
    assert set(stats.misses) <= {MissReason.UNCAPTURED_OUTPUT, *_QUICKER}
    # Models of this size may indeed be quicker without a graph.
    assert stats.hits > 0 or not _QUICKER.isdisjoint(stats.misses)
    assert (num_traces(), num_captures(model)) == (traces, captures)
    restored = tiny.features(fx.restore(model), on_gpu(tiny.image_inputs(tiny.images)))
    assert_same_bits(restored, features[1])


@torch.no_grad()
def test_a_model_that_moves_is_captured_where_it_is(tmp_path: Path) -> None:
    tiny = MODELS["qwen3-vl"]
    tiny.make(tmp_path)
    model, reference = fx.accelerate(tiny.load(tmp_path), config_of(tiny)), tiny.load(tmp_path)
    inputs = tiny.image_inputs(tiny.images[:1])
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        given = {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}
        got, expected = (tiny.features(each.to(device, dtype), given) for each in (model, reference))
        tolerance = 1e-4 if dtype == torch.float32 else math.inf  # bfloat16 has tests of its own
        assert_close(got, expected, tolerance=tolerance)
    assert fx.stats(model).hits == 3
