"""Encodes planned batches on their paths, and gives every item its rows of the outputs."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.grad_mode import in_inference_mode
from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, ReplayError
from fxsplit_encoder.manager.item_facts import select_items
from fxsplit_encoder.manager.legacy_dual_path import postprocess_of
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.planning.plan import BY_THE_TOWER, PathPlan, Plan, PlannedBatch
from fxsplit_encoder.protocol import EncoderItemSpec, SupportsEncoderCudaGraph
from fxsplit_encoder.runtime.statistics import Statistics

logger = logging.getLogger(__name__)


class BatchRunner:
    """Runs batches of one tower, one at a time.

    Args:
        config: with `debug` every rule is checked at every replay, with `invariant` no batch runs through the
            tower's own forward.
    """

    def __init__(
        self,
        tower: SupportsEncoderCudaGraph,
        paths: Mapping[tuple[str, tuple[Hashable, ...]], EncoderPath],
        pool: GraphPool,
        statistics: Statistics,
        config: EncoderConfig,
        *,
        num_axes: int,
        max_items: int,
    ) -> None:
        self.tower = tower
        self.paths = paths
        self.pool = pool
        self.statistics = statistics
        self.config = config
        self.num_axes = num_axes
        self.max_items = max_items
        self.in_inference_mode = False
        """Whether a tower's own code runs in inference mode, as the caller of `execute` does: there the host
        needs less for every op."""
        self.weight_checks = WeightChecks(config.weight_check_seconds)
        self._postprocess = postprocess_of(tower)

    def run(
        self, plan: Plan, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec], *, may_replay: bool
    ) -> tuple[list[Tensor], list[PlannedBatch]]:
        """Encodes a request and counts its items.

        Args:
            may_replay: whether captures serve; if not, every batch falls back.

        Returns:
            Every item, in memory of its own; and the batches as they were served.

        Raises:
            WeightsMovedError: a capture reads parameters that are elsewhere now; its batch was not counted.
            InputError: with `invariant`, a batch that only the tower's own forward takes.
        """
        tokens = [spec.output_tokens for spec in specs]
        results: dict[int, Tensor] = {}
        served: list[PlannedBatch] = []
        everything = tuple(range(len(specs)))
        for batch in plan.batches:
            selected: dict[str, Any] = mm_kwargs
            keys: tuple[Hashable, ...] = ()
            if self.num_axes or batch.indices != everything:
                selected, keys = select_items(self.tower, mm_kwargs, batch.indices, self.num_axes)
            # More items than captures hold are left to the tower's own forward.
            replayable = may_replay and len(batch.indices) <= self.max_items
            replayable = replayable and batch.reason not in BY_THE_TOWER
            outputs: dict[str, Tensor] = {}
            changed: dict[str, PathPlan] = {}
            stream = self.pool.begin_replays()
            try:
                replayed: str | None = None
                for name, planned in batch.paths.items():
                    if planned.budget is None and planned.reason is None:  # skipped
                        continue
                    if replayed is not None:  # captures share memory: the path that comes may write to it
                        outputs[replayed] = outputs[replayed].clone()
                    outputs[name], done = self._run_path(name, keys, planned, selected, replayable)
                    if done is not planned:
                        changed[name] = done
                    replayed = name if done.reason is None else None
                self._collect(batch, outputs, tokens, results, selected)
            finally:  # what failed half-way may have enqueued work too
                self.pool.end_replays(stream)
            if changed:
                batch = batch._replace(paths={**batch.paths, **changed})
            served.append(batch)
            self.statistics.record_items(len(batch.indices), batch.reason)
        return list(map(results.__getitem__, range(plan.num_items))), served

    def _run_path(
        self,
        name: str,
        keys: tuple[Hashable, ...],
        planned: PathPlan,
        selected: dict[str, Any],
        may_replay: bool,
    ) -> tuple[Tensor, PathPlan]:
        """The path's output, and how it was served."""
        path = self.paths.get((name, keys))
        if path is None:  # items of the same keys make up a batch of others
            if self.config.invariant:
                raise InputError(
                    f"invariant: path {name}: nothing is compiled for axis keys {keys}, and the tower's own "
                    "forward gives other bits; expected keys that the tower lists as capture axes"
                )
            self.statistics.record_fallback("eager")
            output = self.tower.encoder_eager_forward(selected, path=name)
            return output, PathPlan(planned.tokens, None, MissReason.NOT_CAPTURED, eager=True)
        if self.config.invariant and planned.eager and planned.reason not in BY_THE_TOWER:
            planned = planned._replace(eager=False)
        captures = path.captures_for(planned) if may_replay else []
        values, rows, exceeded = None, None, False
        if captures or path.runs_compiled(planned):
            values = self._values(path, planned, selected)
        if captures:
            exceeded = values is None
            rows = None if values is None else path.forward.rows(values)
        for budget, ladder, size in captures if values is not None else ():
            assert values is not None
            captured = path.best_capture(ladder, size, values)
            try:
                captured.load(values, rows)
            except ReplayError as error:
                # Raised before anything was copied: the batch is whole.
                logger.warning("%s, %d tokens: %s", path.label, size, error)
                exceeded = True
                continue
            if not budget and not path.keeps(
                captured, size, values, rows, functools.partial(path.run_unpadded, selected, values)
            ):
                continue
            are_checked = not self.weight_checks.is_due((name, keys))
            try:
                output = captured.replay(debug=self.config.debug, parameters_are_checked=are_checked)[0]
            except Exception:  # what was found is there until it is mended
                self.weight_checks.all_are_due()
                raise
            assert isinstance(output, torch.Tensor)
            self.statistics.record_replay(path.key(budget), planned.tokens)
            as_planned = budget and size == planned.budget
            return output, planned if as_planned else PathPlan(planned.tokens, size)
        reason = MissReason.EXTENT_EXCEEDED if exceeded else path.miss_reason(planned)
        return self._run_without_replay(path, planned._replace(reason=reason), selected, values)

    def _values(
        self, path: EncoderPath, planned: PathPlan, selected: dict[str, Any]
    ) -> dict[str, StaticValue | None] | None:
        """What the path needs of a batch; None: the tower refuses it, and only its own forward is left."""
        try:
            if self.in_inference_mode and path.program is None:  # no program gets what it makes
                with in_inference_mode():
                    return path.values(selected)
            return path.values(selected)
        except ReplayError as error:
            logger.warning("%s, %d tokens: %s", path.label, planned.tokens, error)
            return None

    def _run_without_replay(
        self,
        path: EncoderPath,
        planned: PathPlan,
        selected: dict[str, Any],
        values: dict[str, StaticValue | None] | None,
    ) -> tuple[Tensor, PathPlan]:
        if planned.eager or values is None:
            with torch.inference_mode() if self.in_inference_mode else contextlib.nullcontext():
                output, compiled = path.run_eager(selected), False
        else:
            output, compiled = path.run_unpadded(selected, values)
        self.statistics.record_fallback("exact" if compiled else "eager")
        return output, planned._replace(budget=None, eager=not compiled)

    def _collect(
        self,
        batch: PlannedBatch,
        outputs: dict[str, Tensor],
        tokens: list[int],
        results: dict[int, Tensor],
        selected: dict[str, Any],
    ) -> None:
        """Gives the items of a batch their rows of the paths' outputs, each in memory of its own: no replay
        may overwrite them (capture rule 7), and a cache that keeps one image must not keep its batch alive.
        """
        indices = list(batch.indices)
        self._postprocess(outputs, indices, tokens, results, clone=False, batch_mm_kwargs=selected)
        self._own(indices, results, outputs)
        if self.config.debug:
            self.pool.handed_out.add(results[index] for index in indices)

    def _own(self, indices: Sequence[int], results: dict[int, Tensor], outputs: dict[str, Tensor]) -> None:
        """Copies what still lies in a path's output."""
        storages = []
        for output in outputs.values():
            storages.append(output.untyped_storage().data_ptr())
        for index in indices:
            if (item := results[index]).untyped_storage().data_ptr() in storages:
                results[index] = item.clone()


class WeightChecks:
    """Which replays check the parameters that they read.

    Args:
        seconds: between two checks of a path; 0: each of its replays.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.are_always_due = not seconds
        self._last: dict[Hashable, float] = {}

    def is_due(self, path: Hashable) -> bool:
        """Whether the replay that comes has to check; it is taken to do so."""
        if self.are_always_due:
            return True
        now, last = time.monotonic(), self._last.get(path)
        if last is not None and now < last + self._seconds:
            return False
        self._last[path] = now
        return True

    def all_are_due(self) -> None:
        """Has the next replay of every path check."""
        self._last.clear()
