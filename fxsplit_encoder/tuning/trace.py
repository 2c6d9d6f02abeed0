"""A trace of requests: one JSON object per line, with the sizes of the request's images and videos.

    {"items": [{"input_size": 1024, "output_tokens": 256}, {"input_size": 784, "output_tokens": 196}]}

`segments` is left out where it is 1, `path_output_tokens` where "default" is the only path. A manager adds
how each request was served, and a line of `{"run": {...}}` before the first request and whenever the captures
have changed. A trace holds sizes and times, no media.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.planning.packing import pack_greedy
from fxsplit_encoder.planning.plan import Capacity, Item, Loads
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.tuning.search import BatchCosts, rising

Request = tuple[Item, ...]
"""The items of one request, in order, with their sizes and segments."""

_Count = Annotated[int, Field(strict=True, ge=0)]
_Times = Annotated[
    dict[Annotated[int, Field(gt=0)], Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]],
    Field(min_length=1),
]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class MeasuredCosts(_Record):
    """Measured milliseconds of a path by output tokens."""

    replay_ms: _Times
    exact_ms: _Times
    not_kept_from: _Count | None = None
    """The smallest budget from which on `mode: auto` kept none; None: it kept all."""

    def curves(self) -> BatchCosts:
        """The costs of a batch of any size."""
        return BatchCosts(rising(self.replay_ms), rising(self.exact_ms), "ms", self.not_kept_from)


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
    costs: MeasuredCosts | None = None
    """None: not measured, as on a CPU."""


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

    @property
    def packing(self) -> Packing:
        """How requests were packed."""
        packing: Packing = self.config.get("packing", EncoderConfig().packing)
        return packing

    def costs(self) -> dict[str, BatchCosts] | None:
        """The measured costs by path; None: not every path was measured."""
        measured = {name: path.costs.curves() for name, path in self.paths.items() if path.costs is not None}
        return measured if len(measured) == len(self.paths) else None

    def ladders(self) -> dict[str, tuple[int, ...]] | None:
        """The captured budgets by path; None: not every path has any."""
        found = {name: tuple(each.budget for each in path.captures) for name, path in self.paths.items()}
        return found if all(found.values()) else None


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


class TracedItem(_Record, extra="forbid"):
    """The sizes of one image or video."""

    input_size: _Count
    output_tokens: _Count
    segments: _Count = 1
    path_output_tokens: dict[str, _Count] = Field(default_factory=dict)


class TracedRequest(_Record, extra="forbid"):
    """A line of one request."""

    items: tuple[TracedItem, ...]
    batches: tuple[ServedBatch, ...] = ()
    """As it was served; empty: that is not recorded."""
    host_ms: float = 0.0
    """How long the call kept its thread."""


class _RunLine(_Record, extra="forbid"):
    run: RunRecord


def _kind_of(line: Any) -> str:
    return "run" if isinstance(line, dict) and "run" in line else "request"


_LINE: TypeAdapter[_RunLine | TracedRequest] = TypeAdapter(
    Annotated[
        Annotated[_RunLine, Tag("run")] | Annotated[TracedRequest, Tag("request")], Discriminator(_kind_of)
    ]
)


class RecordedRun(NamedTuple):
    """The contents of a trace."""

    runs: tuple[RunRecord, ...]
    """What served, in order; empty in a trace of sizes alone."""
    requests: tuple[TracedRequest, ...]

    def planned(self) -> list[Request]:
        """The items of the requests, as planners take them."""
        return [
            tuple(
                Item(
                    EncoderItemSpec(item.input_size, item.output_tokens, item.path_output_tokens),
                    segments=item.segments,
                )
                for item in request.items
            )
            for request in self.requests
        ]


def read_trace(path: str | os.PathLike[str]) -> RecordedRun:
    """Reads a trace; empty lines hold nothing. InputError: the file cannot be read, or a line malformed."""
    lines = list(_read_lines(path))
    runs = tuple(line.run for line in lines if isinstance(line, _RunLine))
    return RecordedRun(runs, tuple(line for line in lines if isinstance(line, TracedRequest)))


def _read_lines(path: str | os.PathLike[str]) -> Iterator[_RunLine | TracedRequest]:
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _LINE.validate_json(line)
                except ValidationError as error:
                    raise InputError(f"{name}, line {number}, {_first_problem(error)}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: expected UTF-8 text; got {error}") from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}; got {shown(first['input'])}"


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Reads a recorded run: what served, and the requests of which is known how. InputError: the file cannot
    be read, a line is malformed, or it holds sizes alone.
    """
    runs, requests = read_trace(path)
    served = tuple(request for request in requests if "batches" in request.model_fields_set)
    if not runs or not served:
        raise InputError(
            f"{os.fspath(path)}: expected a run that EncoderCudaGraphManager.record_trace wrote, with how "
            "requests were served; this file holds " + ("no request" if runs else "sizes alone, or nothing")
        )
    return RecordedRun(runs, served)


# --- what a trace asks of budgets


def traced_paths(requests: Sequence[Request]) -> list[str]:
    """The paths on which a trace has output tokens, in order of appearance; InputError: there are none."""
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
