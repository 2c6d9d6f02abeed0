"""vLLM in processes of its own: an engine from prompts to tokens, and ranks that share a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm

HAS_KERNELS = any(Path(vllm.__file__).parent.glob("_C*.so"))


def printed_by(module: str, *arguments: str) -> Any:
    """What a module of these tests prints last, as JSON."""
    command = [sys.executable, "-m", f"tests.vllm.{module}", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.strip().splitlines()[-1])


@pytest.mark.skipif(not HAS_KERNELS, reason="vLLM's Python code without its compiled library")
@pytest.mark.parametrize("compiles", [False, True])
def test_the_same_tokens_with_and_without_captures(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("compile: true\npiece_compiler: eager\n" if compiles else "{}\n")
    monkeypatch.setenv("FXSPLIT_ENCODER_CONFIG", str(settings))
    model = tmp_path / "model"
    model.mkdir()
    result = printed_by("generate", str(model))
    assert result["kind"] == "VllmEncoderManager"
    assert (result["graph_hits"], result["graph_misses"]) == (4, 0)
    assert result["after"] == result["before"]
    assert [len(answer) for answer in result["after"]] == [16] * 4
    same = [one == other for one, other in zip(result["before"], result["others"], strict=True)]
    assert same[:3] == [False, False, True]  # of other images; the third request has none


def test_ranks_share_the_images_and_weights_are_left_to_vllm() -> None:
    first, second = printed_by("ranks")
    assert first["weights"] is second["weights"] is None
    assert first["data"]["difference"] == second["data"]["difference"] == 0
    hits = [rank["data"]["hits"] for rank in (first, second)]
    assert sum(hits) == 5
    assert min(hits) > 0
