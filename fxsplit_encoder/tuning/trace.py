"""A trace of requests: one JSON object per line, with the sizes of the request's images and videos.

    {"items": [{"input_size": 1024, "output_tokens": 256}, {"input_size": 784, "output_tokens": 196}]}

`segments` is left out where it is 1, `path_output_tokens` where "default" is the only path. A manager adds
how each request was served, and a line of `{"run": {...}}` before the first request and whenever the captures
have changed. A trace holds sizes and times, no media.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.packing import pack_greedy
from fxsplit_encoder.planning.plan import Capacity, Item, Loads
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.tuning.costs import BatchCosts, parse_costs

_ITEM_KEYS = ("input_size", "output_tokens", "segments", "path_output_tokens")
_REQUEST_KEYS = ("items", "batches", "host_ms")
_SHOWN_CHARACTERS = 60

Request = tuple[Item, ...]
"""The items of one request, in order, with their sizes and segments."""


def read_trace(path: str | os.PathLike[str]) -> list[Request]:
    """Reads the requests of a trace, in order; an empty file and empty lines hold none.

    Raises:
        InputError: the file cannot be read, or a line is not a request.
    """
    return [read_request(line, where) for where, line in read_lines(path) if "run" not in line]


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the JSON object of every non-empty line of a trace, and its place for messages.

    Raises:
        InputError: the file cannot be read, or a line is no object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{os.fspath(path)}, line {number}"
                    yield where, _read_line(line, where)
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{os.fspath(path)}: expected UTF-8 text; got {error}") from None


def read_request(line: Mapping[str, Any], where: str) -> Request:
    """The items of a request's line; raises InputError where it is not a request."""
    request = _object(line, where, required=("items",), allowed=_REQUEST_KEYS)
    if not isinstance(request["items"], list):
        raise InputError(f"{where}, items: expected a list; got {request['items']!r}")
    return tuple(_read_item(item, f"{where}, items[{n}]") for n, item in enumerate(request["items"]))


def traced_paths(requests: Sequence[Request]) -> list[str]:
    """The paths on which a trace has output tokens, in order of appearance.

    Raises:
        InputError: there are none.
    """
    names: dict[str, None] = {}
    for request in requests:
        for spec in (item.spec for item in request):
            for path in spec.path_output_tokens or ("default",):
                if spec.get_path_output_tokens(path):
                    names[path] = None
    if not names:
        raise InputError("expected a trace with at least one item that has output tokens; got none")
    return list(names)


def trace_demands(
    requests: Sequence[Request], *, maximum: int, max_items_per_batch: int
) -> dict[str, list[int]]:
    """The demands of a trace by path: the output tokens of every batch that has any there.

    A request's items are packed together; above a limit, they are cut by ascending size into batches of at
    most `maximum` output tokens per path and `max_items_per_batch` items. An item above `maximum` is a demand
    of its own.
    """
    demands: dict[str, list[int]] = {path: [] for path in traced_paths(requests)}
    for request in requests:
        loads = Loads(request, demands)
        capacity = Capacity(dict.fromkeys(demands, maximum), max_items_per_batch)
        for batch in pack_greedy(loads, capacity):
            for path, path_demands in demands.items():
                if total := sum(loads.tokens[path][index] for index in batch):
                    path_demands.append(total)
    return demands


def batch_loads(requests: Sequence[Request], max_items_per_batch: int) -> set[int]:
    """The positive output tokens that batches of a trace may have on a path, wherever requests are cut.

    A batch is a run of a request's items by ascending size. Runs without an item that is too large on another
    path are not listed.
    """
    loads: set[int] = set()
    for request in requests:
        specs = sorted((item.spec for item in request), key=lambda spec: spec.output_tokens)
        for path in traced_paths([request]) if any(spec.output_tokens for spec in specs) else ():
            sums = [0, *itertools.accumulate(spec.get_path_output_tokens(path) for spec in specs)]
            for start, before in enumerate(sums[:-1]):
                loads.update(total - before for total in sums[start + 1 : start + 1 + max_items_per_batch])
    return loads - {0}


def _read_line(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        shown = line.strip()[:_SHOWN_CHARACTERS]
        raise InputError(
            f"{where}: expected a JSON object; got {shown!r} ({error.msg}, column {error.colno})"
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object; got {value!r}")
    return value


def _read_item(value: Any, where: str) -> Item:
    item = _object(value, where, required=_ITEM_KEYS[:2], allowed=_ITEM_KEYS)
    paths = item.get("path_output_tokens", {})
    if not isinstance(paths, dict):
        raise InputError(f"{where}.path_output_tokens: expected an object, path to tokens; got {paths!r}")
    spec = EncoderItemSpec(
        _count(item["input_size"], f"{where}.input_size"),
        _count(item["output_tokens"], f"{where}.output_tokens"),
        {name: _count(tokens, f"{where}.path_output_tokens.{name}") for name, tokens in paths.items()},
    )
    return Item(spec, segments=_count(item.get("segments", 1), f"{where}.segments"))


def _object(value: Any, where: str, required: Sequence[str], allowed: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object; got {value!r}")
    for key in required:
        if key not in value:
            raise InputError(f"{where}: expected the key {key!r}; got {', '.join(value) or 'no keys'}")
    for key in value:
        if key not in allowed:
            raise InputError(f"{where}: expected only the keys {', '.join(allowed)}; got {key!r}")
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{where}: expected an integer of at least 0; got {value!r}")
    return value


# --- recorded runs


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
    """Measured, as `read_costs` takes them; None: not measured, as on a CPU."""


class RunRecord(_Record):
    """Captures and settings that served requests."""

    tower: str
    device: str
    dtype: str
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    """The settings that were set."""
    max_items_per_batch: int
    max_frames_per_batch: int
    paths: Mapping[str, PathRecord]
    notes: tuple[str, ...] = ()
    """Lines about settings that could not be followed."""


class ServedPath(_Record):
    """Budget or fallback that served one path of a batch."""

    tokens: int
    budget: int | None = None
    """In output tokens; None: no replay."""
    result: str
    """hit, skipped, or the reason of the miss."""
    eager: bool = False
    """Whether a miss ran eagerly."""
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
    """The contents of a trace with a run."""

    runs: tuple[RunRecord, ...]
    """What served, in order; at least one."""
    requests: tuple[ServedRequest, ...]


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Reads a recorded run.

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
    """Returns the costs that the last run in a trace measured, by path, and its budgets.

    Returns:
        The costs; None: it did not measure every path. The budgets; empty: there is no run.

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
