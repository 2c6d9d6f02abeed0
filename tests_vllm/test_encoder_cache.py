"""Two engines of vLLM's, one that encodes and one that generates, with this library's EC connector."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests_vllm.generate import save_model
from tests_vllm.test_engine import HAS_KERNELS

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="vLLM's Python code without its compiled library")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of sockets, whose paths are short."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path) / "stores"


def start(model: Path, directory: Path, role: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests_vllm.encoder_cache", str(model), str(directory), role, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-4000:]
    result: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    return result


def test_what_one_engine_encodes_another_generates_from(model: Path, directory: Path, tmp_path: Path) -> None:
    alone = result_of(start(model, directory, "alone"))
    assert alone["encoded"] == 4

    ready = tmp_path / "ready"
    producer = start(model, directory, "ec_producer", str(ready))
    deadline = time.monotonic() + 300
    while not ready.exists() and producer.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    consumer = result_of(start(model, directory, "ec_consumer"))
    ready.unlink(missing_ok=True)
    assert result_of(producer)["encoded"] == 4

    assert consumer["tokens"] == alone["tokens"]
    assert consumer["encoded"] == 0
    assert consumer["counts"] == {"loaded": 4}
    assert consumer["held"] == 0

    without = result_of(start(model, directory, "ec_consumer"))
    assert without["tokens"] == alone["tokens"]  # the producer is gone: it encodes itself
    assert (without["encoded"], without["counts"]) == (4, {"encoded here": 4})
