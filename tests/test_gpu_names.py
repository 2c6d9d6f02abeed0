"""What tests on a device call by name is there: without one they are skipped, and a name can go stale."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

FILES = sorted((Path(__file__).parent / "gpu").glob("*.py"))
PACKAGE = "fxsplit_encoder."


def resolve(name: str) -> Any:
    """The module, or the attribute of one, of a dotted name.

    Raises:
        ImportError, AttributeError: there is none.
    """
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[number:]:
            found = getattr(found, attribute)
        return found
    raise ImportError(name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_name_in_a_string_is_there(file: Path) -> None:
    """Such as `monkeypatch.setattr` takes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(PACKAGE) and node.value.replace(".", "").isidentifier():
                resolve(node.value)


@pytest.mark.parametrize("name", ["fxsplit_encoder.capture.ladder._NONE", "fxsplit_encoder.no.module"])
def test_a_stale_name_is_found(name: str) -> None:
    with pytest.raises(AttributeError):
        resolve(name)
