"""What `register` changes in vLLM, and when it changes nothing."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fxsplit_encoder as fx
from fxsplit_encoder.integrations.vllm.plugin import StandIn, register
from fxsplit_encoder.integrations.vllm.settings import (
    DEFAULTS,
    VARIABLE,
    encoder_config,
    read_plugin_settings,
)

from .fake_vllm import CUSTOM_OP, MANAGER, NAME, VERSIONS, FakeVllm

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("interface_first", [True, False])
def test_the_manager_is_replaced_where_both_runners_take_it_from(
    version: str, interface_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = FakeVllm(version, monkeypatch)
    original = vllm.manager
    interface = vllm.import_interface() if interface_first else None
    register()
    interface = interface or vllm.import_interface()
    stand_in = vllm.manager
    assert issubclass(stand_in, StandIn)
    assert interface.EncoderCudaGraphManager is stand_in
    assert issubclass(stand_in, original)
    assert vllm.module(CUSTOM_OP).op_registry_oot == {}
    register()
    assert vllm.manager is stand_in


def test_what_holds_another_class_keeps_it(vllm: FakeVllm) -> None:
    interface = vllm.import_interface()
    interface.EncoderCudaGraphManager = other = type("Other", (), {})
    register()
    assert interface.EncoderCudaGraphManager is other


@pytest.fixture
def settings_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "settings.yaml"
    monkeypatch.setenv(VARIABLE, str(file))
    return file


def test_compiling_replaces_the_attention_too(vllm: FakeVllm, settings_file: Path) -> None:
    settings_file.write_text("compile: true\ntoken_budgets: [64]\n")
    register()
    register()
    assert list(vllm.module(CUSTOM_OP).op_registry_oot) == ["ApplyRotaryEmb", "MMEncoderAttention"]
    assert vllm.manager.settings.compile
    assert vllm.manager.settings.token_budgets == (64,)


@pytest.mark.parametrize("value", ["off", " OFF "])
def test_off_changes_nothing(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    before = vllm.manager
    register()
    assert vllm.manager is before


PROTOCOL = "vllm.model_executor.models.interfaces.SupportsEncoderCudaGraph"
OLDER = dataclasses.make_dataclass(
    "EncoderItemSpec", ("input_size", "output_tokens", "global_output_tokens", "local_output_tokens")
)
"""Without paths, as before 0.31."""


@pytest.mark.parametrize(
    ("path", "changed", "said"),
    [
        (
            f"{MANAGER}_defs.EncoderItemSpec",
            OLDER,
            "EncoderItemSpec has the fields input_size, output_tokens, g",
        ),
        (
            f"{MANAGER}.{NAME}",
            type("Derived", (), {}),
            r"is tests\..*Derived, which another plugin put there",
        ),
        (f"{MANAGER}.{NAME}.prefetch", lambda self: None, "prefetch"),
        (f"{MANAGER}.{NAME}.execute", lambda self, mm_kwargs, stream: None, r"takes \(mm_kwargs, stream\)"),
        (
            f"{PROTOCOL}.encoder_cudagraph_forward",
            lambda self, inputs, metadata: None,
            r"encoder_cudagraph_forward takes \(inputs, metadata\)",
        ),
        (f"{MANAGER}.{NAME}", None, f"has no {NAME}"),
        (PROTOCOL, None, "ImportError"),
    ],
)
def test_a_vllm_that_is_not_known_is_left_alone_with_one_warning(
    vllm: FakeVllm, warned: list[str], monkeypatch: pytest.MonkeyPatch, path: str, changed: Any, said: str
) -> None:
    if changed is None:
        monkeypatch.delattr(path)
    else:
        monkeypatch.setattr(path, changed, raising=False)
    before = getattr(vllm.module(MANAGER), NAME, None)
    register()
    register()
    assert getattr(vllm.module(MANAGER), NAME, None) is before
    (warning,) = warned
    assert re.search(said, warning), warning


@pytest.mark.parametrize("version", ["0.40.1.dev3+gabcdef", "0.1.dev17+g0123456", "dev"])
def test_interfaces_decide_and_not_versions(vllm: FakeVllm, version: str) -> None:
    vllm.module("vllm").__version__ = version
    vllm.manager.execute = lambda self, mm_kwargs, stream=None: None  # has a default
    register()
    assert issubclass(vllm.manager, StandIn)


@pytest.mark.parametrize(
    "text", ["token_budgets: [4, 2]", "compile: maybe", "nonsense: 1", "data_parallel: true"]
)
def test_wrong_settings_leave_vllm_alone_with_one_warning(
    vllm: FakeVllm, settings_file: Path, warned: list[str], text: str
) -> None:
    settings_file.write_text(text)
    before = vllm.manager
    register()
    assert vllm.manager is before
    (warning,) = warned
    assert str(settings_file) in warning
    assert text.partition(":")[0] in warning


LOADED = """
import os
import pydantic, sys, torch, yaml  # which vLLM has imported by then
before = set(sys.modules)

import pytest
from tests.integrations.vllm.fake_vllm import VERSIONS, FakeVllm
from fxsplit_encoder.integrations.vllm.plugin import register

for setting in sys.argv[1:]:
    os.environ["FXSPLIT_ENCODER_CONFIG"] = setting
    vllm = FakeVllm(VERSIONS[-1], pytest.MonkeyPatch())
    register()
    new = set(sys.modules) - before
    print(vllm.manager.__module__)
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "transformers")
    print(*(name for name in sorted(new) if name.startswith(heavy)))
    print(*sorted({".".join(name.split(".")[:3]) for name in new if name.startswith("fxsplit_encoder.")}))
