"""`EncoderCudaGraphManager`: packs a request into budgets, replays them, and falls back where none serves."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, StartFileError, WeightsMovedError
from fxsplit_encoder.manager import invariance
from fxsplit_encoder.manager.autograd import without_autograd
from fxsplit_encoder.manager.background import BackgroundCapture, stop_with
from fxsplit_encoder.manager.budget_memory import check_budgets
from fxsplit_encoder.manager.captures import CapturePlan
from fxsplit_encoder.manager.data_parallel import DataParallel
from fxsplit_encoder.manager.generation import Generation, Served, first_of
from fxsplit_encoder.manager.legacy_dual_path import read_item_specs, read_model_config
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.recording import Recorder
from fxsplit_encoder.manager.tensor_parallel import agreement_of
from fxsplit_encoder.manager.tower_part import placement_of
from fxsplit_encoder.manager.turns import StoppedError, Turns
from fxsplit_encoder.planning import Plan
from fxsplit_encoder.planning.limits import needs_budget_range, resolve_limits
from fxsplit_encoder.protocol import (
    BudgetGraphMetadata,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
    missing_methods,
)
from fxsplit_encoder.runtime import Choosers
from fxsplit_encoder.runtime.progress import Phase
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
        self.kernels = Choosers.of(self.config)
        self.kernels.check(self.device)
        self.statistics = Statistics(log_interval)
        self._own = Generation(
            Served(tower, self.model_config, self.limits, self.dtype),
            self.config,
            GraphPool(self.device, priority=self.config.stream_priority),
            self.statistics,
            agree=agreement_of(tower, None if self.config.data_parallel else process_group),
        )
        """What `capture` captures."""
        self._serving = self._own
        """What serves: until that is captured perhaps what is captured sooner."""
        self._check_budgets()
        self.data_parallel = DataParallel(process_group, self.device) if self.config.data_parallel else None
        self._background: BackgroundCapture | None = None
        self._recorder: Recorder | None = None
        self._start_refused: str | None = None
        """Why a saved start is not used."""
        self._start_read = False
        self._captured = False
        self._missed_capture = not self._own.is_idle
        """Whether an execution before the first capture is still to be warned of."""
        self._lock = Turns()
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
    def pool(self) -> GraphPool:
        """The memory of the captures that serve."""
        return self._serving.pool

    @property
    def paths_by_key(self) -> dict[tuple[str, tuple[Hashable, ...]], EncoderPath]:
        """Every path at every combination of axis keys, with the captures that serve."""
        return self._serving.paths_by_key

    @property
    def paths(self) -> dict[str, EncoderPath]:
        """The paths by name, of a tower without capture axes; else those of the first axis keys."""
        return self._serving.paths

    @property
    def programs(self) -> dict[str, BoundProgram | None]:
        """The compiled forward of every path; None before `compile`, and for a path that does not compile."""
        return {name: path.program for name, path in self.paths.items()}

    @property
    def reports(self) -> list[str]:
        """What was dropped or runs in another way than asked, and why."""
        refused = [self._start_refused] if self._start_refused is not None else []
        behind = self._background.notes if self._background is not None else []
        notes = [note for path in self.paths_by_key.values() for note in path.notes]
        kept = invariance.findings(self) if self.config.invariant else ()
        return [*refused, *behind, *notes, *kept]

    @property
    def budget_graphs(self) -> dict[str, dict[int, BudgetGraphMetadata]]:
        """Every capture, by path and budget; with capture axes, of the first axis keys."""
        return {
            name: {budget: path.metadata(budget) for budget in sorted(path.captured)}
            for name, path in self.paths.items()
        }

    def planned_captures(self) -> CapturePlan:
        """What `capture` will capture, and the memory of its static inputs."""
        return self._own.planned_captures()

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles every path's forward; `progress` gets (done, total) of each path, where two
        phases of the tracing and every piece count.
        """
        self.wait_captured()
        with self._lock, without_autograd():
            self._read_start()
            self._own.compile(progress)

    def _read_start(self) -> None:
        """Reads the start that the settings name, once."""
        if self.config.start_file is not None and not self._start_read:
            self.load_start(self.config.start_file)

    def capture(self, progress: Callable[[int, int], None] | None = None, *, wait: bool = True) -> None:
        """Compiles, then captures every budget of every path, largest first (capture rule 10).

        A budget that cannot be captured is dropped, with its reason in `reports`; the others serve. On a
        device every way to run is timed, for `packing: cost`. `progress` is called with (budgets done,
        budgets). What is captured already stays until `clear`. While `capture(wait=False)` is under way it
        waits for the end; if that failed, it does all of it here.

        Args:
            wait: whether all of that is done at the return. False: a few budgets of the tower's own forward
                are captured, which takes seconds, and serve from then on; the rest happens between requests,
                and `stats().progress` says how far it is. Where nothing is compiled there is no such rest.

        Raises:
            InputError: `wait=False` with `data_parallel` or `invariant`.
        """
        if not wait:
            self._capture_first(progress)
            return
        self.wait_captured()
        in_inference_mode = torch.is_inference_mode_enabled()
        with self._lock, self.kernels.choosing(), without_autograd():
            if not self.config.enabled or self._is_complete:
                return
            self._own.run_in(in_inference_mode)
            planned = self.planned_captures()
            logger.info("%s", planned)
            self.compile()
            told = 0
            for _, done, total in self._own.capture(planned):
                if progress is not None and done > told:
                    told = done
                    progress(done, total)
            self._switch()
            if self.data_parallel is not None and self.config.invariant:
                self.data_parallel.check_same("invariant: kernels", invariance.choices(self))
            if self.data_parallel is not None and self.pool.is_cuda:
                self._share_costs(self.data_parallel)

    @property
    def _is_complete(self) -> bool:
        """Whether everything is captured."""
        return self._captured and self._serving is self._own

    def _capture_first(self, progress: Callable[[int, int], None] | None) -> None:
        """As `capture(wait=False)`."""
        if self.data_parallel is not None:
            raise InputError(
                "wait: expected True with data_parallel, whose ranks share their costs in the order of their "
                "calls; got False. Call capture() on every rank, or capture from a start_file"
            )
        if self.config.invariant:
            raise InputError(
                "wait: expected True with invariant, since the first captures are of the tower's own forward "
                "and have other bits than the next; got False. Call capture(), with a start_file to be sooner"
            )
        if not self._own.compiled_paths or not self.config.enabled:
            self.capture(progress)
            return
        first, in_inference_mode = self._own.uncompiled(), torch.is_inference_mode_enabled()
        planned: CapturePlan | None = None
        captures: Iterator[tuple[Phase, int, int]] = iter(())
        while True:
            with self._lock.step(at_once=True), self.kernels.choosing(), without_autograd():
                if self._captured:  # by another thread
                    first.clear()
                    return
                if planned is None:
                    self._read_start()
                    for generation in (first, self._own):
                        generation.run_in(in_inference_mode)
                    planned = self._own.planned_captures()
                    captures = first.capture(first_of(first.planned_captures()))
                elif (made := next(captures, None)) is None:
                    self._serve(first)
                    self._start_background(planned, first)
                    return
                elif progress is not None:
                    progress(*made[1:])

    def _start_background(self, planned: CapturePlan, first: Generation) -> None:
        switch = weakref.WeakMethod(self._switch)

        def switch_if_wanted() -> None:
            if (found := switch()) is None:
                raise StoppedError
            found()

        self._background = BackgroundCapture(
            self._own, planned, first, self._lock, self.kernels, switch_if_wanted
        )
        stop_with(self, self._background)
        self._background.start()

    def _switch(self) -> None:
        """Has what `capture` captures serve, as far as it is captured, and releases what served before."""
        before = self._serving
        self._serve(self._own)
        if before is not self._own:
            before.clear()
        self._check_captures()

    def _serve(self, generation: Generation) -> None:
        self._serving = generation
        self._captured = True
        self._missed_capture = False
        self._use_captures()

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Waits for the work behind `capture(wait=False)`, if there is any.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Whether it is over: `stats().progress` says how it ended.
        """
        return self._background is None or self._background.wait(timeout)

    def save_start(self, path: str | os.PathLike[str]) -> int:
        """Writes a file with which other processes start on devices of the same kind without compiling and
        without measuring: what this process compiled, what was measured of attention on this device, and what
        of this tower. The file replaces what was there as a whole.

        Returns:
            How many bytes it has.

        Raises:
            InputError: nothing was captured yet, or the file cannot be written. While `capture(wait=False)`
                is under way it waits for the end.
        """
        from fxsplit_encoder.manager.start import save_captured

        self.wait_captured()
        with self._lock:
            if not self._is_complete:
                raise InputError("save_start: nothing was compiled or measured yet; call capture() first")
            return save_captured(self._own, self.kernels.measurements, Path(path))

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
        from fxsplit_encoder.manager.start import load_captured

        with self._lock:
            if self._captured:
                raise InputError("load_start: everything is captured already; call it before capture()")
            self._start_read = True
            try:
                load_captured(self._own, self.kernels.measurements, Path(path))
            except StartFileError as error:
                self._start_refused = f"the start in {path} is not used: {error}"
                logger.warning("%s", self._start_refused)
                return False
            self._start_refused = None
            return True

    def can_replay(self) -> bool:
        """Whether what was captured serves any batch, or the settings ask for no captures."""
        serves = any(path.serves for path in self.paths_by_key.values())
        return self._own.is_idle or (bool(self.model_config.modalities) and serves)

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
        self._serving.plans.use_captures(self.limits, captured=self._captured)
        self.statistics.record_clear()
        for path in self.paths_by_key.values():
            for budget, captured in path.captured.items():
                key, costs = path.key(budget), path.ladder.costs.get(budget)
                self.statistics.record_capture(key, captured.mode, path.ladder.num_bytes(budget))
                if costs is not None:
                    self.statistics.record_time(key, costs.best)
        self.statistics.record_input_bytes(sum(path.input_bytes for path in self.paths_by_key.values()))
        if self._recorder is not None:
            self._recorder.captures_changed(self.paths)

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`; of `capture(wait=False)` the part that it does
        before it returns.
        """
        return self._captured

    def clear(self) -> None:
        """Releases every capture and its memory; `capture` may be called again. What is under way behind
        `capture(wait=False)` ends.
        """
        if self._background is not None:
            self._background.stop()
        with self._lock:
            for generation in {self._serving, self._own}:
                generation.clear()
            self._serving, self._captured = self._own, False
            self._use_captures()

    @property
    def num_bytes(self) -> int:
        """Memory that all captures hold: their graphs' pool and their static inputs."""
        return sum(each.captures.num_bytes for each in {self._serving, self._own})

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
        plans = self._serving.plans
        return plans.as_served(plans.of(mm_kwargs, self._item_specs(mm_kwargs)))

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
        with self._lock, self.kernels.choosing(), without_autograd():
            if self._missed_capture:
                self._missed_capture = False
                logger.warning(
                    "encoder CUDA graphs are enabled, but nothing has been captured: every item falls back; "
                    "call capture() before execute(), or set enabled: false"
                )
            self._serving.runner.in_inference_mode = in_inference_mode
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
        plans, runner = self._serving.plans, self._serving.runner
        plan, captured = plans.of(mm_kwargs, specs), self._captured
        try:
            results, batches = runner.run(plan, mm_kwargs, specs, may_replay=captured)
        except WeightsMovedError as error:
            self._capture_again(error)
            plan = plans.of(mm_kwargs, specs)
            results, batches = runner.run(plan, mm_kwargs, specs, may_replay=captured)
        if self._recorder is not None:  # what was encoded: a request that was refused is no load to tune for
            self._recorder.write(mm_kwargs, specs, batches, (time.perf_counter() - start) * 1e3)
        return results

    def _capture_again(self, error: WeightsMovedError) -> None:
        """Captures over the parameters that the tower has now.

        Raises:
            InputError: the program was compiled for others.
            WeightsMovedError: the tower's parameters are sharded: its ranks may not have seen it together.
        """
        if self._own.scope.agree is not None:
            raise error
        for path in self.paths_by_key.values():
            path.forward.current_program()
        warn_of_new_captures(error)
        captures = self._serving.captures
        held = captures.held()
        captures.clear()
        captures.capture(held)
        self._use_captures()

    def check_invariance(self, mm_kwargs: dict[str, Any], *, packings: int = 16, seed: int = 0) -> list[int]:
        """Encodes every item alone, then so many random choices of the items, and compares all bits.

        Returns:
            The items that ever got other bits than alone, by their position; with `invariant` none.

        Raises:
            InputError, RankError: as `execute`.
        """
        return invariance.differing_items(self, mm_kwargs, packings, seed)

    def record_trace(self, path: str | os.PathLike[str]) -> None:
        """Appends every request from now on to a file, for `encoder-cg tune` and `encoder-cg report`: sizes,
        how they were served, and by which captures; nothing of what was encoded.

        Raises:
            InputError: the file cannot be opened.
        """
        with self._lock:
            if self._recorder is not None:
                self._recorder.close()
            self._recorder = Recorder(path, self.tower, self._own.scope, self.limits, self.paths, self.dtype)

    def stats(self) -> ManagerStats:
        """Hits, misses by reason, padding and bytes so far."""
        for path in self.paths_by_key.values():
            if path.unpadded.captures.sizes:
                self.statistics.record_capture(path.key(0), "exact", path.unpadded_bytes)
            else:
                self.statistics.record_release(path.key(0))
        progress = self._background.progress if self._background is not None else None
        return replace(self.statistics.snapshot(), progress=progress)

    def _item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return read_item_specs(self.tower, mm_kwargs)
