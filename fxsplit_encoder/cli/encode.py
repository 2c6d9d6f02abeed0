"""Files of a captured tower: of `encoder-cg encode` embeddings, as safetensors or, with Ray, Parquet; of
`encoder-cg build` what managers start with, without compiling and without measuring.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import fxsplit_encoder as fx
from fxsplit_encoder.cli.console import capture, describe_replay, progress_bars, say_tower
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.models.prepare import EncoderInputs
from fxsplit_encoder.service.settings import ImageEncoderSettings

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):/(?!/)")


def run_encode(
    files: Sequence[Path],
    chosen: ChosenTower,
    config: fx.EncoderConfig | None,
    output: Path,
    document: Document,
) -> None:
    """Encodes files and saves one tensor an item, (tokens, hidden), under the item's key. The metadata holds,
    each as JSON, `items` (key to kind, tokens, and the grid, the tiles or the crops), `config` and `model`.
    InputError: an input or the checkpoint is not usable.
    """
    inputs, device = chosen.inputs(files), chosen.device
    config = ImageEncoderSettings(model=chosen.title, config=config).resolved_config(device)
    say_tower(document, chosen)
    document.facts({"replays": describe_replay(device, config)})
    manager = fx.EncoderCudaGraphManager(chosen.family.wrap(chosen.module), config)
    capture(manager)
    embeddings = manager.execute(inputs.mm_kwargs)
    tensors = {i.key: e.cpu().contiguous() for i, e in zip(inputs.items, embeddings, strict=True)}
    save_file(tensors, output, _metadata(inputs, embeddings, config, chosen.title))
    document.notes(manager.reports)
    batches = manager.plan(inputs.mm_kwargs).batches
    results = {index: str(batch.reason or "hit") for batch in batches for index in batch.indices}
    rows = [
        {
            "item": item.key,
            "size": item.pixels,
            item.unit: item.size,
            "embedding": tuple(embedding.shape),
            "served": results[index],
        }
        for index, (item, embedding) in enumerate(zip(inputs.items, embeddings, strict=True))
    ]
    document.say()
    document.table("items", rows, {"size": "size px"})
    document.put("file", str(output), f"\nwrote {output}, {output.stat().st_size / 2**20:.1f} MiB")


def _metadata(
    inputs: EncoderInputs, embeddings: Sequence[torch.Tensor], config: fx.EncoderConfig, model: str
) -> dict[str, str]:
    items = {
        item.key: {"kind": "video" if item.frames else "image", **item.layout, "tokens": embedding.shape[0]}
        for item, embedding in zip(inputs.items, embeddings, strict=True)
    }
    settings = config.model_dump(mode="json", exclude_unset=True)
    return {"items": json.dumps(items), "config": json.dumps(settings), "model": json.dumps(model)}


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
    try:
        import ray
        import ray.data

        from fxsplit_encoder.service.ray import EncodeJob
        from fxsplit_encoder.service.ray.encode_images import everywhere
    except ModuleNotFoundError as error:
        raise MissingExtraError("encoder-cg encode --ray", "ray") from error

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


def run_build(chosen: ChosenTower, config: fx.EncoderConfig, output: Path, document: Document) -> None:
    """Compile and capture a tower as `config` says, and save what was found. InputError: nothing is captured,
    so that there is nothing to save.
    """
    if not config.enabled:
        raise InputError("--config: enabled: false captures nothing, so there is nothing to save")
    say_tower(document, chosen)
    # What an older file knows is not what this one is to know.
    config = config.replace(start_file=None)
    manager = fx.EncoderCudaGraphManager(chosen.family.wrap(chosen.module), config)
    begin = time.perf_counter()
    capture(manager)
    seconds = time.perf_counter() - begin
    document.notes(manager.reports)
    if not manager.can_replay():
        raise InputError("nothing could be captured, so there is nothing to save: see the notes")
    num_bytes = manager.save_start(output)
    captured = {name: sorted(path.captured) for name, path in manager.paths.items()}
    document.content.update(budgets=captured, seconds=round(seconds, 1))
    for name, budgets in captured.items():
        document.say(f"{'path':<8} {name}: budgets {', '.join(map(str, budgets)) or 'none'}")
    if chosen.device.type != "cuda":
        document.notes(["no GPU: nothing was measured, and on GPUs this file is refused"])
    document.put("file", str(output), f"\nwrote {output}, {num_bytes / 2**20:.1f} MiB, in {seconds:.1f} s")
