from __future__ import annotations

import pytest

import fxsplit_encoder as fx
from fxsplit_encoder.cli.inspection import class_rows, kernel_rows
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.kernels.attention.chooser import Measurements, parse_attention
from fxsplit_encoder.kernels.choice import Pin, measuring
from fxsplit_encoder.kernels.meter import Measured
from fxsplit_encoder.runtime.captured_program import Choosers

from ..manager.mock_towers import PathsOfTiles
from .attention.fakes import CUDA, FakeKernel, FakeMeter, shape


def test_a_report_says_what_was_measured_and_what_is_chosen_and_why_not() -> None:
    kernels = [
        FakeKernel("base"),
        FakeKernel("fast"),
        FakeKernel("wrong"),
        FakeKernel("gone", unavailable="no"),
    ]
    chooser = KernelChooser(measurements=Measurements(kernels, FakeMeter({"base": 9.0, "fast": 4.0})))
    with measuring():
        for tokens in (4096, 1024):
            chooser.ranking(shape(tokens))
    (condition,) = parse_attention({"tokens>=4096": "auto"})[0].conditions
    chooser.pins = (Pin((condition,), "base"),)
    small, large = (str(shape(tokens)) for tokens in (1024, 4096))
    assert small == "bfloat16 16x72, tokens 1024, longest 1024, segments 1, captured"
    assert [tuple(row.values()) for row in kernel_rows(CUDA, chooser)] == [
        ("base", "works", 1),
        ("fast", "works", 1),
        ("wrong", "works", 0),
        ("gone", "no", 0),
    ]
    first, second = class_rows(CUDA, chooser)
    assert (first["shape"], first["chosen"], first["how"]) == (small, "fast", "measured")
    assert (second["shape"], second["chosen"], second["how"]) == (large, "base", "pinned")
    assert first["microseconds"] == {"base": 9.0, "fast": 4.0}
    assert chooser.measurements.table(CUDA)[shape(1024)].rejected == {"wrong": "error 1; allowed: 0.1"}


def test_what_raises_for_all_calls_of_a_kind_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what raises for one of several, or does not compute them, is not."""
    reasons = {
        "one": "TypeError: epilogue fn\ndepends on " + "x" * 500,
        "other": "TypeError: epilogue fn\ndepends on " + "x" * 500,
        "some": "RuntimeError: no tile",
        "wrong": "error 1; allowed: 0.1",
    }
    table = {
        shape(1024): Measured({"base": 9.0}, reasons, ["one", "other", "some"]),
        shape(2048): Measured({"base": 9.0, "some": 5.0}),
        shape(2048, host_lengths=True): Measured({"base": 9.0, "one": 5.0}),
    }
    kernels = [FakeKernel(name) for name in ("base", *reasons)]
    measurements = Measurements(kernels, FakeMeter({}))
    measurements.add(CUDA, table)
    choosers = Choosers(KernelChooser(measurements=measurements))
    (line,) = choosers.failures(CUDA)
    assert line.startswith("attention: one, other: TypeError: epilogue fn depends on") and len(line) < 200
    states = {row["kernel"]: row["state"] for row in kernel_rows(CUDA, choosers.attention)}
    assert [name for name, state in states.items() if state != "works"] == ["one", "other"]
    monkeypatch.setattr(Choosers, "of", classmethod(lambda cls, config: choosers))
    monkeypatch.setattr(choosers, "check", lambda device: None)
    monkeypatch.setattr(measurements, "table", lambda device: table)
    manager = fx.EncoderCudaGraphManager(PathsOfTiles(), log_interval=0)
    assert line in manager.reports
