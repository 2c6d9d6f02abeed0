"""`encoder-cg encode`: files to embeddings, one tensor an item, in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

import fxsplit_encoder as fx
from fxsplit_encoder.cli.console import capture, describe_replay, say_tower
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.models.prepare import EncoderInputs


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
    if config is None:
        # Captures pay off over many calls on a GPU. On a CPU they only cost.
        config = fx.EncoderConfig() if device.type == "cuda" else fx.EncoderConfig(mode="none")
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
