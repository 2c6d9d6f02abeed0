"""`encoder-cg tune`: budgets for a trace, with costs of this GPU, of the recorded run, or estimated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import yaml

from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.tuning import BatchCosts, LadderLimits, MeasuredCosts, Tuning, read_trace, tune_trace

if TYPE_CHECKING:
    from fxsplit_encoder.cli.tower import ChosenTower

_BUDGETS_COLUMN_WIDTH = 24


def measure_costs(chosen: ChosenTower) -> dict[str, BatchCosts]:
    """Captures a tower's default ladder on its GPU; returns what replays and exact shapes cost, by path.
    InputError: it is not on a GPU, or no capture pays there.
    """
    import fxsplit_encoder as fx
    from fxsplit_encoder.cli.console import capture
    from fxsplit_encoder.manager.manager import measured_costs

    if chosen.device.type != "cuda":
        raise InputError(f"--model: costs are measured on a GPU; expected --device cuda; got {chosen.device}")
    manager = fx.EncoderCudaGraphManager(chosen.family.wrap(chosen.module))
    capture(manager)
    measured = {name: measured_costs(path) for name, path in manager.paths.items()}
    manager.clear()
    if nothing := [name for name, costs in measured.items() if costs is None]:
        raise InputError(
            f"--model: nothing to gain: on this GPU no capture of path {nothing[0]} pays, its exact shapes "
            "are as fast"
        )
    return {name: MeasuredCosts.model_validate(costs).curves() for name, costs in measured.items()}


def run_tune(
    trace: Path,
    output: Path | None,
    limits: LadderLimits,
    measured: Mapping[str, BatchCosts] | None,
    document: Document,
) -> None:
    """Chooses budgets for a trace, and says what they would do compared with others. Costs that were
    `measured`, by path, go before those of the recorded run. InputError: the trace is not usable.
    """
    recorded = read_trace(trace)
    if not recorded.requests:
        raise InputError(f"{trace}: expected one request per line; got an empty trace")
    run = recorded.runs[-1] if recorded.runs else None
    costs, source = measured, "measured on this GPU"
    if costs is None and run is not None:
        costs, source = run.costs(), "measured by the recorded run"
    what = f"{len(recorded.requests)} requests, {sum(len(each.items) for each in recorded.requests)} items"
    document.facts({"trace": f"{trace}, {what}", "costs": "estimated" if costs is None else source})
    if costs is None:
        document.notes(["without costs it is open which budgets a GPU keeps: record there, or give --model"])
    tuning = tune_trace(
        recorded.planned(),
        limits,
        costs=costs,
        packing=EncoderConfig().packing if run is None else run.packing,
        current=None if run is None else run.ladders(),
    )
    _say(tuning, document)
    settings = tuning.config.model_dump(mode="json", exclude_unset=True)
    document.content["config"] = settings
    made_from = f"# Tuned for {trace.name}: {what}; at most {limits.max_graphs} graphs of each path.\n"
    text = made_from + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    if output is None:
        document.say(f"\n{text}".rstrip())
        return
    output.write_text(text, encoding="utf-8")
    document.put("file", str(output), f"\nwrote {output}")


def _say(tuning: Tuning, document: Document) -> None:
    other = tuning.baseline_name
    rows = []
    for path, tuned in tuning.tuned.paths.items():
        baseline = tuning.baseline.paths[path]
        for label, ladder in (("tuned", tuned), (other, baseline)):
            ratio = ladder.cost / baseline.cost if baseline.cost else 1.0
            rows.append({"path": path, "ladder": label, **vars(ladder), "ratio": ratio})
    document.say(
        f"\nPredicted cost of all batches in {tuning.unit}, and its ratio to that of the {other} ladder:"
    )
    percent = "{:.1%}".format
    headers = {"padding_fraction": "padding", "hit_fraction": "hit"}
    formats: dict[str, Callable[[Any], str]] = {
        "padding_fraction": percent,
        "hit_fraction": percent,
        "cost": "{:.1f}".format,
    }
    formats |= {"ratio": "{:.3f}".format, "budgets": _budgets}
    document.table("ladders", rows, headers, formats, within=("tuning",))
    said = {"unit": tuning.unit, "gain": tuning.gain, "advice": tuning.advice, "baseline": other}
    document.content["tuning"].update(said)
    document.say(f"\n{tuning.advice}")


def _budgets(budgets: Sequence[int]) -> str:
    return fill(", ".join(map(str, budgets)), _BUDGETS_COLUMN_WIDTH)


def parse_bytes(size: str) -> int:
    """The bytes of a size, as the configuration reads it; raises InputError where it is no such size."""
    try:
        parsed = EncoderConfig(max_graph_bytes=size).max_graph_bytes
    except ConfigError as error:
        raise InputError(f"--max-bytes {size}: {error}") from None
    assert parsed is not None
    return parsed
