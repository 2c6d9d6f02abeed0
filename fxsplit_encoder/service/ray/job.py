"""Encoding image files on a Ray cluster: ordered, resumable, one Parquet file at the end.

    OUTPUT.parts/run.json          what is encoded, how, and in shards of how many images
    OUTPUT.parts/00000017.parquet  a shard; it gets this name once it is whole
    OUTPUT                         all rows in order, a row group a shard

A shard is always encoded as a whole, so it does not matter in which run that happens. OUTPUT may also be a
directory, in which the parts stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from pyarrow import fs

from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.service.ray.encode_images import (
    PREPARING,
    EncodeImages,
    buffers,
    errors_of,
    pool,
    prepare_images,
    preparer_of,
)
from fxsplit_encoder.service.settings import ImageEncoderSettings

EXTENSIONS = (".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the files that are taken from directories."""


def list_files(paths: Sequence[str]) -> list[str]:
    """The files among the paths as they are given, and the images in directories, at any depth and in order
    of name.

    Raises:
        InputError: a path does not exist, or a directory holds no image.
    """
    found: list[str] = []
    for path in paths:
        inside = list(_in_uri(path) if "://" in path else _in_directory(path))
        if not inside:
            raise InputError(f"{path}: no image in this directory; expected {', '.join(EXTENSIONS)}")
        found += inside
    return found


def _in_directory(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such file or directory")
    for directory, below, names in os.walk(path):
        below.sort()
        yield from (os.path.join(directory, name) for name in sorted(names) if _is_image(name))


def _in_uri(uri: str) -> Iterator[str]:
    try:
        filesystem, inside = fs.FileSystem.from_uri(uri)
        (info,) = filesystem.get_file_info([inside])
        if info.type == fs.FileType.File:
            yield uri
            return
        below = filesystem.get_file_info(fs.FileSelector(inside, recursive=True))
    except (OSError, ValueError) as error:
        raise InputError(f"{uri}: cannot be listed: {error}") from None
    scheme = uri.partition("://")[0]
    names = sorted(file.path for file in below if file.type == fs.FileType.File and _is_image(file.path))
    yield from (f"{scheme}://{name}" for name in names)


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


_SETTINGS = ("config.json", "processor_config.json", "preprocessor_config.json")


def paths_digest(paths: Iterable[str]) -> str:
    """Of a list of files, by their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def checkpoint_digest(model: str) -> str:
    """Of a checkpoint: of one on the hub by its revision, of a directory by what its settings hold, and the
    sizes and times of its weights.
    """
    checkpoint = Checkpoint.locate(model)
    digest = hashlib.sha256()
    for name in _SETTINGS:
        found = checkpoint.find(name)
        digest.update(b"" if found is None else found.read_bytes())
        if found is not None and checkpoint.directory is None:
            digest.update(found.parent.name.encode())
    if checkpoint.directory is not None:
        for weights in sorted(checkpoint.directory.glob("*.safetensors")):
            state = weights.stat()
            digest.update(f"{weights.name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


# --- the files of a run

Run = Mapping[str, Any]
"""What tells runs apart, of numbers, texts, and lists and mappings of them; of equal ones the parts fit."""

_DESCRIPTION = "run.json"
_KEY = b"fxsplit_encoder.run"


class Parts:
    """The files of a run.

    Args:
        output: the Parquet file to make; or a directory, which exists or whose name has no suffix.
        run: what is encoded and how.
        num_shards: that it consists of.
    """

    def __init__(self, output: Path, run: Run, num_shards: int) -> None:
        self.output = output
        self.num_shards = num_shards
        self._run = json.loads(json.dumps(run))
        self._is_dataset = output.is_dir() or not output.suffix
        self.directory = output if self._is_dataset else output.with_name(f"{output.name}.parts")

    @property
    def is_complete(self) -> bool:
        """Whether the output is there; raises InputError where it is there, and of another run."""
        if self._is_dataset:
            return self._is_described() and not self.missing()
        if not self.output.exists():
            return False
        self._check(_run_in(self.output), self.output)
        return True

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the directory of parts, or takes up the one of the same run.

        Raises:
            InputError: it holds parts of another run, or another process writes them now.
        """
        if not self.output.parent.is_dir():
            raise InputError(f"{self.output}: no such directory: {self.output.parent}")
        self.directory.mkdir(exist_ok=True)
        with (self.directory / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.directory}: another process is writing this output") from None
            try:
                self._describe()
                yield
            finally:
                (self.directory / ".lock").unlink(missing_ok=True)

    def missing(self) -> list[int]:
        """The shards that are not written yet."""
        written = {int(path.stem) for path in self.directory.glob("*.parquet") if path.stem.isdecimal()}
        return [shard for shard in range(self.num_shards) if shard not in written]

    def finish(self) -> None:
        """Joins the parts in order, and removes them. The output appears as a whole."""
        if self._is_dataset:
            return
        if not self.output.exists():
            partial = self.directory / f"output.partial-{os.getpid()}"
            self._join(partial)
            partial.replace(self.output)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _join(self, path: Path) -> None:
        paths = [part_path(self.directory, shard) for shard in range(self.num_shards)]
        schema = pq.read_schema(paths[0])
        metadata = {_KEY: json.dumps(self._run, sort_keys=True)}
        with pq.ParquetWriter(path, schema.with_metadata(metadata), **_FORMAT) as writer:
            for part in paths:
                writer.write_table(pq.read_table(part).replace_schema_metadata(metadata))

    def _describe(self) -> None:
        if not self._is_described():
            if any(self.directory.glob("*.parquet")):
                raise InputError(f"{self.directory}: holds Parquet files that no run describes")
            text = json.dumps(self._run, indent=1)
            _write(self.directory / _DESCRIPTION, lambda path: path.write_text(text, encoding="utf-8"))
        for left_over in self.directory.glob("*.partial-*"):
            left_over.unlink(missing_ok=True)

    def _is_described(self) -> bool:
        description = self.directory / _DESCRIPTION
        if not description.exists():
            return False
        self._check(json.loads(description.read_text(encoding="utf-8")), self.directory)
        return True

    def _check(self, stored: Run, where: Path) -> None:
        names = {*stored, *self._run}
        differing = sorted(name for name in names if stored.get(name) != self._run.get(name))
        if differing:
            what = f"is of another run, which differs in {', '.join(differing)}"
            raise InputError(f"{where}: {what}; delete it, or give another output")


def part_path(directory: Path, shard: int) -> Path:
    """The file of a shard."""
    return directory / f"{shard:08}.parquet"


def write_part(directory: Path, shard: int, table: pa.Table) -> None:
    """Write a shard at once; two processes may write the same."""
    _write(part_path(directory, shard), lambda path: pq.write_table(table, path, **_FORMAT))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.uname().nodename}-{os.getpid()}")
    write(partial)
    partial.replace(path)


