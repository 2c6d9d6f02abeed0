"""What will be captured, known before anything is; and which captures are worth their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from fxsplit_encoder.capture.buffers import gibibytes, memory_of
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.path_forward import PathForward
from fxsplit_encoder.planning.limits import CaptureKey, Limits


@dataclass(frozen=True)
class PlannedCapture:
    """One budget of one path at one combination of axis keys."""

    key: CaptureKey
    input_bytes: int
    """Static input buffers at this size."""
    own_bytes: int
    """Of these, what no other budget shares: inputs that are of one size for all budgets."""
    pruned: str | None = None
    """Why it is not captured; None: it is."""


@dataclass(frozen=True)
class CapturePlan:
    """Every capture that the settings ask for; printing it shows them as a table."""

    captures: tuple[PlannedCapture, ...]

    @property
    def num_graphs(self) -> int:
        """Captures that are made."""
        return sum(capture.pruned is None for capture in self.captures)

    @property
    def input_bytes(self) -> int:
        """Static input buffers of all captures; those of a path's budgets share what they can."""
        shared: dict[tuple[Any, ...], int] = {}
        own = 0
        for capture in self.captures:
            if capture.pruned is None:
                path = (capture.key.path, capture.key.axis_keys)
                shared[path] = max(shared.get(path, 0), capture.input_bytes - capture.own_bytes)
                own += capture.own_bytes
        return sum(shared.values()) + own

    def __str__(self) -> str:
        pruned = len(self.captures) - self.num_graphs
        summary = f"{self.num_graphs} captures, {self.input_bytes / 2**20:.1f} MiB of static inputs" + (
            f"; {pruned} pruned" if pruned else ""
        )
        rows = [
            [c.key.path, c.key.budget, *c.key.axis_keys, c.input_bytes / 2**20, c.pruned or "captured"]
            for c in self.captures
        ]
        axes = [f"axis {n}" for n in range(max((len(c.key.axis_keys) for c in self.captures), default=0))]
        headers = ["path", "budget", *axes, "input MiB", ""]
        return f"{summary}\n{tabulate(rows, headers, floatfmt='.2f')}" if rows else summary


def plan_captures(paths: Iterable[EncoderPath], limits: Limits) -> CapturePlan:
    """Every budget of every path, with those that no batch can reach pruned."""
    captures: list[PlannedCapture] = []
    for path in paths:
        if path.mode in ("none", "exact"):
            continue
        per_token, fixed, own, refusals = _input_size(path)
        previous = 0
        for budget in path.budgets:
            reason = refusals.get(budget) or _unreachable(path, previous, budget, limits.max_items_per_batch)
            num_bytes = int(per_token * budget + fixed)
            captures.append(PlannedCapture(path.key(budget), num_bytes, own, reason))
            if reason is None:
                previous = budget
    return CapturePlan(tuple(captures))


def _input_size(path: EncoderPath) -> tuple[float, float, int, dict[int, str]]:
    """Bytes a token and bytes beside of a path's static inputs, from the two smallest budgets that the tower
    can make inputs for, in the memory that there is; the bytes of those that do not grow; and why it cannot
    for smaller ones.
    """
    sizes: dict[int, int] = {}
    refusals: dict[int, str] = {}
    own = 0
    for budget in path.budgets:
        try:
            by_name = path.input_bytes_by_name(budget)
            growing = path.forward.growing_inputs()
            sizes[budget] = sum(by_name.values())
            own = sum(num_bytes for name, num_bytes in by_name.items() if name not in growing)
        except (InputError, torch.OutOfMemoryError) as error:
            refusals[budget] = str(error)
        if len(sizes) == 2:
            break
    if not sizes:
        return 0.0, 0.0, 0, refusals
    small, large = min(sizes), max(sizes)
    slope = (sizes[large] - sizes[small]) / (large - small) if len(sizes) > 1 else sizes[small] / small
    return slope, sizes[small] - slope * small, own, refusals


def _unreachable(path: EncoderPath, previous: int, budget: int, max_items: int) -> str | None:
    """Why no batch needs this budget, where the tower tells how many tokens an item of these keys has.

    A batch of n items has between n times the fewest and n times the most tokens of an item; it needs this
    budget if it has more tokens than the budget before and not more than this one.
    """
    token_range = path.item_token_range()
    if token_range is None:
        return None
    fewest, most = token_range
    if fewest > budget:
        return f"one item has at least {fewest} tokens"
    if not any(n * fewest <= budget and n * most > previous for n in range(1, max_items + 1)):
        return f"no {max_items} items of {fewest} to {most} tokens make {previous + 1} to {budget} tokens"
    return None


# Inputs of a token are seldom larger than this many times its output. Where so many outputs fit, inputs are
# not made to find out their size.
_INPUTS_OF_AN_OUTPUT = 64

# Sizes at which inputs are made to find out how they grow: this one or the tower's own, and its doubles.
_SMALL_TOKENS = 16
_DOUBLINGS = 8


def check_budgets(forward: PathForward, *, tile: int | None, out_hidden_size: int, field: str) -> None:
    """Raises ConfigError for budgets whose static inputs and output no memory of the device holds.

    Nothing of a budget's size is allocated: what inputs take is known from small ones, with which it grows in
    proportion.

    Args:
        tile: the smallest size that the path can have; None: any.
        field: where the settings list the budgets.
    """
    budgets, memory = forward.budgets, memory_of(forward.device)
    output = out_hidden_size * forward.dtype.itemsize
    if not budgets or budgets[-1] * output * _INPUTS_OF_AN_OUTPUT <= memory:
        return
    first = tile or _SMALL_TOKENS
    a_token, fixed = _input_bytes(forward, [first << power for power in range(_DOUBLINGS)], budgets[-1])
    needed = int(fixed + budgets[-1] * (a_token + output))
    if needed > memory:
        fitting = max(0, int((memory - fixed) / (a_token + output)))
        raise ConfigError(
            f"{field}: {budgets[-1]} output tokens take {gibibytes(needed)} of static inputs and output, and "
            f"{forward.device} has {gibibytes(memory)}; allowed: budgets of at most {fitting}, less what "
            f"captures take beside; got {list(budgets[-3:])}"
        )


def _input_bytes(forward: PathForward, sizes: Sequence[int], below: int) -> tuple[float, float]:
    """Bytes of the inputs a token, and those beside, from the first two sizes that the tower makes inputs
    of; none where it makes fewer.
    """
    known: list[tuple[int, int]] = []
    for size in sizes:
        if size < below and len(known) < 2:
            with contextlib.suppress(InputError):
                values = forward.capture_values(size)
                known.append((size, sum(tensor.nbytes for tensor in values.values())))
    if len(known) < 2:
        return 0.0, 0.0
    (small, few), (large, many) = known
    a_token = max(0.0, (many - few) / (large - small))
    return a_token, max(0.0, few - a_token * small)
