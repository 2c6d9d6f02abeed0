"""Costs by which ladders of budgets are compared: time of batches, memory of captures."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import (
    EXACT_LAUNCH_TOKENS,
    EXACT_TOLERANCE,
    REPLAY_LAUNCH_TOKENS,
    CostCurve,
    PathCosts,
    Points,
)

# Estimated from the widths of the same tower in 16 bits: the values that are alive in a block, 27 blocks of
# kernel nodes.
_BYTES_PER_TOKEN = 128 * 2**10
_BYTES_PER_GRAPH = 8 * 2**20

_POINTS = ("replay_ms", "exact_ms")
_NOT_KEPT = "not_kept_from"


class RisingCurve(CostCurve):
    """A curve that never falls: a point below an earlier one is noise, and raised to it.

    Args:
        points: pairs of (output tokens, cost), at least one, tokens increasing from 0 or more, costs above 0.

    Raises:
        InputError: a point is invalid.
    """

    def __init__(self, points: Points) -> None:
        if not points:
            raise InputError("costs: expected at least one point, output tokens to cost; got none")
        for tokens, cost in points:
            if not (tokens >= 0 and cost > 0 and math.isfinite(cost)):
                raise InputError(
                    f"costs: expected tokens of at least 0 and a finite cost above 0; got {tokens}: {cost}"
                )
        for (smaller, _), (larger, _) in itertools.pairwise(points):
            if smaller >= larger:
                raise InputError(f"costs: expected increasing tokens; got {larger} after {smaller}")
        highest = itertools.accumulate((cost for _, cost in points), max)
        super().__init__(tuple((tokens, cost) for (tokens, _), cost in zip(points, highest, strict=True)))

    @classmethod
    def from_mapping(cls, costs: Mapping[int, float]) -> Self:
        """The curve through a mapping of output tokens to cost, in any order."""
        return cls(tuple(sorted(costs.items())))

    @classmethod
    def linear(cls, fixed: float) -> Self:
        """A fixed cost and one for every token."""
        return cls(((0, fixed), (1, fixed + 1)))

    def from_one_token(self) -> Points:
        """Points with the same costs at every positive number of tokens, and none at zero."""
        if self.points[0][0] > 0:
            return self.points
        later = tuple(point for point in self.points if point[0] > 1)
        return ((1, self.at(1)), *(later or ((2, self.at(2)),)))


@dataclass(frozen=True)
class BatchCosts:
    """Costs of a batch served by a budget, and at its exact shape.

    By default in units of one output token: a replay costs its budget and 64 tokens, the exact shape its own
    tokens and 256.
    """

    replay: RisingCurve = field(default_factory=lambda: RisingCurve.linear(REPLAY_LAUNCH_TOKENS))
    """By the budget that is replayed."""
    exact: RisingCurve = field(default_factory=lambda: RisingCurve.linear(EXACT_LAUNCH_TOKENS))
    """By the batch's own tokens."""
    unit: str = "tokens"
    not_kept_from: int | None = None
    """The budget from which on `mode: auto` kept none when it measured; None: it kept all."""

    @classmethod
    def measured(
        cls,
        replay_ms: Mapping[int, float],
        exact_ms: Mapping[int, float],
        not_kept_from: int | None = None,
    ) -> Self:
        """Costs in milliseconds, through measured points: output tokens to milliseconds."""
        curves = (RisingCurve.from_mapping(replay_ms), RisingCurve.from_mapping(exact_ms))
        return cls(*curves, "ms", not_kept_from)

    def keeps(self, budgets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which budgets `mode: auto` will keep: by the costs, and by what it kept when it measured them."""
        kept: NDArray[np.bool_] = self.exact(budgets) > EXACT_TOLERANCE * self.replay(budgets)
        return kept if self.not_kept_from is None else kept & (budgets < self.not_kept_from)

    def as_dict(self) -> dict[str, Any]:
        """The costs as `read_costs` takes them."""
        points = {"replay_ms": dict(self.replay.points), "exact_ms": dict(self.exact.points)}
        return points if self.not_kept_from is None else {**points, _NOT_KEPT: self.not_kept_from}

    def of_ladder(self, budgets: Sequence[int]) -> PathCosts:
        """The costs that the manager would find for a path with these budgets."""
        return PathCosts({b: self.replay.at(b) for b in budgets}, exact=self.exact.from_one_token())


@dataclass(frozen=True)
class MemoryModel:
    """An estimate of the device memory of captures, to choose among ladders.

    Captures share one pool: the largest budget takes what its tokens need, and each graph adds what its
    kernels' parameters take. `EncoderConfig.max_graph_bytes` enforces a limit at the capture.

    Raises:
        InputError: `bytes_per_token` is not positive, or `bytes_per_graph` is negative.
    """

    bytes_per_token: int = _BYTES_PER_TOKEN
    """Of the largest budget."""
    bytes_per_graph: int = _BYTES_PER_GRAPH

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1 or self.bytes_per_graph < 0:
            raise InputError(f"memory: expected bytes_per_token of at least 1 and no negatives; got {self}")

    def num_bytes(self, largest_budget: int, num_graphs: int) -> int:
        """Bytes of `num_graphs` captures, the largest of `largest_budget` output tokens."""
        return self.bytes_per_token * largest_budget + self.bytes_per_graph * num_graphs

    def largest_budget(self, max_bytes: int, num_graphs: int) -> int:
        """The largest budget with which `num_graphs` captures take at most `max_bytes`; 0 or less: none."""
        return (max_bytes - self.bytes_per_graph * num_graphs) // self.bytes_per_token


def read_costs(path: str | os.PathLike[str]) -> BatchCosts | dict[str, BatchCosts]:
    """Reads measured costs from a JSON file.

    The file holds `{"replay_ms": {"64": 1.7, ...}, "exact_ms": {"64": 5.3, ...}}`, output tokens to
    milliseconds, for every path alike; or an object of such objects by the path's name. A third entry,
    `not_kept_from`, may hold the smallest budget from which on `mode: auto` keeps none.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    name = os.fspath(path)
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{name}: expected JSON; got {error}") from None
    if not isinstance(value, dict) or not value:
        raise InputError(f"{name}: expected an object with replay_ms and exact_ms; got {value!r}")
    if value.keys() & {*_POINTS}:
        return parse_costs(value, name)
    return {path_name: parse_costs(costs, f"{name}, {path_name}") for path_name, costs in value.items()}


def parse_costs(value: Any, where: str) -> BatchCosts:
    """Measured costs of one path out of JSON; raises InputError where it holds something else."""
    if not isinstance(value, dict) or value.keys() - {_NOT_KEPT} != {*_POINTS}:
        raise InputError(f"{where}: expected an object with replay_ms and exact_ms; got {value!r}")
    replay, exact = (_read_points(value[key], f"{where}, {key}") for key in _POINTS)
    last = value.get(_NOT_KEPT)
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 0):
        raise InputError(f"{where}, {_NOT_KEPT}: expected output tokens; got {last!r}")
    try:
        return BatchCosts.measured(replay, exact, last)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _read_points(value: Any, where: str) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, tokens to milliseconds; got {value!r}")
    points = {}
    for tokens, cost in value.items():
        if not tokens.isdecimal() or isinstance(cost, bool) or not isinstance(cost, int | float):
            raise InputError(f"{where}: expected tokens to milliseconds; got {tokens!r}: {cost!r}")
        points[int(tokens)] = float(cost)
    return points
