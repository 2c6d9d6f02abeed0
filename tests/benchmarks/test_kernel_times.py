from __future__ import annotations

import json
from pathlib import Path

import kernel_times
import pytest
import torch


def test_every_kernel_is_counted_for_one_call() -> None:
    x, y = torch.randn(64, 64), torch.randn(8)

    def call() -> None:
        (x @ x).add_(1)
        (x @ x)
        y.mul(2)

    rows = kernel_times.kernel_times(call, torch.device("cpu"), calls=5)
    assert {row["kernel"]: row["calls"] for row in rows}.items() >= {
        "aten::mm": 2.0,
        "aten::add_": 1.0,
        "aten::mul": 1.0,
    }.items()
    assert [row["us"] for row in rows] == sorted((row["us"] for row in rows), reverse=True)
    assert all(row["us"] > 0 for row in rows if row["kernel"] == "aten::mm")


def test_a_profile_without_kernels_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw no kernel"):
        kernel_times.kernel_times(lambda: None, torch.device("cpu"))


@pytest.mark.slow
def test_a_small_run_profiles_replays_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "small.json"
    monkeypatch.setattr("sys.argv", ["kernel_times.py", "--small", "--output", str(output)])
    kernel_times.main()
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert [row["patches"] for row in stored["rows"]] == [16, 64]
    for row in stored["rows"]:
        calls = {kernel["kernel"]: kernel["calls"] for kernel in row["kernels"]}
        assert calls["fxsplit::varlen_attention"] == 2, "one a block"
        assert row["replay us"] > 0
    assert "attention" in capsys.readouterr().out
