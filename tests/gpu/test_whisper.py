"""Whisper's encoder at the width of large-v3, fewer blocks: no further from float32 than eager is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import fxsplit_encoder as fx
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.media import AudioSamples
from fxsplit_encoder.models.eager import rms_error, share_weights
from fxsplit_encoder.models.media import audio_processor
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES

from .support import poison

pytestmark = pytest.mark.gpu

LARGE = {
    "d_model": 1280,
    "encoder_layers": 3,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
}
RATE = 16000


@torch.no_grad()
def test_audio_is_as_near_to_float32_as_eager(full_precision: None) -> None:
    with torch.device("cuda"):
        tower: Any = WhisperEncoder(WhisperConfig(**LARGE)).requires_grad_(False).eval()
    draw_weights(tower, 0)
    tower = tower.to(torch.bfloat16)
    wider = copy.deepcopy(tower).float()
    wrapped = FAMILIES["whisper"].wrap(share_weights(tower))
    config = fx.EncoderConfig(mode="full", packing="greedy", token_budgets=(1500, 6000))
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    assert not manager.reports
    poison(manager.pool)
    processor = audio_processor(wrapped, WhisperFeatureExtractor(128), hash_name="sha256")
    noise = np.random.default_rng(0).normal(0, 0.1, 70 * RATE).astype(np.float32)
    items = [MediaItem("audio", AudioSamples(noise[: seconds * RATE], RATE)) for seconds in (1, 70, 30)]
    inputs = [processor.prepare(item).inputs["input_features"].cuda() for item in items]
    exact = [wider(own).last_hidden_state.flatten(0, 1) for own in inputs]
    eager = [tower(own.to(torch.bfloat16)).last_hidden_state.flatten(0, 1) for own in inputs]
    settings = ConnectorConfig(timeout_s=None, device_bytes=1 << 30)
    with Connector(processor, [lambda: ManagerEncoder(manager)], settings) as connector:
        ticket = connector.submit(EncodeRequest("r", items))
        assert ticket.token_counts == (1500, 4500, 1500)
        assert ticket.wait(60) == "ready", ticket.error
        with connector.read(ticket, device="cuda:0") as rows:
            ours = [rows[index].rows.cuda() for index in range(3)]
        assert rms_error(ours, exact) <= 1.1 * rms_error(eager, exact)
        assert manager.stats().hit_rate == 1
        assert connector.audit() == []
