"""`benchmarks/reproduce.sh`, with a program in place of Python that says what it is asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench import CASES, parse
from cases.encoder import README, README_VARIANTS, make_jobs
from tables import result_names

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reproduce.sh"


def reproduce(what: str, out: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    return subprocess.run(
        ["bash", SCRIPT, what, out], env=environment, capture_output=True, text=True, check=False
    )


def asked(what: str, out: Path) -> list[list[str]]:
    """The arguments of each command, without the script's name."""
    python = out.parent / "python"
    python.write_text(f'#!/bin/bash\necho "$*" >> {out.parent}/asked\n', encoding="utf-8")
    python.chmod(0o755)
    (out.parent / "asked").write_text("", encoding="utf-8")
    assert reproduce(what, out, str(python)).returncode == 0
    commands = (out.parent / "asked").read_text(encoding="utf-8").splitlines()
    return [command.split()[1:] for command in commands]


def test_every_table_is_measured_by_a_command_that_parses(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parsed = [parse(command) for command in asked("all", out)]
    others = {"map_batches"}  # not again for every set of tables: what needs Ray
    # Rows of a case that are kept beside those of another run of it: another GPU, torch or other towers.
    kept = {"vllm_towers", "vllm_h100", "connector_slices", "connector_synchronous"}
    kept |= {"start_slow_host", "torch_2_14", "passes_h100"}
    files = {f"{name}.json" for name in set(result_names()) - others - kept}
    assert {arguments.output.name for arguments in parsed} == files
    assert {arguments.case for arguments in parsed} == set(CASES) - others
    assert asked("all", out) == []  # what is done does not run again


def test_the_readme_needs_one_command(tmp_path: Path) -> None:
    (command,) = asked("readme", tmp_path / "out")
    jobs = make_jobs(parse(command), "cuda")
    assert [job.variant for job in jobs] == list(README_VARIANTS)
    assert {(job.tower, job.workloads) for job in jobs} == {("qwen3-vl-8b", README)}


def test_what_fails_is_told(tmp_path: Path) -> None:
    done = reproduce("readme", tmp_path / "out", "false")
    assert done.returncode == 1
    assert "readme: failed" in done.stdout
