from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "towers.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def tower_table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("tower_table")


@pytest.fixture
def towers(tower_table: Any) -> Any:
    return importlib.import_module("towers")


def case(name: str, eager: float, ours: float) -> dict[str, Any]:
    errors = {"rms error": 1.01, "max error": 1.2}
    sizes = [1] if name != "batch of 8" else [1, 2]
    times = {"eager ms": eager, "ours ms": ours, "eager / ours": eager / ours}
    return {"case": name, "sizes": sizes, **times, "slower than eager": ours > 1.05 * eager, **errors}


def result(**models: Any) -> dict[str, Any]:
    environment = {"gpu": "H200", "driver": "1", "torch": "2", "transformers": "5", "commit": "abc"}
    return {**environment, "models": models}


def measured(*cases: dict[str, Any]) -> dict[str, Any]:
    return {"compile s": 10.4, "capture s": 2.6, "capture bytes": 2**30, "cases": list(cases)}


def test_the_table_replaces_what_stands_between_the_markers(tower_table: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tower_table.BEGIN}\nold\n{tower_table.END}\nafter\n", encoding="utf-8")
    stored = result(clip=measured(case("small", 4, 2), case("batch of 8", 9, 10)))
    for _ in range(2):
        tower_table.update(page, stored)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{tower_table.BEGIN}\n|")
    assert text.endswith(f"{tower_table.END}\nafter\n")
    assert "old" not in text and "failed" not in text
    row = next(line for line in text.splitlines() if line.startswith("| clip"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    expected = ["1: 4.00 / 2.00 = 2.00", "-", "-", "9.00 / 10.00 = 0.90", "1.01", "10", "3", "1.0"]
    assert cells == ["clip", *expected]
    assert "Slower than eager by more than 5 %: clip (batch of 8)." in text


def test_a_page_without_markers_is_refused(tower_table: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(tower_table.BEGIN, encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md: expected"):
        tower_table.update(page, result())


def test_the_documentation_has_the_markers(tower_table: Any) -> None:
    text = (ROOT / "docs" / "towers.md").read_text(encoding="utf-8")
    assert 0 < text.index(tower_table.BEGIN) < text.index(tower_table.END)


def test_results_are_merged_and_failures_kept(
    towers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = result(step3p7={"failure": "Traceback\nRuntimeError: out of it"})
    second = result(**{"clip-l-336": measured(case("small", 4, 2))})
    for name, stored in {"a": first, "b": second}.items():
        (tmp_path / name).write_text(json.dumps(stored), encoding="utf-8")
    merged = towers.merge([tmp_path / "a", tmp_path / "b"])
    assert list(merged["models"]) == ["clip-l-336", "step3p7"]
    assert towers.report(merged) == 1
    assert "RuntimeError: out of it" in capsys.readouterr().out
    assert towers.report(second) == 0
    (tmp_path / "b").write_text(json.dumps({**second, "torch": "3"}), encoding="utf-8")
    with pytest.raises(ValueError, match="b: other GPU, versions or commit"):
        towers.merge([tmp_path / "a", tmp_path / "b"])


def test_a_tower_that_fails_leaves_its_traceback(
    towers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, device: str, small: bool) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(towers, "Bench", fail)
    stored = towers.run_models(["clip-l-336", "step3p7"], tmp_path / "out.json", small=True)
    assert stored["models"].keys() == {"clip-l-336", "step3p7"}
    assert "RuntimeError: no step3p7" in stored["models"]["step3p7"]["failure"]
    assert json.loads((tmp_path / "out.json").read_text()) == stored


def test_every_family_is_measured_with_its_configuration(towers: Any) -> None:
    from fxsplit_encoder.cli.architectures import ARCHITECTURES

    measured_types = {ARCHITECTURES[name].model_type for name in towers.MODELS}
    assert {known.model_type for known in ARCHITECTURES.values()} - measured_types == {"glm46v"}
    for name, file in towers.MODELS.items():
        assert file is None or towers.chosen_config(name, small=False).model_fields_set


@pytest.mark.slow
def test_a_small_run_measures_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "small.json"
    done = run("--small", "--models", "kimi-vl-a3b", "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads(output.read_text(encoding="utf-8"))
    model = stored["models"]["kimi-vl-a3b"]
    assert model["programs"]["default"]["padding"] == "proved"
    assert [measured["sizes"] for measured in model["cases"]] == [[16], [16, 64]]
    assert all(0.5 < measured["rms error"] <= 1.1 for measured in model["cases"])
    assert stored["torch"] and "kimi-vl-a3b" in done.stdout
