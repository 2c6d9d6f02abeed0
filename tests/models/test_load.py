import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.connectors import (
    checkpoint_connector,
    checkpoint_encoder,
    checkpoint_process,
    config_for,
    weightless_tower,
)
from fxsplit_encoder.models.load import load_tower
from fxsplit_encoder.models.media import media_processor
from fxsplit_encoder.models.prepare import ProcessorSettings

from .checkpoints import CHECKPOINTS, save

CPU = torch.device("cpu")
SaveCheckpoint = Callable[..., Path]


def embedding(tower: Qwen3VLVisionModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    patches = torch.randn(32, 1536, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        output = tower(patches, grid_thw=torch.tensor([[1, 4, 4], [1, 2, 8]]))
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    contents = json.loads(path.read_text(encoding="utf-8"))
    change(contents)
    path.write_text(json.dumps(contents), encoding="utf-8")


@pytest.mark.parametrize("prefix", ["model.visual.", "visual.", ""])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_reloaded_tower_computes_the_same(
    tiny_tower: Qwen3VLVisionModel, save_checkpoint: SaveCheckpoint, prefix: str, shards: int
) -> None:
    tower = load_tower(save_checkpoint(prefix, shards), torch.float32, CPU)
    assert not tower.training
    assert not any(tensor.is_meta for tensor in (*tower.parameters(), *tower.buffers()))
    torch.testing.assert_close(embedding(tower), embedding(tiny_tower), rtol=0, atol=0)


def test_a_bare_tower_as_the_library_saves_it(tiny_tower: Qwen3VLVisionModel, tmp_path: Path) -> None:
    tiny_tower.save_pretrained(tmp_path)
    tower = load_tower(str(tmp_path), torch.float32, CPU)
    torch.testing.assert_close(embedding(tower), embedding(tiny_tower), rtol=0, atol=0)


def test_the_dtype_is_the_parameters_but_not_the_frequencies(
    tiny_tower: Qwen3VLVisionModel, save_checkpoint: SaveCheckpoint
) -> None:
    tower = load_tower(save_checkpoint(), torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in tower.buffers()} == {torch.float32}
    ours, exact = embedding(tower, torch.bfloat16).float(), embedding(tiny_tower)
    assert torch.nn.functional.cosine_similarity(ours, exact).min() > 0.99


def test_missing_and_unexpected_tensors_are_named(save_checkpoint: SaveCheckpoint) -> None:
    directory = save_checkpoint()
    tensors = load_file(directory / "model.safetensors")
    bias = tensors.pop("model.visual.merger.norm.bias")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match=r"1 tensors missing: merger\.norm\.bias"):
        load_tower(directory, torch.float32, CPU)
    extra = {f"model.visual.extra.{n}": torch.zeros(1) for n in range(6)}
    tensors["model.visual.merger.norm.bias"] = bias
    save_file({**tensors, **extra}, directory / "model.safetensors")
    with pytest.raises(InputError, match=r"6 tensors unexpected: extra\.0, .*extra\.3 and 2 more"):
        load_tower(directory, torch.float32, CPU)


def test_a_tensor_of_another_shape_is_named(save_checkpoint: SaveCheckpoint) -> None:
    directory = save_checkpoint()
    edit_json(directory / "config.json", lambda config: config["vision_config"].update(out_hidden_size=20))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"merger.*fc2.* has the shape \(24.*config\.json says \(20"):
        load_tower(directory, torch.float32, CPU)


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, contents: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).write_text(contents, encoding="utf-8")

    return damage


def repeat_a_shard(directory: Path) -> None:
    shutil.copy(directory / "shard-0.safetensors", directory / "shard-1.safetensors")


def leave_language_alone(directory: Path) -> None:
    save_file({"model.language_model.embed_tokens.weight": torch.zeros(1)}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("shards", "damage", "message"),
    [
        (1, remove("config.json"), "no config.json"),
        (1, write("config.json", "{"), "config.json: not valid JSON"),
        (1, write("config.json", "[]"), "config.json: expected a JSON object; got list"),
        (1, write("config.json", '{"model_type": "llama"}'), "model_type 'llama'.*expected one of qwen3_vl,"),
        (1, remove("model.safetensors"), "no weights; expected model.safetensors, or"),
        (1, write("model.safetensors", "no tensors"), "model.safetensors: cannot be read as safetensors"),
        (2, remove("shard-1.safetensors"), "names shard-1.safetensors, which is missing"),
        (2, write("model.safetensors.index.json", "{}"), "has no weight_map"),
        (2, repeat_a_shard, r"shard-1\.safetensors: .*does not contain tensor model\.visual\."),
        (1, leave_language_alone, "no tensor of a vision tower"),
    ],
)
def test_damaged_checkpoints(
    save_checkpoint: SaveCheckpoint, shards: int, damage: Callable[[Path], None], message: str
) -> None:
    directory = save_checkpoint(shards=shards)
    damage(directory)
    with pytest.raises(InputError, match=message):
        load_tower(directory, torch.float32, CPU)


