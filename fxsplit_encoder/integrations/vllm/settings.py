"""Read the plugin's settings, and translate vLLM's settings for the manager."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fxsplit_encoder.config import EncoderConfig, PathConfig
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.planning.limits import inferred_budgets, needs_budget_range, resolve_limits
from fxsplit_encoder.settings_model import read_settings

VARIABLE = "FXSPLIT_ENCODER_CONFIG"
"""The environment variable that holds a YAML file's path, or "off". An environment variable reaches every
process of vLLM, and does not enter the hash of what it compiles, as its `--additional-config` would."""

_OFF = "off"

# vLLM's own captures never look, and what it loads anew is told to the manager.
_WEIGHT_CHECK_SECONDS = 1.0

# In a batch of few items. Rounding the tokens of a budget up to whole frames then adds an eighth at most to
# budgets of 128 and more.
_FEW_FRAMES = 16


DEFAULTS = EncoderConfig(compile=False)
"""The settings without a file. Towers are compiled on demand only: then they attend through this library's op
in place of vLLM's."""


def read_plugin_settings(environment: Mapping[str, str] = os.environ) -> EncoderConfig:
    """The settings in the file that the environment names, or the defaults; not `enabled`: vLLM's manager is
    left in its place. ConfigError for a bad file.
    """
    value = environment.get(VARIABLE, "").strip()
    if not value:
        return DEFAULTS
    if value.lower() == _OFF:
        return EncoderConfig(enabled=False)
    try:
        values = read_settings(value)
        if "data_parallel" in values:
            raise ConfigError("data_parallel: follows vLLM's --mm-encoder-tp-mode; leave it out")
        return EncoderConfig.from_options({"config": {"compile": False, **values}})
    except ConfigError as error:
        raise ConfigError(*(f"{VARIABLE}={value}: {problem}" for problem in error.problems)) from None


def encoder_config(own: EncoderConfig, vllm_config: Any, model: Any) -> EncoderConfig:
    """The manager's settings for a model that vLLM serves: the plugin's file (`own`), then vLLM's four
    settings of encoder CUDA graphs, then what is inferred. ConfigError for settings that do not suit the
    model, which is asked for its range of budgets where frames follow from it.
    """
    model_config = model.get_encoder_cudagraph_config()
    config = _with_vllms(own, vllm_config, model_config)
    if config.max_frames_per_batch is not None or "video" not in model_config.modalities:
        return config
    asks = needs_budget_range(config, model_config)
    budget_range = model.get_encoder_cudagraph_budget_range(vllm_config) if asks else None
    return config.replace(max_frames_per_batch=_inferred_frames(config, model_config, budget_range))


def _with_vllms(own: EncoderConfig, vllm_config: Any, model_config: Any) -> EncoderConfig:
    compilation = vllm_config.compilation_config
    budgets = sorted(set(compilation.encoder_cudagraph_token_budgets))
    items = compilation.encoder_cudagraph_max_vision_items_per_batch
    changes: dict[str, Any] = {
        "token_budgets": tuple(budgets),
        "max_items_per_batch": items,
        "max_frames_per_batch": _frames(vllm_config),
        # Their memory would have no part in what vLLM measured, and a capture holds up every request.
        "capture_recurring": False,
        "weight_check_seconds": _WEIGHT_CHECK_SECONDS,
    }
    changes = {name: value for name, value in changes.items() if name not in own.model_fields_set}
    if changes.get("token_budgets"):
        own_items = own.max_items_per_batch if "max_items_per_batch" in own.model_fields_set else items
        changes["paths"] = _path_budgets(own, model_config, budgets[-1], own_items)
    return own.replace(**changes)


def _frames(vllm_config: Any) -> int | None:
    """Video frames in a batch; None: to be inferred."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is not None and multimodal.get_limit_per_prompt("video") == 0:
        return 0
    frames: int | None = vllm_config.compilation_config.encoder_cudagraph_max_frames_per_batch
    return frames


def _path_budgets(
    own: EncoderConfig, model_config: Any, largest: int, max_items: int
) -> dict[str, PathConfig]:
    """On a path with a smallest budget of its own vLLM takes just the largest of the listed ones."""
    paths = dict(own.paths)
    for name, path in model_config.paths.items():
        smallest = path.min_token_budget
        given = paths.get(name, PathConfig())
        if smallest is not None and not given.token_budgets and smallest <= largest:
            budgets = inferred_budgets(smallest, largest, smallest, max_items)
            paths[name] = PathConfig(token_budgets=budgets, mode=given.mode)
    return paths


def _inferred_frames(config: EncoderConfig, model_config: Any, budget_range: tuple[int, int] | None) -> int:
    """Less than two frames an item, but for batches of few items. Models divide a capture's frames evenly
    among items: with vLLM's, the longest videos', a capture for 64 tokens would have thousands of rows.
    """
    limits = resolve_limits(config, model_config, budget_range, has_video=True)
    return min(limits.max_frames_per_batch, max(2 * limits.max_items_per_batch - 1, _FEW_FRAMES))
