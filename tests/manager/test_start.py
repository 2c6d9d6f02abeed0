"""A start from a file: used as a whole where everything is the same, else refused by name and ignored."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture.ladder import KnownBudget, MeasuredCosts
from fxsplit_encoder.compile import saved
from fxsplit_encoder.manager import path as path_module
from fxsplit_encoder.manager.start import expect_costs, keep_costs, read_parts, tower_key, write_parts
from fxsplit_encoder.runtime.measure import KnownCosts, MeasuredForward

from .managers import generation_of
from .mock_towers import PackedModel, SplitModel, batch
from .start_process import CONFIG

EAGER = CONFIG.replace(piece_compiler="auto", compile=False)


def captured(tower: Any = None, config: fx.EncoderConfig = EAGER) -> fx.EncoderCudaGraphManager:
    manager = fx.EncoderCudaGraphManager(SplitModel() if tower is None else tower, config)
    manager.capture()
    return manager


@functools.cache
def saved_bytes() -> bytes:
    """What a captured manager saves; files are made of it, which tests change."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.start"
        assert captured().save_start(path) == path.stat().st_size
        return path.read_bytes()


@functools.cache
def expected_items() -> list[torch.Tensor]:
    """Of `batch(3, 5)`, from a manager that never saw a file."""
    return captured().execute(batch(3, 5))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    path = tmp_path / "a.start"
    path.write_bytes(saved_bytes())
    return path


