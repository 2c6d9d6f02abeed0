"""Where `tune` has its costs from: measured now, from a file, from the trace itself; or estimated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.tuning import BatchCosts, LadderLimits, read_costs, read_trace, tune_trace
from fxsplit_encoder.tuning.trace import recorded_costs

if TYPE_CHECKING:
    from fxsplit_encoder.cli.tower import ChosenTower


@dataclass(frozen=True)
class FoundCosts:
    """Costs of batches."""

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
    from fxsplit_encoder.manager.manager import measured_costs

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


def run_tune(
    trace: Path,
    output: Path | None,
    limits: LadderLimits,
    found: FoundCosts,
    packing: Packing,
    document: Document,
) -> None:
    """Choose budgets for a trace, and say what they would do compared with others.

    Raises:
        InputError: the trace, the costs or an option is not usable.
    """
    requests = read_trace(trace)
    if not requests:
        raise InputError(f"{trace}: expected one request per line; got an empty trace")
    num_items = sum(len(request) for request in requests)
    what = f"{len(requests)} requests, {num_items} items"
    document.facts({"trace": f"{trace}, {what}", "costs": found.source, "packing": packing})
    if found.costs is None:
        document.notes(["without costs it is open which budgets a GPU keeps: record there, or give --model"])
    tuning = tune_trace(requests, limits, costs=found.costs, packing=packing, current=found.current)
    document.put("tuning", tuning.as_dict(), f"\n{tuning}\n\n{tuning.advice}")
    settings = tuning.to_config().model_dump(mode="json", exclude_unset=True)
    made_from = f"# Tuned for {trace.name}: {what}; at most {limits.max_graphs} graphs of each path.\n"
    text = made_from + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    if output is None:
        document.put("config", settings, f"\n{text}".rstrip())
        return
    output.write_text(text, encoding="utf-8")
    document.content["config"] = settings
    document.put("file", str(output), f"\nwrote {output}")


def parse_bytes(size: str) -> int:
    """The bytes of a size, as the configuration reads it; raises InputError where it is no such size."""
    try:
        parsed = EncoderConfig(max_graph_bytes=size).max_graph_bytes
    except ConfigError as error:
        raise InputError(f"--max-bytes {size}: {error}") from None
    assert parsed is not None
    return parsed
