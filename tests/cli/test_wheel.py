"""The commands from a wheel: installed alone, outside of the checkout, and without the extras' packages."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds a wheel")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the wheel holds; other packages are those of this environment."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def start(installed: Path, cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=500
    )


WITHOUT_EXTRAS = """
    import sys

    for package in ("transformers", "PIL", "safetensors", "huggingface_hub", "jinja2"):
        sys.modules[package] = None

    from typer.testing import CliRunner

    from fxsplit_encoder.cli.document import shipped
    from fxsplit_encoder.cli.main import app

    for name in ("configs/demo.yaml", "examples/images/cat.jpg", "examples/README.md"):
        assert shipped(name).is_relative_to(sys.argv[1]), "the last has the licenses of the pictures"
    trace = str(shipped("examples/traces/chat_images.jsonl"))
    with_help, with_trace = (["--help"], ["bench", "-h"], ["--version"]), (["tune", trace], ["report", trace])
    for arguments in (*with_help, *with_trace, ["demo"]):
        result = CliRunner().invoke(app, arguments)
        print(result.exit_code, result.stderr.strip() or result.stdout.strip().splitlines()[0])
"""


def test_without_the_extras_there_is_help_and_a_line_that_says_what_to_install(
    installed: Path, tmp_path: Path
) -> None:
    script = tmp_path / "commands.py"
    script.write_text(textwrap.dedent(WITHOUT_EXTRAS), encoding="utf-8")
    finished = start(installed, tmp_path, script, installed)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "0", "0", "0", "2", "2"], finished.stdout
    assert "Usage: encoder-cg [OPTIONS] COMMAND" in lines[0]
    assert lines[2].startswith("0 encoder-cg ")
    for line in lines[4:]:
        assert "encoder-cg: error: encoder-cg needs packages that are not installed" in line
        assert "run: pip install " in line and "jinja2" in line and "'transformers>=5.16'" in line


def test_the_command_itself_is_installed(installed: Path, tmp_path: Path) -> None:
    finished = start(installed, tmp_path, installed / "bin" / "encoder-cg", "dmo")
    assert finished.returncode == 2
    assert finished.stderr == "encoder-cg: error: No such command 'dmo'. Did you mean 'demo'?\n"
