"""Dynamo's custom vision encoder: ladder, batches, errors; over the recording, and over the package."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ConfigError, InputError, MediaError
from fxsplit_encoder.media import MediaSettings, load_image
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import load_tower, read_family

from ..models.checkpoints import CPU, save
from .dynamo_interface import RECORDED, installed_at, installed_interface, recorded_interface
from .photographs import data_url, encoded, photograph

CAPTURED = {"device": "cpu", "config": {"token_budgets": [16, 32], "compile": False}}
UNCAPTURED = {"device": "cpu", "config": {"enabled": False}}
SIZES = ((120, 90), (60, 90), (90, 60))


def url_of(size: tuple[int, int] = SIZES[0]) -> str:
    return data_url(encoded(photograph(size=size)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("qwen") / "checkpoint", "qwen3_5")[1]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a language model that takes grids."""
    directory = save(tmp_path_factory.mktemp("native") / "checkpoint", "qwen3_5")[1]
    file = directory / "config.json"
    settings = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**settings, "architectures": ["Qwen3_5ForConditionalGeneration"]}), "utf-8")
    return directory


@pytest.fixture
def dynamo() -> Iterator[Any]:
    with recorded_interface() as module:
        yield module


def backend_of(module: Any, **attributes: Any) -> Any:
    attributes = {"settings": UNCAPTURED, "image_token_id": 7, **attributes}
    return type("Backend", (module.DynamoVisionEncoder,), attributes)()


def eager_rows(directory: Path, url: str) -> torch.Tensor:
    """The tower alone, on what the family's own preparation makes of the image."""
    checkpoint = Checkpoint.locate(directory)
    family, config = read_family(checkpoint)
    picture = load_image(base64.b64decode(url.partition(",")[2]), MediaSettings())
    inputs = family.prepare(config, checkpoint.processors()).image(picture).tensors
    tower = load_tower(checkpoint, torch.float32, CPU)
    with torch.no_grad():
        return tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output


def test_the_ladder_is_dynamos_buckets_and_the_manager_its_forward(
    dynamo: Any, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers = []
    execute = fx.EncoderCudaGraphManager.execute
    monkeypatch.setattr(
        fx.EncoderCudaGraphManager,
        "execute",
        lambda self, inputs: managers.append(self) or execute(self, inputs),
    )
    backend = backend_of(dynamo, settings=CAPTURED)
    assert list(backend.buckets) == [16, 32]  # known before anything is loaded
    backend.build(str(qwen))
    assert backend.buckets == [16, 32]
    ready = [backend.preprocess(url_of(size)) for size in SIZES]
    rows = backend.forward_batch([each.item for each in ready], target_bucket=32)
    for size, each, result in zip(SIZES, ready, rows, strict=True):
        assert each.cost == len(result)
        torch.testing.assert_close(result, eager_rows(qwen, url_of(size)), rtol=0, atol=1e-5)
    assert managers[0].stats().hits == len(SIZES)
    with pytest.raises(RuntimeError, match=r"expected one of \[16, 32\]; got 24"):
        backend.forward_batch([ready[0].item], target_bucket=24)
    backend.close()
    backend.close()
    assert list(backend.buckets) == [16, 32]
    with pytest.raises(RuntimeError, match="closed"):
        backend.forward_batch([ready[0].item])


def test_without_captures_there_are_no_buckets(dynamo: Any, qwen: Path) -> None:
    backend = backend_of(dynamo, settings={**UNCAPTURED, "dtype": "bfloat16"})
    assert backend.buckets is None
    backend.build(str(qwen))
    assert backend.buckets is None
    (rows,) = backend.forward_batch([backend.preprocess(url_of()).item])
    assert rows.dtype == torch.bfloat16  # Dynamo takes the language model's dtype alone
    assert backend.forward_batch([]) == []


def test_language_models_that_place_images_by_grids_get_them(dynamo: Any, native: Path) -> None:
    backend = backend_of(dynamo, image_token_id=None)
    backend.build(str(native))
    ready = backend.preprocess(url_of())
    (made,) = backend.forward_batch([ready.item])
    frames, height, width = made.grid_thw
    assert {type(each) for each in made.grid_thw} == {int}
    assert len(made.embeddings) == frames * height * width // 4 == ready.cost


def test_a_tower_without_grids_is_refused_for_a_model_that_needs_them(
    dynamo: Any, native: Path, tmp_path: Path
) -> None:
    _, siglip = save(tmp_path / "siglip", "siglip")
    backend = backend_of(dynamo, settings={**UNCAPTURED, "model": str(siglip)})
    with pytest.raises(InputError, match="expected a tower with grids"):
        backend.build(str(native))
    with pytest.raises(RuntimeError, match="not built"):
        backend.preprocess(url_of())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/cat.png", "or a data URL of it"),
        ("data:image/png,abc", "or a data URL of it"),
        ("data:image/png;base64,%%%", "expected base64"),
        ("data:image/png;base64," + "A" * (3 << 19), "at most 1048976 bytes"),
        ("data:image/png;base64,AAAA", "cannot be read"),
    ],
)
def test_a_bad_image_is_refused_by_itself_and_is_its_senders(
    dynamo: Any, url: str, message: str, qwen: Path
) -> None:
    backend = backend_of(dynamo, settings={**UNCAPTURED, "max_pixels": 100})
    backend.build(str(qwen))
    with pytest.raises(MediaError, match=message) as caught:
        backend.preprocess(url)
    assert isinstance(caught.value, ValueError)  # HTTP 400, with this message


