"""Encoding image files on a Ray cluster: ordered, resumable, one Parquet file at the end.

    OUTPUT.parts/00000017.parquet  a shard; it gets this name once it is whole
    OUTPUT                         all rows in order, a row group a shard

A shard is always encoded as a whole, so it does not matter in which run that happens. OUTPUT may also be a
directory, in which the parts stay. Every file's metadata says what is encoded, how, and in which shards.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from pyarrow import fs

from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.kernels.store import write_atomic
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.service.ray.encode_images import encode_images, gpus_of, place_of, preparer_of
from fxsplit_encoder.service.settings import ImageEncoderSettings

EXTENSIONS = (".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the files that are taken from directories."""


def list_files(paths: Sequence[str]) -> list[str]:
    """List files as they are given, and images in directories, at any depth, by name; InputError: none."""
    found: list[str] = []
    for path in paths:
        scheme, mark, _ = path.rpartition("://")
        try:
            filesystem, inside = place_of(path)
            (info,) = filesystem.get_file_info([inside])
            if info.type == fs.FileType.File:
                found.append(path)
                continue
            below = filesystem.get_file_info(fs.FileSelector(inside, recursive=True))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be listed: {error}") from None
        names = [file.path for file in below if file.type == fs.FileType.File]
        images = sorted(name for name in names if name.lower().endswith(EXTENSIONS))
        if not images:
            raise InputError(f"{path}: no image in this directory; expected {', '.join(EXTENSIONS)}")
        found += [f"{scheme}{mark}{name}" for name in images]
    return found


def checkpoint_digest(model: str) -> str:
    """Digest a checkpoint's settings and revision, or the sizes and times of a directory's weights."""
    checkpoint = Checkpoint.locate(model)
    digest = hashlib.sha256()
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
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

_KEY = b"fxsplit_encoder.run"


class Parts:
    """The files of a run, whose output is a Parquet file; or a directory, which exists or has no suffix. The
    parts of a run are those of another with equal values.
    """

    def __init__(self, output: Path, run: Mapping[str, Any], num_shards: int) -> None:
        self.output = output
        self.num_shards = num_shards
        self._metadata = {_KEY: json.dumps(run, sort_keys=True)}
        self._is_dataset = output.is_dir() or not output.suffix
        self.directory = output if self._is_dataset else output.with_name(f"{output.name}.parts")

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[int]]:
        """Make the directory of parts, or take it up, and give what is missing; InputError: another process
        writes it, and as of `missing`.
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
                for left_over in self.directory.glob(".*.parquet"):
                    left_over.unlink(missing_ok=True)
                yield self.missing()
            finally:
                (self.directory / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # unless there are parts
                    self.directory.rmdir()

    def missing(self) -> list[int]:
        """The shards that are not written yet; InputError: those of another run are, or its output."""
        if not self._is_dataset and self.output.exists():
            self._check(self.output)
            return []
        written = {path.stem: path for path in sorted(self.directory.glob("[!.]*.parquet"))}
        for name in {*[*written][:1], *[*written][-1:]}:  # who wrote those between has looked here too
            self._check(written[name])
        return [shard for shard in range(self.num_shards) if self._path(shard).stem not in written]

    def write(self, shard: int, table: pa.Table) -> None:
        """Write a shard at once; two processes may write the same."""
        whole = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(self._metadata), whole, **_FORMAT)
        write_atomic(self._path(shard), whole.getvalue())

    def finish(self) -> None:
        """Joins the parts in order, and removes them. The output appears as a whole."""
        if self._is_dataset:
            return
        if not self.output.exists():
            partial = self.directory / f"output.partial-{os.getpid()}"
            paths = [self._path(shard) for shard in range(self.num_shards)]
            with pq.ParquetWriter(partial, pq.read_table(paths[0]).schema, **_FORMAT) as writer:
                for path in paths:
                    writer.write_table(pq.read_table(path))
            partial.replace(self.output)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, shard: int) -> Path:
        return self.directory / f"{shard:08}.parquet"

    def _check(self, path: Path) -> None:
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"{path}: exists and is no Parquet file: {error}") from None
        stored, own = (json.loads(each.get(_KEY, b"{}")) for each in (metadata, self._metadata))
        differing = sorted(name for name in {*stored, *own} if stored.get(name) != own.get(name))
        if differing:
            what = f"is of another run, which differs in {', '.join(differing)}"
            raise InputError(f"{path}: {what}; delete it, or give another output")


# Half of each value of a bfloat16 tower is zeros, which compress if bytes of one place are put together.
_FORMAT: dict[str, Any] = {
    "compression": "zstd",
    "use_byte_stream_split": ["embedding.list.element"],
    "use_dictionary": ["error", "layout"],
}


def write_shard(shard: pa.Table, parts: Parts) -> pa.Table:
    """Write embeddings to a file; return counts of the shard's images and of those without an embedding."""
    (number,) = shard["shard"].unique().to_pylist()
    parts.write(number, shard.drop_columns(["shard", "path"]).rename_columns({"given": "path"}))
    return pa.table({"images": [shard.num_rows], "failed": [shard.num_rows - shard["error"].null_count]})


