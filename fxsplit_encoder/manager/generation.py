"""A generation of captures: the paths of a tower under one configuration, with their plans and runs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from tabulate import tabulate

from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder.capture.buffers import gibibytes, memory_of
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.config import EncoderConfig, Mode, PathConfig
from fxsplit_encoder.errors import ConfigError, InputError, TowerChangedError
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.manager.data_parallel import why_not_compiled
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.request_plans import RequestPlans
from fxsplit_encoder.manager.tower import TowerSpec
from fxsplit_encoder.pauses import pause
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.runtime.measure import run_timed
from fxsplit_encoder.runtime.memory_limit import CaptureSet
from fxsplit_encoder.runtime.requests import CaptureScope, WeightChecks
from fxsplit_encoder.runtime.statistics import Statistics

logger = logging.getLogger(__name__)

# Budgets of each path that are captured before anything is compiled. Four over a whole ladder are captured in
# seconds; a batch that suits none of them runs as it would without captures. The number is a choice.
_FIRST_BUDGETS = 4

# Inputs of a token are seldom larger than this many times its output. Where so many outputs fit, inputs are
# not made to find out their size.
_INPUTS_OF_AN_OUTPUT = 64

# Sizes at which inputs are made to find out how they grow: this one or the tower's own, and its doubles.
_SMALL_TOKENS = 16
_DOUBLINGS = 8


_PathKey: TypeAlias = tuple[str, tuple[Hashable, ...]]
"""Name and axis keys."""


@dataclass(frozen=True)
class PlannedCapture:
    """One budget of one path at one combination of axis keys."""

    key: CaptureKey
    input_bytes: int
    """Of static inputs at this size."""
    own_bytes: int
    """Of these, what no other budget shares: inputs of one size for all budgets."""
    pruned: str | None = None
    """Why it is not captured; None: it is."""


@dataclass(frozen=True)
class CapturePlan:
    """Every capture that the settings ask for; printing it shows them as a table."""

    captures: tuple[PlannedCapture, ...]

    @property
    def num_graphs(self) -> int:
        """Number of captures that are made."""
        return sum(capture.pruned is None for capture in self.captures)

    @property
    def input_bytes(self) -> int:
        """Bytes of the static inputs of all captures; the budgets of a path share memory."""
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


class Generation:
    """The paths of a tower in one state under one configuration, over one pool; other arguments as
    `CaptureScope`.
    """

    def __init__(
        self,
        spec: TowerSpec,
        config: EncoderConfig,
        pool: GraphPool,
        statistics: Statistics,
        *,
        agree: Callable[[bool], bool] | None = None,
        compares_kernels: bool = True,
    ) -> None:
        self.spec = spec
        self.config = config
        self.pool = pool
        self.structure: Structure | None = None
        """Of the tower, as it was when it was first compiled or captured."""
        self.weight_checks = WeightChecks(config.weight_check_seconds)
        scope = CaptureScope(
            config,
            pool,
            agree=agree,
            not_compiled="" if agree is None else why_not_compiled(spec.tower),
            compares_kernels=compares_kernels,
            weight_checks=self.weight_checks,
        )
        self.captures = CaptureSet(scope)
        self.scope = self.captures.scope
        self.paths_by_key = {
            (name, keys): EncoderPath(name, spec, self.scope, keys)
            for name in spec.limits.path_budgets
            for keys in itertools.product(*spec.model_config.capture_axes)
        }
        """Every path at every combination of axis keys."""
        self.captures.programs = self.paths_by_key
        self.captures.skippable = {key for key in self.paths_by_key if key[0] in spec.limits.skippable_paths}
        self.runner = BatchRunner(spec, self.paths_by_key, self.scope, statistics)
        self.plans = RequestPlans(spec, config, self.runner)

    @property
    def compiled_paths(self) -> list[EncoderPath]:
        """Paths whose forward is compiled, or is to be; one without budgets runs eagerly."""
        return [path for path in self.paths_by_key.values() if path.budgets and path.is_to_compile]

    def check_budgets(self) -> None:
        """Raises ConfigError for budgets beyond the device's memory, extrapolated from small inputs."""
        model_config, memory = self.spec.model_config, memory_of(self.pool.device)
        output = model_config.out_hidden_size * self.spec.dtype.itemsize
        for path in self.paths_by_key.values():
            budgets = path.budgets
            if not budgets or budgets[-1] * output * _INPUTS_OF_AN_OUTPUT <= memory:
                continue
            first = model_config.paths[path.name].min_token_budget or _SMALL_TOKENS
            sizes = [size for power in range(_DOUBLINGS) if (size := first << power) < budgets[-1]]
            a_token, fixed, _ = _input_bytes(path, sizes)
            if (needed := int(fixed + budgets[-1] * (a_token + output))) > memory:
                fitting = max(0, int((memory - fixed) / (a_token + output)))
                own = self.config.paths.get(path.name)
                listed = f"paths.{path.name}.token_budgets" if own and own.token_budgets else "token_budgets"
                raise ConfigError(
                    f"{listed}: {budgets[-1]} output tokens take {gibibytes(needed)} of static inputs and "
                    f"output, and {self.pool.device} has {gibibytes(memory)}; allowed: budgets of at most "
                    f"{fitting}, less what captures take beside; got {list(budgets[-3:])}"
                )

    def unit_costs(self) -> tuple[float, float]:
        """Returns milliseconds of a patch at the exact shape, and of a pair of patches in attention."""
        per_patch, per_pair = 1.0, 0.0
        for path in self.paths_by_key.values():
            costs = path.costs
            if costs.exact:
                tokens, milliseconds = costs.exact[-1]
                per_patch, per_pair = milliseconds / (tokens * path.measured.rows_per_token), costs.attention
        return per_patch, per_pair

    def planned_captures(self) -> CapturePlan:
        """Plans every budget of every path, and prunes those that no batch can reach."""
        captures: list[PlannedCapture] = []
        is_wanted = self.config.enabled and bool(self.spec.model_config.modalities)
        for path in self.paths_by_key.values() if is_wanted else ():
            if path.mode in ("none", "exact"):
                continue
            per_token, fixed, refusals = _input_bytes(path, path.budgets)
            try:
                own = path.fixed_bytes() if per_token or fixed else 0
            except torch.OutOfMemoryError as error:  # of the largest
                own, refusals = 0, dict.fromkeys(path.budgets, str(error))
            previous, max_items = 0, self.spec.limits.max_items_per_batch
            for budget in path.budgets:
                reason = refusals.get(budget) or _unreachable(path, previous, budget, max_items)
                num_bytes = int(per_token * budget + fixed)
                captures.append(PlannedCapture(path.key(budget), num_bytes, own, reason))
                if reason is None:
                    previous = budget
        return CapturePlan(tuple(captures))

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """As `EncoderCudaGraphManager.compile`."""
        refusals: dict[str, str] = {}
        for path in self.paths_by_key.values():
            if path.budgets:
                path.compile(progress, refusals)

    def prepare(self, planned: CapturePlan) -> list[tuple[_PathKey, int]]:
        """Notes why budgets are pruned, and times runs; returns the (path key, budget) pairs to capture."""
        for capture in planned.captures:
            if capture.pruned is not None:
                path = self.paths_by_key[capture.key.path, capture.key.axis_keys]
                path.note(f"{path.label}: budget {capture.key.budget} is not captured: {capture.pruned}")
        wanted = _wanted(planned)
        if self.is_measured:
            for key in dict.fromkeys(key for key, _ in wanted):
                self.paths_by_key[key].measure()
                pause()
        return wanted

    @property
    def is_measured(self) -> bool:
        """Whether runs without captures are timed before captures are made."""
        return self.config.packing == "cost" and self.scope.compares_kernels

    def run(self, planned: CapturePlan) -> None:
        """Runs what will be timed and captured, so that `collecting` finds the kernels to compare."""
        wanted = sorted(_wanted(planned), key=lambda each: -each[1])
        for key, budget in wanted:
            self.paths_by_key[key].ladder.run(budget)
            pause()
        for key in dict.fromkeys(key for key, _ in wanted if self.is_measured and self.scope.measured):
            if (path := self.paths_by_key[key]).expected is None:
                run_timed(path, path.budgets)
            pause()

    @property
    def num_bytes(self) -> int:
        """Bytes of all captures."""
        return self.captures.num_bytes

    @property
    def derived_bytes(self) -> int:
        """Bytes of the parameters in another form that the paths' programs keep."""
        bound = [path.program for path in self.paths_by_key.values()]
        return sum(each.num_bytes for each in {one.program.derived for one in bound if one is not None})

    def may_return(self) -> bool:
        """Whether the tower may be in this state again."""
        return self.structure is not None and self.structure.may_return()

    def check_tower(self) -> None:
        """Raises TowerChangedError if the tower is in another state."""
        if self.structure is not None and (change := self.structure.change()):
            raise TowerChangedError(
                f"the tower: expected the modules that were captured; got {change}. Call "
                "capture() to have the tower captured as it is now"
            )

    def run_in(self, inference_mode: bool) -> None:
        """Sets whether the tower's own code is timed in inference mode."""
        for path in self.paths_by_key.values():
            path.ladder.in_inference_mode = inference_mode

    def outdate_weights(self) -> None:
        """Makes the next replay of every path check its parameters and recompute derived ones."""
        self.weight_checks.all_are_due()
        for path in self.paths_by_key.values():
            if path.program is not None:
                path.program.program.derived.outdate()
        getattr(self.spec.tower, "outdate_tables", lambda: None)()

    def clear(self) -> None:
        """Releases every capture and its notes."""
        self.captures.clear()
        for path in self.paths_by_key.values():
            path.notes.clear()

    def forget_tower(self) -> None:
        """Releases every capture and forgets the compiled forwards."""
        self.clear()
        for path in self.paths_by_key.values():
            path.forget()

    # --- others of the same tower

    def again(self) -> Generation:
        """Returns a generation with the same settings, for another state of the tower."""
        return self._over_its_own_pool(self.config, agree=self.scope.agree)

    def uncompiled(self) -> Generation:
        """Returns a generation of the tower's own forward in mode `breakable`, captured in seconds."""
        uncompiled = {"compile": False, "piece_compiler": "auto", "passes": "auto", "packing": "cost"}
        paths = {
            name: PathConfig(token_budgets=path.token_budgets, mode=path.mode and _first_mode(path.mode))
            for name, path in self.config.paths.items()
        }
        config = self.config.replace(**uncompiled, mode=_first_mode(self.config.mode), paths=paths)
        return self._over_its_own_pool(config, compares_kernels=False)

    def _over_its_own_pool(self, config: EncoderConfig, **scope: Any) -> Generation:
        pool = GraphPool(self.pool.device, stream=self.pool.stream, priority=self.pool.priority)
        return Generation(self.spec, config, pool, self.runner.statistics, **scope)


