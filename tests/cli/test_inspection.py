from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.cli.inspection import run_inspect, say_captures, say_towers
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.towers import DenseTowerSpec


def say(config: Any, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    config.architectures = [type(config).__name__.replace("Config", "Model")]
    config.save_pretrained(directory)
    document = Document()
    return say_towers(Checkpoint.locate(directory), document), capsys.readouterr().out


def test_the_towers_of_a_checkpoint_are_listed_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a family that no other command knows, too; without weights there is nothing to load."""
    is_known, text = say(transformers.ViTConfig(num_hidden_layers=1), tmp_path, capsys)
    assert not is_known
    assert re.search(r"ViTModel +by rule", text)
    is_known, text = say(transformers.ViTMAEConfig(num_hidden_layers=1), tmp_path, capsys)
    assert not is_known
    assert "the model (ViTMAEModel): it draws random numbers: aten.rand.default" in text
    is_known, text = say(transformers.GPT2Config(n_layer=1), tmp_path, capsys)
    assert "no vision tower was found in GPT2Model" in text


class Blocks(nn.Module):
    """Attention blocks over tiles; `mixed` says behind which one the tiles of a batch are averaged."""

    def __init__(self, mixed: int | None) -> None:
        super().__init__()
        self.mixed = mixed
        self.proj = nn.Linear(4, 4)
        self.sizes = SimpleNamespace(depth=3, hidden_size=4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values.flatten(2).transpose(1, 2)
        x = F.pad(x, (0, 1))[:, :, None]
        for block in range(3):
            y = self.proj(x).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(y, y, y).transpose(1, 2)
            if block == self.mixed:
                x = x - x.mean(0, keepdim=True)
        return x.flatten(2)


class Family:
    """What `run_inspect` needs of one."""

    @staticmethod
    def wrap(module: nn.Module) -> Any:
        return fx.wrap(module, DenseTowerSpec((3, 2, 2), 4, 4, output=lambda features: features))


def test_passes_and_unproved_nodes_stand_beside_their_places(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxsplit_encoder.cli.inspection.describe_tower", lambda tower: "3 blocks")
    run_inspect(Blocks(1).eval(), Family(), fx.EncoderConfig(), Document())  # type: ignore[arg-type]
    out = capsys.readouterr().out
    (verdict,) = [line for line in out.splitlines() if line.startswith("padding ")]
    assert verdict.startswith(
        "padding  declared by the tower, not proved: mean: mean reduces over tokens, at "
    )
    (passes,) = [line for line in out.splitlines() if "passes" in line]
    assert "conv_to_linear 0" in passes
    assert "test_inspection.py" in verdict and ".mean(" in verdict
    rows = {line.split("  ")[0]: line for line in out.splitlines() if line.startswith(("piece", "splitting"))}
    # First piece, behind the first attention, behind the second with the mean, and the last.
    assert rows["piece 0"].endswith("proved") and rows["piece 1"].endswith("proved")
    assert "mean: " in rows["piece 2"]
    assert rows["piece 3"].endswith("reads rows that are not proved")
    (splits,) = (row for name, row in rows.items() if name.startswith("splitting op"))
    assert splits.endswith("reads rows that are not proved")


def test_captures_are_shown_with_their_graphs_and_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    wrapped = Family.wrap(Blocks(None).eval())
    for mode, graphs, breaks in (("full", 1, 0), ("piecewise", 4, 3), ("breakable", 4, 3)):
        say_captures(wrapped, fx.EncoderConfig(mode=mode, token_budgets=(4, 8)), Document())
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if "default" in line]
        assert [line[1:6] for line in lines] == [
            [str(budget), mode, str(graphs), str(breaks), str(graphs + breaks)] for budget in (4, 8)
        ]


def test_captures_that_come_later_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    say_captures(Family.wrap(Blocks(None).eval()), fx.EncoderConfig(mode="exact"), Document())
    assert "default: token counts are captured when they come" in " ".join(capsys.readouterr().out.split())