@dataclass(frozen=True)
class Outcome:
    """Counts of a run, and how long its stages took."""

    images: int
    written_before: int
    """Of all images, by runs before this one."""
    failed: int
    """Images of this run that have an error in place of an embedding."""
    stages: str
    """Times and rates of preparing, encoding and writing, as Ray Data tells them; empty: nothing was left."""


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
        self.workers = _num_workers(settings, workers)
        if not self.files:
            raise InputError("images: expected at least one path")
        preparer = preparer_of(settings)  # raises here what it would raise in every task
        form = {"pooling": preparer.pooling, "normalize": preparer.normalizes}
        digest = hashlib.sha256("\0".join(self.files).encode("utf-8", "surrogateescape"))
        run = {
            "images": {"count": len(self.files), "sha256": digest.hexdigest()},
            "model": {"name": settings.model, "sha256": checkpoint_digest(settings.model)},
            "settings": {**settings.model_dump(mode="json", exclude={"model"}), **form},
            "shard_size": shard_size,
        }
        self.parts = Parts(output.absolute(), run, math.ceil(len(self.files) / shard_size))

    def run(self, progress: Progress = lambda done, total: None) -> Outcome:
        """Encodes what is not written yet, and makes the output.

        Raises:
            InputError: the output is of other images, settings or another checkpoint, or is being written.
        """
        total, failed, stages = len(self.files), 0, ""
        with self.parts.opened() as missing:
            before = done = total - sum(len(self._paths(shard)) for shard in missing)
            progress(done, total)
            if missing:
                dataset = self._dataset(missing)
                for written in dataset.iter_rows():
                    done += written["images"]
                    failed += written["failed"]
                    progress(done, total)
                stages = dataset.stats()
            if left := self.parts.missing():
                raise InputError(
                    f"{self.parts.directory}: shards {left[:8]} are not there; is it on every node?"
                )
            self.parts.finish()
        return Outcome(total, before, failed, stages)

    def _dataset(self, shards: Sequence[int]) -> ray.data.Dataset:
        encoded = encode_images(
            ray.data.from_arrow([*map(self._table, shards)]),
            workers=self.workers,
            batch_size=None,
            **dict(self.settings),
        )
        written = encoded.map_batches(
            write_shard, fn_kwargs={"parts": self.parts}, batch_size=None, batch_format="pyarrow"
        )
        written.context.execution_options.preserve_order = False
        written.context.target_max_block_size = None  # a block is a shard, however large
        return written

    def _table(self, shard: int) -> pa.Table:
        given = self._paths(shard)
        root = os.getcwd()  # workers have another
        paths = [path if "://" in path else os.path.join(root, path) for path in given]
        return pa.table({"shard": [shard] * len(given), "given": given, "path": paths})

    def _paths(self, shard: int) -> list[str]:
        return self.files[shard * self._shard_size : (shard + 1) * self._shard_size]


def _num_workers(settings: ImageEncoderSettings, asked: int | None) -> int:
    """Actors; InputError: the cluster has too few GPUs or CPUs for them."""
    has: dict[str, float] = ray.cluster_resources()
    gpus, cpus = int(has.get("GPU", 0)), int(has.get("CPU", 0))
    on_gpus = gpus_of(settings) > 0
    workers = asked or (gpus if on_gpus else max(1, cpus // 2))
    if on_gpus and workers > gpus:
        raise InputError(f"workers: {workers}, and the cluster has {gpus} GPUs")
    if workers >= cpus:
        have = f"{cpus} CPUs"
        raise InputError(f"workers: {workers} take a CPU each, one more prepares, and the cluster has {have}")
    return workers
