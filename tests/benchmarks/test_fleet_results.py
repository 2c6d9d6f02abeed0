"""What docs/scaling.md shows is what the simulation says of the measured parts, and close to real runs."""

from __future__ import annotations

import pytest

pytest.importorskip("simpy", reason="a development tool")

from fleet_simulated import SCENARIOS, offline_row
from storage import RESULTS, load

ROWS = load(RESULTS / "fleet.json")["rows"]


def test_the_stored_fleets_are_simulated_from_the_stored_parts() -> None:
    (driver,) = (row for row in ROWS if row["part"] == "driver")
    stored = [row for row in ROWS if row["part"] == "offline"]
    assert len(stored) == len(SCENARIOS)
    for scenario, row in zip(SCENARIOS, stored, strict=True):
        if scenario.gpus > 64:
            continue  # which takes long
        parts = next(each for each in ROWS if each["part"] == "prepare" and each["tower"] == row["tower"])
        again = offline_row(parts, driver["ms a shard"] / 1e3, scenario)
        assert again["limit"] == row["limit"]
        assert again["images/s"] == pytest.approx(row["images/s"], rel=1e-3)


def test_the_simulation_is_close_to_real_runs_with_two_actors() -> None:
    checked = [row for row in ROWS if row["part"] == "check"]
    assert {row["limit"] for row in checked} == {"preparing", "encoding"}
    for row in checked:
        assert row["simulated s"] == pytest.approx(row["measured s"], rel=0.1)
        assert row["simulated share"] == pytest.approx(row["measured share"], rel=0.1)


def test_the_parts_are_those_of_the_stored_times_of_a_gpu() -> None:
    """The milliseconds of a GPU are found again in what the GPU's own benchmarks stored."""
    for row in (row for row in ROWS if row["part"] == "prepare"):
        file = "encoder.json" if row["tower"].startswith("qwen") else "towers.json"
        known = [
            each.get("p50") or each.get("ours")
            for each in load(RESULTS / file)["rows"]
            if each["tower"] == row["tower"] and each.get("variant", "ours-auto") == "ours-auto"
        ]
        assert all(ms in known for _, ms in row["points"]), row["tower"]
        assert row["encode ms"] == pytest.approx(min(ms / images for images, ms in row["points"]), rel=1e-4)
        assert row["CPUs a GPU"] == pytest.approx(
            (row["prepare ms"] + row["write mean ms"]) / row["encode ms"], rel=1e-3
        )
