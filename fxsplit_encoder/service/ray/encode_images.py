"""Prepared images and embeddings as columns of Arrow tables, which is what Ray's blocks are.

path, ...   whatever else a row has is kept
inputs      what the tower takes, the bytes of safetensors as a list: pixels of uint8, grids and counts
layout      how the image was cut, as JSON
error       why the row has no embedding; null: it has one
embedding   its values, row by row
tokens      its rows
width       its columns
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from pyarrow import fs
from safetensors.numpy import save

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.messages import names_of, shown
from fxsplit_encoder.service.encoder import (
    MANY_BUDGETS,
    Array,
    PreparedImage,
    Preparer,
    QueuedEncoder,
    Result,
)
from fxsplit_encoder.service.settings import ImageEncoderSettings

_DTYPES = {"U8": np.uint8, "F32": np.float32, "I64": np.int64, "I32": np.int32}


def everywhere(model: str | Path) -> str:
    """A directory by its whole path, as workers have another working directory; a hub name as it is."""
    return str(Path(model).resolve() if Path(model).is_dir() else model)


def place_of(path: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or a URI, and its path there."""
    return fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)


def read_file(path: str) -> bytes:
    """The contents of a file, or of a URI; raises MediaError where it cannot be read."""
    try:
        filesystem, inside = place_of(path)
        with filesystem.open_input_stream(inside) as stream:
            data: bytes = stream.read()
        return data
    except OSError as error:
        raise MediaError(f"cannot be read: {error}") from None


def _source_of(table: object, expected: Sequence[str]) -> str:
    """The column that holds the images."""
    if not isinstance(table, pa.Table):
        raise InputError(
            f'batch_format: expected "pyarrow", whose batches are tables; got {shown(type(table))}'
        )
    if (name := next((name for name in expected if name in table.column_names), None)) is None:
        columns = f"one of the columns {', '.join(expected)}"
        raise InputError(f"images: expected {columns}; got {names_of(table.column_names)}")
    return name


def errors_of(table: pa.Table) -> list[str | None]:
    """The error of every row."""
    if "error" not in table.column_names:
        return [None] * table.num_rows
    errors: list[str | None] = table["error"].to_pylist()
    return errors


def with_inputs(table: pa.Table, prepared: Sequence[PreparedImage | str]) -> pa.Table:
    """The table with prepared images, or their errors, in place of encoded or decoded ones."""
    inputs = [
        None if isinstance(each, str) else np.frombuffer(save(dict(each.inputs)), np.uint8)
        for each in prepared
    ]
    layouts = [None if isinstance(each, str) else json.dumps(each.layout) for each in prepared]
    errors = [each if isinstance(each, str) else None for each in prepared]
    return _replaced(
        table,
        ("bytes", "image"),
        {
            "inputs": pa.array(inputs, pa.large_list(pa.uint8())),  # whose values, unlike binary's, are views
            "layout": pa.array(layouts, pa.string()),
            "error": pa.array(errors, pa.string()),
        },
    )


def inputs_of(table: pa.Table) -> list[PreparedImage | str]:
    """The prepared images, views of the table's memory, or their errors."""
    rows = zip(table["inputs"], table["layout"].to_pylist(), errors_of(table), strict=True)
    return [
        error or PreparedImage(_unpacked(packed.values.to_numpy()), json.loads(layout))
        for packed, layout, error in rows
    ]


def with_embeddings(table: pa.Table, results: Sequence[Result | str], dtype: str) -> pa.Table:
    """The table with embeddings, or errors, in place of inputs."""
    arrays = [each if isinstance(each, np.ndarray) else None for each in results]
    errors = [None if isinstance(each, np.ndarray) else str(each) for each in results]
    flat = [None if array is None else array.reshape(-1) for array in arrays]
    return _replaced(
        table,
        ("inputs",),
        {
            "embedding": pa.array(flat, pa.large_list(pa.from_numpy_dtype(np.dtype(dtype)))),
            "tokens": pa.array([None if a is None else a.shape[0] for a in arrays], pa.int32()),
            "width": pa.array([None if a is None else a.shape[1] for a in arrays], pa.int32()),
            "error": pa.array(errors, pa.string()),
        },
    )


def _replaced(table: pa.Table, old: Sequence[str], new: Mapping[str, pa.Array]) -> pa.Table:
    kept = {name: table[name] for name in table.column_names if name not in (*old, *new)}
    return pa.table({**kept, **new})


def _unpacked(data: Array) -> dict[str, Array]:
    # Arrays of safetensors, as views.
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    entries, body = json.loads(data[8:start].tobytes()), data[start:]
    return {
        name: body[slice(*entry["data_offsets"])].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries.items()
    }


