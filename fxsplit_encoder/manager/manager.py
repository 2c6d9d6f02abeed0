"""`EncoderCudaGraphManager`: packs a request into budgets, replays them, and falls back where none serves."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, StartFileError, WeightsMovedError
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.manager.budget_memory import check_budgets
from fxsplit_encoder.manager.captures import CapturePlan, plan_captures
from fxsplit_encoder.manager.data_parallel import DataParallel
from fxsplit_encoder.manager.legacy_dual_path import read_item_specs, read_model_config
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.recording import Recorder
from fxsplit_encoder.manager.request_plans import RequestPlans
from fxsplit_encoder.manager.tensor_parallel import agreement_of, why_not_compiled
from fxsplit_encoder.manager.tower_part import placement_of
from fxsplit_encoder.planning import Plan
from fxsplit_encoder.planning.limits import needs_budget_range, resolve_limits
from fxsplit_encoder.protocol import (
    BudgetGraphMetadata,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
    missing_methods,
)
from fxsplit_encoder.runtime import CaptureScope, CaptureSet, Choosers
from fxsplit_encoder.runtime.statistics import ManagerStats, Statistics
from fxsplit_encoder.runtime.weights import warn_of_new_captures

if TYPE_CHECKING:
    from fxsplit_encoder.compile import BoundProgram

logger = logging.getLogger(__name__)


class EncoderCudaGraphManager:
    """Encodes batches of images and videos through captured budgets.

    Args:
        tower: what `wrap` returns, or any object with the protocol's methods.
        config: budgets, modes, limits.
        device, dtype: where and in what the tower computes; by default those of its parameters.
        log_interval: items between two log lines of statistics; 0: none.
        vllm_config: passed to the tower's `get_encoder_cudagraph_budget_range`, from which towers written for
            vLLM read the scheduler's limits. A tower is asked for its range only where the settings leave
            the budgets of a path, or the items of a batch, to it.
        process_group: with `config.data_parallel` the ranks that share the items; None: the default group.
            Without, the ranks that share the tower's weights and whose forward has collectives: they capture
            the same. None: nobody does, or DTensor tells who.

    Threads may share a manager: batches run one at a time. Without CUDA the recorded steps are replayed one
    by one over the same static buffers: right, and no faster.

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
        self.model_config = read_model_config(tower)
        self.limits = resolve_limits(
            self.config,
            self.model_config,
            tower.get_encoder_cudagraph_budget_range(vllm_config)
            if needs_budget_range(self.config, self.model_config)
            else None,
            has_video="video" in self.model_config.modalities,
        )
        self.pool = GraphPool(self.device, priority=self.config.stream_priority)
        self.kernels = Choosers.of(self.config)
        self.kernels.check(self.device)
        agree = agreement_of(tower, None if self.config.data_parallel else process_group)
        self._scope = CaptureScope(
            self.config,
            self.pool,
            lambda: self._captures.remaining_bytes,
            agree,
            not_compiled="" if agree is None else why_not_compiled(tower),
        )
        self.paths_by_key = {
            (name, keys): EncoderPath(name, tower, self.limits, self._scope, self.dtype, keys)
            for name in self.limits.path_budgets
            for keys in itertools.product(*self.model_config.capture_axes)
        }
        """Every path at every combination of axis keys."""
        self._check_budgets()
        self.statistics = Statistics(log_interval)
        skippable = {key for key in self.paths_by_key if key[0] in self.limits.skippable_paths}
        limit = self.config.max_graph_bytes
        self._captures = CaptureSet(self.paths_by_key, self.pool, limit, skippable, agree)
        self.data_parallel = DataParallel(process_group, self.device) if self.config.data_parallel else None
        self._plans = RequestPlans(tower, self.config, self.model_config, self.paths_by_key)
        num_axes, debug = len(self.model_config.capture_axes), self.config.debug
        self._runner = BatchRunner(
            tower,
            self.paths_by_key,
            self.pool,
            self.statistics,
            num_axes=num_axes,
            max_items=self.limits.max_items_per_batch,
            debug=debug,
        )
        self._recorder: Recorder | None = None
        self._start_refused: str | None = None
        """Why a saved start is not used."""
        self._start_read = False
        self._captured = False
        self._missed_capture = not self._is_idle
        """Whether an execution before the first capture is still to be warned of."""
        self._lock = threading.RLock()
        self._use_captures()

    def _check_budgets(self) -> None:
        """Raises ConfigError for budgets that the device cannot hold."""
        for path in self.paths_by_key.values():
            own = self.config.paths.get(path.name)
            check_budgets(
                path.forward,
                tile=self.model_config.paths[path.name].min_token_budget,
                out_hidden_size=self.model_config.out_hidden_size,
                field=f"paths.{path.name}.token_budgets" if own and own.token_budgets else "token_budgets",
            )

    # --- compile and capture

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
        """What was dropped or runs in another way than asked, and why."""
        refused = [self._start_refused] if self._start_refused is not None else []
        return [*refused, *(note for path in self.paths_by_key.values() for note in path.notes)]

    @property
    def budget_graphs(self) -> dict[str, dict[int, BudgetGraphMetadata]]:
        """Every capture, by path and budget; with capture axes, of the first axis keys."""
        return {
            name: {budget: path.metadata(budget) for budget in sorted(path.captured)}
            for name, path in self.paths.items()
        }

    def planned_captures(self) -> CapturePlan:
        """What `capture` will capture, and the memory of its static inputs."""
        if not self.config.enabled or not self.model_config.modalities:
            return CapturePlan(())
        return plan_captures(self.paths_by_key.values(), self.limits)

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles every path's forward; `progress` gets (done, total) of each path, where two
        phases of the tracing and every piece count.
        """
        refusals: dict[str, str] = {}
        with self._lock, _without_autograd():
            if self.config.start_file is not None and not self._start_read:
                self.load_start(self.config.start_file)
            for path in self.paths_by_key.values():
                if path.budgets:  # else nothing tells at which size to trace it, and it runs eagerly
                    path.compile(progress, refusals)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles, then captures every budget of every path, largest first (capture rule 10).

        A budget that cannot be captured is dropped, with its reason in `reports`; the others serve. On a
        device every way to run is timed, for `packing: cost`. `progress` is called with (budgets done,
        budgets). What is captured already stays until `clear`.
        """
        in_inference_mode = torch.is_inference_mode_enabled()
        with self._lock, self.kernels.choosing(), _without_autograd():
            if not self.config.enabled or self._captured:
                return
            for path in self.paths_by_key.values():
                path.ladder.in_inference_mode = in_inference_mode
            planned = self.planned_captures()
            logger.info("%s", planned)
            self.compile()
            for capture in planned.captures:
                if capture.pruned is not None:
                    path = self.paths_by_key[capture.key.path, capture.key.axis_keys]
                    path.note(f"{path.label}: budget {capture.key.budget} is not captured: {capture.pruned}")
            wanted = [capture.key for capture in planned.captures if capture.pruned is None]
            if self.config.packing == "cost":
                for key in dict.fromkeys((key.path, key.axis_keys) for key in wanted):
                    self.paths_by_key[key].measure()
            self._captures.capture([((key.path, key.axis_keys), key.budget) for key in wanted], progress)
            self._captured = True
            self._missed_capture = False
            self._use_captures()
            self._check_captures()
            if self.data_parallel is not None and self.pool.is_cuda:
                self._share_costs(self.data_parallel)

    def save_start(self, path: str | os.PathLike[str]) -> int:
        """Writes a file with which other processes start on devices of the same kind without compiling and
        without measuring: what this process compiled, what was measured of attention on this device, and what
        of this tower. The file replaces what was there as a whole.

        Returns:
            How many bytes it has.

        Raises:
            InputError: nothing was captured yet, or the file cannot be written.
        """
        from fxsplit_encoder.manager.start import save_manager

        with self._lock:
            if not self._captured:
                raise InputError("save_start: nothing was compiled or measured yet; call capture() first")
            return save_manager(self, Path(path))

    def load_start(self, path: str | os.PathLike[str]) -> bool:
        """Has `compile` and `capture` use what `save_start` wrote. The file holds compiled code, so it has to
        come from someone who may run code here.

        One that is damaged, or was made by another GPU, version, tower or configuration, is ignored, with a
        warning that names what differs; `reports` says so too.

        Returns:
            Whether it is used.

        Raises:
            InputError: captures are there already.
        """
        from fxsplit_encoder.manager.start import load_manager

        with self._lock:
            if self._captured:
                raise InputError("load_start: everything is captured already; call it before capture()")
            self._start_read = True
            try:
                load_manager(self, Path(path))
            except StartFileError as error:
                self._start_refused = f"the start in {path} is not used: {error}"
                logger.warning("%s", self._start_refused)
                return False
            self._start_refused = None
            return True

    def can_replay(self) -> bool:
        """Whether what was captured serves any batch, or the settings ask for no captures."""
        serves = any(path.serves for path in self.paths_by_key.values())
        return self._is_idle or (bool(self.model_config.modalities) and serves)

    def _check_captures(self) -> None:
        """An encoder that is enabled and can replay nothing says so."""
        if self.can_replay():
            return
        if not self.model_config.modalities:
            reason = "the tower declares no modality for them"
        else:
            reason = "; ".join(self.reports) or "no path has a budget"
        logger.error(
            "encoder CUDA graphs are enabled, but no budget could be captured; every item will fall back: %s",
            reason,
        )

    @property
    def _is_idle(self) -> bool:
        """Whether the settings ask for no captures."""
        return not self.config.enabled or all(path.mode == "none" for path in self.paths_by_key.values())

    def _share_costs(self, data_parallel: DataParallel) -> None:
        """So that ranks get items of equal cost, not just of equal size."""
        per_patch, per_pair = 1.0, 0.0
        for path in self.paths_by_key.values():
            costs = path.costs
            if costs.exact:
                tokens, milliseconds = costs.exact[-1]
                per_patch, per_pair = milliseconds / (tokens * path.measured.rows_per_token), costs.attention
        data_parallel.share_costs(per_patch, per_pair)

    def _use_captures(self) -> None:
        """Tells of the captures whoever plans, runs and counts."""
        self._plans.use_captures(self.limits, captured=self._captured)
        self.statistics.record_clear()
        for path in self.paths_by_key.values():
            for budget, captured in path.captured.items():
                key, costs = path.key(budget), path.ladder.costs.get(budget)
                self.statistics.record_capture(key, captured.mode, path.ladder.num_bytes(budget))
                if costs is not None:
                    self.statistics.record_time(key, costs.best)
        self.statistics.record_input_bytes(sum(path.input_bytes for path in self.paths_by_key.values()))
        if self._recorder is not None:
            self._recorder.captures_changed()

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`."""
        return self._captured

    def clear(self) -> None:
        """Releases every capture and its memory; `capture` may be called again."""
        with self._lock:
            self._captures.clear()
            for path in self.paths_by_key.values():
                path.notes.clear()
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

        Before `capture`, the plan is that of a full ladder. Pixels may be left out; those that are given must
        be what the grids describe.

        Raises:
            InputError: as `execute`.
        """
        return self._plans.as_served(self._plans.of(mm_kwargs, self._item_specs(mm_kwargs)))

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """Encodes a batch of images and videos.

        Args:
            mm_kwargs: what the model's processor makes; for packed towers `pixel_values` with
                `image_grid_thw` and `pixel_values_videos` with `video_grid_thw`, in any dtype and on any
                device. No items is a valid batch, given as tensors without rows. Pinned tensors are copied
                asynchronously: do not overwrite them before the current stream has passed.

        Returns:
            One tensor an item, (output tokens, hidden), images first, then videos. They are the caller's own.

        Raises:
            InputError: an input is missing, not what it should be, or contradicts another; nothing was
                encoded, and nobody waited for it.
            RankError: with `config.data_parallel`, another rank failed or got other inputs.
        """
        # Before the lock is taken: whoever sends bad inputs holds up nobody else. Ranks have to tell one
        # another that theirs are bad, in the order of their calls.
        specs = self._item_specs(mm_kwargs) if self.data_parallel is None else None
        in_inference_mode = torch.is_inference_mode_enabled()
        with self._lock, self.kernels.choosing(), _without_autograd():
            if self._missed_capture:
                self._missed_capture = False
                logger.warning(
                    "encoder CUDA graphs are enabled, but nothing has been captured: every item falls back; "
                    "call capture() before execute(), or set enabled: false"
                )
            self._runner.in_inference_mode = in_inference_mode
            if self.data_parallel is not None:
                return self.data_parallel.execute(mm_kwargs, self._encode, self.tower)
            return self._encode(mm_kwargs, specs)

    def _encode(
        self, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec] | None = None
    ) -> list[Tensor]:
        """The items of a batch, all of them on this device; `specs`, if their sizes were read before."""
        if specs is None:
            specs = self._item_specs(mm_kwargs)
        start = time.perf_counter()
        plan, captured = self._plans.of(mm_kwargs, specs), self._captured
        try:
            results, batches = self._runner.run(plan, mm_kwargs, specs, may_replay=captured)
        except WeightsMovedError as error:
            self._capture_again(error)
            plan = self._plans.of(mm_kwargs, specs)
            results, batches = self._runner.run(plan, mm_kwargs, specs, may_replay=captured)
        if self._recorder is not None:  # what was encoded: a request that was refused is no load to tune for
            self._recorder.write(mm_kwargs, specs, batches, (time.perf_counter() - start) * 1e3)
        return results

    def _capture_again(self, error: WeightsMovedError) -> None:
        """Captures over the parameters that the tower has now.

        Raises:
            InputError: the program was compiled for others.
            WeightsMovedError: the tower's parameters are sharded: its ranks may not have seen it together.
        """
        if self._scope.agree is not None:
            raise error
        for path in self.paths_by_key.values():
            path.forward.current_program()
        warn_of_new_captures(error)
        held = self._captures.held()
        self._captures.clear()
        self._captures.capture(held)
        self._use_captures()

    def record_trace(self, path: str | os.PathLike[str]) -> None:
        """Appends every request from now on to a file, for `encoder-cg tune` and `encoder-cg report`: sizes,
        how they were served, and by which captures; nothing of what was encoded.

        Raises:
            InputError: the file cannot be opened.
        """
        with self._lock:
            if self._recorder is not None:
                self._recorder.close()
            self._recorder = Recorder(path, self.tower, self._scope, self.limits, self.paths, self.dtype)

    def stats(self) -> ManagerStats:
        """Hits, misses by reason, padding and bytes so far."""
        for path in self.paths_by_key.values():
            if path.unpadded.captures.sizes:
                self.statistics.record_capture(path.key(0), "exact", path.unpadded_bytes)
            else:
                self.statistics.record_release(path.key(0))
        return self.statistics.snapshot()

    def _item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return read_item_specs(self.tower, mm_kwargs)


def _without_autograd() -> AbstractContextManager[None]:
    return _OutsideInferenceMode() if torch.is_inference_mode_enabled() else torch.no_grad()


# Entered for every request of vLLM's: a class takes less time than a generator.
class _OutsideInferenceMode(AbstractContextManager[None]):
    """Without autograd, and outside of inference mode: static buffers are ordinary tensors, which could not
    be written outside of it if they were made inside.
    """

    __slots__ = ("_inference_mode", "_no_grad")

    def __enter__(self) -> None:
        self._inference_mode = torch.inference_mode(False)
        self._no_grad = torch.no_grad()
        self._inference_mode.__enter__()
        self._no_grad.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._no_grad.__exit__(None, None, None)
        self._inference_mode.__exit__(None, None, None)
