"""Auto classes with images give eager's outputs, and docs/models.csv says so of each: a fixed tenth of them
and some of a kind of their own; `make test-all` all, compiled.
"""

from __future__ import annotations

import zlib

import pytest
import transformers

from .classes import COMPILED, SETTINGS, TABLE, read_table, row
from .tiny_configs import auto_classes, model_types

CELLS = read_table()
IS_OF_THE_TABLE = f"transformers {transformers.__version__} " in TABLE.with_suffix(".md").read_text()
ASKS_FOR_ALL = {"FlavaModel"}
"""Models that ask for all hidden states and read one, which is captured from the second call on."""


OF_THEIR_OWN = {
    f"{family}ForConditionalGeneration"
    for family in ("Glm4v", "InternVL", "Kimi_K25", "Llama4", "Llava", "Mistral3", "Qwen2_5_VL")
}


def is_quick(name: str) -> bool:
    return name in OF_THEIR_OWN or zlib.crc32(name.encode()) % 10 == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if is_quick(name) else pytest.mark.exhaustive)
        for name in sorted(CELLS.keys() & model_types().keys())
    ],
)
def test_outputs_are_those_of_eager(name: str) -> None:
    found = row(name, SETTINGS if is_quick(name) else COMPILED)
    assert found.difference <= 1e-5
    assert found.uncaptured == (name in ASKS_FOR_ALL)
    if found.served.startswith("by "):
        assert found.hits >= 2
    else:
        assert found.reason
    if IS_OF_THE_TABLE:
        assert CELLS[name][:2] == [found.towers, found.served]


def of_automodel() -> set[str]:
    names = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES.values()
    return {each for name in names for each in ((name,) if isinstance(name, str) else name)}


def test_150_classes_of_automodel_are_served() -> None:
    served = {name for name, cells in CELLS.items() if cells[1].startswith("by ")}
    assert len(served & of_automodel()) >= 150


@pytest.mark.exhaustive
@pytest.mark.skipif(not IS_OF_THE_TABLE, reason="another transformers has other classes")
def test_the_table_has_every_class_of_automodel() -> None:
    assert of_automodel().intersection(auto_classes()) <= CELLS.keys()
