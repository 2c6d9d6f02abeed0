"""`encoder-cg bench`: what is measured, how it is shown, and what is advised."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from fxsplit_encoder.cli import bench as bench_run
from fxsplit_encoder.cli.bench import Measured, advice
from fxsplit_encoder.cli.tower import Batch
from fxsplit_encoder.cli.ways import WAYS, Running

from ..models.checkpoints import save
from .conftest import refuse, run, succeed

TITLES = {name: way.title for name, way in WAYS.items()}


def measured(item: str, **ms: float) -> Measured:
    return Measured(Batch({"item": item}, {}), {name.replace("_", "-"): each for name, each in ms.items()})


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path, size in zip(paths, [(96, 64), (64, 128), (96, 64)], strict=True):
        Image.effect_noise(size, 60).convert("RGB").save(path)
    return paths


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """Few captures without a trace, on a CPU."""
    config = tmp_path / "config.yaml"
    config.write_text("token_budgets: [8, 64]\nmode: breakable\nmax_items_per_batch: 4\n", encoding="utf-8")
    return ["--device", "cpu", "--config", config]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "qwen", "qwen2_vl")[1]


def test_images_are_measured_alone_and_together(
    checkpoint: Path, images: list[Path], options: list[object], tmp_path: Path
) -> None:
    numbers = tmp_path / "numbers.json"
    result = succeed("bench", checkpoint, *images, *options, "-o", numbers)
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert [row["item"] for row in found["rows"]] == ["0.png", "1.png", "all 3"], "a size once"
    assert all(row["eager_ms"] > 0 and row["ours_ms"] > 0 for row in found["rows"])
    assert found["notes"] == ["CUDA graph needs a GPU", "reduce-overhead needs a GPU"]
    out = result.stdout
    assert "No advice: without a GPU these times say nothing about one." in out
    assert "gain" not in out and "ratio" not in out
    assert f"wrote {numbers}" in out


@pytest.mark.parametrize(
    ("prepare", "note"),
    [
        (
            mock.Mock(side_effect=RuntimeError("no kernel\nimage is available")),
            "ours failed: RuntimeError: no kernel",
        ),
        (
            lambda mm_kwargs: lambda: [torch.zeros(1, 1)],
            "ours failed: RuntimeError: it is wrong: differs from eager by 1 of",
        ),
    ],
)
def test_a_way_that_fails_or_is_wrong_leaves_the_others(
    checkpoint: Path,
    images: list[Path],
    options: list[object],
    monkeypatch: pytest.MonkeyPatch,
    prepare: Any,
    note: str,
) -> None:
    way = WAYS["ours"]._replace(start=lambda *_: Running(prepare))
    monkeypatch.setitem(WAYS, "ours", way)
    found = json.loads(run("bench", checkpoint, images[0], *options, "--json").stdout)
    assert any(each.startswith(note) for each in found["notes"])
    assert found["rows"][0]["eager_ms"] > 0 and found["rows"][0]["ours_ms"] is None


def test_many_sizes_are_thinned_out(
    checkpoint: Path, tmp_path: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "_MOST_ALONE", 3)
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(1, 6):
        Image.effect_noise((64, 56 * number), 60).convert("RGB").save(folder / f"{number}.png")
    found = json.loads(run("bench", checkpoint, folder, *options, "--json", "--ways", "eager").stdout)
    assert [row["item"] for row in found["rows"]] == ["1.png", "3.png", "5.png", "all 5"]
    assert "of 5 sizes 3 are measured alone" in found["notes"][0]


def test_mistakes_are_a_line(checkpoint: Path, images: list[Path], tmp_path: Path) -> None:
    cases = {
        ("--ways", "ours,graphs"): "--ways graphs: no such way; did you mean graph? expected some of eager,",
        ("-o", tmp_path): "a directory; expected the file to write",
    }
    if not torch.cuda.is_available():
        cases[()] = "bench measures what a GPU gains, and there is none here"
    for arguments, message in cases.items():
        refuse(message, "bench", checkpoint, *images, *arguments)


BEST = "1.20 to 1.50 times as fast as the best other way"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [measured("a", eager=16, graph=3, ours=2), measured("b", eager=20, graph=12, ours=10)],
            f"Use the manager: {BEST}, 2.00 to 8.00 times as fast as eager.",
        ),
        (
            [measured("a", eager=4, ours=2), measured("b", reduce_overhead=10, ours=10)],
            "Use the manager: 2.00 times as fast as the best other way, 2.00 times as fast as eager; "
            "nothing to gain on b, where reduce-overhead is as fast.",
        ),
        (
            [measured("a", eager=16, graph=2, ours=2), measured("b", eager=10, graph=12, ours=10)],
            "Nothing to gain on these images: CUDA graph or eager is as fast.",
        ),
        ([], "No advice: ours or everything else was not measured."),
    ],
    ids=["all", "some", "none", "nothing measured"],
)
def test_advice_says_where_there_is_a_gain(rows: list[Measured], expected: str) -> None:
    assert advice([*rows, measured("c", eager=9)], TITLES) == expected
