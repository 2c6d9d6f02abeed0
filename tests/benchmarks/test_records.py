from __future__ import annotations

import copy
from pathlib import Path

import pytest
from records import FLOOR, Key, Records, merge

TOWER = "qwen3-vl-8b"


def test_a_file_holds_everything(records: Records, tmp_path: Path) -> None:
    path = tmp_path / "new" / "encoder.json"
    records.save(path)
    assert Records.load(path) == records
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_ratios(records: Records) -> None:
    assert records.milliseconds(TOWER, FLOOR, "1x224") == pytest.approx(0.3)
    assert records.ratio(TOWER, "1x224", "ours-auto", FLOOR) == pytest.approx(5)
    assert records.ratio(TOWER, "1x224", "eager", "ours-auto") == pytest.approx(10)
    assert records.ratio(TOWER, "1x448", "graph-exact", "ours-auto") is None
    assert records.milliseconds("unknown", FLOOR, "1x224") is None


def test_slower_workloads_and_failures_are_named(records: Records) -> None:
    (sentence,) = records.slower("ours-auto", "eager")
    assert "1x448" in sentence
    assert "1.25 times" in sentence
    records.fail(TOWER, "compile", "stopped")
    records.skip(TOWER, "eager-flash", "not installed")
    assert records.failures == [f"{TOWER} compile: stopped", f"{TOWER} graph-exact 1x448: lost"]
    assert records.contenders(TOWER) == ["eager", "graph-exact", "ours-auto"]


def test_parts_are_joined(records: Records) -> None:
    other = Records(records.environment, records.settings)
    other.add(TOWER, "floor", {"event": "workload", "workload": "1x896", "patches": [3136], "flops": [1]})
    other.add(TOWER, "graph-exact", {"event": "row", "workload": "1x448", "p50": 4.0})
    other.add("internvl3-8b", "eager", {"event": "row", "workload": "tiles1", "p50": 9.0})
    before = copy.deepcopy(records)
    merged = merge([records, other])
    assert records == before
    assert merged.workloads(TOWER) == ["1x224", "1x448", "1x896"]
    assert merged.rows[Key(TOWER, "graph-exact", "1x448")] == {"p50": 4.0}  # the later one
    assert not merged.failures
    assert merged.contenders("internvl3-8b") == ["eager"]
    assert merged.towers[TOWER]["gemm_flops_per_second"] == 8e14


def test_towers_keep_their_commits_and_have_one_each(records: Records) -> None:
    records.environment["commit"] = "abc"
    later = Records({**records.environment, "commit": "def"}, records.settings)
    later.add("internvl3-8b", "eager", {"event": "row", "workload": "tiles1", "p50": 9.0})
    merged = merge([merge([records]), later])
    assert {name: tower["commit"] for name, tower in merged.towers.items()} == {
        TOWER: "abc",
        "internvl3-8b": "def",
    }
    assert merged.environment["commit"] == "abc, def"
    assert records.environment["commit"] == "abc"
    later.add(TOWER, "eager", {"event": "row", "workload": "1x224", "p50": 9.0})
    with pytest.raises(ValueError, match=f"{TOWER} was measured at abc and def"):
        merge([records, later])


def test_workloads_are_sorted(records: Records) -> None:
    before = records.workloads(TOWER)
    records.sort_workloads(TOWER, ["1x448", "absent"])
    assert records.workloads(TOWER) == ["1x448", *(name for name in before if name != "1x448")]


@pytest.mark.parametrize("name", ["environment", "settings"])
def test_other_machines_and_settings_are_not_joined(name: str, records: Records) -> None:
    other = copy.deepcopy(records)
    getattr(other, name).update({"driver": "590", "new": 1})
    with pytest.raises(ValueError, match="driver, new"):
        merge([records, other])
