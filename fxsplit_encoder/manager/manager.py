"""`EncoderCudaGraphManager`: packs a request into budgets, replays them, and falls back where none serves."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fxsplit_encoder.caching import reading_once
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, WeightsMovedError
from fxsplit_encoder.kernels.store import describe_environment, package_version
from fxsplit_encoder.manager.background import check_that_steps_will_do
from fxsplit_encoder.manager.data_parallel import DataParallel, agreement_of
from fxsplit_encoder.manager.generation import CapturePlan, Generation
from fxsplit_encoder.manager.lifecycle import Lifecycle, serving_scope
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.tower import (
    ItemReader,
    RequestItems,
    TowerSpec,
    placement_of,
    read_item_specs,
    select_items,
)
from fxsplit_encoder.planning.limits import needs_budget_range, resolve_limits
from fxsplit_encoder.planning.plan import Item, Plan, PlannedBatch
from fxsplit_encoder.protocol import BudgetGraphMetadata, SupportsEncoderCudaGraph, missing_methods
from fxsplit_encoder.runtime.captured_program import Choosers
from fxsplit_encoder.runtime.statistics import ManagerStats, Statistics

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import BoundProgram

logger = logging.getLogger(__name__)

_PACKAGES = ("fxsplit-encoder", "torch", "transformers", "flash-attn-4", "nvidia-cudnn-frontend")


class EncoderCudaGraphManager(Lifecycle):
    """Encodes batches of images and videos through captured budgets.

    Args:
        tower: what `wrap` returns, or any object with the protocol's methods.
        config: budgets, modes, limits.
        device, dtype: of the tower's computation; by default those of its parameters.
        log_interval: items between two log lines of statistics; 0: none.
        vllm_config: passed to the tower's `get_encoder_cudagraph_budget_range`, which is called only where
            the settings leave the budgets of a path, or the items of a batch, open.
        process_group: with `config.data_parallel` the ranks that share the items; None: the default group.
            Without, the ranks that share the tower's weights and whose forward has collectives: they capture
            the same. None: none do, or DTensor knows them.

    Threads may share a manager: batches run one at a time. Without CUDA the recorded steps are replayed one
    by one over the same static buffers, no faster than eagerly.

    Raises:
        InputError: the tower lacks methods of the protocol, or declares an impossible range.
        ConfigError: the settings do not suit the tower, the device has no memory for a budget, or there is no
            process group for `data_parallel`.
    """

    def __init__(
        self,
        tower: SupportsEncoderCudaGraph,
        config: EncoderConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        log_interval: int = 100,
        vllm_config: Any = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if missing := missing_methods(tower):
            raise InputError(
                f"tower: {type(tower).__name__} lacks methods of SupportsEncoderCudaGraph; pass what "
                f"wrap(model.visual) returns; missing: {', '.join(missing)}"
            )
        self.tower = tower
        self.config = config if config is not None else EncoderConfig()
        self.device, self.dtype = placement_of(tower, device, dtype)
        self.model_config = tower.get_encoder_cudagraph_config()
        self.limits = resolve_limits(
            self.config,
            self.model_config,
            tower.get_encoder_cudagraph_budget_range(vllm_config)
            if needs_budget_range(self.config, self.model_config)
            else None,
            has_video="video" in self.model_config.modalities,
        )
        self._items = ItemReader(tower, num_axes=len(self.model_config.capture_axes))
        kernels = Choosers.of(self.config)
        kernels.attention.check(self.device)
        self.statistics = Statistics(log_interval)
        own = Generation(
            TowerSpec(tower, self.model_config, self.limits, self.dtype),
            self.config,
            GraphPool(self.device, priority=self.config.stream_priority),
            self.statistics,
            agree=agreement_of(tower, None if self.config.data_parallel else process_group),
        )
        own.check_budgets()
        self.data_parallel = DataParallel(process_group, self.device) if self.config.data_parallel else None
        self._recorder: Recorder | None = None
        self._missed_capture = not own.plans.is_idle
        """Whether an execution before the first capture is still to be warned of."""
        super().__init__(own, kernels)
        self._use_captures()

    # --- compile and capture

    @property
    def pool(self) -> GraphPool:
        """The memory pool of the captures that serve."""
        return self._serving.pool

    @property
    def paths_by_key(self) -> dict[tuple[str, tuple[Hashable, ...]], EncoderPath]:
        """The paths that serve, by name and axis keys."""
        return self._serving.paths_by_key

    @property
    def paths(self) -> dict[str, EncoderPath]:
        """The paths by name, of a tower without capture axes; else those of the first axis keys."""
        return {name: path for (name, _), path in reversed(self.paths_by_key.items())}

    @property
    def programs(self) -> dict[str, BoundProgram | None]:
        """The compiled forward of every path; None before `compile`, and for a path that does not compile."""
        return {name: path.program for name, path in self.paths.items()}

    @property
    def reports(self) -> list[str]:
        """Lines that say what was dropped or runs in another way than configured, and why."""
        notes = [*self._start_notes, *(self._background.notes if self._background is not None else ())]
        notes += [note for path in self.paths_by_key.values() for note in path.notes]
        kept = _invariant_kernels(self.kernels, self.device) if self.config.invariant else ()
        return [*notes, *kept, *self.kernels.failures(self.device)]

    @property
    def budget_graphs(self) -> dict[str, dict[int, BudgetGraphMetadata]]:
        """Every capture, by path and budget; with capture axes, of the first axis keys."""
        return {
            name: {budget: path.metadata(budget) for budget in sorted(path.captured)}
            for name, path in self.paths.items()
        }

    def planned_captures(self) -> CapturePlan:
        """Returns what `capture` will capture, and the bytes of its static inputs."""
        return self._own.planned_captures()

    def capture(self, progress: Callable[[int, int], None] | None = None, *, wait: bool = True) -> None:
        """Compiles, then captures every budget of every path, largest first (capture rule 10).

        A budget that cannot be captured is dropped, with its reason in `reports`. On a device every way to
        run is timed, for `packing: cost`. What is captured already stays until `clear`. While
        `capture(wait=False)` is under way it waits for the end; if that failed, it does all of it here.

        Args:
            progress: called with (budgets done, budgets).
            wait: whether all is captured at the return. False: a few budgets of the tower's own forward are
                captured, in seconds, and serve; the rest is captured between requests, see
                `stats().progress`. Where nothing is compiled all is captured at the return.

        Raises:
            InputError: `wait=False` with `data_parallel` or `invariant`.
        """
        if not wait:
            check_that_steps_will_do(self.config)
            if self._own.compiled_paths and self.config.enabled:
                self._capture_first(progress)
                return
        self.wait_captured()
        with serving_scope(self._turns, self.kernels, self.device):
            self._take_structure()
            if not self.config.enabled or self._is_complete:
                return
            wanted = self._prepare()
            self._own.captures.capture(wanted, progress)
            self._switch()
            self._background = None  # it failed, or was stopped
            if self.data_parallel is not None and self.config.invariant:
                choices = _invariant_choices(self.kernels, self.device)
                self.data_parallel.check_same("invariant: kernels", choices)
            if self.data_parallel is not None and self.pool.is_cuda:
                # So that ranks get items of equal cost, not just of equal size.
                self.data_parallel.share_costs(*self._serving.unit_costs())

    def can_replay(self) -> bool:
        """Returns whether captures serve any batch, or the settings ask for none."""
        serves = any(path.serves for path in self.paths_by_key.values())
        return self._serving.plans.is_idle or (bool(self.model_config.modalities) and serves)

    def _use_captures(self) -> None:
        """Passes the captures that serve to plans, statistics and the trace."""
        captured = self._is_captured
        self._missed_capture = self._missed_capture and not captured
        self._serving.plans.use_captures(self.limits, captured=captured)
        self._serving.captures.record(self.statistics)
        if self._recorder is not None:
            self._recorder.captures_changed(self.paths)
        if self._is_complete and not self.can_replay():
            reason = "; ".join(self.reports) or "no path has a budget"
            if not self.model_config.modalities:
                reason = "the tower declares no modality for them"
            logger.error(
                "encoder CUDA graphs are enabled, but no budget could be captured; every item will fall "
                "back: %s",
                reason,
            )

    def is_captured(self) -> bool:
        """Returns whether `capture` has run since the last `clear`, with `wait=False` up to its return."""
        return self._is_captured

    def check_weights(self) -> None:
        """Makes the next batch check all parameters and modules, and compute derived parameters anew, as is
        due after writes through `.data` (docs/manager.md).
        """
        with self._turns:
            for each in self._generations():
                each.outdate_weights()
        self._looks.all_are_due()

    @property
    def num_bytes(self) -> int:
        """Bytes of all captures: their graphs' pools and their static inputs."""
        return sum(each.num_bytes for each in self._generations())

    def supports_modality(self, modality: str) -> bool:
        """Returns whether captures serve "image" or "video" inputs of this tower."""
        return modality in self.model_config.modalities

    # --- plan and execute

    def plan(self, mm_kwargs: dict[str, Any]) -> Plan:
        """Returns how `execute` would encode these inputs now; before `capture`, with a full ladder. Reads
        only the grids, so pixels may be left out. Raises InputError as `execute`.
        """
        plans = self._serving.plans
        return plans.as_served(plans.of(self._items.read(mm_kwargs), is_use=False))

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """Encodes a batch of images and videos.

        Args:
            mm_kwargs: what the model's processor makes; for packed towers `pixel_values` with
                `image_grid_thw` and `pixel_values_videos` with `video_grid_thw`, in any dtype and on any
                device. Tensors without rows are a valid batch. Pinned tensors are copied asynchronously: do
                not overwrite them before the current stream has passed.

        Returns:
            One tensor an item, (output tokens, hidden), images first, then videos, each in its own memory.

        Raises:
            InputError: an input is missing, malformed or contradicts another; nothing was encoded.
            RankError: with `config.data_parallel`, another rank failed or got other inputs.
        """
        with reading_once():
            # Before the lock is taken. Ranks report errors in the order of their calls.
            items = self._items.read(mm_kwargs) if self.data_parallel is None else None
            in_inference_mode = torch.is_inference_mode_enabled()
            with serving_scope(self._turns, self.kernels, self.device):
                if self._missed_capture:
                    self._missed_capture = False
                    logger.warning(
                        "encoder CUDA graphs are enabled, but nothing has been captured: every item falls "
                        "back; call capture() before execute(), or set enabled: false"
                    )
                self._serving.runner.in_inference_mode = in_inference_mode
                if self.data_parallel is not None:
                    return self.data_parallel.execute(mm_kwargs, self._encode, self.tower)
                return self._encode(mm_kwargs, items)

    def _encode(self, mm_kwargs: dict[str, Any], items: RequestItems | None = None) -> list[Tensor]:
        if items is None:
            items = self._items.read(mm_kwargs)
        start = time.perf_counter()
        if self._has_adapters:
            self._follow_adapters()
        plans, runner = self._serving.plans, self._serving.runner
        wanted = plans.of(items)
        plan, captured = self._allowed(wanted), self._is_captured
        try:
            results, batches = runner.run(plan, mm_kwargs, items.specs, may_replay=captured)
        except WeightsMovedError as error:
            self._capture_again(error)
            plan = plans.of(items)
            results, batches = runner.run(plan, mm_kwargs, items.specs, may_replay=captured)
        self._check_tower()  # while the device works
        if plans.recurring is not None and plan is wanted:
            plans.improve(mm_kwargs, items)
        if self._recorder is not None:  # what was encoded: a request that was refused is no load to tune for
            try:
                self._recorder.record(items, batches, (time.perf_counter() - start) * 1e3)
            except OSError as error:
                self._recorder = None
                logger.warning("requests are served, and not recorded any more: %s", error)
        return results

    def check_invariance(self, mm_kwargs: dict[str, Any], *, packings: int = 16, seed: int = 0) -> list[int]:
        """Encodes every item alone, then in `packings` random choices of the items; returns the positions of
        those whose bits ever differ, none with `invariant`. Raises as `execute`.
        """
        num_axes = len(self.model_config.capture_axes)
        count = len(read_item_specs(self.tower, mm_kwargs))

        def encoded(indices: Sequence[int]) -> list[Tensor]:
            return self.execute(select_items(self.tower, mm_kwargs, indices, num_axes)[0])

        alone = [encoded([index])[0] for index in range(count)]
        numbers = random.Random(seed)
        differing: set[int] = set()
        for _ in range(packings if count else 0):
            indices = sorted(numbers.sample(range(count), numbers.randint(1, count)))
            results = zip(indices, encoded(indices), strict=True)
            differing |= {index for index, result in results if not torch.equal(result, alone[index])}
        return sorted(differing)

    def record_trace(self, path: str | os.PathLike[str]) -> None:
        """Appends every request from now on to a file, for `encoder-cg tune` and `encoder-cg report`: sizes
        and how they were served, no contents. InputError: the file cannot be opened.
        """
        with self._turns:
            before, self._recorder = self._recorder, Recorder(path, self._own, self.paths)
            if before is not None:
                before.close()

    def stats(self) -> ManagerStats:
        """Returns hits, misses by reason, padding and bytes so far."""
        self._serving.captures.record(self.statistics)
        derived_bytes = sum(each.derived_bytes for each in self._generations())
        progress = self._background.progress if self._background is not None else None
        return replace(self.statistics.snapshot(), progress=progress, derived_bytes=derived_bytes)


