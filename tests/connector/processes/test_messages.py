"""Errors that cross between processes, and what must never cross."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest
import torch

import fxsplit_encoder.connector
from fxsplit_encoder import errors
from fxsplit_encoder.connector.processes.wire import KNOWN, Failed, from_wire, to_wire


def across(error: BaseException) -> Exception:
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(error)), type=Failed)
    return from_wire(wire, pid=12)


class OwnError(KeyError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        errors.MediaError("not an image"),
        errors.ConfigError("mode: bad", "debug: bad"),
        errors.MissingExtraError("wrap", "hf"),
        errors.ConnectorError("too slow", "timeout", True),
        errors.EncoderLostError("gone"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("x", 3, 2.5, True),
        KeyError("name"),
        FileNotFoundError(2, "No such file"),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_itself(error: Exception) -> None:
    again = across(error)
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert getattr(again, "retryable", None) == getattr(error, "retryable", None)
    assert "In the encoder process 12" in again.__notes__[0]


def test_an_unknown_class_comes_back_as_its_nearest_known_base() -> None:
    again = across(OwnError("name"))
    assert type(again) is KeyError
    assert "OwnError: 'name'" in str(again)


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError("one")]),
        ValueError(object()),
        ValueError(2**200),
        ValueError("x" * 10**6),
    ],
    ids=["decode", "group", "object", "large", "long"],
)
def test_what_is_made_from_more_than_words_keeps_them(error: Exception) -> None:
    again = across(error)
    assert str(error)[:20] in str(again)
    assert len(str(again)) < 10**5


def test_only_known_classes_are_made() -> None:
    for kind in ("system", "SystemExit", "KeyboardInterrupt", "Process", "__import__", ""):
        again = from_wire(Failed(kind, ["rm"], ""), pid=1)
        assert type(again) is RuntimeError
    assert all(issubclass(kind, Exception) for kind in KNOWN.values())


ROOT = Path(fxsplit_encoder.connector.__file__).parent
SOURCES = sorted((ROOT / "processes").glob("*.py"))
assert len(SOURCES) == 4
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
