from __future__ import annotations

import pytest
from bench import parse
from cases import start

import fxsplit_encoder as fx


def test_the_towers_own_budgets_are_those_of_the_case() -> None:
    config = start.config_of(parse(["start"]), start.BUDGETS)
    assert (config.mode, config.token_budgets) == ("full", start.BUDGETS)


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "internvl3-8b", "deepseek-ocr"])
def test_another_tower_has_its_own_settings(name: str) -> None:
    arguments = parse(["start", "--tower", name])
    config = start.config_of(arguments, ())
    assert config != fx.EncoderConfig()
    assert config.mode == "auto"
    assert start.config_of(arguments, (64, 128)) == config.replace(token_budgets=(64, 128))
