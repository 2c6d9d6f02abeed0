"""Prepared images and embeddings as columns of Arrow tables, which is what Ray's blocks are.

path, ...   whatever else a row has is kept
inputs      what the tower takes, as safetensors: pixels of uint8, grids and counts
layout      how the image was cut, as JSON
error       why the row has no embedding; null: it has one
embedding   its values, row by row
tokens      its rows
width       its columns
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.integrations.images import ImagePreparer, PreparedImage, Result
from fxsplit_encoder.integrations.images.preparer import Array
from fxsplit_encoder.messages import names_of, shown

Prepare = Callable[[ImagePreparer], PreparedImage]

_SOURCES = ("bytes", "image", "path")
_DTYPES = {"U8": np.uint8, "F32": np.float32, "I64": np.int64, "I32": np.int32}


def check_table(batch: object) -> None:
    """Raises InputError for a batch of another format."""
    if not isinstance(batch, pa.Table):
        raise InputError(
            f'batch_format: expected "pyarrow", whose batches are tables; got {shown(type(batch))}'
        )


def sources(table: pa.Table, read: Callable[[str], bytes]) -> list[Prepare | str]:
    """What prepares the image of every row; of a row with an error, the error.

    Args:
        table: with one of the columns `bytes` (encoded), `image` (pixels) and `path`.
        read: the contents of a path.

    Raises:
        InputError: the table has none of these columns.
    """
    name = next((name for name in _SOURCES if name in table.column_names), None)
    if name is None:
        columns = f"one of the columns {', '.join(_SOURCES)}"
        raise InputError(f"images: expected {columns}; got {names_of(table.column_names)}")
    errors = errors_of(table)
    values = _values(table[name])
    makers: dict[str, Callable[[Any], Prepare | str]] = {
        "bytes": _from_bytes,
        "image": _from_pixels,
        "path": _from_path(read),
    }
    make = makers[name]
    return [error or make(value) for error, value in zip(errors, values, strict=True)]


def errors_of(table: pa.Table) -> list[str | None]:
    """The error of every row."""
    if "error" not in table.column_names:
        return [None] * table.num_rows
    errors: list[str | None] = table["error"].to_pylist()
    return errors


def with_inputs(table: pa.Table, prepared: Sequence[PreparedImage | str]) -> pa.Table:
    """The table with prepared images, or their errors, in place of encoded or decoded ones."""
    images = [None if isinstance(each, str) else each for each in prepared]
    inputs = [None if image is None else save(dict(image.inputs)) for image in images]
    layouts = [None if image is None else json.dumps(image.layout) for image in images]
    errors = [each if isinstance(each, str) else None for each in prepared]
    return _replaced(
        table,
        ("bytes", "image"),
        {
            "inputs": pa.array(inputs, pa.large_binary()),
            "layout": pa.array(layouts, pa.string()),
            "error": pa.array(errors, pa.string()),
        },
    )


def inputs_of(table: pa.Table) -> list[PreparedImage | str]:
    """The prepared images, views of the table's memory, or their errors."""
    rows = zip(_values(table["inputs"]), table["layout"].to_pylist(), errors_of(table), strict=True)
    return [
        error or PreparedImage(_unpacked(memoryview(inputs)), json.loads(layout))
        for inputs, layout, error in rows
    ]


def with_embeddings(table: pa.Table, results: Sequence[Result | str], dtype: str) -> pa.Table:
    """The table with embeddings, or errors, in place of inputs.

    Args:
        table: what `inputs_of` was given.
        results: of every row.
        dtype: of the embeddings.
    """
    arrays = [each if isinstance(each, np.ndarray) else None for each in results]
    errors = [None if isinstance(each, np.ndarray) else str(each) for each in results]
    return _replaced(
        table,
        ("inputs",),
        {
            "embedding": _lists(arrays, np.dtype(dtype)),
            "tokens": pa.array([None if a is None else a.shape[0] for a in arrays], pa.int32()),
            "width": pa.array([None if a is None else a.shape[1] for a in arrays], pa.int32()),
            "error": pa.array(errors, pa.string()),
        },
    )


def _replaced(table: pa.Table, old: Sequence[str], new: dict[str, pa.Array]) -> pa.Table:
    kept = table.drop_columns([name for name in (*old, *new) if name in table.column_names])
    for name, array in new.items():
        kept = kept.append_column(name, array)
    return kept


def _lists(arrays: Sequence[Array | None], dtype: np.dtype[Any]) -> pa.Array:
    """A list per array, null for None."""
    sizes = [0 if array is None else array.size for array in arrays]
    flat = [array.reshape(-1) for array in arrays if array is not None]
    values = pa.array(np.concatenate(flat) if flat else np.zeros(0, dtype))
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), pa.int64())
    mask = pa.array([array is None for array in arrays], pa.bool_())
    return pa.LargeListArray.from_arrays(offsets, values, mask=mask)


def _values(column: pa.ChunkedArray) -> Iterator[Any]:
    """The values of a column: buffers of binary ones, arrays of tensors."""
    for chunk in column.chunks:
        if pa.types.is_binary(chunk.type) or pa.types.is_large_binary(chunk.type):
            yield from buffers(chunk)
        elif isinstance(chunk.type, pa.ExtensionType):
            yield from chunk.to_numpy(zero_copy_only=False)
        else:
            yield from chunk.to_pylist()


def buffers(chunk: pa.Array) -> Iterator[pa.Buffer | None]:
    """The values of a binary array where they lie; Arrow's own scalars are copies."""
    _, ends, data = chunk.buffers()
    size = np.int64 if pa.types.is_large_binary(chunk.type) else np.int32
    offsets = np.frombuffer(ends, size)[chunk.offset :].tolist() if len(chunk) else []
    for index, is_valid in enumerate(chunk.is_valid().to_pylist()):
        start = offsets[index]
        yield data.slice(start, offsets[index + 1] - start) if is_valid else None


def _unpacked(data: memoryview) -> dict[str, Array]:
    """Arrays of safetensors, as views."""
    size = int.from_bytes(data[:8], "little")
    start = 8 + size
    return {
        name: np.frombuffer(
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], _DTYPES[entry["dtype"]]
        ).reshape(entry["shape"])
        for name, entry in json.loads(bytes(data[8:start])).items()
        if name != "__metadata__"
    }


def _from_bytes(data: pa.Buffer | None) -> Prepare | str:
    return "no bytes" if data is None else lambda preparer: preparer.load(memoryview(data))


def _from_pixels(pixels: Array | None) -> Prepare | str:
    return "no pixels" if pixels is None else lambda preparer: preparer.load(np.asarray(pixels))


def _from_path(read: Callable[[str], bytes]) -> Callable[[str | None], Prepare | str]:
    def prepare(preparer: ImagePreparer, path: str) -> PreparedImage:
        try:
            data = read(path)
        except OSError as error:
            raise MediaError(f"cannot be read: {error}") from None
        return preparer.load(data)

    return lambda path: "no path" if path is None else lambda preparer: prepare(preparer, path)
