"""Images to embeddings in Ray's actors: one tower, one GPU and one encoding thread each."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import ray.data

from fxsplit_encoder.integrations.images import ImageEncoder, ImageEncoderSettings, PreparedImage, results_of
from fxsplit_encoder.integrations.ray.columns import check_table, inputs_of, with_embeddings
from fxsplit_encoder.integrations.ray.prepare_images import prepare_images, prepare_table

# What a process needs that prepares a batch. Asking for it also keeps Ray from running these tasks inside the
# actors that follow: it does where both ask for the same.
PREPARING = {"num_cpus": 1, "memory": 1 << 29}


class EncodeImages:
    """A class for `Dataset.map_batches`, with `batch_format="pyarrow"`; `encode_images` passes the rest.

    Ray makes actors on one thread and calls them on others, so this has a thread of its own that loads,
    captures and encodes. Calls may overlap: while one is encoded, the next is unpacked and the last packed.

    Args:
        settings: those of `ImageEncoderSettings`.

    Raises:
        InputError: the checkpoint or the device is not usable.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = ImageEncoderSettings(**settings)
        self._thread = ThreadPoolExecutor(1, "encoder")
        self._decoders = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decoder")
        self.encoder = self._thread.submit(ImageEncoder, self._settings).result()

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows, in order, with `embedding`, `tokens`, `width` and `error`.

        Args:
            table: what `prepare_images` returns; or what it takes, which is then prepared here.

        Raises:
            InputError: the table has no column of images.
        """
        check_table(table)
        if "inputs" not in table.column_names:
            table = prepare_table(table, self.encoder.preparer, self._decoders.map)
        rows = inputs_of(table)
        images = [row for row in rows if isinstance(row, PreparedImage)]
        launched = self._thread.submit(self.encoder.launch, images).result()
        embeddings = iter(results_of(launched))
        results = [next(embeddings) if isinstance(row, PreparedImage) else row for row in rows]
        return with_embeddings(table, results, self._settings.output_dtype)


def encode_images(
    dataset: ray.data.Dataset,
    *,
    workers: int | tuple[int, int] = 1,
    num_gpus: float = 1,
    batch_size: int = 128,
    prepare_apart: bool = True,
    **settings: Any,
) -> ray.data.Dataset:
    """A dataset of images as one of embeddings.

    Args:
        dataset: rows as `prepare_images` takes them.
        workers: actors; two numbers: at least and at most.
        num_gpus: of each actor; 0: on a CPU.
        batch_size: images that an actor gets together, which it packs. Large enough to fill budgets.
        prepare_apart: whether images are decoded in tasks, on any node; else by each actor, on its own.
        settings: those of `ImageEncoderSettings`.
    """
    checked = ImageEncoderSettings(**settings)  # here, before actors are started
    if prepare_apart:
        dataset = dataset.map_batches(
            prepare_images, fn_kwargs=settings, batch_size=32, batch_format="pyarrow", **PREPARING
        )
    return dataset.map_batches(
        EncodeImages,
        fn_constructor_kwargs={name: getattr(checked, name) for name in checked.model_fields_set},
        compute=pool(workers),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        num_cpus=1,
        udf_modifying_row_count=False,
    )


def pool(workers: int | tuple[int, int]) -> ray.data.ActorPoolStrategy:
    """Of actors with a thread of their own to encode on, so that the rest of a call may overlap."""
    least, most = (workers, workers) if isinstance(workers, int) else workers
    return ray.data.ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_tasks_in_flight_per_actor=4,
        max_concurrent_calls_per_actor=2,
        enable_true_multi_threading=True,
    )