def prepare_images(table: pa.Table, **settings: Any) -> pa.Table:
    """Prepare the images of a table, for `Dataset.map_batches` with `batch_format="pyarrow"`.

    Args:
        table: rows with one of the columns `bytes` (encoded images, as `ray.data.read_binary_files` reads
            them), `image` (height, width, channels; as `read_images` does) and `path`.
        settings: those of `ImageEncoderSettings`.

    Returns:
        The rows, in order, with `inputs` and `layout` in place of `bytes` or `image`; or with an `error`.
    """
    preparer = preparer_of(ImageEncoderSettings(**settings))
    name = _source_of(table, ("bytes", "image", "path"))

    def prepare(error: str | None, source: Any) -> PreparedImage | str:
        if error is not None or source is None:
            return error or f"no {name}"
        try:
            return preparer.load(read_file(source) if name == "path" else source)
        except MediaError as refused:
            return str(refused)

    return with_inputs(table, [*map(prepare, errors_of(table), table[name].to_pylist())])


@functools.lru_cache(maxsize=4)
def preparer_of(settings: ImageEncoderSettings) -> Preparer:
    """One for all tasks of a worker's process."""
    return Preparer(settings)


# What a process needs that prepares a batch. Asking for it also keeps Ray from running these tasks inside the
# actors that follow: it does where both ask for the same.
PREPARING = {"num_cpus": 1, "memory": 1 << 29}


class EncodeImages:
    """Encodes tables in an actor, for `Dataset.map_batches` with `batch_format="pyarrow"`. The queue's own
    thread captures and encodes, whichever threads Ray calls from. Calls may overlap.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = ImageEncoderSettings(**settings)
        self.encoder = QueuedEncoder(self._settings, budgets_per_batch=MANY_BUDGETS)
        self.encoder.wait_started()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Encode what `prepare_images` returns. The rows, in order, have `embedding`, `tokens`, `width` and
        `error`.
        """
        _source_of(table, ("inputs",))
        rows = inputs_of(table)
        embeddings = iter(self.encoder.encode([row for row in rows if isinstance(row, PreparedImage)]))
        results = [next(embeddings) if isinstance(row, PreparedImage) else row for row in rows]
        return with_embeddings(table, results, self._settings.output_dtype)


def encode_images(
    dataset: ray.data.Dataset,
    *,
    workers: int | tuple[int, int] = 1,
    num_gpus: float | None = None,
    batch_size: int | None = 128,
    **settings: Any,
) -> ray.data.Dataset:
    """Encode a dataset of images to one of embeddings, in the order of its rows.

    Args:
        dataset: rows as `prepare_images` takes them.
        workers: actors; two numbers: at least and at most.
        num_gpus: of each actor; 0: on a CPU. None: one, if the cluster has any and `device` is not cpu. More
            than there are is an InputError: Ray would wait for ever.
        batch_size: images that an actor gets together, which it packs. Large enough to fill budgets. None: a
            block is prepared and encoded as a whole.
        settings: those of `ImageEncoderSettings`.
    """
    checked = ImageEncoderSettings(**settings)  # here, before actors are started
    gpus = gpus_of(checked, num_gpus)
    at_once = 32 if batch_size is not None else None
    prepared = dataset.map_batches(
        prepare_images, fn_kwargs=settings, batch_size=at_once, batch_format="pyarrow", **PREPARING
    )
    encoded = encode_batches(prepared, EncodeImages, settings, workers, gpus, batch_size)
    encoded.context.execution_options.preserve_order = True
    return encoded


def gpus_of(settings: ImageEncoderSettings, asked: float | None = None) -> float:
    """GPUs of an actor: as asked, else one if the cluster has any and `device` is not cpu."""
    available = float(ray.cluster_resources().get("GPU", 0))
    if asked is None:
        return float(available > 0 and settings.device != "cpu")
    if asked > available:
        raise InputError(f"num_gpus: {asked:g}, and the cluster has {available:g} GPUs; 0 encodes on CPUs")
    return asked


def encode_batches(
    dataset: ray.data.Dataset,
    encoder: type[EncodeImages],
    arguments: Mapping[str, Any],
    workers: int | tuple[int, int],
    num_gpus: float,
    batch_size: int | None,
) -> ray.data.Dataset:
    """A dataset of images as actors encode them, each by an `encoder` of these arguments, in batches; None: a
    block is one.
    """
    least, most = (workers, workers) if isinstance(workers, int) else workers
    pool = ray.data.ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_tasks_in_flight_per_actor=4,
        max_concurrent_calls_per_actor=2,  # it encodes on a thread of its own: the rest overlaps
        enable_true_multi_threading=True,
    )
    return dataset.map_batches(
        encoder,
        fn_constructor_kwargs=dict(arguments),
        compute=pool,
        batch_size=batch_size,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        num_cpus=1,
        udf_modifying_row_count=False,
    )
