"""The configurations in configs/ fit the published towers that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases.towers import MODELS

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import DEMO_MODEL, demo_tower
from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.planning.limits import resolve_limits

CONFIGS = Path(__file__).parents[1] / "configs"
TOWERS = [*MODELS.items(), (DEMO_MODEL, "demo")]
"""Models and the names of their files; None: everything is inferred."""

MANAGER_ALONE = {"demo", "deepseek_ocr"}
"""Files with options that do not apply behind torch.compile: frames and paths."""

ABOVE_THE_RANGE = {"llama4": 2448}
"""A photograph of 16 tiles and the whole image as one more: beyond what pays for several small images."""


def test_every_file_is_of_a_tower() -> None:
    named = [file for _, file in TOWERS if file is not None]
    assert sorted(named) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_both_front_ends_take_a_file_unless_it_says_otherwise(path: Path) -> None:
    own = {"packing", "paths", "data_parallel", "max_frames_per_batch"}
    assert bool(own & fx.EncoderConfig.from_yaml(path).model_fields_set) == (path.stem in MANAGER_ALONE)


@pytest.mark.parametrize(("name", "file"), TOWERS)
def test_budgets_items_and_frames_fit_the_tower(name: str, file: str | None) -> None:
    config = fx.EncoderConfig() if file is None else fx.EncoderConfig.from_yaml(CONFIGS / f"{file}.yaml")
    # No limit depends on the number of blocks.
    wrapped: Any = architecture(name).family.wrap(demo_tower(1, "meta", model=name))
    model_config = wrapped.get_encoder_cudagraph_config()
    budget_range = wrapped.get_encoder_cudagraph_budget_range(None)
    has_video = "video" in model_config.modalities
    limits = resolve_limits(config, model_config, budget_range, has_video)
    if config.paths:
        assert config.paths.keys() == model_config.paths.keys()

    lowest, highest = budget_range
    first, *_ = limits.path_budgets
    assert limits.path_budgets[first][0] >= lowest
    assert limits.path_budgets[first][-1] <= ABOVE_THE_RANGE.get(name, highest)
    for path, budgets in limits.path_budgets.items():
        tile = model_config.paths[path].min_token_budget or 1
        assert all(budget % tile == 0 for budget in budgets), path

    smallest_item = model_config.paths[first].min_token_budget or lowest
    largest = limits.path_budgets[first][-1]
    assert config.max_items_per_batch in (0, limits.max_items_per_batch)
    assert limits.max_items_per_batch * smallest_item <= largest
    if config.max_frames_per_batch is not None:
        assert limits.max_frames_per_batch == config.max_frames_per_batch <= largest