def _run_in(path: Path) -> Run:
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: exists and is no Parquet file: {error}") from None
    run: Run = json.loads(metadata.get(_KEY, b"{}"))
    return run


# Half of each value of a bfloat16 tower is zeros, which compress if bytes of one place are put together.
_FORMAT: dict[str, Any] = {
    "compression": "zstd",
    "use_byte_stream_split": ["embedding.list.element"],
    "use_dictionary": ["error", "layout"],
}


Span = tuple[float, float]
"""When a stage began and ended to work on a shard, in seconds of `time.time`."""

STAGES = ("prepare", "encode", "write")


def prepare_shard(row: pa.Table, root: str, **settings: Any) -> pa.Table:
    """Prepare the images of a shard, whose paths are relative to `root`."""
    begin = time.time()
    shard, paths = row["shard"][0].as_py(), row["paths"][0].as_py()
    read_from = [path if "://" in path else os.path.join(root, path) for path in paths]
    prepared = prepare_images(pa.table({"path": read_from}), **settings)
    table = prepared.set_column(0, "path", pa.array(paths))
    return packed(shard, table, {"prepare": (begin, time.time())})


class EncodeShard(EncodeImages):
    """Encodes prepared images."""

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
    """Write embeddings to a file; return counts of the shard's images and of those without an embedding."""
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
    """The number of a shard, and its table, a view of the row's memory."""
    assert row.num_rows == 1
    (stream,) = buffers(row["rows"].chunk(0))
    with pa.ipc.open_stream(stream) as reader:
        return row["shard"][0].as_py(), reader.read_all()


def spans_of(row: pa.Table) -> dict[str, Span]:
    """By the stages that a shard has passed."""
    return {stage: tuple(row[stage][0].as_py()) for stage in STAGES if stage in row.column_names}


@dataclass(frozen=True)
class ShardReport:
    """One shard of a run."""

    shard: int
    images: int
    failed: int
    """Images that have an error in place of an embedding."""
    spans: Mapping[str, Span]
    """By stage: "prepare", "encode", "write"."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ShardReport:
        """From what `write_shard` returns."""
        spans = {stage: (row[stage][0], row[stage][1]) for stage in STAGES}
        return cls(row["shard"], row["images"], row["failed"], spans)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    images: int
    """All of the output's."""
    written_before: int
    """Of these, by runs before this one."""
    shards: tuple[ShardReport, ...]
    """Of this run, in the order in which they were done."""
    workers: int
    """That encoded."""

    @property
    def failed(self) -> int:
        """Images of this run that have an error in place of an embedding."""
        return sum(shard.failed for shard in self.shards)

    @property
    def seconds(self) -> dict[str, float]:
        """What each stage took for all shards together."""
        return {stage: sum(_length(shard.spans[stage]) for shard in self.shards) for stage in STAGES}

    @property
    def encoding_share(self) -> float:
        """The part of the time from the first shard encoded to the last in which a worker was encoding, on
        average; 0.0 before the first."""
        spans = [shard.spans["encode"] for shard in self.shards]
        if not spans:
            return 0.0
        whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
        return sum(map(_length, spans)) / (whole * self.workers) if whole else 1.0

    @property
    def cpus_per_worker(self) -> float:
        """CPUs that would have to prepare and write for one worker to encode all the time."""
        seconds = self.seconds
        return (seconds["prepare"] + seconds["write"]) / seconds["encode"] if seconds["encode"] else 0.0


