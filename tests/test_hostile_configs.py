"""Settings that nobody means: refused by name, before anything of the size that they claim is made."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fxsplit_encoder as fx
from fxsplit_encoder.backend.dispatch import dispatchers
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.manager.path import EncoderPath
from tests.small_tower import FEATURES, SmallAdapter, SmallTower

MEBIBYTE = 1 << 20
MILLION = 10**6


def assert_refused(call: Callable[[], Any], message: str) -> None:
    """An error of the tree that matches, and less than 16 MiB on the way to it."""
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message) as raised:
            call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(raised.value)) < 20_000
    assert peak < 16 * MEBIBYTE


# --- files


def bomb(levels: int, width: int = 10) -> str:
    """Each line names the one before so many times."""
    lines = ["a0: &a0 [1, 2]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


FILES: dict[str, tuple[str | bytes, str]] = {
    "an alias bomb": (bomb(12), "line 2, column 10: not valid YAML: an alias; write the value out"),
    "deep lists": (
        "a: " + "[" * 500,
        "line 1, column 20: not valid YAML: nested too deep; allowed: at most 16",
    ),
    "a file too large": ("# " + "x" * (1 << 17), "larger than settings are; allowed: at most 65536 bytes"),
    "many values": ("token_budgets: [" + "1," * 4_100 + "1]", "token_budgets: allowed: .*at most 4096"),
    "several documents": ("mode: full\n---\nmode: auto", "line 2, column 1: not valid YAML: .*document"),
    "a tab": ("paths:\n\tdefault: {}", "line 2, column 1: not valid YAML"),
    "a tag of Python": ("mode: !!python/object/apply:os.system [ls]", "column 7: not valid YAML: .*python"),
    "a date that is none": ("mode: 2024-13-45", "column 7: not valid YAML: '2024-13-45' is no timestamp"),
    "a zero character": ("mode: a\0b", "not valid YAML"),
    "Latin-1": ("mode: \xfc".encode("latin-1"), "cannot be read: .* at byte 6; allowed: UTF-8"),
    "text": ("auto", "allowed: a mapping of settings at the top level; got 'auto'"),
    "a budget in hexadecimal": ("token_budgets: [0x" + "f" * 900 + "]", "got .*an integer of 3600 bits"),
}


@pytest.mark.parametrize("label", FILES)
def test_a_file_is_refused_by_name(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = FILES[label]
    path = tmp_path / "tower.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    constructed = []
    real = yaml.constructor.BaseConstructor.construct_document

    def counted(self: Any, node: Any) -> Any:
        constructed.append(node)
        return real(self, node)

    monkeypatch.setattr(yaml.constructor.BaseConstructor, "construct_document", counted)
    assert_refused(lambda: fx.EncoderConfig.from_yaml(path), rf"(?s)tower\.yaml: .*({message})")
    if any(words in message for words in ("alias", "too deep", "larger")):
        assert constructed == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.yaml", "absent.yaml: cannot be read: .*No such file"),
        (".", "cannot be read: .*Is a directory"),
        ("a\0b", "cannot be read: .*null"),
        ("x" * 5000, "cannot be read: .*too long"),
        (None, "None: cannot be read"),
        ("/dev/zero", "/dev/zero: larger than settings are"),
    ],
)
def test_what_is_no_file_is_refused_by_name(
    path: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(lambda: fx.EncoderConfig.from_yaml(path), message)


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_refused(
        lambda: fx.EncoderConfig.from_yaml(tmp_path / "pipe"), "pipe: cannot be read: it is a pipe"
    )


def test_empty_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tower.yaml"
    for text in ("", "\n", "---\n", "# nothing\n", "\ufeff"):
        path.write_text(text, encoding="utf-8")
        assert fx.EncoderConfig.from_yaml(path) == fx.EncoderConfig()


# --- values


class Raises:
    """Whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def in_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["paths"] = value
    return value


def shared(levels: int) -> list[Any]:
    """A list that is short only until it is written out."""
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value] * 100
    return value


