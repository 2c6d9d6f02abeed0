"""The results of `encoder.py`: how they are stored, merged and compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from storage import load, store

Row = dict[str, Any]

FLOOR = "floor"
"""The arithmetic floor, where the name of a contender may stand."""


class Key(NamedTuple):
    """What tells rows apart."""

    tower: str
    contender: str
    workload: str


@dataclass
class Records:
    """Everything that was measured on one kind of machine; `save` writes it as it is so far.

    Rows hold milliseconds (`p50`, `p99`, `cpu`, `gpu`), `bytes` and `prepare_seconds`, or, in their place,
    why there are none: "skipped" or "failure".
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    towers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: the rate of a matrix product, and `workloads`, each with patches, items and operations."""
    starts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By "tower contender": seconds and bytes before the first request, or why there is no such contender."""
    rows: dict[Key, Row] = field(default_factory=dict)

    # --- what is measured

    def add(self, tower: str, contender: str, event: Mapping[str, Any]) -> None:
        """Adds what a worker sent."""
        values = {name: value for name, value in event.items() if name not in ("event", "workload")}
        known = self.towers.setdefault(tower, {"workloads": {}})
        match event["event"]:
            case "rate":
                known.update(values)
            case "workload":
                known["workloads"][event["workload"]] = values
            case "start":
                self.starts[f"{tower} {contender}"] = values
            case "row":
                self.rows[Key(tower, contender, event["workload"])] = values

    def fail(self, tower: str, contender: str, failure: str) -> None:
        """Notes why a contender ended early; its rows so far stay."""
        self.starts.setdefault(f"{tower} {contender}", {})["failure"] = failure

    def skip(self, tower: str, contender: str, reason: str) -> None:
        """Notes why a contender does not run."""
        self.starts[f"{tower} {contender}"] = {"skipped": reason}

    def sort_workloads(self, tower: str, order: Iterable[str]) -> None:
        """Brings a tower's workloads into an order; those that it lacks stay behind."""
        measured = self.towers[tower]["workloads"]
        self.towers[tower]["workloads"] = {
            name: measured[name] for name in dict.fromkeys([*order, *measured]) if name in measured
        }

    # --- what follows

    def milliseconds(self, tower: str, contender: str, workload: str) -> float | None:
        """The median wall time of a contender, or of `FLOOR`; None if it was not measured.

        The floor is a request's operations over the rate of the matrix product, the median of the requests.
        """
        if contender != FLOOR:
            return self.rows.get(Key(tower, contender, workload), {}).get("p50")
        known = self.towers.get(tower, {})
        if "gemm_flops_per_second" not in known or workload not in known["workloads"]:
            return None
        flops: list[int] = known["workloads"][workload]["flops"]
        return statistics.median(flops) / known["gemm_flops_per_second"] * 1e3

    def ratio(self, tower: str, workload: str, one: str, other: str) -> float | None:
        """The time of one contender over that of another; either may be `FLOOR`."""
        times = [self.milliseconds(tower, contender, workload) for contender in (one, other)]
        return None if times[0] is None or times[1] is None else times[0] / times[1]

    def patches(self, tower: str, workload: str) -> float | None:
        """Patches of a request, the median of the requests."""
        known = self.towers.get(tower, {}).get("workloads", {}).get(workload)
        return None if known is None else statistics.median(known["patches"])

    def workloads(self, tower: str) -> list[str]:
        """What a tower was measured on, in the order in which it ran."""
        measured = (key.workload for key in self.rows if key.tower == tower)
        return list(dict.fromkeys([*self.towers.get(tower, {}).get("workloads", {}), *measured]))

    def contenders(self, tower: str) -> list[str]:
        """What a tower was run by, with a time of at least one workload."""
        timed = (key for key, row in self.rows.items() if key.tower == tower and "p50" in row)
        return list(dict.fromkeys(key.contender for key in timed))

    def slower(self, contender: str, other: str) -> list[str]:
        """The workloads on which one contender is slower than another, as sentences."""
        found = []
        for tower, known, workload in self.rows:
            ratio = self.ratio(tower, workload, contender, other) if known == contender else None
            if ratio is not None and ratio > 1:
                found.append(f"{tower}, {workload}: {contender} takes {ratio:.2f} times as long as {other}")
        return found

    @property
    def failures(self) -> list[str]:
        """Everything that went wrong, as sentences."""
        ended = [f"{name}: {start['failure']}" for name, start in self.starts.items() if "failure" in start]
        rows = [f"{' '.join(key)}: {row['failure']}" for key, row in self.rows.items() if "failure" in row]
        return ended + rows

    # --- files

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [{**key._asdict(), **row} for key, row in self.rows.items()]
        return {**vars(self), "rows": rows}

    def save(self, path: Path) -> None:
        """Writes everything into a file, as a whole."""
        store(path, self.as_dict())

    @classmethod
    def load(cls, path: Path) -> Records:
        """Reads what `save` wrote."""
        return cls.from_dict(load(path))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Records:
        """The inverse of `as_dict`."""
        rows = {}
        for row in stored["rows"]:
            key = Key(*(row[name] for name in Key._fields))
            rows[key] = {name: value for name, value in row.items() if name not in Key._fields}
        return cls(**{**stored, "rows": rows})


def merge(parts: Sequence[Records]) -> Records:
    """The results of several runs as one; of what several hold, the last one's. Each tower keeps the commit
    that it was measured at.

    Raises:
        ValueError: they come from other kinds of machine, versions or settings, or those of one tower from
            several commits.
    """
    first = parts[0]
    merged = Records(dict(first.environment), first.settings)
    for part in parts:
        for name in ("environment", "settings"):
            differing = _differences(getattr(first, name), getattr(part, name)) - {"commit"}
            if differing:
                raise ValueError(
                    f"these results cannot be merged; they differ in {', '.join(sorted(differing))}"
                )
        for tower, known in part.towers.items():
            commit = known.get("commit", part.environment.get("commit"))
            mine = merged.towers.setdefault(tower, {"workloads": {}, "commit": commit})
            if mine["commit"] != commit:
                raise ValueError(
                    f"these results cannot be merged; {tower} was measured at {mine['commit']} and {commit}"
                )
            workloads = {**mine["workloads"], **known["workloads"]}
            mine.update({**known, "workloads": workloads})
        merged.starts.update(part.starts)
        merged.rows.update(part.rows)
    commits = dict.fromkeys(known["commit"] for known in merged.towers.values() if known["commit"])
    merged.environment["commit"] = ", ".join(commits) or None
    return merged


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}
