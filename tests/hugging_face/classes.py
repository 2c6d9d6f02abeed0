"""Classes of transformers by the rules, at the tiny sizes of `classes.json`; `python -m
tests.hugging_face.classes` compares each with eager and writes docs/models.md.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import fxsplit_encoder as fx
from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder.hugging_face.calls import is_named
from fxsplit_encoder.hugging_face.lifecycle import find_towers
from fxsplit_encoder.towers.grid import count_patches
from fxsplit_encoder.towers.rules import GridTower, arguments_of

from .comparisons import tensors
from .tiny_model import randomize

DATA = json.loads(Path(__file__).with_name("classes.json").read_text())
CONFIGS = {name: config for config, entry in DATA.items() for name in entry["classes"]}
"""The configuration of every class."""

SETTINGS = fx.EncoderConfig(piece_compiler="eager", mode="full", exact_min_hits=1)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Classes of images

For whoever asks whether a class of transformers is served, and how exactly: a class that is not here is
served or refused by [the same rule](hugging_face.md#towers-without-a-name).

Written by `python -m tests.hugging_face.classes` with transformers {version}, from tiny configurations with
random weights, in float32 on a CPU: the largest difference from eager over one, two and three images,
dictionaries and tuples, hidden states, and `pixel_values` in float16 where the class takes them; of patches
with grids over one and two images, and a video.

| class | tower | served | largest difference, or the reason |
|---|---|---|---|
"""


class Compared(NamedTuple):
    """How a class was served."""

    tower: str
    rule: str
    difference: float
    hits: int
    misses: dict[Any, int]


def models(name: str) -> tuple[Any, Any]:
    """A model of a class twice, with equal weights."""
    entry = DATA[CONFIGS[name]]
    config = getattr(transformers, CONFIGS[name])(**copy.deepcopy(entry["sizes"]))
    torch.manual_seed(0)
    family = entry.get("grids")
    module = import_module(f"transformers.models.{family}.modeling_{family}") if family else transformers
    model, reference = (getattr(module, name)(config).float().eval() for _ in "12")
    randomize(reference)
    model.load_state_dict(reference.state_dict())
    return model, reference


def difference(got: Any, expected: Any) -> float:
    """The largest one; the outputs have to be of one class, with equal fields, shapes and dtypes."""
    found, wanted = dict(tensors(got)), dict(tensors(expected))
    assert isinstance(got, type(expected))
    assert [(n, v.shape, v.dtype) for n, v in found.items()] == [
        (n, v.shape, v.dtype) for n, v in wanted.items()
    ]
    return max(float((found[n].double() - v.double()).abs().max()) for n, v in wanted.items())


def of_images(tower: Any, size: int) -> Iterator[dict[str, Any]]:
    """Arguments with one, two and three images."""
    for count, options, dtype in (
        (1, {}, torch.float32),
        (2, {}, torch.float32),
        (3, {"return_dict": False}, torch.float32),
        (2, {}, torch.float16),
        (2, {"output_hidden_states": True}, torch.float32),
    ):
        pixels = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))
        yield {arguments_of(tower)[0]: pixels.to(dtype), **options}


def of_grids(tower: Any) -> Iterator[dict[str, Any]]:
    """Arguments with one and two images, and a video."""
    adapter = fx.wrap(linked_copy(tower))
    assert isinstance(adapter, fx.PackedTower)
    m = adapter.merge_size
    name, grid_name = adapter.input_names
    for number, grids in enumerate(
        ([(1, 2 * m, 3 * m)], [(1, 2 * m, 2 * m), (1, 4 * m, m)], [(3, 2 * m, 2 * m)], [(1, 3 * m, 2 * m)])
    ):
        generator = torch.Generator().manual_seed(number)
        patches = torch.randn(count_patches(grids), adapter.patch_features, generator=generator)
        if isinstance(adapter, GridTower):
            patches = adapter.viewed(patches)
        yield {name: patches, grid_name: torch.tensor(grids)}


@torch.no_grad()
def compare(name: str) -> Compared:
    """Serves a class and compares it with eager; UnsupportedTowerError if the rule refuses it."""
    model, reference = models(name)
    (found,), _ = find_towers(model)
    is_packed = "grids" in DATA[CONFIGS[name]]
    fx.accelerate(model, SETTINGS.replace(token_budgets=(16, 32, 64)) if is_packed else SETTINGS)
    # A model around two towers has a method for its images.
    towers = [each.get_submodule(found.name) for each in (model, reference)]
    differences = []
    for inputs in of_grids(towers[1]) if is_packed else of_images(towers[1], DATA[CONFIGS[name]]["size"]):
        outputs = []
        for tower in towers:
            try:
                outputs.append(tower(**inputs))
            except RuntimeError as error:  # of another dtype: both raise
                outputs.append(str(error))
        if isinstance(outputs[1], str):
            assert outputs[0] == outputs[1]
        else:
            differences.append(difference(*outputs))
    stats = fx.stats(model)
    rule = "by name" if is_named(found.module) else "by the rule"
    return Compared(type(found.module).__name__, rule, max(differences), stats.hits, stats.misses)


def row(name: str) -> str:
    """A line of the table."""
    try:
        compared = compare(name)
    except fx.UnsupportedTowerError as error:
        return f"| {name} |  | no | {str(error).split('served: ')[-1].split('. Wrap')[0]} |"
    if not compared.hits:
        return f"| {name} | {compared.tower} | no | {', '.join(map(str, compared.misses))} |"
    return f"| {name} | {compared.tower} | {compared.rule} | {compared.difference:.0e} |"


if __name__ == "__main__":
    rows = []
    for each in sys.argv[1:] or sorted(CONFIGS):
        rows.append(row(each))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(HEAD.format(version=transformers.__version__) + "\n".join(rows) + "\n")
