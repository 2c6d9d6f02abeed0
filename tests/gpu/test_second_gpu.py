"""A tower on a GPU that is not this thread's current one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder._torch.streams import capture_streams
from fxsplit_encoder.kernels.attention import varlen_attention
from fxsplit_encoder.models.eager import rms_error
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.runtime.captured_program import Choosers
from fxsplit_encoder.service.encoder import Launched

from .support import seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_devices")]

LIMITS = {"token_budgets": (64, 256), "max_items_per_batch": 4, "max_frames_per_batch": 0}
BATCHES = ([(1, 16, 16)], [(1, 8, 16), (1, 16, 8)], [(1, 40, 40)], [(1, 8, 8)] * 4)


@pytest.fixture(scope="module")
def tower(two_devices: None) -> Iterator[Any]:
    yield fx.wrap(demo_tower(3, "cuda:1", torch.bfloat16))
    torch.cuda.empty_cache()


@pytest.mark.parametrize("given_on", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("mode", ["full", "piecewise", "breakable", "exact", "auto"])
@torch.no_grad()
def test_every_mode_encodes_there(mode: str, given_on: str, tower: Any) -> None:
    torch.cuda.set_device(0)
    settings = {"mode": mode, **LIMITS, **({"exact_min_hits": 1} if mode == "exact" else {})}
    manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(**settings), log_interval=0)
    manager.capture()
    for grids in BATCHES:
        inputs = seeded(grids, tower.patch_features, device=given_on)
        with torch.cuda.device(1):
            there = {name: value.to("cuda:1") for name, value in inputs.items() if name == "pixel_values"}
            expected = tower.encoder_eager_forward({**inputs, **there}).float()
        output = torch.cat(manager.execute(inputs))
        assert output.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert rms_error([output], [expected]) < 0.05
    manager.clear()


@torch.no_grad()
def test_captures_between_requests_are_made_there(tower: Any) -> None:
    manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(mode="full", **LIMITS), log_interval=0)
    manager.capture(wait=False)
    inputs = seeded(BATCHES[0], tower.patch_features)
    before = torch.cat(manager.execute(inputs))
    assert manager.wait_captured(), manager.stats().progress
    assert str(manager.stats().progress).startswith("done"), manager.reports
    assert rms_error([torch.cat(manager.execute(inputs))], [before.float()]) < 0.05
    manager.clear()


@pytest.mark.parametrize("index", [0, 1])
def test_embeddings_are_complete_when_they_are_there(index: int) -> None:
    weight = torch.randn(4096, 4096, device=f"cuda:{index}") / 64
    rows = torch.randn(4096, 4096, device=f"cuda:{index}")
    rest = [len(rows)], torch.float32, lambda *_: None, 0.0
    Launched(rows, *rest).wait()  # pinned memory is there
    for _ in range(50):
        rows = rows @ weight
    (copied,) = Launched(rows, *rest).wait()
    copied = torch.from_numpy(copied).clone()
    assert torch.equal(copied, rows.cpu())


@pytest.mark.parametrize("kernel", ["auto", "torch_flash", "triton_64x64"])
def test_attention_runs_where_its_tensors_are(kernel: str) -> None:
    q, k, v = torch.randn(3, 96, 4, 64, device="cuda:1", dtype=torch.bfloat16)
    lengths = torch.tensor([0, 32, 96], dtype=torch.int32, device="cuda:1")
    with Choosers.of(fx.EncoderConfig(attention=kernel)).choosing():
        output = varlen_attention(q, k, v, lengths, 64, 0.125)
    for start, end in ((0, 32), (32, 96)):
        parts = (x[start:end].transpose(0, 1).float() for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, scale=0.125)
        assert rms_error([output[start:end].transpose(0, 1)], [expected]) < 0.02


@torch.no_grad()
def test_a_compiled_module_is_captured_there() -> None:
    torch.cuda.set_device(0)
    capture_streams.cache_clear()  # as in a process that has captured nothing there
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).to(
        "cuda:1"
    )
    options = {"mode": "full", "exact_min_hits": 1}
    compiled = torch.compile(layer, backend="encoder_cg", options=options)
    for rows in (5, 16, 40, 5):
        x_TC = torch.randn(rows, 64, device="cuda:1")
        assert torch.allclose(compiled(x_TC), layer(x_TC), atol=1e-3)
    assert fx.stats(compiled).hits == 4
    assert torch.cuda.current_device() == 0