# --- the same bits in every batch


def _invariant_kernels(kernels: Choosers, device: torch.device) -> list[str]:
    from fxsplit_encoder.kernels.products.fixed import PRODUCTS

    attention = [f"attention of {chosen}" for chosen in kernels.attention.chosen]
    return [f"invariant: {each}" for each in (*attention, *PRODUCTS.describe(device))]


def _invariant_choices(kernels: Choosers, device: torch.device) -> list[str]:
    from fxsplit_encoder.kernels.products.fixed import PRODUCTS

    known: dict[str, Any] = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        known = describe_environment(device)
    return [
        *(f"{name} {value}" for name, value in known.items()),
        *kernels.attention.chosen,
        *PRODUCTS.choices(device),
    ]


# --- a trace of requests


class Recorder:
    """Appends requests of one manager, whose lock the caller holds, to a trace: a line each, which is written
    at once. InputError: the file cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], generation: Generation, paths: Mapping[str, EncoderPath]
    ) -> None:
        try:
            self._file = open(path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"trace {path}: cannot be written: {error.strerror}") from None
        self.generation = generation
        self.paths = paths
        self._is_described = False

    def captures_changed(self, paths: Mapping[str, EncoderPath]) -> None:
        """Makes the next request describe these paths first."""
        self.paths = paths
        self._is_described = False

    def record(self, items: RequestItems, batches: Iterable[PlannedBatch], host_ms: float) -> None:
        """Appends one request, its batches as served, and the milliseconds of its thread."""
        if not self._is_described:
            self._file.write(json.dumps({"run": self._describe()}, default=str) + "\n")
            self._is_described = True
        recorded = [Item(spec, segments=n) for spec, n in zip(items.specs, items.segments, strict=True)]
        served = [batch.as_dict() for batch in batches]
        self._file.write(trace_line(recorded, batches=served, host_ms=round(host_ms, 3)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _describe(self) -> dict[str, Any]:
        """Returns a run as `tuning.trace.RunRecord` holds it."""
        spec, device = self.generation.spec, self.generation.pool.device
        tower, limits = spec.tower, spec.limits
        return {
            "tower": type(getattr(tower, "tower", tower)).__name__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "dtype": str(spec.dtype).removeprefix("torch."),
            "versions": {name: found for name in _PACKAGES if (found := package_version(name)) is not None},
            "config": self.generation.config.model_dump(mode="json", exclude_unset=True, fallback=str),
            "max_items_per_batch": limits.max_items_per_batch,
            "max_frames_per_batch": limits.max_frames_per_batch,
            "paths": {name: _describe_path(path) for name, path in self.paths.items()},
            "notes": [note for path in self.paths.values() for note in path.notes],
        }


def measured_costs(path: EncoderPath) -> dict[str, Any] | None:
    """Returns measurements of a path as `tuning.MeasuredCosts` holds them; None: no capture was kept."""
    costs = path.costs
    if not (costs.measured and costs.replay and costs.exact):
        return None
    points = {"replay_ms": dict(costs.replay), "exact_ms": dict(costs.exact)}
    above = [budget for budget in path.ladder.no_graph_needed if budget > max(costs.replay)]
    return {**points, **({"not_kept_from": min(above)} if above else {})}


def _describe_path(path: EncoderPath) -> dict[str, Any]:
    return {
        "budgets": list(path.budgets),
        "captures": [
            {"budget": budget, "mode": captured.mode, "num_bytes": path.ladder.num_bytes(budget)}
            for budget, captured in sorted(path.captured.items())
        ],
        "not_kept": sorted(path.ladder.no_graph_needed),
        "costs": measured_costs(path),
    }


def trace_line(items: Sequence[Item], **served: Any) -> str:
    """Returns the line of a request: sizes and segments of its items, and how it was `served`."""
    listed: list[dict[str, Any]] = []
    for item in items:
        spec = item.spec
        listed.append({"input_size": spec.input_size, "output_tokens": spec.output_tokens})
        if item.segments != 1:
            listed[-1]["segments"] = item.segments
        if spec.path_output_tokens:
            listed[-1]["path_output_tokens"] = dict(spec.path_output_tokens)
    # Sizes may be NumPy's integers, which JSON does not know.
    return json.dumps({"items": listed, **served}, default=int) + "\n"
