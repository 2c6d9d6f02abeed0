"""Encoding image files on a Ray cluster: ordered, resumable, a file at the end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
import ray.data

from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.integrations.images import ImageEncoderSettings
from fxsplit_encoder.integrations.ray.encode_images import PREPARING, pool, preparer_of
from fxsplit_encoder.integrations.ray.files import checkpoint_digest, list_files, paths_digest
from fxsplit_encoder.integrations.ray.parts import (
    EncodeShard,
    Outcome,
    Parts,
    ShardReport,
    prepare_shard,
    write_shard,
)

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
