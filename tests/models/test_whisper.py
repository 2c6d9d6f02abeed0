"""Whisper's encoder from a checkpoint, by itself and behind a connector, against transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import fxsplit_encoder as fx
from fxsplit_encoder.connector.fake import FakeProcessor
from fxsplit_encoder.connector.interfaces import MediaItem, ProcessorByModality
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.media import AudioSamples, MediaSettings
from fxsplit_encoder.models.connectors import checkpoint_connector
from fxsplit_encoder.models.load import load_tower
from fxsplit_encoder.models.media import AudioProcessor, audio_processor, media_processor
from fxsplit_encoder.models.prepare import ProcessorSettings
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES

RATE, PIECE, ROWS, WIDTH = 16000, 16000, 50, 24
"""Pieces of a second."""


def config() -> WhisperConfig:
    return WhisperConfig(
        d_model=WIDTH,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        num_mel_bins=16,
        max_source_positions=ROWS,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=8,
        vocab_size=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=16, chunk_length=1)


@pytest.fixture(scope="module")
def model() -> Any:
    made = WhisperForConditionalGeneration(config()).eval().requires_grad_(False)
    draw_weights(made, 0)
    return made


@pytest.fixture(scope="module")
def encoder(model: Any) -> ManagerEncoder:
    """Captured, as on a GPU."""
    tower = FAMILIES["whisper"].wrap(copy.deepcopy(model.model.encoder))
    limits = {"token_budgets": (ROWS, 4 * ROWS), "max_items_per_batch": 4, "max_frames_per_batch": 0}
    settings = fx.EncoderConfig(**limits, mode="full", piece_compiler="eager")
    made = ManagerEncoder(fx.EncoderCudaGraphManager(tower, settings, log_interval=0))
    made.start()
    return made


@pytest.fixture
def processor(encoder: ManagerEncoder) -> AudioProcessor:
    return audio_processor(encoder.manager.tower, extractor(), hash_name="sha256")


def speech(num_samples: int, seed: int = 0) -> AudioSamples:
    noise = np.random.default_rng(seed).normal(0, 0.1, num_samples)
    return AudioSamples(noise.astype(np.float32), RATE)


def expected(model: Any, audio: AudioSamples) -> Tensor:
    """What transformers makes of it, piece by piece."""
    rows = []
    for start in range(0, len(audio.samples), PIECE):
        piece = audio.samples[start : start + PIECE]
        features = extractor()(piece, sampling_rate=RATE, return_tensors="pt")["input_features"]
        rows.append(model.model.encoder(features).last_hidden_state[0])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("num_samples", "pieces", "sound"),
    [(1, 1, 1), (320, 1, 1), (321, 1, 2), (PIECE, 1, 50), (PIECE + 1, 2, 51), (5 * PIECE // 2, 3, 125)],
)
def test_rows_are_counted_from_the_length(
    processor: AudioProcessor, num_samples: int, pieces: int, sound: int
) -> None:
    item = MediaItem("audio", speech(num_samples))
    prepared = processor.prepare(item)
    assert processor.count_tokens(item) == prepared.num_tokens == pieces * ROWS
    assert prepared.inputs["input_features"].shape == (pieces, 16, 100)
    assert prepared.metadata == {
        "hidden_size": WIDTH,
        "seconds": num_samples / RATE,
        "pieces": pieces,
        "rows_with_sound": sound,
    }
    assert prepared.digest == processor.digest(item)


def test_rows_are_those_of_transformers(
    model: Any, encoder: ManagerEncoder, processor: AudioProcessor
) -> None:
    audios = [speech(length, seed) for seed, length in enumerate((100, 3 * PIECE, PIECE + 7, PIECE))]
    outputs = encoder.encode([processor.prepare(MediaItem("audio", audio)) for audio in audios])
    for output, audio in zip(outputs, audios, strict=True):
        torch.testing.assert_close(output, expected(model, audio), rtol=0, atol=1e-5)
    stats = encoder.manager.stats()
    assert stats.hit_rate == 1.0


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (MediaItem("image", b""), "expected audio"),
        (MediaItem("audio", speech(10), {"fps": 2}), "'?fps'? is unknown"),
        (
            MediaItem("audio", AudioSamples(np.zeros(10, np.float32), 8000)),
            "16000 samples a second.*resample",
        ),
        (MediaItem("audio", speech(7 * PIECE)), "max_tokens"),
    ],
)
def test_what_the_model_does_not_take_is_refused(
    processor: AudioProcessor, item: MediaItem, message: str
) -> None:
    limits = MediaSettings(max_tokens=6 * ROWS)
    strict = audio_processor(processor.tower, extractor(), limits, hash_name="sha256")
    for call in (strict.count_tokens, strict.prepare):
        with pytest.raises(MediaError, match=message):
            call(item)


# --- checkpoints and connectors


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(directory)
    extractor().save_pretrained(directory)
    (directory / "encoder.yaml").write_text("enabled: false\n", encoding="utf-8")
    return directory


def test_a_checkpoint_is_loaded_without_its_decoder(model: Any, checkpoint: Path) -> None:
    tower = load_tower(checkpoint, torch.float32, torch.device("cpu"))
    ours, theirs = dict(tower.named_parameters()), dict(model.model.encoder.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(InputError, match="audio only"):
        FAMILIES["whisper"].prepare({}, ProcessorSettings())


def test_a_checkpoint_takes_audio_through_a_connector(model: Any, checkpoint: Path) -> None:
    settings = ConnectorConfig(timeout_s=None)
    with checkpoint_connector(
        checkpoint, ["cpu"], checkpoint / "encoder.yaml", settings, hash_name="sha256"
    ) as connector:
        assert isinstance(connector.processor, AudioProcessor)
        one, other = speech(PIECE + 5), speech(30, seed=1)
        items = [MediaItem("audio", audio) for audio in (one, other, one)]
        prompt = PositionMap([1, 9, 1, 9, 9], ["audio"] * 3, {"audio": 9})
        ticket = connector.submit(EncodeRequest("r", items, prompt))
        assert ticket.token_counts == (2 * ROWS, ROWS, 2 * ROWS)
        assert ticket.wait(60) == "ready", ticket.error
        out = torch.zeros(5 * ROWS + 2, WIDTH)
        for start in range(0, len(out), 64):
            connector.merge(ticket, (start, min(start + 64, len(out))), out[start : start + 64])
        rows = [expected(model, audio) for audio in (one, other, one)]
        wanted = torch.cat([torch.zeros(1, WIDTH), rows[0], torch.zeros(1, WIDTH), *rows[1:]])
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
        assert connector.stats().misses == 2
        too_short = connector.submit(EncodeRequest("r", [MediaItem("audio", speech(0))]))
        assert too_short.wait(60) == "unavailable"
        connector.release(ticket)
        assert connector.audit() == []


def test_each_modality_has_its_processor(processor: AudioProcessor) -> None:
    both, image = ProcessorByModality({"image": FakeProcessor(), "audio": processor}), MediaItem("image", "a")
    audio = MediaItem("audio", speech(100))
    assert (both.digest(image), both.digest(audio)) == (
        FakeProcessor().digest(image),
        processor.digest(audio),
    )
    assert [both.prepare(item).num_tokens for item in (image, audio)] == [4, ROWS]
    assert [both.count_tokens(item) for item in (image, audio)] == [4, ROWS]
    assert both.reduce(audio, "half_resolution") is None
    smaller = both.reduce(image, "half_resolution")
    assert smaller is not None and smaller.options["tokens"] == 2


def test_a_modality_without_a_processor_is_refused() -> None:
    with pytest.raises(MediaError, match="expected image; got 'audio'"):
        ProcessorByModality({"image": FakeProcessor()}).digest(MediaItem("audio", b""))


def test_the_processors_file_may_be_joint(checkpoint: Path, encoder: ManagerEncoder, tmp_path: Path) -> None:
    own = json.loads((checkpoint / "preprocessor_config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text("utf-8"), encoding="utf-8")
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": own}), encoding="utf-8")
    made = [
        media_processor(encoder.manager.tower, path, hash_name="sha256") for path in (checkpoint, tmp_path)
    ]
    item = MediaItem("audio", speech(100))
    assert made[0].digest(item) == made[1].digest(item)
