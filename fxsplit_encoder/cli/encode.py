"""`encoder-cg encode`: files to embeddings, one tensor an item, in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

import fxsplit_encoder as fx
from fxsplit_encoder.cli.console import describe_device, describe_replay, describe_tower, progress_bars
from fxsplit_encoder.cli.document import Document, columns
from fxsplit_encoder.cli.tower import locate
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.models.prepare import EncoderInputs, find_files, load_inputs
from fxsplit_encoder.planning.plan import Plan


def run_encode(
    files: Sequence[Path],
    model: str,
    config: fx.EncoderConfig | None,
    output: Path,
    place: tuple[torch.device, torch.dtype],
    document: Document,
) -> None:
    """Encode files and save their embeddings.

    The file holds one tensor an item, (tokens, hidden), under the item's key. Its metadata holds, each as
    JSON, `items` (key to kind, tokens, and the grid, the tiles or the crops), `config` and `model`.

    Raises:
        InputError: an input or the checkpoint is not usable.
    """
    device, dtype = place
    checkpoint = locate(model)
    family, settings = read_family(checkpoint)
    inputs = load_inputs(find_files(files), family.prepare(settings, checkpoint.processors()))
    tower = load_tower(checkpoint, dtype, device)
    if config is None:
        # Captures pay off over many calls on a GPU. On a CPU they only cost.
        config = fx.EncoderConfig() if device.type == "cuda" else fx.EncoderConfig(mode="none")
    document.facts({"tower": describe_tower(tower), "device": describe_device(device)})
    document.facts({"replays": describe_replay(device, config)})
    inputs = inputs.to(device, dtype)
    manager = fx.EncoderCudaGraphManager(family.wrap(tower), config)
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
    embeddings = manager.execute(inputs.mm_kwargs)
    tensors = {i.key: e.cpu().contiguous() for i, e in zip(inputs.items, embeddings, strict=True)}
    save_file(tensors, output, _metadata(inputs, embeddings, config, model))
    document.notes(manager.reports)
    _say_items(document, inputs, family.unit, manager.plan(inputs.mm_kwargs), embeddings)
    document.put("file", str(output), f"\nwrote {output}, {output.stat().st_size / 2**20:.1f} MiB")


def _metadata(
    inputs: EncoderInputs, embeddings: Sequence[torch.Tensor], config: fx.EncoderConfig, model: str
) -> dict[str, str]:
    items = {
        item.key: {
            "kind": "video" if item.frames else "image",
            **item.layout,
            "tokens": embedding.shape[0],
        }
        for item, embedding in zip(inputs.items, embeddings, strict=True)
    }
    settings = config.model_dump(mode="json", exclude_unset=True)
    return {"items": json.dumps(items), "config": json.dumps(settings), "model": json.dumps(model)}


def _say_items(
    document: Document,
    inputs: EncoderInputs,
    unit: str,
    plan: Plan,
    embeddings: Sequence[torch.Tensor],
) -> None:
    results = {index: str(batch.reason or "hit") for batch in plan.batches for index in batch.indices}
    rows = [
        [item.key, item.pixels, item.size, tuple(embedding.shape), results[index]]
        for index, (item, embedding) in enumerate(zip(inputs.items, embeddings, strict=True))
    ]
    headers = columns(item="item", size="size px", **{unit: unit}, embedding="embedding", served="served")
    document.say()
    document.table("items", headers, rows)