HUGE = 10**5000
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a huge budget": ({"token_budgets": [HUGE]}, "^token_budgets: an integer of 16610 bits is more than"),
    "a budget beyond 32 bits": ({"token_budgets": [2**31]}, "^token_budgets: 2147483648 is more than"),
    "frames not a number": ({"max_frames_per_batch": float("nan")}, "^max_frames_per_batch: .*nan"),
    "huge text of bytes": ({"max_graph_bytes": "9" * 400 + "TiB"}, "^max_graph_bytes: not a size"),
    "a tensor of budgets": (
        {"token_budgets": torch.zeros(1, 1).expand(10**9, 9)},
        "^token_budgets: .*Tensor of",
    ),
    "a million budgets": (
        {"token_budgets": list(range(1, MILLION))},
        "^token_budgets: allowed: an integer, or a list of at most 4096",
    ),
    "endless budgets": ({"token_budgets": count(1)}, r"^token_budgets: allowed.*count\(1\)"),
    "a million options": ({f"a{n}": n for n in range(20_000)}, "and 19980 settings more"),
    "paths in themselves": ({"paths": in_itself()}, r"^paths\.paths\.paths: unknown option"),
    "lists that share lists": ({"token_budgets": shared(6)}, r"^token_budgets\.0: allowed: a valid integer"),
    "a long mode": ({"mode": "x" * MILLION}, "^mode: not one of the allowed"),
    "a long name": ({"x" * MILLION: 1}, "'xxx.*unknown option"),
    "an object": ({"mode": Raises()}, "^mode: .*an object of Raises"),
    "lone surrogates": ({"paths": {"a": {"mode": "\ud800"}}}, r"^paths\.a\.mode: "),
}


@pytest.mark.parametrize("label", VALUES)
def test_values_are_refused_by_name(label: str) -> None:
    values, message = VALUES[label]
    assert_refused(lambda: fx.EncoderConfig(**values), message)
    assert_refused(lambda: fx.EncoderConfig.from_options({"config": values}), message)
    if all(name in fx.EncoderConfig.model_fields for name in values):
        assert_refused(lambda: fx.EncoderConfig().replace(**values), message)


# --- budgets that no memory holds


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets of which inputs are made."""
    budgets: list[int] = []
    real = EncoderPath.capture_values

    def recorded(self: EncoderPath, budget: int) -> Any:
        budgets.append(budget)
        assert budget < 10**5
        return real(self, budget)

    monkeypatch.setattr(EncoderPath, "capture_values", recorded)
    return budgets


@pytest.mark.parametrize("budgets", [(64, 10**8), (2**31 - 1,)])
@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_the_manager_refuses_such_a_budget(
    budgets: Any, mode: Any, made: list[int], tiny_towers: Any
) -> None:
    for settings, field in (
        ({"token_budgets": budgets}, "^token_budgets"),
        ({"paths": {"default": {"token_budgets": budgets}}}, r"^paths\.default\.token_budgets"),
    ):
        config = fx.EncoderConfig(mode=mode, **settings)
        message = rf"{field}: {budgets[-1]} output tokens take [\d,.]+ GiB .*allowed: budgets of at most \d+"
        assert_refused(lambda config=config: fx.EncoderCudaGraphManager(tiny_towers.wrapped, config), message)
    assert made == [16, 32] * 2


def test_what_the_message_allows_is_taken(tiny_towers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit_encoder.manager.generation.memory_of", lambda device: 10 * MEBIBYTE)
    with pytest.raises(ConfigError) as raised:
        fx.EncoderCudaGraphManager(tiny_towers.wrapped, fx.EncoderConfig(token_budgets=(10**4,)))
    fitting = int(str(raised.value).split("at most ")[1].split(",")[0])
    assert 300 < fitting < 10 * MEBIBYTE // (4 * 1536 * 4)
    assert fx.EncoderCudaGraphManager(tiny_towers.wrapped, fx.EncoderConfig(token_budgets=(fitting,)))
    with pytest.raises(ConfigError):
        fx.EncoderCudaGraphManager(tiny_towers.wrapped, fx.EncoderConfig(token_budgets=(fitting + 2,)))


def test_ordinary_budgets_are_not_tried_out(made: list[int], tiny_towers: Any) -> None:
    fx.EncoderCudaGraphManager(tiny_towers.wrapped)
    assert made == []


def test_the_backend_drops_such_a_budget_with_its_reason(fresh_dynamo: None) -> None:
    options = {"token_budgets": [16, 10**8], "piece_compiler": "eager"}
    tower = SmallTower()
    compiled = torch.compile(SmallAdapter(tower), backend="encoder_cg", options=options)
    known = set(dispatchers())
    with torch.no_grad():
        for side in (4, 16):
            arguments = torch.randn(side**2, FEATURES), torch.tensor([[1, side, side]])
            torch.testing.assert_close(compiled(*arguments), tower(*arguments), rtol=0, atol=1e-4)
        assert fx.warmup(compiled) == 1
    (dispatcher,) = set(dispatchers()) - known
    assert dispatcher.hits == 1
    assert dispatcher.misses == {fx.MissReason.NOT_CAPTURED: 1}
    (ladder,) = [program.ladder for program in dispatcher.programs.values()]
    assert list(ladder.captured) == [16]
    assert list(ladder.dropped) == [10**8]
    assert "token_budgets: 100000000 output tokens take" in ladder.dropped[10**8]
