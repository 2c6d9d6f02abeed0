from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import towers

from .tower_results import case, measured, result

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "towers.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_results_are_merged_and_failures_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    with pytest.raises(ValueError, match="b: other GPU or versions"):
        towers.merge([tmp_path / "a", tmp_path / "b"])


def test_every_tower_keeps_the_commit_that_it_was_measured_at(tmp_path: Path) -> None:
    models = {"old": "clip-l-336", "new": "step3p7", "newest": "dinov2-l-518"}
    for commit, model in models.items():
        stored = {**result(**{model: measured()}), "commit": commit}
        (tmp_path / commit).write_text(json.dumps(stored), encoding="utf-8")
    (tmp_path / "two").write_text(json.dumps(towers.merge([tmp_path / "old", tmp_path / "new"])), "utf-8")
    merged = towers.merge([tmp_path / "two", tmp_path / "newest"])
    assert {name: model["commit"] for name, model in merged["models"].items()} == {
        model: commit for commit, model in models.items()
    }
    assert set(merged["commit"].split(", ")) == set(models)


def test_a_tower_that_fails_leaves_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, device: str, small: bool) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(towers, "Bench", fail)
    stored = towers.run_models(["clip-l-336", "step3p7"], tmp_path / "out.json", small=True)
    assert stored["models"].keys() == {"clip-l-336", "step3p7"}
    assert "RuntimeError: no step3p7" in stored["models"]["step3p7"]["failure"]
    assert stored["models"]["step3p7"]["seconds"].keys() == {"build"}
    assert json.loads((tmp_path / "out.json").read_text()) == stored


def test_the_progress_says_where_seconds_went_and_pieces_came_from() -> None:
    parts = "build 1.0, references 2.0, compile 10.4, capture 2.6, cases 3.0"
    assert towers.progress("clip", measured()) == f"clip: 19 s ({parts}; 3 of 4 pieces cached)"
    failed = {"failure": "Traceback", "seconds": {"build": 0.5}}
    assert towers.progress("clip", failed) == "clip: 0 s (build 0.5)"


def test_every_family_is_measured_with_its_configuration() -> None:
    from fxsplit_encoder.models.registry import ARCHITECTURES

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
    assert list(model["seconds"]) == ["build", "references", "compile", "capture", "cases"]
    assert stored["torch"] and "kimi-vl-a3b" in done.stdout


@pytest.mark.slow
def test_only_compiling_fills_the_cache_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fxsplit_encoder as fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with_inductor = fx.EncoderConfig(mode="none", piece_compiler="inductor")
    monkeypatch.setattr(towers, "chosen_config", lambda name, small: with_inductor)
    arguments = ["towers.py", "--small", "--compile-only", "--models", "clip-l-336"]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(tmp_path / "none.json")])
    for cached in (0, 2):
        assert towers.main() == 0
        line = capsys.readouterr().out
        assert f"{cached} of 2 pieces cached" in line and "references" not in line
    assert not (tmp_path / "none.json").exists()