def _length(span: Span) -> float:
    return span[1] - span[0]


# --- the run

Progress = Callable[[int, int], None]
"""Takes the images that are written, and how many there are."""


class EncodeJob:
    """Image files to one Parquet file of embeddings, or a directory of them, by the cluster that Ray is
    connected to.

    Args:
        paths: image files, directories (at any depth), and URIs that pyarrow reads.
        output: the Parquet file; a directory, or a name without a suffix: a file a shard. On the disks of
            every node, if there are several.
        settings: checkpoint, captures, and the form of embeddings.
        shard_size: images that are encoded together and written as a whole.
        workers: actors. None: one a GPU; on a cluster without GPUs, one for two CPUs.

    Raises:
        ConfigError: a number is not positive.
        InputError: a path does not exist, the checkpoint is not usable, or nothing in the cluster can encode.
    """

    def __init__(
        self,
        paths: Sequence[str],
        output: Path,
        settings: ImageEncoderSettings,
        *,
        shard_size: int = 128,
        workers: int | None = None,
    ) -> None:
        for name, value in (("shard_size", shard_size), ("workers", workers)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: allowed: integers of at least 1; got {value}")
        self.settings = settings
        self.files = list_files(paths)
        self._shard_size = shard_size
        self._workers = workers
        if not self.files:
            raise InputError("images: expected at least one path")
        preparer_of(settings)  # raises here what it would raise in every task
        run = {
            "images": {"count": len(self.files), "sha256": paths_digest(self.files)},
            "model": {"name": settings.model, "sha256": checkpoint_digest(settings.model)},
            "settings": settings.model_dump(mode="json", exclude={"model"}),
            "shard_size": shard_size,
        }
        self.parts = Parts(output, run, math.ceil(len(self.files) / shard_size))

    def run(self, progress: Progress = lambda done, total: None) -> Outcome:
        """Encodes what is not written yet, and makes the output.

        Raises:
            InputError: the output is of other images, settings or another checkpoint, or is being written.
        """
        total, workers = len(self.files), self._resources()[0]
        shards: list[ShardReport] = []
        if self.parts.is_complete:
            self.parts.finish()
            progress(total, total)
            return Outcome(total, total, (), workers)
        with self.parts.opened():
            missing = self.parts.missing()
            before = total - sum(len(self._paths(shard)) for shard in missing)
            progress(before, total)
            for row in self._dataset(missing).iter_rows() if missing else ():
                shards.append(ShardReport.of(row))
                progress(before + sum(shard.images for shard in shards), total)
            if left := self.parts.missing():
                raise InputError(
                    f"{self.parts.directory}: shards {left[:8]} are not there; is it on every node?"
                )
            self.parts.finish()
        return Outcome(total, before, tuple(shards), workers)

    def _dataset(self, shards: Sequence[int]) -> ray.data.Dataset:
        """The run as a dataset: reading and preparing, encoding, writing."""
        workers, num_gpus = self._resources()
        settings = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        stage = {"batch_size": 1, "batch_format": "pyarrow", "udf_modifying_row_count": False}
        described = [{"shard": shard, "paths": self._paths(shard)} for shard in shards]
        own = {"root": os.getcwd(), **settings}
        return (
            ray.data.from_items(described, override_num_blocks=len(described))
            .map_batches(prepare_shard, fn_kwargs=own, **PREPARING, **stage)
            .map_batches(
                EncodeShard,
                fn_constructor_kwargs=settings,
                compute=pool(workers),
                num_gpus=num_gpus,
                num_cpus=1,
                **stage,
            )
            .map_batches(write_shard, fn_kwargs={"directory": str(self.parts.directory.resolve())}, **stage)
        )

    def _paths(self, shard: int) -> list[str]:
        return self.files[shard * self._shard_size : (shard + 1) * self._shard_size]

    def _resources(self) -> tuple[int, float]:
        """Actors, and the GPUs of each."""
        has: dict[str, float] = ray.cluster_resources()
        gpus, cpus = int(has.get("GPU", 0)), int(has.get("CPU", 0))
        on_gpus = gpus > 0 and self.settings.device != "cpu"
        workers = self._workers or (gpus if on_gpus else max(1, cpus // 2))
        if on_gpus and workers > gpus:
            raise InputError(f"workers: {workers}, and the cluster has {gpus} GPUs")
        if workers >= cpus:
            have = f"{cpus} CPUs"
            raise InputError(
                f"workers: {workers} take a CPU each, one more prepares, and the cluster has {have}"
            )
        return workers, float(on_gpus)
