from __future__ import annotations

import json

import pytest
import torch

from fxsplit_encoder.kernels import store
from fxsplit_encoder.kernels.attention.chooser import MEASUREMENTS
from fxsplit_encoder.manager.start import differences, environment_key, plain

CPU = torch.device("cpu")


def test_the_environment_names_what_compiles_and_measures() -> None:
    key = environment_key(CPU)
    assert json.loads(json.dumps(key)) == key == environment_key(CPU)
    assert key["torch"] == torch.__version__
    assert key["gpu"] is None and key["cpu"]
    assert {
        "fxsplit_encoder",
        "fxsplit_encoder.code",
        "triton",
        "cuda",
        "python",
        "transformers",
    } <= key.keys()


def test_of_a_gpu_its_name_capability_and_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        store, "package_version", lambda package: "4.0" if package == "flash-attn-4" else None
    )
    key = environment_key(torch.device("cuda", 0), [MEASUREMENTS])
    assert (key["gpu"], key["gpu.capability"]) == ("NVIDIA H200", "9.0")
    assert key["measured_with.packages.flash-attn-4"] == "4.0"
    assert "torch_flash" in key["attention.kernels"]


def test_every_difference_is_named_with_both_values() -> None:
    expected = plain({"gpu": "H200", "settings": {"mode": "auto", "compile": True}, "budgets": (4, 16)})
    got = plain({"gpu": "H100", "settings": {"mode": "auto"}, "budgets": (4, 16), "more": None})
    assert differences(expected, got) == [
        'gpu: expected "H200"; got "H100"',
        "settings.compile: expected true; got nothing",
        "more: expected nothing; got null",
    ]
    assert differences(expected, expected) == []
