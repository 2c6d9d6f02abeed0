"""A start from a file: used as a whole where everything is the same, else refused by name and ignored."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.capture.ladder import MeasuredCosts
from fxsplit_encoder.compile import saved
from fxsplit_encoder.errors import InputError, StartFileError
from fxsplit_encoder.kernels import store
from fxsplit_encoder.kernels.attention.chooser import MEASUREMENTS
from fxsplit_encoder.manager import path as path_module
from fxsplit_encoder.manager.start import (
    KnownTower,
    environment_key,
    expect_costs,
    keep_costs,
    read_parts,
    tower_from_json,
    tower_key,
    write_parts,
)
from fxsplit_encoder.manager.tower import named_tensors
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
    assert path.expected is not None and path.options.is_known
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


@pytest.mark.parametrize(
    ("part", "content", "expected"),
    [
        ("environment.json", {"torch": "2.11.0"}, f'torch: expected "{torch.__version__}"; got "2.11.0"'),
        (
            "environment.json",
            {"fxsplit_encoder": "9"},
            f'fxsplit_encoder: expected "{fx.__version__}"; got "9"',
        ),
        ("tower.json", None, "tower.json: expected in every saved start; got none"),
        ("tower.json", {"paths": {}}, "path default: expected what was measured of it; got nothing"),
        ("tower.json", b"[]", "tower.json: expected what a start holds there; got "),
        ("environment.json", b"[1]", "environment.json: expected what a start holds there; got "),
        (
            "measured/attention.json",
            b"[{}]",
            "measured/attention.json: expected what a start holds there; got KeyEr",
        ),
        ("torch.bin", b"torn", "torch.bin: expected graphs that torch compiled; got 4 bytes"),
        ("kernels/../../x", b"", "kernels: expected compiled kernels; got ../../x"),
    ],
)
def test_a_file_for_something_else_is_refused_by_name_and_ignored(
    part: str, content: Any, expected: str, start: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = read_parts(start)
    if content is None:
        del parts[part]
    elif isinstance(content, bytes):
        parts[part] = content
    else:
        parts[part] = json.dumps({**json.loads(parts[part]), **content}).encode()
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
    monkeypatch.setattr(saved, "_key_of", lambda step: (str(step.distinct), ""))
    monkeypatch.setattr(
        saved,
        "_load_piece",
        lambda key, guards: lambda *args: [x if fits else 2 * x for x in pieces[key](*args)],
    )
    second = fx.EncoderCudaGraphManager(SplitModel(), config)
    tensors = named_tensors(first.tower)
    second.paths["default"].saved = saved.save_program(first.paths["default"].program, tensors)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    second.capture()
    assert (counts["unique_graphs"] == before) == fits
    said = "the saved start's program is not used, it is traced: program: expected what the forward returns"
    assert (said in caplog.text) != fits
    inputs = batch(3, 5)
    torch.testing.assert_close(second.execute(inputs), first.execute(inputs))


def test_costs_that_are_known_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_module, "measure_forward", mock.Mock(side_effect=AssertionError("measured")))
    manager = fx.EncoderCudaGraphManager(SplitModel(), EAGER)
    path = manager.paths["default"]
    monkeypatch.setattr(manager.pool, "is_cuda", True)
    with pytest.raises(AssertionError, match="measured"):
        path.measure()
    path.expect(KNOWN_COSTS)
    path.measure()
    assert path.measured is KNOWN_COSTS.forward
    assert path.ladder.capture_ms == KNOWN_COSTS.capture_ms


def test_costs_stay_on_the_machine_for_the_same_tower_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = (EAGER, EAGER, EAGER.replace(token_budgets=(4, 8)), EAGER)
    first, second, for_others, third = (
        generation_of(fx.EncoderCudaGraphManager(SplitModel(), config)) for config in configs
    )
    monkeypatch.setattr(first.paths_by_key["default", ()], "known", lambda: KNOWN_COSTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not expect_costs(second, ())
    keep_costs(first, ())
    assert expect_costs(second, ()) and not expect_costs(for_others, ())
    assert second.paths_by_key["default", ()].expected == KNOWN_COSTS
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(file.read_bytes()[:-1])
    assert not expect_costs(third, ())
    assert third.paths_by_key["default", ()].expected is None


# --- what a saved start is made of: named parts, measurements as JSON, and the environment's key


PARTS = {"tower.json": b"[]", "kernels/triton/a/b.cubin": bytes(range(256)) * 40}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "a.start"
    assert write_parts(path, PARTS) == path.stat().st_size
    return path


@settings(max_examples=80)
@given(data=st.data(), is_cut=st.booleans())
def test_a_changed_byte_anywhere_or_a_missing_end_is_noticed(
    data: st.DataObject, is_cut: bool, written: Path
) -> None:
    content = bytearray(written.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if is_cut:
        del content[position:]
    else:
        content[position] ^= data.draw(st.integers(1, 255))
    damaged = written.with_suffix(".damaged")
    damaged.write_bytes(content)
    with pytest.raises(StartFileError, match=r"^file: expected one that save_start wrote, undamaged; got "):
        read_parts(damaged)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o777])
def test_a_file_that_others_can_write_or_replace_is_not_read(written: Path, mode: int) -> None:
    where = written.parent if mode == 0o777 else written
    where.chmod(mode)
    with pytest.raises(StartFileError, match="others can write there"):
        read_parts(written)
    where.chmod(0o600 if where is written else 0o1777)  # they can put files there, but not replace this one
    assert read_parts(written) == PARTS and list(read_parts(written)) == list(PARTS)


@settings(max_examples=60)
@given(data=st.data())
def test_a_forged_file_is_a_named_error_or_what_it_says(data: st.DataObject, written: Path) -> None:
    body = bytearray(written.read_bytes().partition(b"\n")[2])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(99, len(body) - 1)))
        body[position] ^= data.draw(st.integers(1, 255))
    forged = written.with_suffix(".forged")
    forged.write_bytes(store.sealed(bytes(body[: data.draw(st.integers(0, len(body)))])))
    with contextlib.suppress(StartFileError):
        assert all(isinstance(part, bytes) for part in read_parts(forged).values())


_ONE = zlib.compress(b"-")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]\n", id="no names"),
        pytest.param(b'{"a": null}\n' + _ONE, id="no number"),
        pytest.param(b'{"a": 0.5, "b": 0.5}\n' + _ONE, id="no whole number"),
        pytest.param(b'{"a": -1, "b": 2}\n' + _ONE, id="less than nothing"),
        pytest.param(b'{"a": 2}\n' + _ONE, id="too little"),
        pytest.param(b'{"a": 1}\n' + zlib.compress(bytes(10**8)), id="far more than it says"),
        pytest.param(b'{"a": 9999999999}\n' + _ONE, id="too large"),
        pytest.param(b"[" * 10**5, id="too deep"),
    ],
)
def test_an_index_of_something_else_is_a_named_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.start"
    path.write_bytes(store.sealed(content))
    with pytest.raises(StartFileError, match=r"^file: expected named parts; got "):
        read_parts(path)


def test_a_failed_write_leaves_the_old_file_and_no_other(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="cannot be written: the disk is full"):
        write_parts(written, {"other": b""})
    assert read_parts(written) == PARTS
    assert os.listdir(written.parent) == [written.name]
    with pytest.raises(InputError, match="cannot be written"):
        write_parts(written / "below" / "x.start", PARTS)


KNOWN_COSTS = KnownCosts(
    MeasuredForward(((4, 1.5), (16, math.inf)), 0.5, 3.0, 0.5, 0.25, 99, 2.0),
    {
        4: MeasuredCosts({"full": math.inf}, 2.0, 0.5, 0.1, 0.7, "full"),
        16: MeasuredCosts({}, math.inf, math.inf, 0.0),
    },
    7.0,
)
KNOWN = KnownTower(
    {"tower": "T", "items": 4, "settings.mode": None},
    {"path default": KNOWN_COSTS, "path nothing": KnownCosts(MeasuredForward(), {}, 1.0)},
)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"{",
        lambda content: b"{}",
        lambda content: content.replace(b"capture_ms", b"capture_us"),
        lambda content: content.replace(b'"rows_per_token": 3.0', b'"rows_per_token": "many"'),
    ],
)
def test_what_was_measured_of_a_tower_comes_back_and_anything_else_is_refused(change: object) -> None:
    content = json.dumps(asdict(KNOWN)).encode()
    assert tower_from_json(content) == KNOWN
    with pytest.raises(ValueError):
        tower_from_json(change(content))  # type: ignore[operator]


def test_the_environment_names_what_compiles_and_measures() -> None:
    key = environment_key(torch.device("cpu"))
    assert json.loads(json.dumps(key)) == key == environment_key(torch.device("cpu"))
    assert key["torch"] == torch.__version__
    assert key["gpu"] is None and key["cpu"]
    assert set("fxsplit_encoder fxsplit_encoder.code triton cuda python transformers".split()) <= key.keys()


def test_of_a_gpu_its_name_capability_and_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        store, "package_version", lambda package: "4.0" if package == "flash-attn-4" else None
    )
    key = environment_key(torch.device("cuda", 0), [MEASUREMENTS])
    assert (key["gpu"], key["gpu.capability"]) == ("NVIDIA H200", "9.0")
    assert key["measured_with.packages.flash-attn-4"] == "4.0"
    assert "torch_flash" in key["attention.kernels"]
