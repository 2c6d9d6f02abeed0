"""Encoded images to a tower's inputs, in Ray's tasks: a CPU each, as many as there are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.integrations.images import ImageEncoderSettings, ImagePreparer, PreparedImage
from fxsplit_encoder.integrations.ray.columns import Prepare, check_table, sources, with_inputs
from fxsplit_encoder.integrations.ray.files import read_file

Map = Callable[[Callable[[Prepare | str], PreparedImage | str], Iterable[Prepare | str]], Iterable[Any]]


def prepare_images(table: pa.Table, **settings: Any) -> pa.Table:
    """A function for `Dataset.map_batches`, with `batch_format="pyarrow"` and the settings as `fn_kwargs`.

    Args:
        table: rows with one of the columns `bytes` (encoded images, as `ray.data.read_binary_files` reads
            them), `image` (height, width, channels; as `read_images` does) and `path`.
        settings: those of `ImageEncoderSettings`.

    Returns:
        The rows, in order, with `inputs` and `layout` in place of `bytes` or `image`, pixels as uint8; those
        without an image with an `error`.

    Raises:
        InputError: the table has no such column, or the checkpoint is not usable.
    """
    check_table(table)
    return prepare_table(table, preparer_of(ImageEncoderSettings(**settings)))


def prepare_table(table: pa.Table, preparer: ImagePreparer, each: Map = map) -> pa.Table:
    """As `prepare_images`; `each` may be the `map` of an executor."""

    def prepare(source: Prepare | str) -> PreparedImage | str:
        if isinstance(source, str):
            return source
        try:
            return source(preparer)
        except MediaError as error:
            return str(error)

    return with_inputs(table, list(each(prepare, sources(table, read_file))))


@functools.lru_cache(maxsize=4)
def preparer_of(settings: ImageEncoderSettings) -> ImagePreparer:
    """One for all tasks of a worker's process."""
    return ImagePreparer(settings)
