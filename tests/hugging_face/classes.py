"""Serves every auto class of transformers with images, as small as `tiny_configs` makes it, and compares it
with eager; `python -m tests.hugging_face.classes` writes docs/models.csv and the page that shows it.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.hugging_face.calls import twin_of
from fxsplit_encoder.hugging_face.lifecycle import find_towers
from fxsplit_encoder.hugging_face.rules import is_named
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.towers.grid import count_patches
from fxsplit_encoder.towers.rules import MODEL_ERRORS, arguments_of

from .comparisons import tensors
from .tiny_configs import auto_classes, build, model_types
from .tiny_model import randomize

SETTINGS = fx.EncoderConfig(mode="exact", exact_min_hits=1, compile=False)
COMPILED = SETTINGS.replace(mode="full", compile=True, piece_compiler="eager")

TABLE = Path(__file__).parents[2] / "docs" / "models.csv"
PAGE = """# Classes of images

To see whether a class of transformers is served, and how exactly; of a checkpoint:

```sh
encoder-cg inspect --model CHECKPOINT_DIR  # its towers, and why one is not served
```

A class that is not in [the table](models.csv) is served or refused by
[the same rule](hugging_face.md#towers-without-a-name). `python -m tests.hugging_face.classes` wrote it with
transformers {version} for the classes of its auto mappings that take images: {counts}.
Tiny configurations with random weights, in float32 on a CPU, not compiled: the largest difference from eager
of the towers over one, two and three images, or patches of images and a video, and of the model's `forward`
of images alone, `get_image_features` and `generate`.

```{{csv-table}}
:file: models.csv
:header-rows: 1
```
"""
HEADER = ("classes", "towers", "served", "largest difference, or the reason")


class Row(NamedTuple):
    """How a class was served, or why it was not."""

    name: str
    towers: str = ""
    served: str = "no"
    reason: str = ""
    difference: float = 0
    hits: int = 0
    uncaptured: int = 0
    """Calls of a tower in the model's own that were encoded twice."""

    def cells(self) -> tuple[str, str, str]:
        """Those of the table, but the class."""
        return self.towers, self.served, self.reason or f"{self.difference:.0e}"


def difference(got: Any, expected: Any) -> float:
    """The largest one of a value, in multiples of the tensor's largest value if that is above 1, as depths
    in meters are; the outputs have to be of one class, with equal fields, shapes and dtypes.
    """
    found, wanted = dict(tensors(got)), dict(tensors(expected))
    assert isinstance(got, type(expected))
    assert [(n, v.shape, v.dtype) for n, v in found.items()] == [
        (n, v.shape, v.dtype) for n, v in wanted.items()
    ]
    assert all(value.isfinite().all() for value in wanted.values())
    exact = {name: value.double() for name, value in wanted.items() if value.numel()}
    return max(
        float((found[name].double() - value).abs().max()) / max(1.0, float(value.abs().max()))
        for name, value in exact.items()
    )


def inputs_of(found: Any) -> Iterator[dict[str, Any]]:
    """Arguments of a tower with one, two and three images."""
    kind, seen = found.calls
    calls = kind(twin_of(found.module), frozenset(), SETTINGS, seen)
    example = calls.example(calls.example_key)
    for count in (1, 2, 3):
        generator = torch.Generator().manual_seed(count)
        yield {
            name: torch.randn(count, *value.shape[1:], generator=generator)
            if value.is_floating_point()
            else value.expand(count, *value.shape[1:]).clone()
            for name, value in example.items()
        }


def inputs_of_grids(tower: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments of a tower with one and two images, and a video."""
    adapter = fx.wrap(twin_of(tower))
    assert isinstance(adapter, fx.PackedTower)
    m = adapter.merge_size
    name, grid_name = adapter.input_names
    for number, grids in enumerate(
        ([(1, 2 * m, 3 * m)], [(1, 2 * m, 2 * m), (1, 4 * m, m)], [(3, 2 * m, 2 * m)])
    ):
        generator = torch.Generator().manual_seed(number)
        patches = torch.randn(count_patches(grids), adapter.patch_features, generator=generator)
        yield {name: adapter.viewed(patches), grid_name: torch.tensor(grids)}


def whole_calls(model: Any, found: Any, inputs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A model's own calls of its tower, with their arguments; some need more, and raise."""
    if not found.name:
        return
    names = {"grid_thw": "image_grid_thw", "hidden_states": "pixel_values"}
    given = {names.get(name, name): value for name, value in inputs.items()}
    yield "forward", given
    if hasattr(model, "get_image_features"):
        yield "get_image_features", given
        if model.can_generate():
            features = model.get_image_features(**given)
            features = getattr(features, "pooler_output", features)
            rows = [each.shape[:-1].numel() for _, each in tensors(features)]
            image = getattr(model.config, "image_token_id", None) or model.config.image_token_index
            ids = torch.tensor([[5, *[image] * sum(rows), 6, 7]])
            words = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if "mm_token_type_ids" in arguments_of(model):
                words["mm_token_type_ids"] = (ids == image).long()
            yield "generate", {**given, **words, "max_new_tokens": 2, "do_sample": False}


_rows: dict[Any, Row] = {}
"""Of models with equal configurations and towers."""


def row(name: str, settings: fx.EncoderConfig = SETTINGS) -> Row:
    """Builds a class and serves it."""
    try:
        model = build(name)
    except Exception as error:  # whatever a configuration leads to
        return Row(name, served="not built", reason=_first_line(error))
    try:
        found, _ = find_towers(model)
    except fx.UnsupportedTowerError as error:
        text = str(error).split("; looked at")[0].split(". Wrap it")[0]
        return Row(name, reason=text.split("can be served: ")[-1].removeprefix("accelerate: "))
    towers = list(dict.fromkeys(type(each.module).__name__ for each in found))
    key = (model_types()[name], *towers, model.can_generate(), settings.compile)
    if key not in _rows:
        _rows[key] = compare(model, found, settings)._replace(towers=", ".join(towers))
    return _rows[key]._replace(name=name)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Class validation")]
    text = f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
    needed = re.search(r"requires the (\w+) library|No module named '(\w+)'", text)
    return f"needs {needed[1] or needed[2]}" if needed else text


@torch.no_grad()
def compare(model: Any, towers: Sequence[Any], settings: fx.EncoderConfig) -> Row:
    """Compares the outputs of a model's towers, and what it makes of them, with eager."""
    randomize(model)
    reference = copy.deepcopy(model)
    has_grids = [any("grid_thw" in argument for argument in arguments_of(each.module)) for each in towers]
    given = [
        [*(inputs_of_grids(found.module) if packed else inputs_of(found))]
        for found, packed in zip(towers, has_grids, strict=True)
    ]
    fx.accelerate(model, settings.replace(token_budgets=(16, 32, 64)) if any(has_grids) else settings)
    wanted: list[tuple[str, dict[str, Any], Any]] = []
    with contextlib.suppress(*MODEL_ERRORS):
        for method, arguments in whole_calls(reference, towers[0], given[0][0]):
            with contextlib.suppress(*MODEL_ERRORS):
                wanted.append((method, arguments, getattr(reference, method)(**arguments)))
    got = [getattr(model, method)(**arguments) for method, arguments, _ in wanted]
    uncaptured = fx.stats(model).misses.get(MissReason.UNCAPTURED_OUTPUT, 0)
    differences = [difference(each, expected) for each, (*_, expected) in zip(got, wanted, strict=True)]
    failure = ""
    for each, inputs_of_each in zip(towers, given, strict=True):
        own = reference.get_submodule(each.name)
        for inputs in inputs_of_each:
            try:
                expected = own(**inputs)
            except MODEL_ERRORS as error:
                failure = _first_line(error)  # it takes no videos
                continue
            differences.append(difference(each.module(**inputs), expected))
    stats = fx.stats(model)
    if not differences:
        return Row("", served="not built", reason=f"its own forward raises {failure}")
    others = stats.misses.keys() - {MissReason.UNCAPTURED_OUTPUT}
    if others:
        return Row("", served="eagerly", reason=", ".join(sorted(others)))
    rule = "by name" if all(is_named(each.module) for each in towers) else "by the rule"
    return Row("", "", rule, "", max(differences), stats.hits, uncaptured)


def write(rows: Sequence[Row]) -> None:
    """Writes the table, in which classes of one configuration with equal cells share a line, and the page."""
    counts = Counter(each.served for each in rows)
    lines: dict[Any, list[str]] = {}
    for each in rows:
        lines.setdefault((model_types()[each.name], each.cells()), []).append(each.name)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEADER)
        table.writerows((", ".join(names), *cells) for (_, cells), names in lines.items())
    said = f"{len(rows)}, of which {', '.join(f'{count} {served}' for served, count in counts.items())}"
    TABLE.with_suffix(".md").write_text(PAGE.format(version=transformers.__version__, counts=said))


def read_table() -> dict[str, list[str]]:
    """The cells of every class in the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {name: cells for names, *cells in rows for name in names.split(", ")}


if __name__ == "__main__":
    found_rows = []
    for each in sys.argv[1:] or auto_classes():
        found_rows.append(row(each))
        print(each, *found_rows[-1].cells(), sep=" | ", flush=True)
    if not sys.argv[1:]:
        write(found_rows)
