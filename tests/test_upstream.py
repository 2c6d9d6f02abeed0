"""The script that runs transformers' own tests, on a file of tests that stands for a checkout's."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import upstream

TESTS = """
import pytest
import torch
import transformers

SIZES = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def tower():
    config = transformers.SiglipVisionConfig(image_size=8, patch_size=4, **SIZES)
    return transformers.SiglipVisionModel(config)


def test_holds():
    with torch.no_grad():
        assert tower().eval()(torch.randn(1, 3, 8, 8)).pooler_output.shape == (1, 8)


def test_holds_only_plain():
    assert "forward" not in vars(tower())


def test_is_skipped():
    pytest.skip("needs another machine")


def test_fails():
    raise AssertionError
"""


@pytest.mark.exhaustive
def test_what_fails_only_accelerated_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "tests" / "models" / "tiny"
    directory.mkdir(parents=True)
    (directory / "test_modeling_tiny.py").write_text(TESTS)
    assert upstream.main(str(tmp_path), "tiny", f"--rootdir={tmp_path}", config='{"mode": "breakable"}') == 1
    shown = capfd.readouterr().out
    assert "\nhits 1\n" in shown
    *_, counts, failing = shown.splitlines()
    assert counts == "2 passed plain, 1 accelerated; only plain:"
    assert failing.endswith("test_modeling_tiny.test_holds_only_plain")
