"""`encoder-cg encode --ray`: images to Parquet on a Ray cluster."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxsplit_encoder.cli.console import progress_bars
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.service.settings import ImageEncoderSettings

try:
    import ray
    import ray.data

    from fxsplit_encoder.service.ray import EncodeJob
    from fxsplit_encoder.service.ray.encode_images import everywhere
except ModuleNotFoundError as error:
    raise MissingExtraError("encoder-cg encode --ray", "ray") from error

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):/(?!/)")


def run_encode_ray(
    images: Sequence[Path],
    output: Path,
    document: Document,
    model: str,
    shard_size: int,
    workers: int | None,
    settings: Mapping[str, Any],
) -> None:
    """Encodes images (files, directories at any depth, URIs) and saves a row an image, in the order of the
    paths, by an `EncodeJob`, with `settings` of `ImageEncoderSettings`. What an earlier run of the same has
    written is not encoded again. InputError: an input, the checkpoint or the output is not usable.
    """
    if output.suffix not in (".parquet", ""):
        raise InputError(f"--output {output}: with --ray, expected a name.parquet, or a directory")
    encoder = ImageEncoderSettings(model=everywhere(model), **settings)
    paths = [_SCHEME.sub(r"\1://", str(path)) for path in images]  # a Path has joined the two slashes
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    job = EncodeJob(paths, output, encoder, shard_size=shard_size, workers=workers)
    with progress_bars() as bar:
        outcome = job.run(bar("encoding"))
    if outcome.stages:
        document.put("stages", outcome.stages, outcome.stages)
    document.facts(
        {
            "images": f"{outcome.images}, of which {outcome.written_before} were written before",
            "errors": f"{outcome.failed} images of this run have no embedding but an error",
        }
    )
    document.put("file", str(output), f"wrote {output}")
