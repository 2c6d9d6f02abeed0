"""vLLM's settings, and those of the plugin's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fxsplit_encoder as fx
from fxsplit_encoder.integrations.vllm.settings import (
    VARIABLE,
    PluginSettings,
    encoder_config,
    needs_range,
    read_plugin_settings,
)

from .fake_vllm import FakeVllm

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
    return encoder_config(fx.EncoderConfig(**own), vllm.config(**given), model, RANGE)


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


def test_the_model_is_asked_for_its_range_where_it_decides(vllm: FakeVllm) -> None:
    listed = vllm.config(encoder_cudagraph_token_budgets=[64], encoder_cudagraph_max_vision_items_per_batch=2)
    assert not needs_range(fx.EncoderConfig(), listed, ONE)
    assert needs_range(fx.EncoderConfig(), vllm.config(encoder_cudagraph_token_budgets=[64]), ONE)
    assert needs_range(fx.EncoderConfig(), vllm.config(), TWO)


def test_the_environment_names_a_file_or_switches_off(tmp_path: Path) -> None:
    assert read_plugin_settings({}) == PluginSettings()
    assert not PluginSettings().encoder.compile
    assert not read_plugin_settings({VARIABLE: "off"}).enabled
    file = tmp_path / "settings.yaml"
    file.write_text("compile: true\nmax_graph_bytes: 2GiB\n")
    settings = read_plugin_settings({VARIABLE: str(file)})
    assert settings.enabled
    assert settings.encoder == fx.EncoderConfig(max_graph_bytes=2**31)
    assert settings.without_compiling().encoder == fx.EncoderConfig(max_graph_bytes=2**31, compile=False)
    file.write_text("enabled: false\n")
    assert not read_plugin_settings({VARIABLE: str(file)}).enabled


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(fx.ConfigError, match=r"nothing\.yaml: cannot be read"):
        read_plugin_settings({VARIABLE: str(tmp_path / "nothing.yaml")})
