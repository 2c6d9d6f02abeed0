"""A recorded run: beside the sizes of every request, how it was served, and what served it.

A line of `{"run": {...}}` comes before the first request, and again whenever the captures have changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.tuning.costs import BatchCosts, parse_costs
from fxsplit_encoder.tuning.trace import Request, read_lines, read_request


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class CaptureRecord(_Record):
    """One capture that served."""

    budget: int
    mode: str
    num_bytes: int
    """Device memory that capturing it added."""


class PathRecord(_Record):
    """One path of the tower."""

    budgets: tuple[int, ...]
    """Output tokens of the budgets that were asked for."""
    captures: tuple[CaptureRecord, ...] = ()
    not_kept: tuple[int, ...] = ()
    """Budgets whose exact shape was measured to be as fast."""
    costs: Mapping[str, Any] | None = None
    """What was measured, as `read_costs` takes it; None: nothing, as on a CPU."""


class RunRecord(_Record):
    """What served requests."""

    tower: str
    device: str
    dtype: str
    versions: Mapping[str, str]
    """Of packages, by name."""
    config: Mapping[str, Any]
    """The settings that were set."""
    max_items_per_batch: int
    max_frames_per_batch: int
    paths: Mapping[str, PathRecord]
    notes: tuple[str, ...] = ()
    """What did not go as asked."""


class ServedPath(_Record):
    """How one path of a batch was served."""

    tokens: int
    budget: int | None = None
    """What was replayed, in output tokens; None: nothing."""
    result: str
    """hit, skipped, or the reason of the miss."""
    eager: bool = False
    """Whether what was not replayed ran eagerly."""
    milliseconds: float | None = None
    """The predicted time on the device."""


class ServedBatch(_Record):
    """Items that were encoded together."""

    items: tuple[int, ...]
    output_tokens: int
    paths: Mapping[str, ServedPath]


class ServedRequest(NamedTuple):
    """One request."""

    items: Request
    batches: tuple[ServedBatch, ...]
    host_ms: float
    """How long the call kept its thread."""


class RecordedRun(NamedTuple):
    """Everything that a trace tells of a run."""

    runs: tuple[RunRecord, ...]
    """What served, in order; at least one."""
    requests: tuple[ServedRequest, ...]


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """A recorded run.

    Raises:
        InputError: the file cannot be read, a line is malformed, or it holds sizes alone.
    """
    name = os.fspath(path)
    runs: list[RunRecord] = []
    requests: list[ServedRequest] = []
    for where, line in read_lines(path):
        if "run" in line:
            runs.append(_validated(RunRecord, line["run"], where))
        elif "batches" in line:
            requests.append(_read_served(line, where))
    if not runs or not requests:
        raise InputError(
            f"{name}: expected a run that EncoderCudaGraphManager.record_trace wrote, with how requests were "
            "served; this file holds " + ("no request" if runs else "sizes alone, or nothing")
        )
    return RecordedRun(tuple(runs), tuple(requests))


def recorded_costs(
    path: str | os.PathLike[str],
) -> tuple[dict[str, BatchCosts] | None, dict[str, tuple[int, ...]]]:
    """What the last run in a trace measured, by path, and the budgets of its captures.

    Returns:
        The costs; None: it measured nothing, or not of every path. The budgets; empty: there is no run.

    Raises:
        InputError: a line is malformed.
    """
    last = None
    for where, line in read_lines(path):
        if "run" in line:
            last = where, _validated(RunRecord, line["run"], where)
    if last is None:
        return None, {}
    where, run = last
    current = {name: tuple(c.budget for c in record.captures) for name, record in run.paths.items()}
    current = current if all(current.values()) else {}
    if any(record.costs is None for record in run.paths.values()):
        return None, current
    costs = {name: parse_costs(record.costs, f"{where}, {name}") for name, record in run.paths.items()}
    return costs, current


def _read_served(line: Mapping[str, Any], where: str) -> ServedRequest:
    batches, host_ms = line["batches"], line.get("host_ms", 0.0)
    if not isinstance(batches, list):
        raise InputError(f"{where}, batches: expected a list; got {batches!r}")
    if isinstance(host_ms, bool) or not isinstance(host_ms, int | float):
        raise InputError(f"{where}, host_ms: expected milliseconds; got {host_ms!r}")
    served = tuple(_validated(ServedBatch, batch, where) for batch in batches)
    return ServedRequest(read_request(line, where), served, host_ms)


R = TypeVar("R", bound=_Record)


def _validated(record: type[R], value: Any, where: str) -> R:
    try:
        return record.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}, {field}: {first['msg']}") from None
