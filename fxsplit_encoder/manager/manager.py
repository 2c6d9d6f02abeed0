"""`EncoderCudaGraphManager`: packs a request into budgets, replays them, and falls back where none serves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention import KernelChooser, choosing
from fxsplit_encoder.capture import GraphPool, MissReason
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, ReplayError
from fxsplit_encoder.manager.budgets import resolve_limits
from fxsplit_encoder.manager.capture_set import CaptureSet
from fxsplit_encoder.manager.captures import CapturePlan, plan_captures
from fxsplit_encoder.manager.costs import CostModel
from fxsplit_encoder.manager.data_parallel import DataParallel
from fxsplit_encoder.manager.dual_path import postprocess_of, read_item_specs, read_model_config
from fxsplit_encoder.manager.item_facts import (
    axis_keys,
    item_axis_keys,
    item_modalities,
    item_segments,
    video_frames,
)
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.plan import Plan
from fxsplit_encoder.manager.planner import build_fallback_plan, build_plan
from fxsplit_encoder.manager.protocol import BudgetGraphMetadata, missing_methods
from fxsplit_encoder.manager.statistics import ManagerStats, Statistics
from fxsplit_encoder.manager.trace import TraceWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fxsplit_encoder.capture.buffers import StaticValue
    from fxsplit_encoder.compile import BoundProgram
    from fxsplit_encoder.manager.plan import PathPlan, PlannedBatch
    from fxsplit_encoder.manager.protocol import EncoderItemSpec, SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)

# Plans depend on sizes alone, and the same sizes come again.
_KEPT_PLANS = 1024

# Host milliseconds that a batch adds, to decide whether it is worth splitting one.
_PER_BATCH_MS = 0.3


class EncoderCudaGraphManager:
    """Encodes batches of images and videos through captured budgets.

    Args:
        tower: what `wrap` returns, or any object with the protocol's methods.
        config: budgets, modes, limits.
        device, dtype: where and in what the tower computes; by default those of its parameters.
        log_interval: items between two log lines of statistics; 0: none.
        process_group: the ranks that share the items if `config.data_parallel` is set; None: the default
            group.
        trace: a file to which the item sizes of every request are appended, for `encoder-cg tune`.

    Threads may share a manager: batches run one at a time. Without CUDA the recorded steps are replayed one
    by one over the same static buffers: right, and no faster.

    Raises:
        InputError: the tower lacks methods of the protocol, or declares an impossible range.
        ConfigError: the settings do not suit the tower, or there is no process group for `data_parallel`.
    """

    def __init__(
        self,
        tower: SupportsEncoderCudaGraph,
        config: EncoderConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        log_interval: int = 100,
        process_group: ProcessGroup | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if missing := missing_methods(tower):
            raise InputError(
                f"tower: {type(tower).__name__} lacks methods of SupportsEncoderCudaGraph; pass what "
                f"wrap(model.visual) returns; missing: {', '.join(missing)}"
            )
        self.tower = tower
        self.config = config if config is not None else EncoderConfig()
        self.device, self.dtype = _placement(tower, device, dtype)
        self.model_config = read_model_config(tower)
        self.limits = resolve_limits(
            self.config,
            self.model_config,
            tower.get_encoder_cudagraph_budget_range(None),
            has_video="video" in self.model_config.modalities,
        )
        self.pool = GraphPool(self.device)
        self.routes = {
            (name, keys): EncoderPath(
                name,
                tower,
                self.config,
                self.limits,
                self.pool,
                self.device,
                self.dtype,
                keys,
                remaining_bytes=lambda: self._captures.remaining_bytes,
            )
            for name in self.limits.path_budgets
            for keys in itertools.product(*self.model_config.capture_axes)
        }
        """Every path at every combination of axis keys."""
        self.kernels = KernelChooser(self.config.attention)
        self.kernels.check(self.device)
        self.statistics = Statistics(log_interval)
        self._captures = CaptureSet(
            self.routes,
            self.pool,
            self.statistics,
            self.limits.skippable_paths,
            self.config.max_graph_bytes,
        )
        self.data_parallel = DataParallel(process_group, self.device) if self.config.data_parallel else None
        self._postprocess = postprocess_of(tower)
        self._trace = TraceWriter(trace) if trace is not None else None
        self._captured = False
        self._lock = threading.RLock()
        self._use_captures()

    # --- compile and capture

    @property
    def paths(self) -> dict[str, EncoderPath]:
        """The paths by name, of a tower without capture axes; else those of the first axis keys."""
        return {name: path for (name, _), path in reversed(self.routes.items())}

    @property
    def programs(self) -> dict[str, BoundProgram | None]:
        """The compiled forward of every path; None before `compile`, and for a path that does not compile."""
        return {name: path.program for name, path in self.paths.items()}

    @property
    def reports(self) -> list[str]:
        """What was dropped or runs in another way than asked, and why."""
        return [note for path in self.routes.values() for note in path.notes]

    @property
    def budget_graphs(self) -> dict[str, dict[int, BudgetGraphMetadata]]:
        """Every capture, by path and budget; with capture axes, of the first axis keys."""
        return {
            name: {b: self._metadata(path, b) for b in sorted(path.captured)}
            for name, path in self.paths.items()
        }

    def planned_captures(self) -> CapturePlan:
        """What `capture` will capture, and the memory of its static inputs."""
        if not self.config.enabled or not self.model_config.modalities:
            return CapturePlan(())
        return plan_captures(self.routes.values(), self.limits)

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles every path's forward; `progress` gets (done, total) of each path, where two
        phases of the tracing and every piece count.
        """
        with self._lock:
            for path in self.routes.values():
                if path.budgets:  # else nothing tells at which size to trace it, and it runs eagerly
                    path.compile(progress)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles, then captures every budget of every path, largest first (capture rule 10).

        A budget that cannot be captured is dropped, with its reason in `reports`; the others serve. On a
        device every way to run is timed, for `packing: cost`. `progress` is called with (budgets done,
        budgets).
        """
        with self._lock, choosing(self.kernels):
            if not self.config.enabled:
                return
            planned = self.planned_captures()
            logger.info("%s", planned)
            self.compile()
            for capture in planned.captures:
                if capture.pruned is not None:
                    path = self.routes[capture.key.path, capture.key.axis_keys]
                    path.note(f"{path.label}: budget {capture.key.budget} is not captured: {capture.pruned}")
            wanted = [capture.key for capture in planned.captures if capture.pruned is None]
            self._captures.capture(wanted, progress)
            if self.config.packing == "cost":
                for path in self.routes.values():
                    path.measure()
            self._captured = True
            self._use_captures()
            if wanted and not any(path.captured or path.ladder.exact for path in self.routes.values()):
                logger.error(
                    "encoder CUDA graphs are enabled, but no budget could be captured; every item will fall "
                    "back: %s",
                    "; ".join(self.reports),
                )
            if self.data_parallel is not None and self.pool.is_cuda:
                self._share_costs(self.data_parallel)

    def _share_costs(self, data_parallel: DataParallel) -> None:
        """So that ranks get items of equal cost, not just of equal size."""
        per_patch, per_pair = 1.0, 0.0
        for path in self.routes.values():
            costs = path.costs()
            if costs.exact:
                tokens, milliseconds = costs.exact[-1]
                per_patch, per_pair = milliseconds / (tokens * path.rows_per_token), costs.attention
        data_parallel.share_costs(per_patch, per_pair)

    def _use_captures(self) -> None:
        """Gathers what plans depend on, so that a request need not."""
        self._plans: dict[Hashable, Plan] = {}
        routes = self.routes.values()
        costs = {key: path.costs() for key, path in self.routes.items()}
        for key, path in self.routes.items():
            if path.exact is not None and costs[key].measured:
                path.exact.use_costs(costs[key], path.ladder.capture_ms)
        self._build_plan = functools.partial(
            build_plan,
            limits=self.limits,
            captured=frozenset(p.key(b) for p in routes for b in p.captured) if self._captured else None,
            exact=frozenset(p.key(b) for p in routes for b in p.ladder.exact),
            packing=self.config.packing,
            costs=CostModel(costs, _PER_BATCH_MS) if self._captured else None,
        )
        self.statistics.record_input_bytes(sum(path.input_bytes for path in routes))

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`."""
        return self._captured

    def clear(self) -> None:
        """Releases every capture and its memory; `capture` may be called again."""
        with self._lock:
            self._captures.release()
            self._captured = False
            self._use_captures()

    @property
    def num_bytes(self) -> int:
        """Memory that all captures hold: their graphs' pool and their static inputs."""
        return self._captures.num_bytes

    def supports_modality(self, modality: str) -> bool:
        """Whether captures serve "image" or "video" inputs of this tower."""
        return modality in self.model_config.modalities

    # --- plan and execute

    def plan(self, mm_kwargs: dict[str, Any]) -> Plan:
        """How `execute` would encode these inputs now. Touches no tensor but the grids; needs no GPU.

        Before `capture`, the plan is that of a full ladder.
        """
        return self._with_exact_replays(self._plan(mm_kwargs, self._item_specs(mm_kwargs)))

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """Encodes a batch of images and videos.

        Args:
            mm_kwargs: what the model's processor makes; for packed towers `pixel_values` with
                `image_grid_thw` and `pixel_values_videos` with `video_grid_thw`, in any dtype and on any
                device. No items is a valid batch. Pinned tensors are copied asynchronously: do not overwrite
                them before the current stream has passed.

        Returns:
            One tensor an item, (output tokens, hidden), images first, then videos. They are the caller's own.

        Raises:
            InputError: the inputs contradict one another; nothing was encoded.
            RankError: with `config.data_parallel`, another rank failed or got other inputs.
        """
        with self._lock, choosing(self.kernels), _without_autograd():
            if self.data_parallel is not None:
                return self.data_parallel.execute(mm_kwargs, self._encode, self.tower)
            return self._encode(mm_kwargs)

    def _encode(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """The items of a batch, all of them on this device."""
        specs = self._item_specs(mm_kwargs)
        if self._trace is not None:
            self._trace.write(specs, item_segments(self.tower, mm_kwargs, len(specs)))
        plan = self._plan(mm_kwargs, specs)
        tokens = [spec.output_tokens for spec in specs]
        results: dict[int, Tensor] = {}
        for batch in plan.batches:
            self._run_batch(batch, mm_kwargs, tokens, results)
        return [results[index] for index in range(plan.num_items)]

    def stats(self) -> ManagerStats:
        """Hits, misses by reason, padding and bytes so far."""
        for path in self.routes.values():
            if path.exact is not None and path.exact.shapes.sizes:
                self.statistics.record_capture(path.key(0), "exact", path.exact.num_bytes)
        return self.statistics.snapshot()

    # --- one plan

    def _item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return read_item_specs(self.tower.get_encoder_cudagraph_item_specs(mm_kwargs))

    def _plan(self, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> Plan:
        if not self.config.enabled or all(path.mode == "none" for path in self.routes.values()):
            return build_fallback_plan(
                specs, self.limits.path_budgets, MissReason.DISABLED, self.limits.skippable_paths
            )
        modalities = item_modalities(self.tower, mm_kwargs, len(specs))
        segments = item_segments(self.tower, mm_kwargs, len(specs))
        frames = video_frames(self.tower, mm_kwargs, modalities, segments)
        keys = item_axis_keys(self.tower, mm_kwargs, len(specs)) if self.model_config.capture_axes else None
        sizes = tuple([(s.input_size, s.output_tokens, *s.path_output_tokens.items()) for s in specs])
        cache_key = (sizes, tuple(segments), tuple(frames), tuple(modalities), tuple(keys or ()))
        plan = self._plans.get(cache_key)
        if plan is None:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            plan = self._make_plan(specs, modalities, segments, frames, keys)
            self._plans[cache_key] = plan
        return plan

    def _make_plan(
        self,
        specs: Sequence[EncoderItemSpec],
        modalities: Sequence[str],
        segments: Sequence[int],
        frames: Sequence[int],
        keys: Sequence[tuple[Hashable, ...]] | None,
    ) -> Plan:
        unsupported = {m for m in modalities if not self.supports_modality(m)}
        return self._build_plan(
            specs,
            item_segments=segments,
            item_frames=frames if any(frames) else None,
            item_reasons=[MissReason.UNSUPPORTED_INPUT if m in unsupported else None for m in modalities]
            if unsupported
            else None,
            item_axis_keys=keys,
        )

    def _with_exact_replays(self, plan: Plan) -> Plan:
        """The plan with what captures at exact shapes, which come and go, would serve now."""
        if not self._captured or all(path.exact is None for path in self.routes.values()):
            return plan
        batches = []
        for batch in plan.batches:
            paths = {
                name: self.routes[name, batch.axis_keys].as_served(planned)
                if (name, batch.axis_keys) in self.routes
                else planned
                for name, planned in batch.paths.items()
            }
            batches.append(replace(batch, paths=paths))
        return Plan(tuple(batches), plan.num_items)

    # --- one batch

    def _run_batch(
        self,
        batch: PlannedBatch,
        mm_kwargs: dict[str, Any],
        tokens: list[int],
        results: dict[int, Tensor],
    ) -> None:
        indices = list(batch.indices)
        everything = indices == list(range(len(tokens))) and not self.model_config.capture_axes
        selected = mm_kwargs if everything else self.tower.select_encoder_cudagraph_items(mm_kwargs, indices)
        keys = axis_keys(selected) if self.model_config.capture_axes else ()
        reason: MissReason | None = None
        with self.pool.replaying():
            outputs: dict[str, Tensor] = {}
            for name, planned in batch.paths.items():
                if not planned.skipped:
                    outputs[name], missed = self._run_path(name, keys, planned, selected)
                    reason = reason or missed
            self._postprocess(outputs, indices, tokens, results, clone=False, batch_mm_kwargs=selected)
            self._own(indices, results, outputs)
            if self.config.debug:
                self.pool.handed_out.add(results[index] for index in indices)
        self.statistics.record_items(len(indices), reason)

    def _run_path(
        self, name: str, keys: tuple[Hashable, ...], planned: PathPlan, selected: dict[str, Any]
    ) -> tuple[Tensor, MissReason | None]:
        """The path's output, and why it is no replay's."""
        path = self.routes.get((name, keys))
        if path is None:  # items of the same keys make up a batch of others: the tower's own forward serves
            self.statistics.record_fallback("eager")
            return self.tower.encoder_eager_forward(selected, path=name), MissReason.NOT_CAPTURED
        values = None
        reason = None
        if self._captured:
            for key, ladder, size in path.captures_for(planned):
                values = path.values(selected) if values is None else values
                captured = path.best_capture(ladder, size, values)
                try:
                    path.load(captured, values)
                except ReplayError as error:
                    # Raised before anything was copied: the batch is whole.
                    logger.warning("%s, %d tokens: %s", path.label, size, error)
                    reason = MissReason.EXTENT_EXCEEDED
                    continue
                output = captured.replay(debug=self.config.debug)[0]
                assert isinstance(output, torch.Tensor)
                self.statistics.record_replay(key, planned.tokens)
                return output, None
        output = self._run_without_replay(path, planned, selected, values)
        return output, reason or path.miss_reason(planned)

    def _run_without_replay(
        self,
        path: EncoderPath,
        planned: PathPlan,
        selected: dict[str, Any],
        values: dict[str, StaticValue | None] | None = None,
    ) -> Tensor:
        if planned.eager:
            output, compiled = path.run_eager(selected), False
        else:
            output, compiled = path.run_exact(selected, values)
        self.statistics.record_fallback("exact" if compiled else "eager")
        return output

    def _own(self, indices: Sequence[int], results: dict[int, Tensor], outputs: dict[str, Tensor]) -> None:
        """Copies what still lies in a path's output, so that no replay overwrites it (capture rule 7).

        Every item gets memory of its own: a cache that keeps one image must not keep its batch alive.
        """
        storages = {output.untyped_storage().data_ptr() for output in outputs.values()}
        for index in indices:
            if results[index].untyped_storage().data_ptr() in storages:
                results[index] = results[index].clone()

    def _metadata(self, path: EncoderPath, budget: int) -> BudgetGraphMetadata:
        captured = path.captured[budget]
        return BudgetGraphMetadata(
            token_budget=budget,
            max_batch_size=self.limits.max_items_per_batch,
            max_frames_per_batch=self.limits.max_frames_per_batch,
            graph=captured.capture,
            input_buffers=captured.inputs.tensors,
            output_buffer=captured.outputs[0],
            axis_keys=path.axis_keys,
            mode=captured.mode,
            graph_bytes=path.ladder.num_bytes(budget),
        )


@contextlib.contextmanager
def _without_autograd() -> Iterator[None]:
    if not torch.is_inference_mode_enabled():
        with torch.no_grad():
            yield
        return
    # Static buffers are ordinary tensors; inside inference mode they could not be written later outside
    # of it.
    with torch.inference_mode(False), torch.no_grad():
        yield


def _placement(
    tower: Any, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    parameter = next(iter(tower.parameters()), None) if hasattr(tower, "parameters") else None
    if device is None:
        device = parameter.device if parameter is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = parameter.dtype if parameter is not None else torch.get_default_dtype()
    return torch.device(device), dtype