"""
LIGHT = {"config", "errors", "integrations", "integrations.vllm", "messages", "planning", "protocol"}
LIGHT |= {"caching", "settings_model", "version"}
COMPILING = {"_torch", "child_process", "kernels", "pauses"}


def test_a_process_that_makes_no_manager_imports_little(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("compile: true")
    settings = ["off", "", str(tmp_path / "settings.yaml")]
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *settings], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = ran.stdout.split("\n")
    ours = "fxsplit_encoder.integrations.vllm.plugin"
    assert lines[:-1:3] == ["vllm.v1.worker.encoder_cudagraph", ours, ours]
    assert not any(lines[1::3])
    for imported, light in zip(lines[2::3], (LIGHT, LIGHT, LIGHT | COMPILING), strict=True):
        allowed = tuple(f"fxsplit_encoder.{name}." for name in light)
        assert not [name for name in imported.split() if not f"{name}.".startswith(allowed)]


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry = project["entry-points"]["vllm.general_plugins"]["fxsplit_encoder"]
    assert entry == f"{register.__module__}:{register.__name__}"
    assert "vllm" in project["optional-dependencies"]


# --- vLLM's settings, and those of the plugin's file


ONE = fx.EncoderCudaGraphConfig(["image", "video"], ["pixel_values"], 8, max_frames_per_video=64)
TWO = fx.EncoderCudaGraphConfig(
    ["image"],
    ["pixel_values"],
    8,
    paths={
        "global": fx.EncoderCudaGraphPathConfig(min_token_budget=16),
        "local": fx.EncoderCudaGraphPathConfig(min_token_budget=10, allow_zero_tokens=True),
    },
)
RANGE = (16, 256)


def config(vllm: FakeVllm, own: dict[str, Any], model: Any = ONE, **settings: Any) -> fx.EncoderConfig:
    given = {f"encoder_cudagraph_{name}": value for name, value in settings.items() if name != "video_limit"}
    if "video_limit" in settings:
        given["video_limit"] = settings["video_limit"]
    tower = mock.Mock()
    tower.get_encoder_cudagraph_config.return_value = model
    tower.get_encoder_cudagraph_budget_range.return_value = RANGE
    return encoder_config(fx.EncoderConfig(**own), vllm.config(**given), tower)


def test_listed_budgets_are_sorted_and_each_kept_once(vllm: FakeVllm) -> None:
    made = config(vllm, {}, token_budgets=[64, 16, 64, 32], max_vision_items_per_batch=4)
    assert made.token_budgets == (16, 32, 64)
    assert made.max_items_per_batch == 4
    assert not made.paths


def test_nothing_is_captured_while_vllm_serves_unless_the_file_says_so(vllm: FakeVllm) -> None:
    assert not config(vllm, {}).capture_recurring
    assert config(vllm, {"capture_recurring": True}).capture_recurring


def test_on_several_paths_just_the_largest_counts(vllm: FakeVllm) -> None:
    made = config(vllm, {}, TWO, token_budgets=[100, 33])
    assert made.paths["global"].token_budgets == (16, 32, 48, 64, 80, 96)
    assert made.paths["local"].token_budgets == (10, 20, 30, 40, 50, 60, 70, 80, 100)


def test_what_the_file_says_wins(vllm: FakeVllm) -> None:
    own = {"token_budgets": [8, 24], "max_frames_per_batch": 3, "paths": {}}
    made = config(vllm, own, token_budgets=[64], max_vision_items_per_batch=2, max_frames_per_batch=9)
    assert (made.token_budgets, made.max_frames_per_batch, made.max_items_per_batch) == ((8, 24), 3, 2)
    paths = {"global": fx.PathConfig(token_budgets=(48,)), "local": fx.PathConfig(mode="full")}
    two = config(vllm, {"paths": paths}, TWO, token_budgets=[40])
    assert two.paths["global"].token_budgets == (48,)
    assert (two.paths["local"].token_budgets, two.paths["local"].mode) == ((10, 20, 30, 40), "full")


SHORT = fx.EncoderCudaGraphConfig(["video"], ["pixel_values"], 8, max_frames_per_video=1)


@pytest.mark.parametrize(
    ("model", "settings", "frames"),
    [
        (ONE, {"max_frames_per_batch": 5}, 5),
        (ONE, {"max_frames_per_batch": 5, "video_limit": 0}, 0),
        (ONE, {"video_limit": 0}, 0),
        (ONE, {}, 31),  # 16 items in a batch
        (ONE, {"max_vision_items_per_batch": 2}, 16),
        (SHORT, {}, 16),  # no more than the longest videos have
        (TWO, {}, None),  # images alone
    ],
)
def test_video_frames(vllm: FakeVllm, model: Any, settings: dict[str, Any], frames: int | None) -> None:
    assert config(vllm, {}, model, **settings).max_frames_per_batch == frames


def test_the_environment_names_a_file_or_switches_off(tmp_path: Path) -> None:
    assert read_plugin_settings({}) == DEFAULTS
    assert not DEFAULTS.compile
    assert not read_plugin_settings({VARIABLE: "off"}).enabled
    file = tmp_path / "settings.yaml"
    file.write_text("compile: true\nmax_graph_bytes: 2GiB\n")
    settings = read_plugin_settings({VARIABLE: str(file)})
    assert settings.enabled
    assert settings == fx.EncoderConfig(max_graph_bytes=2**31)
    file.write_text("enabled: false\n")
    assert not read_plugin_settings({VARIABLE: str(file)}).enabled


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(fx.ConfigError, match=r"nothing\.yaml: cannot be read"):
        read_plugin_settings({VARIABLE: str(tmp_path / "nothing.yaml")})
