"""Images as rows of tables, and back; what a row without one becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.service.encoder import PreparedImage, Preparer, QueuedEncoder
from fxsplit_encoder.service.ray import encode_images
from fxsplit_encoder.service.ray.encode_images import (
    errors_of,
    inputs_of,
    prepare_images,
    with_embeddings,
    with_inputs,
)
from fxsplit_encoder.service.ray.job import Parts, write_shard

from ...models.checkpoints import save
from ..photographs import EXAMPLES, encoded, photograph, settings_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint"), "qwen2_5_vl")[1]


def test_inputs_come_back_as_they_were_read_where_they_lie(model: Path) -> None:
    preparer = Preparer(settings_of(model))
    images = [preparer.prepare(photograph(size=(60 + 30 * n, 80))) for n in range(3)]
    table = pa.table({"bytes": [b"a", b"b", b"c", b"d"], "name": list("abcd")})
    table = with_inputs(table, [*images[:2], "no image", images[2]])
    assert table.column_names == ["name", "inputs", "layout", "error"]
    rows = inputs_of(table)
    assert rows[2] == "no image"
    for row, image in zip([rows[0], rows[1], rows[3]], images, strict=True):
        assert isinstance(row, PreparedImage)
        assert row.layout == {"grid": list(image.layout["grid"])}
        assert row.inputs.keys() == image.inputs.keys()
        for name, array in row.inputs.items():
            assert array.dtype == image.inputs[name].dtype
            np.testing.assert_array_equal(array, image.inputs[name])
        address, memory = row.inputs["pixel_values"].ctypes.data, table["inputs"].chunk(0).values.buffers()[1]
        assert memory.address <= address < memory.address + memory.size


def test_a_shard_is_written_alone_and_under_the_paths_that_were_given(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out", {}, 4)
    shard = {"shard": [3], "given": ["0.png"], "path": [str(tmp_path / "0.png")]}
    parts.directory.mkdir()
    embeddings = {"embedding": pa.array([None], pa.large_list(pa.float32())), "layout": ["{}"]}
    made = write_shard(pa.table({**shard, **embeddings, "error": ["no image"]}), parts)
    assert made.to_pylist() == [{"images": 1, "failed": 1}]
    written = pq.read_table(parts.directory / "00000003.parquet")
    assert written.column_names == ["path", "embedding", "layout", "error"]
    assert written["path"].to_pylist() == ["0.png"]
    with pytest.raises(ValueError, match="too many values"):
        write_shard(pa.table({"shard": [1, 2], "path": ["a", "b"]}), parts)


def test_embeddings_take_the_place_of_inputs() -> None:
    table = pa.table(
        {"path": list("abcd"), "inputs": [b"1", b"2", None, b"4"], "error": [None, None, "x", None]}
    )
    first, last = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 4), np.float32)
    results = [first, InputError("too large"), "x", last]
    made = with_embeddings(table, results, "float32")
    assert made.column_names == ["path", "embedding", "tokens", "width", "error"]
    assert made["embedding"].to_pylist() == [[0, 1, 2, 3, 4, 5], None, None, [1, 1, 1, 1]]
    assert made["tokens"].to_pylist() == [3, None, None, 1]
    assert made["width"].to_pylist() == [2, None, None, 4]
    assert errors_of(made) == [None, "too large", "x", None]
    assert with_embeddings(table, ["x"] * 4, "float32").schema == made.schema
    assert with_embeddings(table.slice(0, 0), [], "float32").schema == made.schema


def test_images_come_from_bytes_pixels_or_paths(model: Path, tmp_path: Path) -> None:
    images = [photograph(size=(60 + 30 * n, 80)) for n in range(2)]
    paths = [tmp_path / f"{n}.png" for n in range(2)]
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(encoded(image))
    settings = {"model": str(model)}
    preparer = Preparer(settings_of(model))
    expected = [preparer.prepare(image).inputs["pixel_values"] for image in images]
    names = [str(path) for path in paths]
    missing = str(tmp_path / "missing.png")
    for table in (
        pa.table({"bytes": [*map(encoded, images), b"no image"]}),
        pa.table({"path": [*names, missing]}),
        pa.table({"path": ["file://" + name for name in names] + ["file://" + missing]}),
        pa.table({"bytes": [*map(encoded, images), None], "path": ["not read"] * 3}),
        pa.table({"bytes": [*map(encoded, images), b""], "error": [None, None, "of before"]}),
    ):
        made = prepare_images(table, **settings)
        rows = inputs_of(made)
        assert "bytes" not in made.column_names
        assert isinstance(rows[2], str)
        for row, pixels in zip(rows[:2], expected, strict=True):
            assert isinstance(row, PreparedImage)
            np.testing.assert_array_equal(row.inputs["pixel_values"], pixels)


def test_other_formats_and_tables_are_refused(model: Path) -> None:
    with pytest.raises(InputError, match='batch_format: expected "pyarrow"'):
        prepare_images({"bytes": np.array([b"x"])}, model=str(model))
    with pytest.raises(InputError, match=r"one of the columns bytes, image, path; got url"):
        prepare_images(pa.table({"url": ["x"]}), model=str(model))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, np.ndarray]:
    encoder = QueuedEncoder(settings_of(model))
    paths = sorted(EXAMPLES.iterdir())
    results = encoder.encode([encoder.preparer.load(path.read_bytes()) for path in paths])
    return {path.name: result for path, result in zip(paths, results, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bytes", "image"])
def test_a_dataset_is_encoded(cluster: Any, model: Path, expected: dict[str, Any], source: str) -> None:
    read = cluster.data.read_binary_files if source == "bytes" else cluster.data.read_images
    dataset = encode_images(
        read(str(EXAMPLES), include_paths=True), batch_size=2, model=str(model), config={"enabled": False}
    )
    rows = dataset.take_all()
    assert [Path(row["path"]).name for row in rows] == list(expected)
    for row in rows:
        assert row["error"] is None
        found = np.array(row["embedding"]).reshape(row["tokens"], row["width"])
        np.testing.assert_allclose(found, expected[Path(row["path"]).name], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_rows_keep_their_order_and_gpus_that_are_not_there_are_not_waited_for(
    cluster: Any, model: Path
) -> None:
    rows = [{"bytes": encoded(photograph(size=(50 + n % 7, 60))), "number": n} for n in range(60)]
    dataset = cluster.data.from_items(rows, override_num_blocks=15)
    settings = {"model": str(model), "config": {"enabled": False}}
    found = encode_images(dataset, workers=2, batch_size=4, **settings).take_all()
    assert [row["number"] for row in found] == list(range(60))
    with pytest.raises(InputError, match="num_gpus: 1, and the cluster has 0 GPUs; 0 encodes on CPUs"):
        encode_images(dataset, num_gpus=1, **settings)


def test_a_wrong_setting_is_said_before_actors_are_started() -> None:
    with pytest.raises(ConfigError, match="pooling"):
        encode_images(None, model="m", pooling="max")
