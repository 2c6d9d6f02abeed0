"""Datasets of images to datasets of embeddings."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.integrations.images import ImageEncoder
from fxsplit_encoder.integrations.ray import EncodeImages, encode_images

from ..images.photographs import EXAMPLES, encoded, photograph, settings_of


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, np.ndarray]:
    encoder = ImageEncoder(settings_of(model))
    paths = sorted(EXAMPLES.iterdir())
    results = encoder.encode([encoder.preparer.load(path.read_bytes()) for path in paths])
    return {path.name: result for path, result in zip(paths, results, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bytes", "image"])
def test_a_dataset_is_encoded(cluster: Any, model: Path, expected: dict[str, Any], source: str) -> None:
    read = cluster.data.read_binary_files if source == "bytes" else cluster.data.read_images
    dataset = encode_images(
        read(str(EXAMPLES), include_paths=True),
        num_gpus=0,
        batch_size=4,
        prepare_apart=source == "bytes",
        model=str(model),
        config={"enabled": False},
    )
    rows = dataset.take_all()
    assert {Path(row["path"]).name for row in rows} == expected.keys()
    for row in rows:
        assert row["error"] is None
        found = np.array(row["embedding"]).reshape(row["tokens"], row["width"])
        np.testing.assert_allclose(found, expected[Path(row["path"]).name], rtol=0, atol=2e-6)


def test_a_wrong_setting_is_said_before_actors_are_started() -> None:
    with pytest.raises(ConfigError, match="pooling"):
        encode_images(None, model="m", pooling="max")


def test_everything_happens_on_one_thread_whoever_calls(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes actors on one thread and calls them on others, several at a time."""
    threads: set[int] = set()
    for name in ("capture", "execute"):
        original = getattr(fx.EncoderCudaGraphManager, name)

        def noting(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            threads.add(threading.get_ident())
            return original(self, *args, **kwargs)

        monkeypatch.setattr(fx.EncoderCudaGraphManager, name, noting)
    actor = EncodeImages(model=str(model), config={"enabled": False})
    tables = [pa.table({"bytes": [encoded(photograph(size=(50 + n, 60)))] * 3}) for n in range(4)]
    results: dict[int, pa.Table] = {}

    def call(number: int) -> None:
        results[number] = actor(tables[number])

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(threads) == 1
    assert not threads & {threading.get_ident(), *(caller.ident for caller in callers)}
    for number, table in enumerate(tables):
        assert results[number]["embedding"] == actor(table)["embedding"]
