"""Encodes planned batches on their paths, and gives every item its rows of the outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fxsplit_encoder.capture.forward import measure_ms
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.tower import TowerSpec, select_items
from fxsplit_encoder.planning.plan import BY_THE_TOWER, MissReason, PathPlan, Plan, PlannedBatch
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.runtime.requests import CaptureScope
from fxsplit_encoder.runtime.statistics import Statistics


class BatchRunner:
    """Runs batches of one tower, one at a time."""

    def __init__(
        self,
        spec: TowerSpec,
        paths: Mapping[tuple[str, tuple[Hashable, ...]], EncoderPath],
        scope: CaptureScope,
        statistics: Statistics,
    ) -> None:
        self.tower = spec.tower
        self.paths = paths
        self.scope = scope
        self.pool = scope.pool
        self.statistics = statistics
        self.num_axes = len(spec.model_config.capture_axes)
        self.max_items = spec.limits.max_items_per_batch
        self.in_inference_mode = False
        """Whether a tower's own code runs in inference mode, as its caller does."""
        self._postprocess = spec.tower.postprocess_encoder_output

    def run(
        self, plan: Plan, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec], *, may_replay: bool
    ) -> tuple[list[Tensor], list[PlannedBatch]]:
        """Encodes a request; returns every item in memory of its own, and the batches as they were served.
        Unless `may_replay`, every batch falls back. WeightsMovedError: a capture reads parameters that have
        moved; its batch was not counted. InputError: with `invariant`, a batch that only the tower's own
        forward takes.
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
            fits = len(batch.indices) <= self.max_items and batch.reason not in BY_THE_TOWER
            outputs: dict[str, Tensor] = {}
            changed: dict[str, PathPlan] = {}
            with self.pool.replaying():
                replayed: str | None = None
                for name, planned in batch.paths.items():
                    if planned.budget is None and planned.reason is None:  # skipped
                        continue
                    if replayed is not None:  # captures share memory: the path that comes may write to it
                        outputs[replayed] = outputs[replayed].clone()
                    path = self.paths.get((name, keys))
                    if path is None:
                        outputs[name], done = self._run_unlisted(name, keys, planned, selected)
                    else:
                        own, done, budget = path.run(
                            planned if not planned.eager else self._allowed(planned),
                            selected,
                            may_replay=may_replay and fits,
                            in_inference_mode=self.in_inference_mode,
                        )
                        outputs[name] = own[0]
                        if budget is None:
                            self.statistics.record_fallback("eager" if done.eager else "exact")
                        else:
                            self.statistics.record_replay(path.key(budget), planned.tokens)
                    if done is not planned:
                        changed[name] = done
                    replayed = name if done.reason is None else None
                self.collect(batch, outputs, tokens, results, selected)
            if changed:
                batch = batch._replace(paths={**batch.paths, **changed})
            served.append(batch)
            self.statistics.record_items(len(batch.indices), batch.reason)
        return list(map(results.__getitem__, range(plan.num_items))), served

    def milliseconds(self, plan: Plan, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> float:
        """Times a request by a plan, after one run for warm-up; in no statistics."""
        counted, self.statistics = self.statistics, Statistics(log_interval=0)
        try:
            return measure_ms(lambda: self.run(plan, mm_kwargs, specs, may_replay=True), self.pool.device)
        finally:
            self.statistics = counted

    def _allowed(self, planned: PathPlan) -> PathPlan:
        if self.scope.config.invariant and planned.reason not in BY_THE_TOWER:
            return planned._replace(eager=False)
        return planned

    def _run_unlisted(
        self, name: str, keys: tuple[Hashable, ...], planned: PathPlan, selected: dict[str, Any]
    ) -> tuple[Tensor, PathPlan]:
        if self.scope.config.invariant:
            raise InputError(
                f"invariant: path {name}: nothing is compiled for axis keys {keys}, and the tower's own "
                "forward gives other bits; expected keys that the tower lists as capture axes"
            )
        self.statistics.record_fallback("eager")
        output = self.tower.encoder_eager_forward(selected, path=name)
        return output, PathPlan(planned.tokens, None, MissReason.NOT_CAPTURED, eager=True)

    def collect(
        self,
        batch: PlannedBatch,
        outputs: dict[str, Tensor],
        tokens: list[int],
        results: dict[int, Tensor],
        selected: dict[str, Any],
    ) -> None:
        """Copies items out of the captures (capture rule 7), so that a cached image keeps no batch alive."""
        indices = list(batch.indices)
        self._postprocess(outputs, indices, tokens, results, clone=False, batch_mm_kwargs=selected)
        storages = [output.untyped_storage().data_ptr() for output in outputs.values()]
        for index in indices:
            if (item := results[index]).untyped_storage().data_ptr() in storages:
                results[index] = item.clone()
