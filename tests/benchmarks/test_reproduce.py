"""`benchmarks/reproduce.sh`, with programs in place of Python and nvidia-smi that say what they are asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[list[str], dict[str, str]]]

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "reproduce.sh"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in (
        ("nvidia-smi", "printf '0\\n1\\n2\\n'"),
        ("python3", 'echo "$CUDA_VISIBLE_DEVICES: $*"'),
    ):
        program = programs / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)

    def call(*arguments: str) -> tuple[list[str], dict[str, str]]:
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        subprocess.run(["bash", SCRIPT, *arguments], env=environment, check=True, capture_output=True)
        out = Path(arguments[1])
        logs = {path.stem: path.read_text() for path in out.glob("*.log")}
        return (out / "jobs").read_text().splitlines(), logs

    return call


def test_every_gpu_test_runs_once(run: Run, tmp_path: Path) -> None:
    jobs, logs = run("spread", str(tmp_path / "out"))
    assert all(": done, " in job for job in jobs)
    assert len(jobs) == len(logs)
    asked = " ".join(logs.values())
    for path in (REPOSITORY / "tests" / "gpu").glob("test_*.py"):
        assert asked.count(f"tests/gpu/{path.name}") == 1, path.name
    assert {log.split(":")[0] for log in logs.values()} == {"0", "1", "2", "0,1"}
    _, quiet = run("quiet", str(tmp_path / "quiet"))
    assert set(quiet) == {"host_time", "tests_alone", "startup"}
    assert {log.split(":")[0] for log in quiet.values()} == {"0"}


def test_what_is_done_does_not_run_again(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs, logs = run("spread", str(out))
    kept = [job for job in jobs if not job.startswith(("kernel_times", "tests_parallel"))]
    (out / "jobs").write_text("\n".join([*kept, "kernel_times: failed (124), 5 s on GPU 0", ""]))
    for log in out.glob("*.log"):
        log.unlink()
    again, missing = run("spread", str(out))
    assert set(missing) == {"kernel_times", "tests_parallel"}
    assert len(again) == len(kept) + 3
    assert len(logs) == len(jobs)


def test_after_the_time_nothing_begins(run: Run, tmp_path: Path) -> None:
    jobs, logs = run("spread", str(tmp_path / "out"), "0")
    assert jobs
    assert all(job.endswith(": not begun") for job in jobs)
    assert logs == {}


def test_benchmarks_that_it_names_exist(run: Run, tmp_path: Path) -> None:
    for mode in ("quiet", "spread"):
        _, logs = run(mode, str(tmp_path / mode))
        programs = {log.split()[1] for log in logs.values()} - {"-m"}
        assert all((REPOSITORY / program).is_file() for program in programs)
