"""What tuning found: the ladder of every path, what it is predicted to do, and whether it is worth using."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.tuning.forecast import LadderForecast

_BUDGETS_COLUMN_WIDTH = 24

# Less is within what predictions are worth.
_WORTH = 0.02


@dataclass(frozen=True)
class PathTuning:
    """The tuned ladder of a path, and what it is compared with."""

    tuned: LadderForecast
    baseline: LadderForecast
    """Of the ladder in use, where that is known; else of the default one, from the smallest to the largest
    demand that a budget may serve."""

    def as_dict(self) -> dict[str, Any]:
        """Both forecasts as plain values that JSON can hold."""
        return {"tuned": asdict(self.tuned), "baseline": asdict(self.baseline)}


@dataclass(frozen=True)
class Tuning:
    """The tuned ladder of every path; printing it shows them as a table."""

    paths: Mapping[str, PathTuning]
    unit: str
    """What costs are counted in."""

    max_items_per_batch: int = 0
    """The items of a batch that the demands were cut for; 0: it is not known."""

    max_bytes: int | None = None
    """The memory limit that the ladders keep; None: none."""

    packing: Packing = "cost"
    """How the manager was taken to pack."""

    host_cost: float = 0.0
    """What the batches of the tuned ladders cost the host in addition; 0.0 where costs are not times."""

    baseline_name: str = "default"
    """Which ladders the tuned ones are compared with: "default", or "current" ones."""

    baseline_host_cost: float = 0.0
    """What the batches of those cost the host."""

    @property
    def cost(self) -> float:
        """Of all demands of all paths, by the tuned ladders, and of the host."""
        return sum(path.tuned.cost for path in self.paths.values()) + self.host_cost

    @property
    def gain(self) -> float:
        """The share of the baseline's cost that the tuned ladders save; negative where they cost more."""
        before = sum(path.baseline.cost for path in self.paths.values()) + self.baseline_host_cost
        return 1 - self.cost / before

    @property
    def advice(self) -> str:
        """Whether the tuned ladders are worth using, in a line."""
        tuned = sum(len(path.tuned.budgets) for path in self.paths.values())
        before = sum(len(path.baseline.budgets) for path in self.paths.values())
        name = f"the {self.baseline_name} ladder ({before} graphs)"
        if self.gain >= _WORTH:
            return f"Use it: predicted to cost {self.gain:.1%} less than {name}."
        if self.gain <= -_WORTH:
            return f"Nothing to gain: {name} is predicted to cost less. Keep it, or allow more graphs."
        if tuned < before:
            return f"Nothing to gain but memory: {name} costs as much; the tuned one has {tuned}."
        return f"Nothing to gain: {name} costs as much. Keep it."

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values that JSON can hold."""
        return {
            "unit": self.unit,
            "packing": self.packing,
            "cost": self.cost,
            "gain": self.gain,
            "advice": self.advice,
            "baseline": self.baseline_name,
            "paths": {name: path.as_dict() for name, path in self.paths.items()},
        }

    @property
    def ladders(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The tuned budgets of every path, with its name."""
        return tuple((name, path.tuned.budgets) for name, path in self.paths.items())

    def to_config(self) -> EncoderConfig:
        """The settings to capture the ladders with."""
        budgets = {name: path.tuned.budgets for name, path in self.paths.items()}
        if budgets.keys() == {"default"}:
            settings: dict[str, object] = {"token_budgets": budgets["default"]}
        else:
            settings = {"paths": {name: {"token_budgets": ladder} for name, ladder in budgets.items()}}
        if self.max_items_per_batch:
            settings["max_items_per_batch"] = self.max_items_per_batch
        if self.max_bytes is not None:
            settings["max_graph_bytes"] = self.max_bytes
        if self.packing != "cost":
            settings["packing"] = self.packing
        return EncoderConfig(**settings)

    def __str__(self) -> str:
        headers = ["path", "ladder", "budgets", "graphs", "padding %", "hit %", "cost", "ratio"]
        rows = [
            [name, label, *ladder.row(), ladder.cost / path.baseline.cost]
            for name, path in self.paths.items()
            for label, ladder in (("tuned", path.tuned), (self.baseline_name, path.baseline))
        ]
        table = tabulate(
            rows,
            headers,
            floatfmt=("", "", "", "", ".1f", ".1f", ".1f", ".3f"),
            maxcolwidths=[None, None, _BUDGETS_COLUMN_WIDTH],
        )
        ratio = f"its ratio to that of the {self.baseline_name} ladder"
        return f"Predicted cost of all batches in {self.unit}, and {ratio}:\n{table}"
