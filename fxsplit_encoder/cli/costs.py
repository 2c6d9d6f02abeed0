"""Where `tune` has its costs from: measured now, from a file, from the trace itself; or estimated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.tuning import BatchCosts, read_costs
from fxsplit_encoder.tuning.recording import recorded_costs

if TYPE_CHECKING:
    from fxsplit_encoder.cli.tower import ChosenTower

ESTIMATE_NOTE = "without costs it is open which budgets a GPU keeps: record there, or give --model"


@dataclass(frozen=True)
class FoundCosts:
    """What batches cost."""

    costs: BatchCosts | Mapping[str, BatchCosts] | None
    """For every path alike or by path; None: they have to be estimated."""
    source: str
    """Where they are from, in words."""
    current: Mapping[str, tuple[int, ...]] | None = None
    """The budgets that the recorded run captured, by path; None: not known."""


def find_costs(trace: Path, file: Path | None) -> FoundCosts:
    """The costs in a file, or else those that a recorded run measured.

    Raises:
        InputError: one of the files is malformed.
    """
    recorded, current = recorded_costs(trace)
    if file is not None:
        return FoundCosts(read_costs(file), str(file), current or None)
    if recorded is not None:
        return FoundCosts(recorded, "measured by the recorded run", current or None)
    return FoundCosts(None, "estimated", current or None)


def measure_costs(chosen: ChosenTower, file: Path) -> None:
    """Captures a tower's default ladder on its GPU, and writes what replays and exact shapes cost.

    Raises:
        InputError: it is not on a GPU, or no capture pays there.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.console import progress_bars
    from fxsplit_encoder.manager.recording import measured_costs

    device = next(chosen.module.parameters()).device
    if device.type != "cuda":
        raise InputError(f"--model: costs are measured on a GPU; expected --device cuda; got {device}")
    manager = fx.EncoderCudaGraphManager(chosen.family.wrap(chosen.module))
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
    measured = {name: measured_costs(path) for name, path in manager.paths.items()}
    manager.clear()
    if nothing := [name for name, costs in measured.items() if costs is None]:
        raise InputError(
            f"--model: nothing to gain: on this GPU no capture of path {nothing[0]} pays, its exact shapes "
            "are as fast"
        )
    file.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
