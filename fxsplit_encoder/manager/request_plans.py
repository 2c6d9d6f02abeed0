"""The plans of requests: made from what captures there are and what they cost, and kept by sizes."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.manager.item_facts import ItemFacts, item_axis_keys
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.planning import (
    Captured,
    CostModel,
    Item,
    Limits,
    MissReason,
    Plan,
    build_fallback_plan,
    build_plan,
)
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH
from fxsplit_encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)

# Plans depend on sizes alone, and the same sizes come again.
_KEPT_PLANS = 1024


class RequestPlans:
    """Plans requests of one tower. To be told of its captures by `use_captures` before anything is planned.

    Args:
        paths: by (name, axis keys).
    """

    def __init__(
        self,
        tower: SupportsEncoderCudaGraph,
        config: EncoderConfig,
        model_config: EncoderCudaGraphConfig,
        paths: Mapping[tuple[str, tuple[Hashable, ...]], EncoderPath],
    ) -> None:
        self.tower = tower
        self.config = config
        self.model_config = model_config
        self.paths = paths
        self.facts = ItemFacts(tower)
        self._kept: dict[Hashable, Plan] = {}

    def use_captures(self, limits: Limits, *, captured: bool) -> None:
        """Gathers what plans depend on, so that a request need not; forgets the plans so far.

        Args:
            captured: whether the paths are captured; if not, plans are those of a full ladder.
        """
        self._kept.clear()
        self._limits = limits
        self._captured = captured
        paths = self.paths.values()
        costs = {key: path.costs for key, path in self.paths.items()}
        for key, path in self.paths.items():
            if costs[key].measured:
                path.unpadded.use_costs(costs[key], path.ladder.capture_ms)
        self.build = functools.partial(
            build_plan,
            limits=limits,
            captured=Captured(
                frozenset(path.key(b) for path in paths for b in path.captured),
                frozenset(path.key(b) for path in paths for b in path.ladder.no_graph_needed),
            )
            if captured
            else None,
            packing=self.config.packing,
            costs=CostModel(costs, HOST_MS_PER_BATCH) if captured else None,
        )

    def of(self, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> Plan:
        """The plan of a request with items of these sizes. Touches no tensor but the grids."""
        if not self.config.enabled or all(path.mode == "none" for path in self.paths.values()):
            items = list(map(Item, specs))
            paths, skippable = self._limits.path_budgets, self._limits.skippable_paths
            return build_fallback_plan(items, paths, MissReason.DISABLED, skippable)
        modalities = self.facts.modalities(mm_kwargs, len(specs))
        segments = self.facts.segments(mm_kwargs, len(specs))
        frames = self.facts.frames(mm_kwargs, modalities, segments)
        num_axes = len(self.model_config.capture_axes)
        keys = item_axis_keys(self.tower, mm_kwargs, len(specs), num_axes) if num_axes else [()] * len(specs)
        sizes = tuple([(s.input_size, s.output_tokens, *s.path_output_tokens.items()) for s in specs])
        key = (sizes, tuple(segments), tuple(frames), tuple(modalities), tuple(keys))
        plan = self._kept.get(key)
        if plan is None:
            if len(self._kept) >= _KEPT_PLANS:
                self._kept.clear()
            refusals = [None if self._serves(m) else MissReason.UNSUPPORTED_INPUT for m in modalities]
            items = list(map(Item, specs, frames, segments, keys, refusals))
            plan = self._kept[key] = self.build(items)
        return plan

    def _serves(self, modality: str) -> bool:
        """Whether captures serve a modality. A tower with names of its own for them ("vision_chunk") is asked
        by these before it gets a batch, and calls it an image all the same.
        """
        served = self.model_config.modalities
        return modality in served or (bool(served) and not {"image", "video"} & set(served))

    def as_served(self, plan: Plan) -> Plan:
        """The plan with what captures of recurring token counts, which come and go, would serve now."""
        if not self._captured or all(path.recurring_counts is None for path in self.paths.values()):
            return plan
        batches = []
        for batch in plan.batches:
            paths = {
                name: self.paths[name, batch.axis_keys].as_served(planned)
                if (name, batch.axis_keys) in self.paths
                else planned
                for name, planned in batch.paths.items()
            }
            batches.append(batch._replace(paths=paths))
        return Plan(tuple(batches), plan.num_items)