def _wanted(planned: CapturePlan) -> list[tuple[_PathKey, int]]:
    keys = (capture.key for capture in planned.captures if capture.pruned is None)
    return [((key.path, key.axis_keys), key.budget) for key in keys]


def first_of(planned: CapturePlan) -> CapturePlan:
    """Returns a few of the planned captures of each path, from the smallest to the largest."""
    by_path: dict[tuple[object, ...], list[CaptureKey]] = {}
    for capture in planned.captures:
        if capture.pruned is None:
            by_path.setdefault((capture.key.path, capture.key.axis_keys), []).append(capture.key)
    kept: set[CaptureKey] = set()
    for keys in by_path.values():
        number = min(_FIRST_BUDGETS, len(keys))
        kept.update(keys[round(n * (len(keys) - 1) / max(number - 1, 1))] for n in range(number))
    return CapturePlan(tuple(capture for capture in planned.captures if capture.key in kept))


def _first_mode(mode: Mode) -> Mode:
    return "breakable" if mode in ("auto", "full", "piecewise") else mode


# --- what is captured


def _input_bytes(path: EncoderPath, sizes: Iterable[int]) -> tuple[float, float, dict[int, str]]:
    """Bytes of static inputs a token, and fixed, from the first two sizes that the tower makes inputs of, and
    why it makes none of others.
    """
    known: dict[int, int] = {}
    refusals: dict[int, str] = {}
    for size in sizes:
        if len(known) == 2:
            break
        try:
            known[size] = sum(tensor.nbytes for tensor in path.capture_values(size).values())
        except (InputError, torch.OutOfMemoryError) as error:
            refusals[size] = str(error)
    if not known:
        return 0.0, 0.0, refusals
    (small, few), (large, many) = min(known.items()), max(known.items())
    slope = (many - few) / (large - small) if large > small else few / small
    return slope, few - slope * small, refusals


def _unreachable(path: EncoderPath, previous: int, budget: int, max_items: int) -> str | None:
    """Why no batch has more tokens than the previous budget and at most this one; None: one may."""
    token_range = getattr(path.tower, "get_encoder_cudagraph_item_token_range", None)
    if token_range is None:
        return None
    fewest, most = token_range(path=path.name, axis_keys=path.axis_keys)
    if fewest > budget:
        return f"one item has at least {fewest} tokens"
    if not any(n * fewest <= budget and n * most > previous for n in range(1, max_items + 1)):
        return f"no {max_items} items of {fewest} to {most} tokens make {previous + 1} to {budget} tokens"
    return None
