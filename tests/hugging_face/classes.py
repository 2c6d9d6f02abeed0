"""Classes of transformers by the dense rule, at the tiny sizes of `classes.json`; `python -m
tests.hugging_face.classes` compares each with eager and writes docs/models.md.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import fxsplit_encoder as fx
from fxsplit_encoder.hugging_face.calls import is_named
from fxsplit_encoder.hugging_face.lifecycle import find_towers

from .comparisons import tensors
from .tiny_model import randomize

DATA = json.loads(Path(__file__).with_name("classes.json").read_text())
CONFIGS = {name: config for config, entry in DATA.items() for name in entry["classes"]}
"""The configuration of every class."""

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Classes of images

For whoever asks whether a class of transformers is served, and how exactly: a class that is not here is
served or refused by [the same rule](hugging_face.md#towers-without-a-name).

Written by `python -m tests.hugging_face.classes` with transformers {version}, from tiny configurations with
random weights, in float32 on a CPU: the largest difference from eager over one, two and three images,
dictionaries and tuples, hidden states, and `pixel_values` in float16 where the class takes them.

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
    config = getattr(transformers, CONFIGS[name])(**copy.deepcopy(DATA[CONFIGS[name]]["sizes"]))
    torch.manual_seed(0)
    model, reference = (getattr(transformers, name)(config).eval() for _ in "12")
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


@torch.no_grad()
def compare(name: str) -> Compared:
    """Serves a class and compares it with eager; UnsupportedTowerError if the rule refuses it."""
    model, reference = models(name)
    (found,), _ = find_towers(model)
    fx.accelerate(model, fx.EncoderConfig(piece_compiler="eager", mode="full", exact_min_hits=1))
    # A model around two towers has a method for its images.
    towers = [each.get_submodule(found.name) for each in (model, reference)]
    differences = []
    for count, options, dtype in (
        (1, {}, torch.float32),
        (2, {}, torch.float32),
        (3, {"return_dict": False}, torch.float32),
        (2, {}, torch.float16),
        (2, {"output_hidden_states": True}, torch.float32),
    ):
        size = DATA[CONFIGS[name]]["size"]
        pixels = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count)).to(dtype)
        outputs = []
        for tower in towers:
            try:
                outputs.append(tower(pixels, **options))
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
