"""The plans of requests: made from the captures and their costs, and kept by the sizes of the items."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.manager.tower import RequestItems, TowerSpec
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostCurve, CostModel, PathCosts
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.planning.plan import Item, MissReason, Plan
from fxsplit_encoder.planning.planner import build_plan

logger = logging.getLogger(__name__)

# Plans depend on sizes alone, and the same sizes come again.
_KEPT_PLANS = 1024

# Uses after which a request recurs, and the share of its predicted time that fewer batches may be predicted
# to lose before they are not even timed: what was timed apart differs so much from what runs in a row. Of
# plans whose times differ by less than the last number, each start keeps the one of fewer batches. Choices.
_RECURRING_USES = 8
_TRIED = 0.1
_TIE = 1.01

# What a batch adds where as few as possible are wanted: more than all tokens of a request together.
_FEWEST = float(1 << 40)


@dataclass(slots=True, eq=False)
class _Kept:
    """The plan of requests of the same sizes."""

    plan: Plan
    uses: int | None
    """Times that it served, until it recurs; None: it stays as it is."""


class RequestPlans:
    """Plans requests of one tower, after `use_captures`, and keeps the plans by sizes.

    A request that recurs, and is not one replay, is looked at once. Its batches without a replay are captured
    without padding (`UnpaddedCaptures`), and several batches are timed against as few as possible: it keeps
    the plan that is faster. What was predicted from sizes that were timed apart decides only until then.
    """

    def __init__(self, spec: TowerSpec, config: EncoderConfig, runner: BatchRunner) -> None:
        self.config = config
        self.model_config = spec.model_config
        self.paths = runner.paths
        self._kept: dict[Hashable, _Kept] = {}
        self.recurring: _Kept | None = None
        """Of the request that was planned last, if it is to be looked at."""
        self._runner = runner
        self.is_idle = not config.enabled or all(path.mode == "none" for path in self.paths.values())
        """Whether the settings ask for no captures."""

    def use_captures(self, limits: Limits, *, captured: bool) -> None:
        """Reads captures and costs, and forgets plans; unless `captured`, plans assume a full ladder."""
        self._forget()
        self._limits = limits
        self._captured = captured
        costs = {key: path.costs for key, path in self.paths.items()}
        for key, path in self.paths.items():
            if costs[key].measured:
                path.unpadded.use_costs(costs[key], path.ladder.capture_ms)
        self._costs = costs
        self.build = functools.partial(
            build_plan,
            limits=limits,
            packing=self.config.packing,
            costs=CostModel(costs, HOST_MS_PER_BATCH) if captured else None,
        )
        self._plans_anew = (
            captured
            and self.config.packing == "cost"
            and all(path.recurring_counts == "cost" and costs[key].exact for key, path in self.paths.items())
        )

    def of(self, items: RequestItems, *, is_use: bool = True) -> Plan:
        """Returns the plan of a request, which counts as one more use if `is_use`."""
        if self.is_idle:
            refused = [Item(spec, refusal=MissReason.DISABLED) for spec in items.specs]
            return build_plan(refused, replace(self._limits, max_items_per_batch=max(1, len(refused))))
        kept = self._kept.get(items.key)
        if kept is None:
            if len(self._kept) >= _KEPT_PLANS:
                self._forget()
            plan = self.build(self._planned(items))
            may_gain = self._plans_anew and (len(plan.batches) > 1 or any(_without_replay(plan)))
            kept = self._kept[items.key] = _Kept(plan, 0 if may_gain else None)
        if kept.uses is not None and is_use:
            kept.uses += 1
            if kept.uses == _RECURRING_USES:
                self.recurring = kept
        return kept.plan

    def improve(self, mm_kwargs: dict[str, Any], items: RequestItems) -> None:
        """Looks at the `recurring` request, which was served."""
        kept, self.recurring = self.recurring, None
        if kept is None or self._kept.get(items.key) is not kept:  # that one was refused
            return
        kept.uses = None
        other = self._in_fewest_batches(self._planned(items), kept.plan)
        for path, tokens in _without_replay(other or kept.plan):
            self.paths[path].unpadded.make_due(tokens)
        if other is None:
            return
        try:
            before, after = (
                self._runner.milliseconds(plan, mm_kwargs, items.specs) for plan in (kept.plan, other)
            )
        except (InputError, torch.OutOfMemoryError) as error:  # the request is served already
            logger.warning("%d batches stay: %s", len(kept.plan.batches), error)
            return
        batches = len(kept.plan.batches), len(other.batches)
        logger.info("%d batches take %.3f ms, %d take %.3f", batches[0], before, batches[1], after)
        if after <= before * _TIE:
            kept.plan = other

    def _planned(self, items: RequestItems) -> list[Item]:
        refusals = [None if self._serves(m) else MissReason.UNSUPPORTED_INPUT for m in items.modalities]
        return list(map(Item, items.specs, items.frames, items.segments, items.axis_keys, refusals))

    def _in_fewest_batches(self, items: Sequence[Item], plan: Plan) -> Plan | None:
        """The plan of the fewest batches, whatever was measured; None: `plan` has as few, these are predicted
        to lose too much, or a count cannot be captured.
        """
        level = PathCosts(exact=((1, 1.0), (2, 2.0)))
        costs = CostModel(dict.fromkeys(self._costs, level), _FEWEST)
        other = _unpriced(self.build(items, costs=costs))
        if len(other.batches) >= len(plan.batches):
            return None
        if self._predicted(other) > self._predicted(plan) * (1 + _TRIED):
            return None
        if any(tokens in self.paths[path].unpadded.refused for path, tokens in _without_replay(other)):
            return None
        return other

    def _predicted(self, plan: Plan) -> float:
        """Milliseconds without attention, which is the same of any batches, if all counts were captured."""
        milliseconds = HOST_MS_PER_BATCH * len(plan.batches)
        for batch in plan.batches:
            for name, planned in batch.paths.items():
                costs = self._costs[name, batch.axis_keys]
                if planned.budget is not None:
                    milliseconds += costs.replay[planned.budget]
                elif planned.tokens:
                    replays = CostCurve(tuple(sorted(costs.replay.items())))
                    milliseconds += min(replays.at(planned.tokens), costs.exact_curve.at(planned.tokens))
        return milliseconds

    def _forget(self) -> None:
        self._kept.clear()
        self.recurring = None

    def _serves(self, modality: str) -> bool:
        # A tower with names of its own ("vision_chunk") is asked by these, and calls a batch an image.
        served = self.model_config.modalities
        return modality in served or (bool(served) and not {"image", "video"} & set(served))

    def as_served(self, plan: Plan) -> Plan:
        """Returns the plan as captures without padding, which come and go, would serve it now."""
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


def _unpriced(plan: Plan) -> Plan:
    batches = []
    for batch in plan.batches:
        paths = {name: planned._replace(milliseconds=None) for name, planned in batch.paths.items()}
        batches.append(batch._replace(paths=paths, milliseconds=None))
    return Plan(tuple(batches), plan.num_items)


def _without_replay(plan: Plan) -> Iterator[tuple[tuple[str, tuple[Hashable, ...]], int]]:
    """The path and the tokens of each part of a plan that no capture serves."""
    for batch in plan.batches:
        for name, planned in batch.paths.items():
            if planned.budget is None and planned.tokens and not planned.eager:
                yield (name, batch.axis_keys), planned.tokens
