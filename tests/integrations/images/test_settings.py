"""Settings are checked when they are made, devices where they are used."""

from __future__ import annotations

import pickle

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.integrations.images import ImageEncoderSettings, ServingSettings


def test_settings_are_checked() -> None:
    for wrong in (
        {"model": ""},
        {"model": "m", "pooling": "max"},
        {"model": "m", "config": {"mode": "fast"}},
    ):
        with pytest.raises(fx.ConfigError):
            ImageEncoderSettings(**wrong)
    with pytest.raises(InputError, match="expected auto, cpu"):
        ImageEncoderSettings(model="m", device="tpu").resolved_device()
    with pytest.raises(InputError, match="sees"):
        ImageEncoderSettings(model="m", device="cuda:97").resolved_device()


def test_settings_are_sent_to_other_processes() -> None:
    settings = ImageEncoderSettings(
        model="m", config={"mode": "full", "token_budgets": [4]}, max_image_bytes="1MiB"
    )
    sent = pickle.loads(pickle.dumps(settings))
    assert sent == settings
    assert hash(sent) == hash(settings)
    assert sent.config == fx.EncoderConfig(mode="full", token_budgets=[4])


def test_who_serves_captures_nothing_later() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert ImageEncoderSettings(model="m").resolved_config(cuda) == fx.EncoderConfig()
    assert ServingSettings(model="m").resolved_config(cuda) == fx.EncoderConfig(capture_recurring=False)
    assert ServingSettings(model="m").resolved_config(cpu) == fx.EncoderConfig(mode="none")
    given = fx.EncoderConfig(mode="full")
    assert ServingSettings(model="m", config=given).resolved_config(cuda) == given