def test_what_fails_a_batch_is_no_senders_fault(
    dynamo: Any, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(dynamo)
    backend.build(str(qwen))
    item = backend.preprocess(url_of()).item

    full = mock.Mock(side_effect=torch.OutOfMemoryError("of the test"))
    monkeypatch.setattr(fx.EncoderCudaGraphManager, "execute", full)
    with pytest.raises(RuntimeError, match="not encoded: out of memory") as caught:
        backend.forward_batch([item])
    assert not isinstance(caught.value, ValueError | TypeError)


@pytest.mark.parametrize("settings", [{"modle": "x"}, {"output_dtype": "float16"}])
def test_settings_are_checked_before_dynamo_loads(dynamo: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        backend_of(dynamo, settings=settings)


# --- the package from the index, where it is installed


@pytest.fixture
def package() -> Iterator[SimpleNamespace]:
    folder = installed_at()
    if folder is None:
        pytest.skip("ai-dynamo is not installed")
    with installed_interface(folder) as interface:
        yield interface


def test_the_recording_is_of_the_package(package: SimpleNamespace) -> None:
    for recorded, installed in zip(RECORDED, package.classes, strict=True):
        assert recorded.__name__ == installed.__name__
        members = [name for name in vars(recorded) if not name.startswith("_")]
        assert members == [name for name in vars(installed) if not name.startswith("_")]
        assert list(inspect.signature(recorded).parameters) == list(inspect.signature(installed).parameters)
        for name in members:
            ours, theirs = getattr(recorded, name), getattr(installed, name)
            if callable(ours):
                mine, own = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
                assert [(p.name, p.kind, p.default) for p in mine.values()] == [
                    (p.name, p.kind, p.default) for p in own.values()
                ]
            else:
                assert ours == theirs


def test_dynamos_own_driver_joins_requests_and_its_adapter_takes_the_rows(
    package: SimpleNamespace, qwen: Path
) -> None:
    backend = backend_of(package.ours, settings=CAPTURED)
    model = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: 20, is_multimodal_model=False)
    adapter = package.make_adapter(backend, model, SimpleNamespace(enable_prompt_embeds=True))
    urls = [url_of(size) for size in SIZES]
    results = driven(package, backend, qwen, [urls[:2], urls[2:], ["https://example.com/a.png"]])
    assert isinstance(results[2], ValueError)
    for asked, rows in zip((urls[:2], urls[2:]), results, strict=False):
        prompt = adapter.prepare_prompt([1, *[7] * len(asked), 2], rows)
        expected = torch.cat([eager_rows(qwen, url) for url in asked])
        torch.testing.assert_close(prompt["prompt_embeds"][1:-1], expected, rtol=0, atol=1e-5)


def test_dynamos_adapter_takes_the_grids(package: SimpleNamespace, native: Path) -> None:
    backend = backend_of(package.ours, image_token_id=None)
    model = SimpleNamespace(
        architectures=["Qwen3_5ForConditionalGeneration"],
        hf_config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
    )
    adapter = package.make_adapter(backend, model, SimpleNamespace())
    (artifacts,) = driven(package, backend, native, [[url_of(size) for size in SIZES]])
    images = adapter.prepare_prompt([1, 7, 2], artifacts)["multi_modal_data"]["image"]
    assert images["image_grid_thw"].shape == (3, 3)
    expected = torch.cat([eager_rows(native, url_of(size)) for size in SIZES])
    torch.testing.assert_close(images["image_embeds"], expected, rtol=0, atol=1e-5)


def driven(package: SimpleNamespace, backend: Any, directory: Path, requests: list[list[str]]) -> list[Any]:
    """What Dynamo's driver answers to requests that come together."""
    driver = package.Driver(backend)
    driver.load(str(directory))

    async def ask() -> list[Any]:
        return await asyncio.gather(*map(driver.encode, requests), return_exceptions=True)

    try:
        return asyncio.run(ask())
    finally:
        driver.shutdown()
