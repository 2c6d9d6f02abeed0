"""What tests on a device call by name is there: without one they are skipped, and a name can go stale."""

from __future__ import annotations

import ast
from pathlib import Path
from pkgutil import resolve_name

import pytest

FILES = sorted((Path(__file__).parent / "gpu").glob("*.py"))
PACKAGE = "fxsplit_encoder."


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_name_in_a_string_is_there(file: Path) -> None:
    """Such as `monkeypatch.setattr` takes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(PACKAGE) and node.value.replace(".", "").isidentifier():
                resolve_name(node.value)
