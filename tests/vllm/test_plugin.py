"""The plugin in the vLLM that is installed: what it replaces, and that nothing of it has changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import vllm

from tests.vllm.record import RECORDED, record


def test_the_interfaces_are_those_that_were_recorded() -> None:
    recorded = json.loads((RECORDED / f"{vllm.__version__}.json").read_text(encoding="utf-8"))
    assert record() == recorded, "python -m tests.vllm.record refreshes what the main tests run against"


LOADED = """
from vllm.plugins import load_general_plugins

load_general_plugins()
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
print(EncoderCudaGraphManager.__module__)
"""


@pytest.mark.parametrize(
    ("setting", "module"), [("", "fxsplit_encoder."), ("off", "vllm.v1.worker.encoder_cudagraph")]
)
def test_vllm_finds_it_by_its_entry_point(setting: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSPLIT_ENCODER_CONFIG", setting)
    monkeypatch.delenv("VLLM_PLUGINS")
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert ran.stdout.strip().splitlines()[-1].startswith(module), ran.stderr
