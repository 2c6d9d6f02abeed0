from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench import parse
from cases import ab

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """A checkout of its own, as far as the benchmark needs one."""
    package = "fxsplit_encoder"
    shutil.copytree(REPOSITORY / package, tmp_path / "base" / package, ignore=lambda *_: {"__pycache__"})
    return tmp_path / "base"


@pytest.mark.exhaustive
def test_both_checkouts_are_timed_and_compared_with_eager(baseline: Path, tmp_path: Path) -> None:
    output = tmp_path / "ab.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "bench.py"), "ab", "--tiny"]
    options = ["--baseline", str(baseline), "--rounds", "2", "--samples", "2", "--output", str(output)]
    subprocess.run([*command, *options], check=True)
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored["wrong"] == []
    assert {(row["workload"], row["time"]) for row in stored["rows"]} >= {
        (workload, time) for workload in ("1x64", "mixed2", "full graph") for time in ("execute", "host")
    }
    assert all(row[side]["samples"] == 4 for row in stored["rows"] for side in ab.SIDES)
    assert all(0 < error < 1e-3 for errors in stored["errors"].values() for error in errors.values())


def test_a_side_that_imports_another_package_is_refused(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (baseline / "fxsplit_encoder" / "__init__.py").unlink()
    with pytest.raises(SystemExit, match="expected the root of a checkout"):
        ab.Side(baseline, tmp_path, {})
    monkeypatch.setattr(ab.Side, "ask", lambda self, **_: {"package": str(REPOSITORY / "fxsplit_encoder")})
    side = ab.Side.__new__(ab.Side)
    side.root = baseline
    with pytest.raises(SystemExit, match="expected the package of"):
        side.start()


def test_ratios_are_of_medians_and_their_spread_is_that_of_turns() -> None:
    baseline = {"1x224": {"execute": [[2.0, 2.0, 9.0], [4.0, 4.0]], "replay": [[1.0]]}}
    this = {"1x224": {"execute": [[1.0, 1.0, 1.0], [4.0, 4.0]]}}
    (row,) = ab.compare({"baseline": baseline, "this": this})
    assert (row["baseline"]["p50"], row["this"]["p50"], row["ratio"]) == (4.0, 1.0, 0.25)
    assert (row["lowest"], row["highest"]) == (0.5, 1.0)


def test_its_grids_are_those_of_the_other_cases() -> None:
    settings = ab.settings_of(tiny=False, config={})
    patches = {
        name: sum(t * h * w for t, h, w in workload["grids"])
        for name, workload in settings["workloads"].items()
    }
    assert patches == {
        "1x224": 196,
        "1x448": 784,
        "1x896": 3136,
        "1x1344": 7056,
        "mixed8": 12588,
        "20x336": 8000,
        "full graph": 256,
    }


def test_the_config_reaches_every_manager() -> None:
    arguments = parse(["ab", "--baseline", "base", "--config", '{"packing": "greedy"}'])
    managers = ab.settings_of(tiny=False, config=arguments.config)["managers"]
    assert {config["packing"] for config in managers.values()} == {"greedy"}
