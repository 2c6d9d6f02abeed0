"""The first search of images by text, as docs/serve.md has it: its commands and its code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ..models.embedding_models import WORDS, save_model
from .serving import HOST, free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text("utf-8")
MOST_LINES = 10


def test_a_first_search_takes_ten_lines() -> None:
    commands, code = blocks()
    lines = [line for line in (*commands, *code.splitlines()) if line]
    assert len(lines) <= MOST_LINES


def blocks() -> tuple[list[str], str]:
    """The commands of the page, and its code."""
    (commands, *_), (code, *_) = (
        re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("sh", "python")
    )
    return commands.splitlines(), code


@pytest.mark.slow
def test_the_first_page_finds_an_image_by_a_text(tmp_path: Path) -> None:
    (install, command), code = blocks()
    assert install.startswith("pip install '.[serve")
    name = shlex.split(command)[-1]
    _, directory = save_model(tmp_path / "model", "Siglip")
    settings, port = tmp_path / "settings.yaml", free_port()
    settings.write_text(f"served_name: {name}\nconfig:\n  enabled: false\n", encoding="utf-8")
    program = [sys.executable, "-m", "fxsplit_encoder.cli.main", *shlex.split(command)[1:-1], str(directory)]
    options = ["--port", str(port), "--settings", str(settings), "--device", "cpu"]
    server = subprocess.Popen([*program, *options], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        while not is_ready(port):
            assert server.poll() is None
            time.sleep(0.2)
        script = tmp_path / "search.py"
        script.write_text(code.replace("127.0.0.1:8000", f"{HOST}:{port}"), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
    finally:
        server.terminate()
        server.wait()
    assert "coffee" in WORDS  # else all texts are the same to the model
    assert Path(done.stdout.strip()).name in {path.name for path in (ROOT / "examples" / "images").iterdir()}


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://{HOST}:{port}/ready").status_code == 200
    except httpx.HTTPError:
        return False
