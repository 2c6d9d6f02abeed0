"""What must never cross a process's border, looked for in the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fxsplit_encoder.connector

ROOT = Path(fxsplit_encoder.connector.__file__).parent
SOURCES = sorted([*(ROOT / "transport").glob("*.py"), *(ROOT / "processes").glob("*.py")])
FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "copyreg", "joblib"}
CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "eval", "exec", "save", "load", "reductions"}
FAMILIES = {"AF_INET", "AF_INET6", "create_connection", "create_server", "bind_to_random_port"}


@pytest.mark.parametrize("source", SOURCES, ids=[f"{path.parent.name}.{path.stem}" for path in SOURCES])
def test_no_wire_has_pickles_or_leads_to_a_network(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    assert names & (FORBIDDEN | CALLS | FAMILIES) == set()
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not any("tcp://" in text or "pgm://" in text for text in texts)


def test_the_sources_are_looked_at() -> None:
    assert len(SOURCES) > 10
