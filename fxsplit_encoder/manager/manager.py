"""`EncoderCudaGraphManager`: packs a request into budgets, replays them, and falls back where none serves."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.capture import GraphPool, MissReason
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, ReplayError
from fxsplit_encoder.manager.budgets import resolve_limits
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.plan import Plan, PlannedBatch, build_fallback_plan, build_plan
from fxsplit_encoder.manager.protocol import BudgetGraphMetadata, SupportsEncoderCudaGraph
from fxsplit_encoder.manager.statistics import ManagerStats, Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from fxsplit_encoder.compile import BoundProgram
    from fxsplit_encoder.manager.protocol import EncoderItemSpec

logger = logging.getLogger(__name__)


class EncoderCudaGraphManager:
    """Encodes batches of images and videos through captured budgets.

    Args:
        tower: what `wrap` returns, or any object with the protocol's methods.
        config: budgets, modes, limits.
        device, dtype: where and in what the tower computes; by default those of its parameters.
        log_interval: items between two log lines of statistics; 0: none.

    Without CUDA the recorded steps are replayed one by one over the same static buffers: right, and no
    faster.

    Raises:
        InputError: the tower lacks methods of the protocol, or declares an impossible range.
        ConfigError: the settings do not suit the tower.
    """

    def __init__(
        self,
        tower: SupportsEncoderCudaGraph,
        config: EncoderConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        log_interval: int = 100,
    ) -> None:
        if not isinstance(tower, SupportsEncoderCudaGraph):
            raise InputError(
                f"tower: {type(tower).__name__} lacks methods of SupportsEncoderCudaGraph; pass what "
                "wrap(model.visual) returns"
            )
        self.tower = tower
        self.config = config if config is not None else EncoderConfig()
        self.device, self.dtype = _placement(tower, device, dtype)
        self.model_config = tower.get_encoder_cudagraph_config()
        self.limits = resolve_limits(
            self.config,
            self.model_config,
            tower.get_encoder_cudagraph_budget_range(None),
            has_video="video" in self.model_config.modalities,
        )
        self.pool = GraphPool(self.device, self.config.max_graph_bytes)
        self.paths = {
            name: EncoderPath(name, tower, self.config, self.limits, self.pool, self.device, self.dtype)
            for name in self.limits.path_budgets
        }
        self.statistics = Statistics(log_interval)
        self._captured = False
        self._lock = threading.RLock()

    # --- compile and capture

    @property
    def programs(self) -> dict[str, BoundProgram | None]:
        """The compiled forward of every path; None before `compile`, and for a path that does not compile."""
        return {name: path.program for name, path in self.paths.items()}

    @property
    def reports(self) -> list[str]:
        """What was dropped or runs in another way than asked, and why."""
        return [note for path in self.paths.values() for note in path.notes]

    @property
    def budget_graphs(self) -> dict[str, dict[int, BudgetGraphMetadata]]:
        """Every capture, by path and budget."""
        return {
            name: {b: self._metadata(path, b) for b in sorted(path.captured)}
            for name, path in self.paths.items()
        }

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles every path's forward; `progress` gets (pieces done, pieces) of each path."""
        with self._lock:
            for path in self.paths.values():
                path.compile(progress)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles, then captures every budget of every path, largest first (capture rule 10).

        A budget that cannot be captured is dropped, with its reason in `reports`; the others serve.
        `progress` is called with (budgets done, budgets).
        """
        with self._lock:
            if not self.config.enabled:
                return
            self.compile()
            wanted = [
                (budget, path)
                for path in self.paths.values()
                if path.mode != "none"
                for budget in path.budgets
            ]
            wanted.sort(key=lambda pair: -pair[0])
            for done, (budget, path) in enumerate(wanted):
                path.capture(budget)
                if budget in path.captured:
                    captured = path.captured[budget]
                    self.statistics.record_capture(
                        path.name, budget, captured.mode, path.ladder.num_bytes(budget)
                    )
                    if self.pool.is_cuda:
                        self.statistics.record_time(path.name, budget, captured.measure())
                if progress is not None:
                    progress(done + 1, len(wanted))
            self._captured = True
            if wanted and not any(path.captured or path.ladder.exact for path in self.paths.values()):
                logger.error(
                    "no budget could be captured; every item will fall back: %s", "; ".join(self.reports)
                )

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`."""
        return self._captured

    def clear(self) -> None:
        """Releases every capture and its memory; `capture` may be called again."""
        with self._lock:
            for path in self.paths.values():
                path.clear()
            self._captured = False
            self.statistics.record_clear()
            self.pool.retire()

    def supports_modality(self, modality: str) -> bool:
        """Whether captures serve "image" or "video" inputs of this tower."""
        return modality in self.model_config.modalities

    # --- plan and execute

    def plan(self, mm_kwargs: dict[str, Any]) -> Plan:
        """How `execute` would encode these inputs now. Touches no tensor but the grids; needs no GPU.

        Before `capture`, the plan is that of a full ladder.
        """
        return self._plan(mm_kwargs, self.tower.get_encoder_cudagraph_item_specs(mm_kwargs))

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
        """
        with self._lock, self._inference():
            specs = self.tower.get_encoder_cudagraph_item_specs(mm_kwargs)
            plan = self._plan(mm_kwargs, specs, captured_only=True)
            tokens = [spec.output_tokens for spec in specs]
            results: dict[int, Tensor] = {}
            for batch in plan.batches:
                self._run_batch(batch, mm_kwargs, tokens, results, num_items=plan.num_items)
            return [results[index] for index in range(plan.num_items)]

    def stats(self) -> ManagerStats:
        """Hits, misses by reason, padding and bytes so far."""
        return self.statistics.snapshot()

    # --- one plan

    def _plan(
        self, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec], *, captured_only: bool = False
    ) -> Plan:
        if not self.config.enabled or all(path.mode == "none" for path in self.paths.values()):
            return build_fallback_plan(specs, self.paths, MissReason.DISABLED)
        if specs and not self.supports_modality(self.tower.get_input_modality(mm_kwargs)):
            return build_fallback_plan(specs, self.paths, MissReason.UNSUPPORTED_INPUT)
        segments = self._item_segments(mm_kwargs, len(specs))
        everything = not (captured_only or self._captured)
        return build_plan(
            specs,
            self.limits,
            None if everything else {(name, b) for name, path in self.paths.items() for b in path.captured},
            self._item_frames(mm_kwargs, segments),
            exact={(name, b) for name, path in self.paths.items() for b in path.ladder.exact},
            item_segments=segments,
            segment_room={
                (n, b): room for n, path in self.paths.items() for b, room in path.segment_room.items()
            },
        )

    def _item_segments(self, mm_kwargs: dict[str, Any], num_items: int) -> list[int]:
        """Attention segments of every item; one each where the tower does not tell."""
        item_segments = getattr(self.tower, "item_segments", None)
        return item_segments(mm_kwargs) if item_segments is not None else [1] * num_items

    def _item_frames(self, mm_kwargs: dict[str, Any], segments: list[int]) -> list[int] | None:
        """Video frames of every item, 0 for images, which come first."""
        if mm_kwargs.get("video_grid_thw") is None:
            return None
        num_videos = len(mm_kwargs["video_grid_thw"])
        return [0] * (len(segments) - num_videos) + segments[len(segments) - num_videos :]

    # --- one batch

    def _run_batch(
        self,
        batch: PlannedBatch,
        mm_kwargs: dict[str, Any],
        tokens: list[int],
        results: dict[int, Tensor],
        *,
        num_items: int,
    ) -> None:
        indices = list(batch.indices)
        selected = (
            mm_kwargs
            if indices == list(range(num_items))
            else self.tower.select_encoder_cudagraph_items(mm_kwargs, indices)
        )
        reason = batch.reason
        with self.pool.replaying():
            outputs: dict[str, Tensor] = {}
            for name, planned in batch.paths.items():
                if planned.tokens:
                    outputs[name], failure = self._run_path(
                        self.paths[name], planned.budget, planned.tokens, selected
                    )
                    reason = reason or failure
            self.tower.postprocess_encoder_output(
                outputs, indices, tokens, results, clone=False, batch_mm_kwargs=selected
            )
            self._own(indices, results, outputs)
        self.statistics.record_items(len(indices), reason)

    def _run_path(
        self, path: EncoderPath, budget: int | None, tokens: int, selected: dict[str, Any]
    ) -> tuple[Tensor, MissReason | None]:
        if budget is None:
            return path.run_exact(selected), None
        values = path.values(selected)
        captured = path.best_capture(budget, values)
        try:
            path.load(captured, values)
        except ReplayError as error:
            # Raised before anything was copied: the batch is whole and runs at its exact shape.
            logger.warning("path %s, budget %d: %s", path.name, budget, error)
            return path.run_exact(selected, values), MissReason.EXTENT_EXCEEDED
        output = captured.replay(debug=self.config.debug)[0]
        assert isinstance(output, torch.Tensor)
        self.statistics.record_replay(path.name, budget, tokens)
        return output, None

    def _own(self, indices: Sequence[int], results: dict[int, Tensor], outputs: dict[str, Tensor]) -> None:
        """Copies what still lies in a path's output, so that no replay overwrites it (capture rule 7).

        Every item gets memory of its own: a cache that keeps one image must not keep its batch alive.
        """
        storages = {output.untyped_storage().data_ptr() for output in outputs.values()}
        for index in indices:
            if results[index].untyped_storage().data_ptr() in storages:
                results[index] = results[index].clone()

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        # Static buffers are ordinary tensors; inside inference mode they could not be written later outside
        # of it.
        with torch.inference_mode(False), torch.no_grad():
            yield

    def _metadata(self, path: EncoderPath, budget: int) -> BudgetGraphMetadata:
        captured = path.captured[budget]
        return BudgetGraphMetadata(
            token_budget=budget,
            max_batch_size=self.limits.max_items_per_batch,
            max_frames_per_batch=self.limits.max_frames_per_batch,
            graph=captured.capture,
            input_buffers=captured.inputs.tensors,
            output_buffer=captured.outputs[0],
            mode=captured.mode,
            graph_bytes=path.ladder.num_bytes(budget),
        )


def _placement(
    tower: Any, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    parameter = next(iter(tower.parameters()), None) if hasattr(tower, "parameters") else None
    if device is None:
        device = parameter.device if parameter is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = parameter.dtype if parameter is not None else torch.get_default_dtype()
    return torch.device(device), dtype
