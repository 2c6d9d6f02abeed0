"""Runs planned batches on their paths, and gives every item its rows of the outputs."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.capture import BudgetLadder, GraphPool
from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.errors import ReplayError
from fxsplit_encoder.manager.dual_path import postprocess_of
from fxsplit_encoder.manager.item_facts import axis_keys
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.statistics import Statistics
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import PathPlan, PlannedBatch
from fxsplit_encoder.protocol import SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)


class BatchRunner:
    """Runs batches of one tower, one at a time.

    Args:
        routes: the paths by (name, axis keys).
        num_axes: how many capture axes the tower has.
    """

    def __init__(
        self,
        tower: SupportsEncoderCudaGraph,
        routes: Mapping[tuple[str, tuple[Hashable, ...]], EncoderPath],
        pool: GraphPool,
        statistics: Statistics,
        *,
        num_axes: int,
    ) -> None:
        self.tower = tower
        self.routes = routes
        self.pool = pool
        self.statistics = statistics
        self.num_axes = num_axes
        self._postprocess = postprocess_of(tower)

    def run(
        self,
        batch: PlannedBatch,
        mm_kwargs: dict[str, Any],
        tokens: list[int],
        results: dict[int, Tensor],
        *,
        may_replay: bool,
        debug: bool,
    ) -> None:
        """Encodes the items of a batch and counts them.

        Args:
            mm_kwargs: the whole request.
            tokens: the output tokens of every item of the request.
            results: receives each item of the batch, in memory of its own.
            may_replay: whether captures serve; if not, the batch falls back.
            debug: whether every rule is checked at every replay.
        """
        indices = list(batch.indices)
        everything = indices == list(range(len(tokens))) and not self.num_axes
        selected = mm_kwargs if everything else self.tower.select_encoder_cudagraph_items(mm_kwargs, indices)
        keys = axis_keys(selected, self.num_axes) if self.num_axes else ()
        with self.pool.replaying():
            outputs, reason = self._run_paths(batch, keys, selected, may_replay, debug)
            self._postprocess(outputs, indices, tokens, results, clone=False, batch_mm_kwargs=selected)
            self._own(indices, results, outputs)
            if debug:
                self.pool.handed_out.add(results[index] for index in indices)
        self.statistics.record_items(len(indices), reason)

    def _run_paths(
        self,
        batch: PlannedBatch,
        keys: tuple[Hashable, ...],
        selected: dict[str, Any],
        may_replay: bool,
        debug: bool,
    ) -> tuple[dict[str, Tensor], MissReason | None]:
        """The outputs of the paths that are not skipped, and why not all are of replays."""
        outputs: dict[str, Tensor] = {}
        reason: MissReason | None = None
        running = {name: planned for name, planned in batch.paths.items() if not planned.skipped}
        for name, planned in running.items():
            path = self.routes.get((name, keys))
            if path is None:  # items of the same keys make up a batch of others
                output, missed = self._run_without_captures(name, selected)
            else:
                output, missed = self._run_path(path, planned, selected, may_replay, debug)
            if missed is None and len(outputs) < len(running) - 1:
                output = output.clone()  # captures share memory: the next path may write to it
            outputs[name] = output
            reason = reason or missed
        return outputs, reason

    def _run_path(
        self, path: EncoderPath, planned: PathPlan, selected: dict[str, Any], may_replay: bool, debug: bool
    ) -> tuple[Tensor, MissReason | None]:
        """The path's output, and why it is no replay's."""
        captures = list(path.captures_for(planned)) if may_replay else []
        values = None
        if captures or path.runs_compiled(planned):
            values = self._values(path, planned, selected)
        if values is not None:
            output = self._replay(path, captures, planned, values, debug)
            if output is not None:
                return output, None
        reason = MissReason.EXTENT_EXCEEDED if captures else path.miss_reason(planned)
        return self._run_without_replay(path, planned, selected, values), reason

    def _values(
        self, path: EncoderPath, planned: PathPlan, selected: dict[str, Any]
    ) -> dict[str, StaticValue | None] | None:
        """What the path needs of a batch; None: the tower refuses it, and only its own forward is left."""
        try:
            return path.values(selected)
        except ReplayError as error:
            logger.warning("%s, %d tokens: %s", path.label, planned.tokens, error)
            return None

    def _replay(
        self,
        path: EncoderPath,
        captures: Sequence[tuple[CaptureKey, BudgetLadder, int]],
        planned: PathPlan,
        values: Mapping[str, StaticValue | None],
        debug: bool,
    ) -> Tensor | None:
        """The output of the first capture that the batch fits into; None: there is none."""
        for key, ladder, size in captures:
            captured = path.best_capture(ladder, size, values)
            try:
                path.load(captured, values)
            except ReplayError as error:
                # Raised before anything was copied: the batch is whole.
                logger.warning("%s, %d tokens: %s", path.label, size, error)
                continue
            output = path.replay(captured, debug=debug)[0]
            assert isinstance(output, torch.Tensor)
            self.statistics.record_replay(key, planned.tokens)
            return output
        return None

    def _run_without_captures(self, name: str, selected: dict[str, Any]) -> tuple[Tensor, MissReason | None]:
        """The same for a path that has nothing at these axis keys: the tower's own forward."""
        self.statistics.record_fallback("eager")
        return self.tower.encoder_eager_forward(selected, path=name), MissReason.NOT_CAPTURED

    def _run_without_replay(
        self,
        path: EncoderPath,
        planned: PathPlan,
        selected: dict[str, Any],
        values: dict[str, StaticValue | None] | None,
    ) -> Tensor:
        if planned.eager or values is None:
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
