"""What serves a tower's requests at one time: its paths with their captures, their plans and their runs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.config import EncoderConfig, Mode, PathConfig
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.manager.captures import CapturePlan, check_budgets, plan_captures
from fxsplit_encoder.manager.data_parallel import why_not_compiled
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.request_plans import RequestPlans
from fxsplit_encoder.pauses import pause
from fxsplit_encoder.planning.limits import CaptureKey, Limits
from fxsplit_encoder.protocol import EncoderCudaGraphConfig, SupportsEncoderCudaGraph
from fxsplit_encoder.runtime import CaptureScope, CaptureSet, WeightChecks
from fxsplit_encoder.runtime.statistics import Phase, Statistics

logger = logging.getLogger(__name__)

# Budgets of each path that are captured before anything is compiled. Four over a whole ladder are captured in
# seconds; a batch that suits none of them runs as it would without captures. The number is a choice.
_FIRST_BUDGETS = 4

# Settings of compiled pieces, and what they are without any.
_UNCOMPILED = {"compile": False, "piece_compiler": "auto", "passes": "auto"}


Tell = Callable[[Phase, int, int], None]
"""Is called with the phase, and how many budgets of how many are done in it."""


@dataclass(frozen=True)
class Served:
    """A tower, and how large its captures are."""

    tower: SupportsEncoderCudaGraph
    model_config: EncoderCudaGraphConfig
    limits: Limits
    dtype: torch.dtype


class Generation:
    """The paths of a tower under one configuration, over one pool; other arguments as `CaptureScope`."""

    def __init__(
        self,
        served: Served,
        config: EncoderConfig,
        pool: GraphPool,
        statistics: Statistics,
        *,
        agree: Callable[[bool], bool] | None = None,
        compares_kernels: bool = True,
    ) -> None:
        tower, limits = served.tower, served.limits
        self.served = served
        self.config = config
        self.pool = pool
        self.weight_checks = WeightChecks(config.weight_check_seconds)
        self.scope = CaptureScope(
            config,
            pool,
            lambda: self.captures.remaining_bytes,
            agree,
            not_compiled="" if agree is None else why_not_compiled(tower),
            compares_kernels=compares_kernels,
            weight_checks=self.weight_checks,
        )
        axes = served.model_config.capture_axes
        self.paths_by_key = {
            (name, keys): EncoderPath(name, tower, limits, self.scope, served.dtype, keys)
            for name in limits.path_budgets
            for keys in itertools.product(*axes)
        }
        """Every path at every combination of axis keys."""
        skippable = {key for key in self.paths_by_key if key[0] in limits.skippable_paths}
        self.captures = CaptureSet(self.paths_by_key, pool, config.max_graph_bytes, skippable, agree)
        self.plans = RequestPlans(tower, config, served.model_config, self.paths_by_key)
        self.runner = BatchRunner(
            tower,
            self.paths_by_key,
            pool,
            statistics,
            config,
            num_axes=len(axes),
            max_items=limits.max_items_per_batch,
        )

    @property
    def paths(self) -> dict[str, EncoderPath]:
        """The paths by name, of a tower without capture axes; else those of the first axis keys."""
        return {name: path for (name, _), path in reversed(self.paths_by_key.items())}

    @property
    def is_idle(self) -> bool:
        """Whether the settings ask for no captures."""
        return not self.config.enabled or all(path.mode == "none" for path in self.paths_by_key.values())

    @property
    def compiled_paths(self) -> list[EncoderPath]:
        """Those whose forward is compiled, or is to be; one without budgets runs eagerly."""
        return [path for path in self.paths_by_key.values() if path.budgets and path.is_to_compile]

    def check_budgets(self) -> None:
        """Raises ConfigError for budgets that the device cannot hold."""
        model_config = self.served.model_config
        for path in self.paths_by_key.values():
            own = self.config.paths.get(path.name)
            check_budgets(
                path.forward,
                tile=model_config.paths[path.name].min_token_budget,
                out_hidden_size=model_config.out_hidden_size,
                field=f"paths.{path.name}.token_budgets" if own and own.token_budgets else "token_budgets",
            )

    def unit_costs(self) -> tuple[float, float]:
        """Milliseconds of a patch at the exact shape, and of a pair of patches in attention."""
        per_patch, per_pair = 1.0, 0.0
        for path in self.paths_by_key.values():
            costs = path.costs
            if costs.exact:
                tokens, milliseconds = costs.exact[-1]
                per_patch, per_pair = milliseconds / (tokens * path.measured.rows_per_token), costs.attention
        return per_patch, per_pair

    def planned_captures(self) -> CapturePlan:
        """What `capture` makes."""
        if not self.config.enabled or not self.served.model_config.modalities:
            return CapturePlan(())
        return plan_captures(self.paths_by_key.values(), self.served.limits)

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """As `EncoderCudaGraphManager.compile`."""
        refusals: dict[str, str] = {}
        for path in self.paths_by_key.values():
            if path.budgets:
                path.compile(progress, refusals)

    def capture(self, planned: CapturePlan, tell: Tell = lambda phase, done, total: None) -> None:
        """Measures and captures what was planned. Where the captures are too large together, they are made
        again.
        """
        for capture in planned.captures:
            if capture.pruned is not None:
                path = self.paths_by_key[capture.key.path, capture.key.axis_keys]
                path.note(f"{path.label}: budget {capture.key.budget} is not captured: {capture.pruned}")
        wanted = _wanted(planned)
        if self._measures:
            for key in dict.fromkeys(key for key, _ in wanted):
                tell("measuring", 0, 0)
                self.paths_by_key[key].measure()
                pause()
        tell("capturing", 0, len(wanted))
        self.captures.capture(wanted, lambda done, total: tell("capturing", done, total))

    @property
    def _measures(self) -> bool:
        return self.config.packing == "cost" and self.scope.compares_kernels

    def run(self, planned: CapturePlan) -> None:
        """Runs, once each, what `capture` will time and capture, largest first, with a pause before each:
        inside `collecting` this finds which kernels are to be compared.
        """
        wanted = sorted(_wanted(planned), key=lambda each: -each[1])
        for key, budget in wanted:
            self.paths_by_key[key].ladder.run(budget)
            pause()
        for key in dict.fromkeys(key for key, _ in wanted if self._measures):
            self.paths_by_key[key].run_timed()
            pause()

    def run_in(self, inference_mode: bool) -> None:
        """Has the tower's own code timed as it will run."""
        for path in self.paths_by_key.values():
            path.ladder.in_inference_mode = inference_mode

    def record_captures(self) -> None:
        """Has the statistics show these captures, and no others."""
        statistics = self.runner.statistics
        statistics.record_clear()
        for path in self.paths_by_key.values():
            for budget, made in path.captured.items():
                key, costs = path.key(budget), path.ladder.costs.get(budget)
                statistics.record_capture(key, made.mode, path.ladder.num_bytes(budget))
                if costs is not None:
                    statistics.record_time(key, costs.best)
        statistics.record_input_bytes(sum(path.input_bytes for path in self.paths_by_key.values()))

    def record_unpadded(self) -> None:
        """Has the statistics show the captures of recurring token counts as they are now."""
        statistics = self.runner.statistics
        for path in self.paths_by_key.values():
            if path.unpadded.captures.sizes:
                statistics.record_capture(path.key(0), "exact", path.unpadded_bytes)
            else:
                statistics.record_release(path.key(0))

    def outdate_weights(self) -> None:
        """Has the next replay of every path look at its parameters, and compute anew what is kept of them."""
        self.weight_checks.all_are_due()
        for path in self.paths_by_key.values():
            if path.program is not None:
                path.program.program.derived.outdate()
        getattr(self.served.tower, "outdate_tables", lambda: None)()

    def clear(self) -> None:
        """Releases every capture and forgets what was said of them."""
        self.captures.clear()
        for path in self.paths_by_key.values():
            path.notes.clear()

    def forget_tower(self) -> None:
        """Releases every capture, and has the tower compiled anew."""
        self.clear()
        for path in self.paths_by_key.values():
            path.forward.forget()

    # --- the first captures

    def uncompiled(self) -> Generation:
        """One whose captures take seconds: of the towers' own forwards, in mode `breakable`, by the measured
        costs of replays and eager runs, and with the attention kernels that are known already.
        """
        first = {**_UNCOMPILED, "mode": _first_mode(self.config.mode), "packing": "cost"}
        paths = {
            name: PathConfig(token_budgets=path.token_budgets, mode=path.mode and _first_mode(path.mode))
            for name, path in self.config.paths.items()
        }
        pool = GraphPool(self.pool.device, stream=self.pool.stream, priority=self.pool.priority)
        return Generation(
            self.served,
            self.config.replace(**first, paths=paths),
            pool,
            self.runner.statistics,
            compares_kernels=False,
        )


def _wanted(planned: CapturePlan) -> list[tuple[tuple[str, tuple[Hashable, ...]], int]]:
    """(path's key, budget) of what is captured."""
    keys = (capture.key for capture in planned.captures if capture.pruned is None)
    return [((key.path, key.axis_keys), key.budget) for key in keys]


def first_of(planned: CapturePlan) -> CapturePlan:
    """Of each path a few of the planned captures, the smallest and the largest among them."""
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
