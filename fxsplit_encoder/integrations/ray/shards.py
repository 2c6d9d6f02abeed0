"""The stages of a run, each from a row that is a shard to a row that is the same shard.

A shard is a row of one binary value, an Arrow stream, so Ray neither splits nor joins what belongs together,
whatever the sizes of its blocks, and reads it without a copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from fxsplit_encoder.integrations.ray.columns import buffers, errors_of
from fxsplit_encoder.integrations.ray.encode_images import EncodeImages
from fxsplit_encoder.integrations.ray.parts import write_part
from fxsplit_encoder.integrations.ray.prepare_images import prepare_images

Span = tuple[float, float]
"""When a stage began and ended to work on a shard, in seconds of `time.time`."""

STAGES = ("prepare", "encode", "write")


def prepare_shard(row: pa.Table, root: str, **settings: Any) -> pa.Table:
    """From the paths of a shard, relative to `root`, to prepared images."""
    begin = time.time()
    shard, paths = row["shard"][0].as_py(), row["paths"][0].as_py()
    read_from = [path if "://" in path else os.path.join(root, path) for path in paths]
    prepared = prepare_images(pa.table({"path": read_from}), **settings)
    table = prepared.set_column(0, "path", pa.array(paths))
    return packed(shard, table, {"prepare": (begin, time.time())})


class EncodeShard(EncodeImages):
    """From prepared images to embeddings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lock = threading.Lock()
        self._last = 0.0

    def __call__(self, row: pa.Table) -> pa.Table:
        """The same shard."""
        begin = time.time()
        shard, table = unpacked(row)
        encoded = super().__call__(table)
        with self._lock:  # of calls that overlap, the later one waited for the other
            span = max(begin, self._last), time.time()
            self._last = span[1]
        return packed(shard, encoded, {**spans_of(row), "encode": span})


def write_shard(row: pa.Table, directory: str) -> pa.Table:
    """From embeddings to a file; the result counts the shard's images and those without an embedding."""
    begin = time.time()
    shard, table = unpacked(row)
    write_part(Path(directory), shard, table)
    failed = sum(error is not None for error in errors_of(table))
    counts = {"shard": [shard], "images": [table.num_rows], "failed": [failed]}
    spans = {**spans_of(row), "write": (begin, time.time())}
    return pa.table({**counts, **{stage: [span] for stage, span in spans.items()}})


def packed(shard: int, table: pa.Table, spans: Mapping[str, Span]) -> pa.Table:
    """A table as a row, with the spans of the stages that it has passed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    buffer = sink.getvalue()
    offsets = pa.py_buffer(b"".join(n.to_bytes(8, "little") for n in (0, buffer.size)))
    data = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
    columns = {"shard": pa.array([shard], pa.int64()), "rows": data}
    return pa.table({**columns, **{stage: [span] for stage, span in spans.items()}})


def unpacked(row: pa.Table) -> tuple[int, pa.Table]:
    """The number of a shard, and its table, which is a view of the row's memory."""
    assert row.num_rows == 1
    (stream,) = buffers(row["rows"].chunk(0))
    with pa.ipc.open_stream(stream) as reader:
        return row["shard"][0].as_py(), reader.read_all()


def spans_of(row: pa.Table) -> dict[str, Span]:
    """Of the stages that a shard has passed."""
    return {stage: tuple(row[stage][0].as_py()) for stage in STAGES if stage in row.column_names}
