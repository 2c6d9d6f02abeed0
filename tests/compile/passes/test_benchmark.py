import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    output = tmp_path / "passes.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "passes.py"), "--small"]
    command += ["--only", "default", "no passes", "fp8"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, timeout=500, env=environment
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(output.read_text())
    rows = {row["candidate"]: row for row in results["replays"]}
    assert set(rows) == {"default", "no passes", "fp8"}
    assert all("failed" not in row and row["16"] > 0 and 0 < row["error"] < 0.1 for row in rows.values())
    assert rows["default"]["changed"]["pad_mlp_width"] == 2
    measured = [row for row in results["products"] if "failed" not in row]
    assert {"default", "padded", "gelu epilogue", "fp8"} <= {row["way"] for row in measured}
    assert all(row["us"] > 0 for row in measured)