@pytest.mark.parametrize("model", ["word", "a/b/c", "./absent", "/absent/model", Path("owner/model")])
def test_what_is_neither_a_directory_nor_a_hub_name(model: str | Path) -> None:
    with pytest.raises(InputError, match="no such directory; expected one, or a hub name"):
        load_tower(model, torch.float32, CPU)


def test_a_hub_name_fetches_only_what_is_needed(
    save_checkpoint: SaveCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_checkpoint(shards=3)
    language = "shard-of-language.safetensors"
    index = directory / "model.safetensors.index.json"
    edit_json(index, lambda i: i["weight_map"].update({"model.language_model.norm.weight": language}))  # type: ignore[attr-defined]
    fetched = []

    def download(repository: str, file_name: str) -> str:
        assert repository == "owner/model"
        if not (directory / file_name).exists():
            raise EntryNotFoundError(file_name)
        fetched.append(file_name)
        return str(directory / file_name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_tower("owner/model", torch.float32, CPU).config.depth == 2
    assert sorted(fetched) == ["config.json", index.name, *(f"shard-{n}.safetensors" for n in range(3))]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("no network\nand more"), "the hub cannot be reached: no network$"),
        (OSError("not yours"), "the hub refuses: not yours$"),
    ],
)
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", mock.Mock(side_effect=error))
    with pytest.raises(InputError, match=f"owner/model: no such directory, and {message}"):
        load_tower("owner/model", torch.float32, CPU)


def test_processor_settings_come_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint.locate(tmp_path)
    assert checkpoint.processors() == ProcessorSettings()
    joint = {"image_processor": {"patch_size": 14}, "video_processor": {"merge_size": 1}}
    (tmp_path / "processor_config.json").write_text(json.dumps(joint), encoding="utf-8")
    assert checkpoint.processors() == ProcessorSettings({"patch_size": 14}, {"merge_size": 1})
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 12}', encoding="utf-8")
    assert checkpoint.processors() == ProcessorSettings({"patch_size": 14}, {"merge_size": 1})
    (tmp_path / "processor_config.json").unlink()
    assert checkpoint.processors() == ProcessorSettings({"patch_size": 12}, {"patch_size": 12})


# --- encoders of checkpoints


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tower_without_weights_counts_and_declares_as_one_with_them(
    name: str, photograph: Path, tmp_path: Path
) -> None:
    _, directory = save(tmp_path / "checkpoint", name)
    tower = weightless_tower(directory)
    assert all(parameter.is_meta for parameter in tower.parameters())
    here, apart = checkpoint_encoder(directory), checkpoint_process(directory)
    for modality in ("image", "video", "audio"):
        assert apart.row_bytes(modality) == here.row_bytes(modality)
    processor = media_processor(tower, directory)
    item = MediaItem("image", photograph)
    prepared = processor.prepare(item)
    (feature,) = here.encode([prepared])
    assert processor.count_tokens(item) == prepared.num_tokens == feature.shape[0]
    assert feature.nbytes == feature.shape[0] * (apart.row_bytes("image") or 0)


def test_settings_and_dtypes_are_taken(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "siglip")
    settings = tmp_path / "config.yaml"
    settings.write_text("mode: full\ntoken_budgets: [4]\n", encoding="utf-8")
    assert checkpoint_encoder(directory).manager.dtype is torch.float32  # the checkpoint's
    assert checkpoint_encoder(directory, dtype="float").manager.dtype is torch.float32  # as torch has it
    encoder = checkpoint_encoder(directory, settings, dtype="bfloat16")
    assert (encoder.manager.config.mode, encoder.manager.dtype) == ("full", torch.bfloat16)
    apart = checkpoint_process(directory, settings, dtype="bfloat16")
    assert apart.row_bytes("image") == encoder.row_bytes("image")
    assert apart.program.arguments["config"] == str(settings)


@pytest.mark.parametrize("dtype", ["int32", "nn", "no such"])
def test_a_dtype_that_is_none_is_an_error(dtype: str, tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "siglip")
    for make in (checkpoint_encoder, checkpoint_process):
        expected = f"dtype: expected auto or a floating-point dtype of torch, such as bfloat16; got '{dtype}'"
        with pytest.raises(InputError, match=expected):
            make(directory, dtype=dtype)


def test_encoders_of_a_connector_capture_nothing_while_requests_come(tmp_path: Path) -> None:
    assert config_for(None, torch.device("cuda")) == EncoderConfig(capture_recurring=False)
    assert config_for(None, torch.device("cpu")).mode == "none"
    given = EncoderConfig(mode="full")
    assert config_for(given, torch.device("cuda")) is given
    file = tmp_path / "settings.yaml"
    file.write_text("capture_recurring: true\n", encoding="utf-8")
    assert config_for(file, torch.device("cuda")).capture_recurring


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    _, checkpoint = save(tmp_path / "checkpoint", "qwen2_vl")
    with pytest.raises(InputError, match="devices: expected at least one"):
        checkpoint_connector(checkpoint, [])
    with pytest.raises(InputError, match=r"no config\.json"):
        checkpoint_encoder(tmp_path)
    (tmp_path / "bad.yaml").write_text("mode: fastest\n")
    with pytest.raises(ConfigError, match="mode"):
        checkpoint_encoder(checkpoint, tmp_path / "bad.yaml")
