"""The commands: what they print and write, and their errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from safetensors import safe_open
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from typer.testing import CliRunner

import fxsplit_encoder as fx
from fxsplit_encoder.cli import demo, document
from fxsplit_encoder.cli.document import read_config, shipped
from fxsplit_encoder.cli.main import MODELS, OneLineErrors, app
from fxsplit_encoder.cli.tower import choose_device, choose_tower
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.patches import IMAGE_FORMAT, VIDEO_FORMAT, BlockPatches, block_eager
from fxsplit_encoder.models.prepare import load_inputs
from fxsplit_encoder.models.registry import ARCHITECTURES

from .conftest import refuse, run, succeed

SaveCheckpoint = Callable[..., Path]


@pytest.fixture
def photographs(tmp_path: Path) -> list[Path]:
    """Two photographs, in directories of their own and under one name, and a clip."""
    paths = []
    for number, size in enumerate([(96, 64), (64, 128)]):
        path = tmp_path / str(number) / "photo.png"
        path.parent.mkdir()
        Image.effect_noise(size, 60).convert("RGB").save(path)
        paths.append(path)
    frames = [Image.effect_noise((64, 64), 60).convert("RGB") for _ in range(3)]
    clip = tmp_path / "clip.webp"
    frames[0].save(clip, save_all=True, append_images=frames[1:], lossless=True)
    return [clip, *paths]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    text = "token_budgets: [8, 16]\nmax_items_per_batch: 4\nmax_frames_per_batch: 4\npiece_compiler: eager\n"
    path.write_text(text, encoding="utf-8")
    return path


def without_a_trace(config: Path) -> None:
    config.write_text(f"{config.read_text(encoding='utf-8')}mode: breakable\n", encoding="utf-8")


def images(paths: Sequence[Path]) -> list[object]:
    return [argument for path in paths for argument in ("--images", path)]


@pytest.mark.slow
def test_demo(photographs: list[Path], config: Path, tmp_path: Path) -> None:
    options = ("--config", config, "--device", "cpu", "-o", tmp_path / "demo.json")
    result = succeed("demo", "--blocks", 1, *options, *images(photographs))
    out = result.stdout
    assert "1 blocks, width 1152" in out
    found = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert [row["item"] for row in found["items"]] == ["photo.png", "photo.png#2", "clip.webp", "all 3"]
    assert found["items"][0].keys() >= {"tokens", "budget", "difference"} and "ratio" not in found["items"][0]
    assert (found["plan"]["hits"], found["stats"]["hits"]) == (3, 6)
    assert found["verdict"] == "Every output is within 1e-04 of eager's."
    assert "no GPU: recorded steps are replayed without CUDA graphs; no times" in out
    (headers,) = [line.split() for line in out.splitlines() if line.startswith("item ")]
    assert headers == "item size px patches tokens budget mode served |diff|".split()
    assert "cut at 1 x fxsplit::varlen_attention" in out
    assert "3 items in 2 batches: 3 hit" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["clip.webp"][1:7] == ["3x64x64", "32", "8", "8", "full", "hit"]
    assert "3 of 3" in out and found["verdict"] in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    assert "capturing" in result.stderr and "2/2" in result.stderr


def test_demo_in_bfloat16_is_judged_by_its_error(
    photographs: list[Path], config: Path, save_checkpoint: SaveCheckpoint
) -> None:
    without_a_trace(config)
    arguments = ("--model", save_checkpoint(), "--config", config, "--device", "cpu", "--dtype", "bfloat16")
    result = succeed("demo", *arguments, *images(photographs[:1]))
    assert "times eager's own (allowed: 1.1)" in result.stdout


def test_demo_counts_misses_and_fails_on_a_difference(
    photographs: list[Path], save_checkpoint: SaveCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FLOAT32_TOLERANCE", -1.0)
    small = tmp_path / "small.yaml"
    small.write_text("token_budgets: [4]\nmax_items_per_batch: 1\nmode: breakable\n", encoding="utf-8")
    options = ("--model", save_checkpoint(), "--config", small, "--device", "cpu")
    result = run("demo", *options, *images(photographs[1:2]))
    assert result.exit_code == 1
    assert "over_largest_budget" in result.stdout
    assert "0 of 1" in result.stdout
    assert "encoder-cg: FAILED: photo.png differs from eager by" in result.stderr
    assert "Every output" not in result.stdout


def test_encode(
    photographs: list[Path],
    config: Path,
    save_checkpoint: SaveCheckpoint,
    tiny_tower: Qwen3VLVisionModel,
    tmp_path: Path,
) -> None:
    without_a_trace(config)
    output = tmp_path / "embeddings.safetensors"
    model = save_checkpoint(shards=2)
    (model / "preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6]}', encoding="utf-8")
    options = ("--output", output, "--device", "cpu", "--config", config)
    result = succeed("encode", *photographs, "--model", model, *options)
    assert f"wrote {output}" in result.stdout.replace("\n", "")
    assert "hit" in result.stdout and "capturing" in result.stderr
    formats = (each.updated({"image_mean": [0.4, 0.5, 0.6]}) for each in (IMAGE_FORMAT, VIDEO_FORMAT))
    inputs = load_inputs(photographs, BlockPatches(*formats))
    with torch.no_grad():
        expected = block_eager(tiny_tower, inputs.mm_kwargs)
    with safe_open(output, framework="pt") as file:
        metadata = {name: json.loads(value) for name, value in file.metadata().items()}
        keys = ["photo.png", "photo.png#2", "clip.webp"]
        assert sorted(file.keys()) == sorted(keys)
        torch.testing.assert_close(
            torch.cat([file.get_tensor(key) for key in keys]), expected, rtol=0, atol=1e-5
        )
    assert metadata["items"] == {
        "photo.png": {"kind": "image", "grid": [1, 4, 6], "tokens": 6},
        "photo.png#2": {"kind": "image", "grid": [1, 8, 4], "tokens": 8},
        "clip.webp": {"kind": "video", "grid": [2, 4, 4], "tokens": 8},
    }
    assert metadata["model"] == str(model)
    assert metadata["config"]["token_budgets"] == [8, 16]


def test_build(save_checkpoint: SaveCheckpoint, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    file = tmp_path / "tower.start"
    text = f"token_budgets: [8, 16]\nmax_items_per_batch: 4\ncompile: false\nstart_file: {file}\n"
    settings.write_text(text, encoding="utf-8")
    model = save_checkpoint()
    result = succeed("build", "--model", model, "--config", settings, "-o", file, "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert found["file"] == str(file) and found["budgets"] == {"default": [8, 16]}
    assert found["notes"] == ["no GPU: nothing was measured, and on GPUs this file is refused"]
    chosen = choose_tower(str(model), None, "cpu", "auto")
    manager = fx.EncoderCudaGraphManager(chosen.family.wrap(chosen.module), read_config(settings))
    manager.capture()
    assert manager.reports == []
    disabled = tmp_path / "disabled.yaml"
    disabled.write_text("enabled: false\n", encoding="utf-8")
    refuse("enabled: false", "build", "--model", model, "--config", disabled, "-o", file, "--device", "cpu")


def test_inspect(config: Path, save_checkpoint: SaveCheckpoint) -> None:
    result = succeed("inspect", "--model", save_checkpoint(), "--config", config, "--device", "cpu")
    out = result.stdout
    assert "width 32" in out and "5: 3 pieces, 2 splitting ops, 0 host ops" in out
    assert re.search(r"padding  proved over \d\d+ nodes: no real row depends on pad rows", out)
    rows = [line for line in out.splitlines() if line.startswith(("piece", "splitting op"))]
    assert len(rows) == 4 and all(row.endswith("proved") for row in rows)
    assert "A replay holds at most 4 items, 4 video frames" in out
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["default", "8"], ["default", "16"]]
    assert max(map(len, out.splitlines())) <= 100


def test_inspect_as_json(config: Path, save_checkpoint: SaveCheckpoint, tmp_path: Path) -> None:
    config.write_text("token_budgets: [8, 16]\nmode: breakable\n", encoding="utf-8")
    output = tmp_path / "inspect.json"
    options = ("--config", config, "--device", "cpu", "--capture", "--attention")
    result = succeed("inspect", "--model", save_checkpoint(), *options, "--json", "-o", output)
    found = json.loads(result.stdout)
    assert found == json.loads(output.read_text(encoding="utf-8"))
    assert [row["budget"] for row in found["budgets"]] == [8, 16]
    assert [(row["budget"], row["mode"]) for row in found["captures"]] == [
        (8, "breakable"),
        (16, "breakable"),
    ]
    assert all(row["bytes"] > 0 for row in found["captures"])
    assert found["programs"] == {"default": {"split": "none, this path runs eagerly"}}
    states = {row["kernel"]: row["state"] for row in found["attention_kernels"]}
    assert states["per_segment"] == "works" and "needs CUDA" in states["torch_flash"]


def test_a_configuration_that_is_shipped_goes_by_its_name() -> None:
    assert read_config(Path("demo")) == fx.EncoderConfig.from_yaml(shipped("configs/demo.yaml"))


ERRORS = {
    "config": (["inspect", "--config", "absent.yaml"], "--config absent.yaml: no such file; expected"),
    "model": (["inspect", "--model", "absent"], "--model absent: no such directory or name; expected"),
    "shipped config": (["demo", "--config", "qwen3_vl"], "did you mean qwen3_vl_8b? expected one, or one of"),
    "blocks": (["demo", "--blocks", "28"], "blocks: expected 1 to 27; got 28"),
    "dtype": (["demo", "--dtype", "int8"], "'--dtype': 'int8' is not one of 'auto', 'float32'"),
    "option": (["demo", "--imags", "x"], "No such option: --imags"),
    "command": (["dmo"], "No such command 'dmo'. Did you mean 'demo'?"),
    "missing option": (["encode", "x.png"], "Missing option '--model'"),
    "directory": (["demo", "-o", "."], "--output .: a directory; expected the file to write"),
    "both": (["inspect", "--model", ".", "--blocks", "2"], "--blocks: only for a tower with random"),
    "device": (["inspect", "--device", "abacus"], "--device abacus: expected auto, cpu, cuda or cuda:N"),
    "number": (["inspect", "--device", "cuda:99"], "--device cuda:99: this machine has"),
    "image": (["demo", "--images", "absent.png"], "absent.png: no such file"),
    "output": (["encode", "x.png", "--model", ".", "-o", "absent/x"], "absent/x: no such directory: absent"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_are_a_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    refuse(message, *arguments)


def test_every_wrong_setting_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("token_budget: [8]\nmode: fast\n", encoding="utf-8")
    result = run("inspect", "--config", path)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["encoder-cg", "error"]] * 2
    assert any("did you mean token_budgets?" in line for line in lines)


def test_without_its_files_the_demo_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "ROOTS", (tmp_path / "data", tmp_path))
    message = "examples/images: not found, though it comes with every wheel"
    refuse(message, "demo", "--model", "clip-l-336", "--blocks", 1)
    (tmp_path / "data" / "examples" / "images").mkdir(parents=True)
    (tmp_path / "examples" / "images").mkdir(parents=True)
    assert shipped("examples/images") == tmp_path / "data" / "examples" / "images", "a wheel's own go first"


COMMANDS = ["demo", "encode", "serve", "inspect", "build", "bench", "tune", "report"]


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help(arguments: list[str]) -> None:
    for flags in (["--help"], ["-h"], *([[]] if not arguments else [])):
        result = run(*arguments, *flags)
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


def test_a_service_of_no_model_or_of_wrong_settings_is_refused(tmp_path: Path) -> None:
    refuse("/nowhere: no such directory", "serve", "/nowhere")
    settings = tmp_path / "settings.yaml"
    settings.write_text("max_request: 3\n", encoding="utf-8")
    refuse("did you mean max_requests?", "serve", "/nowhere", "--settings", settings)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("encoder-cg ", set(COMMANDS)),
        ("encoder-cg demo --mo", {"--model"}),
        ("encoder-cg demo --model qwen3", {"qwen3-vl-8b", "qwen3.5-9b", "qwen3.5-27b"}),
        ("encoder-cg bench intern", {"internvl3-8b", "internvl3-38b"}),
        ("encoder-cg demo --dtype b", {"bfloat16"}),
    ],
)
def test_a_shell_completes(words: str, found: set[str]) -> None:
    count = len(words.split()) - (not words.endswith(" "))
    environment = {"_ENCODER_CG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    result = CliRunner().invoke(app, [], env=environment)
    assert set(result.stdout.split()) == found


def test_every_model_is_completed() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


def test_versions() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"encoder-cg {fx.__version__}, torch {version('torch')}, transformers ")


@pytest.mark.parametrize("package", ["transformers", "rich"])
def test_a_missing_package_names_what_to_install(package: str) -> None:
    result = CliRunner().invoke(
        failing(ModuleNotFoundError(f"No module named {package!r}", name=package)), ["demo"]
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("encoder-cg: error: encoder-cg needs packages that are not installed")
    assert "the extra 'cli'; run: pip install " in result.stderr


RUN_OUT = {"out of memory on the device": torch.OutOfMemoryError("x"), "No space": OSError(28, "No space")}


@pytest.mark.parametrize("message", RUN_OUT)
def test_what_runs_out_is_a_line(message: str) -> None:
    result = CliRunner().invoke(failing(RUN_OUT[message]), ["demo"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert message in result.stderr


def test_a_fault_of_ours_is_a_traceback() -> None:
    error = ModuleNotFoundError("No module named 'fxsplit_x'", name="fxsplit_x")
    assert CliRunner().invoke(failing(error), ["demo"]).exception is error


def failing(error: Exception) -> typer.Typer:
    """A program that does nothing but fail, behind `encoder-cg`'s way to say so."""
    program = typer.Typer(cls=OneLineErrors, add_completion=False)

    @program.callback()
    def options() -> None:
        """None."""

    @program.command()
    def demo() -> None:
        raise error

    return program


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda", "auto"):
        choose_device(name)
    assert current == []
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(InputError, match="this machine has 2 CUDA devices"):
        choose_device("cuda:2")
    assert len(current) == 1