def refusal(manager: fx.EncoderCudaGraphManager, path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What is said of a file that is not used, once; and the manager works all the same."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
        assert manager.load_start(path) is False
        manager.capture()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert manager.reports[0] == warning
    torch.testing.assert_close(manager.execute(batch(3, 5)), expected_items())
    assert all(each.expected is None for each in manager.paths_by_key.values())
    return warning.removeprefix(f"the start in {path} is not used: ")


@pytest.mark.slow
def test_another_process_traces_and_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    manager = captured(config=CONFIG)
    path = tmp_path / "a.start"
    manager.save_start(path)
    expected = manager.execute(batch(3, 5))
    program = manager.programs["default"].program
    saved = [str(tmp_path / f"{number}.start") for number in (1, 2)]  # the second from what the first saved
    command = [sys.executable, "-m", "tests.manager.start_process", str(path), *saved]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == 2
    for found in told:
        assert found["used"] and found["traces"] == 0 and not found["can_compile"]
        assert (found["hits"], found["misses"]) == (program.num_distinct, 0)
        torch.testing.assert_close([torch.tensor(each) for each in found["outputs"]], expected)


def test_a_file_for_the_same_is_used_whole(start: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = fx.EncoderCudaGraphManager(SplitModel(), EAGER)
    assert manager.load_start(start) is True
    manager.capture()
    assert manager.reports == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    path = manager.paths["default"]
    assert path.expected is not None and path.forward.options.is_known
    with pytest.raises(fx.InputError, match="load_start: everything is captured already"):
        manager.load_start(start)


def test_a_start_is_saved_after_a_capture() -> None:
    with pytest.raises(fx.InputError, match="save_start: nothing was compiled"):
        fx.EncoderCudaGraphManager(SplitModel(), EAGER).save_start("a.start")


def test_the_setting_names_a_file(start: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EAGER.replace(start_file=start)
    assert captured(config=config).paths["default"].expected is not None
    missing = captured(config=EAGER.replace(start_file=start.with_name("none")))
    assert "file: expected a saved start; got FileNotFoundError" in missing.reports[0]
    missing.clear()
    missing.capture()
    assert sum("is not used" in record.getMessage() for record in caplog.records) == 1


def change_environment(**values: Any) -> Callable[[dict[str, bytes]], None]:
    def change(parts: dict[str, bytes]) -> None:
        environment = json.loads(parts["environment.json"])
        parts["environment.json"] = json.dumps({**environment, **values}).encode()

    return change


def without(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda parts: parts.__delitem__(name)


def with_part(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda parts: parts.__setitem__(name, content)


def without_paths(parts: dict[str, bytes]) -> None:
    parts["tower.json"] = json.dumps({**json.loads(parts["tower.json"]), "paths": {}}).encode()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_environment(torch="2.11.0"), f'torch: expected "{torch.__version__}"; got "2.11.0"'),
        (change_environment(fxsplit_encoder="9"), f'fxsplit_encoder: expected "{fx.__version__}"; got "9"'),
        (without("tower.json"), "tower.json: expected in every saved start; got none"),
        (without_paths, "path default: expected what was measured of it; got nothing"),
        (with_part("tower.json", b"[]"), "tower.json: expected what a start holds there; got "),
        (with_part("environment.json", b"[1]"), "environment.json: expected what a start holds there; got "),
        (
            with_part("measured/attention.json", b"[{}]"),
            "measured/attention.json: expected what a start holds there; got KeyError",
        ),
        (with_part("torch.bin", b"torn"), "torch.bin: expected graphs that torch compiled; got 4 bytes"),
        (with_part("kernels/../../x", b""), "kernels: expected compiled kernels; got ../../x"),
    ],
)
def test_a_file_for_something_else_is_refused_by_name_and_ignored(
    change: Callable[[dict[str, bytes]], None],
    expected: str,
    start: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = read_parts(start)
    change(parts)
    write_parts(start, parts)
    manager = fx.EncoderCudaGraphManager(SplitModel(), EAGER)
    # torch itself warns of bytes that it cannot read
    caplog.set_level(logging.CRITICAL, "torch")
    assert refusal(manager, start, caplog).startswith(expected)


def test_another_tower_setting_or_ladder_is_refused_by_name(
    start: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_tower = fx.EncoderCudaGraphManager(PackedModel(), EAGER.replace(compile=True))
    assert not other_tower.load_start(start)
    said = other_tower.reports[0]
    assert (
        'tower: expected "tests.manager.mock_towers.PackedModel"; got "tests.manager.mock_towers.Split'
        in said
    )
    assert "settings.compile: expected true; got false" in said
    other_ladder = fx.EncoderCudaGraphManager(SplitModel(), EAGER.replace(token_budgets=(4, 8)))
    said = refusal(other_ladder, start, caplog)
    assert "paths.path default: expected [4, 8]; got [4, 16]" in said
    wider = SplitModel()
    wider.extra = torch.nn.Linear(2, 2)
    said = refusal(fx.EncoderCudaGraphManager(wider, EAGER), start, caplog)
    assert said.startswith('tower.modules: expected "')


def test_what_matters_not_is_no_part_of_the_key(tmp_path: Path) -> None:
    one = fx.EncoderCudaGraphManager(SplitModel(), EAGER)
    served = EAGER.replace(capture_recurring=False, weight_check_seconds=1.0)
    other = fx.EncoderCudaGraphManager(SplitModel(), served.replace(debug=True, start_file=tmp_path))
    assert tower_key(generation_of(one)) == tower_key(generation_of(other))


@pytest.mark.parametrize("fits", [True, False])
def test_a_program_that_gives_other_results_is_traced(
    fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG.replace(piece_compiler="eager")
    first = fx.EncoderCudaGraphManager(SplitModel(), config)
    first.compile()
    program = first.programs["default"]
    pieces = {str(step.distinct): step.call for step in program.program.pieces}
    monkeypatch.setattr(saved, "_piece_keys", lambda program: [(key, "") for key in pieces])
    monkeypatch.setattr(
        saved,
        "_load_piece",
        lambda key, guards: lambda *args: [x if fits else 2 * x for x in pieces[key](*args)],
    )
    second = fx.EncoderCudaGraphManager(SplitModel(), config)
    second.paths["default"].forward.saved = first.paths["default"].forward.to_save()
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    second.capture()
    assert (counts["unique_graphs"] == before) == fits
    said = "the saved start's program is not used, it is traced: program: expected what the forward returns"
    assert (said in caplog.text) != fits
    inputs = batch(3, 5)
    torch.testing.assert_close(second.execute(inputs), first.execute(inputs))


def test_costs_that_are_known_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(path_module, "measure_forward", fail)
    manager = fx.EncoderCudaGraphManager(SplitModel(), EAGER)
    path = manager.paths["default"]
    monkeypatch.setattr(manager.pool, "is_cuda", True)
    with pytest.raises(AssertionError, match="measured"):
        path.measure()
    forward = MeasuredForward(((4, 1.0), (16, 2.0)), 0.5)
    path.expect(KnownCosts(forward, {4: KnownBudget(MeasuredCosts({"full": 1.0}, 2.0), "full")}, 3.0))
    path.measure()
    assert path.measured is forward
    assert path.ladder.capture_ms == 3.0


def test_costs_stay_on_the_machine_for_the_same_tower_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = (EAGER, EAGER, EAGER.replace(token_budgets=(4, 8)), EAGER)
    first, second, for_others, third = (
        generation_of(fx.EncoderCudaGraphManager(SplitModel(), config)) for config in configs
    )
    forward = MeasuredForward(((4, 1.0), (16, 2.0)), 0.5)
    known = KnownCosts(forward, {4: KnownBudget(MeasuredCosts({"full": 1.0}, 2.0), "full")}, 3.0)
    monkeypatch.setattr(first.paths["default"], "known", lambda: known)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not expect_costs(second, ())
    keep_costs(first, ())
    assert expect_costs(second, ()) and not expect_costs(for_others, ())
    assert second.paths["default"].expected == known
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(file.read_bytes()[:-1])
    assert not expect_costs(third, ())
    assert third.paths["default"].expected is None
