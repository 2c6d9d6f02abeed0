"""The plans of requests: made from the captures and their costs, and kept by the sizes of the items."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from fxsplit_encoder.caching import Recent
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import FxSplitError
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.manager.tower import ItemFacts, TowerSpec, read_item_specs, select_items
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostCurve, CostModel
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.planning.plan import Item, MissReason, Plan
from fxsplit_encoder.planning.planner import Captured, build_fallback_plan, build_plan
from fxsplit_encoder.protocol import EncoderItemSpec

logger = logging.getLogger(__name__)

# Plans depend on sizes alone, and the same sizes come again.
_KEPT_PLANS = 1024

# Uses after which a request of several batches is compared with one of fewer, and the share of its predicted
# time that these may be predicted to lose: what was timed apart differs so much from what runs in a row. Of
# plans whose times differ by less than the last number, the one with fewer batches is kept at every start.
# Choices.
_RECURRING_USES = 8
_TRIED = 0.1
_TIE = 1.01

_Key: TypeAlias = tuple[
    tuple[tuple[Any, ...], ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[tuple[Hashable, ...], ...],
    tuple[str, ...],
]
"""Of every item its sizes, frames, segments, axis keys and modality."""


class RequestPlans:
    """Plans requests of one tower, after `use_captures`, and keeps the plans by sizes.

    A request of several batches that recurs is timed once against fewer batches, captured without padding
    (`UnpaddedCaptures`), for which the costs foresee much the same; it keeps the plan that is faster.
    """

    def __init__(
        self,
        spec: TowerSpec,
        config: EncoderConfig,
        runner: BatchRunner,
    ) -> None:
        self.tower = spec.tower
        self.config = config
        self.model_config = spec.model_config
        self.paths = runner.paths
        self.facts = ItemFacts(spec.tower)
        self._kept: dict[_Key, Plan] = {}
        self._described: Recent[Hashable, _Key] = Recent(_KEPT_PLANS)
        """Keys of plans, by `RequestItems.described`."""
        self._uses: Counter[_Key] = Counter()
        """Of plans of several batches."""
        self.recurring: _Key | None = None
        """Of the request that was planned last, if it is to be compared with fewer batches."""
        self._runner = runner
        self.is_idle = not config.enabled or all(path.mode == "none" for path in self.paths.values())
        """Whether the settings ask for no captures."""
        self._num_axes = len(spec.model_config.capture_axes)

    def use_captures(self, limits: Limits, *, captured: bool) -> None:
        """Reads captures and costs, and forgets plans; unless `captured`, plans assume a full ladder."""
        self._forget()
        self._limits = limits
        self._captured = captured
        paths = self.paths.values()
        costs = {key: path.costs for key, path in self.paths.items()}
        for key, path in self.paths.items():
            if costs[key].measured:
                path.unpadded.use_costs(costs[key], path.ladder.capture_ms)
        self._costs = costs
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
        self._plans_anew = (
            captured
            and self.config.packing == "cost"
            and all(path.recurring_counts == "cost" and costs[key].exact for key, path in self.paths.items())
        )

    def of(self, mm_kwargs: dict[str, Any], items: RequestItems, *, is_use: bool = True) -> Plan:
        """Returns the plan of a request, which counts as one more use if `is_use`. Reads the grids alone."""
        specs = items.specs
        if self.is_idle:
            paths, skippable = self._limits.path_budgets, self._limits.skippable_paths
            return build_fallback_plan(list(map(Item, specs)), paths, MissReason.DISABLED, skippable)
        key = self._key_of(mm_kwargs, items)
        plan = self._kept.get(key)
        if plan is None:
            if len(self._kept) >= _KEPT_PLANS:
                self._forget()
            plan = self._kept[key] = self.build(self._items(specs, key))
        if is_use and len(plan.batches) > 1 and self._plans_anew:
            self._uses[key] += 1
            if self._uses[key] == _RECURRING_USES:
                self.recurring = key
        return plan

    def compare(self, mm_kwargs: dict[str, Any], items: RequestItems) -> None:
        """Times the `recurring` request, which was served, by its plan and by one of fewer batches, if there
        is one that may gain; keeps the faster one.
        """
        key, self.recurring = self._key_of(mm_kwargs, items), None
        plan = self._kept.get(key)
        if plan is None or self._uses[key] != _RECURRING_USES:  # the recurring one was refused
            return
        other = self._in_fewer_batches(self._items(items.specs, key), plan)
        if other is None:
            return
        before, after = (self._runner.milliseconds(each, mm_kwargs, items.specs) for each in (plan, other))
        logger.info(
            "%d batches take %.3f ms, %d take %.3f", len(plan.batches), before, len(other.batches), after
        )
        if after <= before * _TIE:
            self._kept[key] = other

    def _key_of(self, mm_kwargs: dict[str, Any], items: RequestItems) -> _Key:
        # An adapter with capture axes says of any selection of items what their keys are.
        described = items.described if not self._num_axes else None
        if described is not None and described in self._described:  # `get` would be a call in Python
            return self._described[described]
        key = self._key(mm_kwargs, items.specs)
        if described is not None:
            self._described[described] = key
        return key

    def _key(self, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> _Key:
        modalities = self.facts.modalities(mm_kwargs, len(specs))
        segments = self.facts.segments(mm_kwargs, len(specs))
        frames = self.facts.frames(mm_kwargs, modalities, segments)
        axes = self._num_axes
        keys: Sequence[tuple[Hashable, ...]] = [()] * len(specs)
        if axes:
            keys = [select_items(self.tower, mm_kwargs, [i], axes)[1] for i in range(len(specs))]
        sizes = tuple([(s.input_size, s.output_tokens, *s.path_output_tokens.items()) for s in specs])
        return sizes, tuple(frames), tuple(segments), tuple(keys), tuple(modalities)

    def _items(self, specs: Sequence[EncoderItemSpec], key: _Key) -> list[Item]:
        _, frames, segments, keys, modalities = key
        refusals = [None if self._serves(m) else MissReason.UNSUPPORTED_INPUT for m in modalities]
        return list(map(Item, specs, frames, segments, keys, refusals))

    def _in_fewer_batches(self, items: Sequence[Item], plan: Plan) -> Plan | None:
        """The plan if every token count were captured and a batch cost more, its counts due to be captured;
        None: it has as many batches, or counts that cannot be captured.
        """
        if plan.milliseconds is None:
            return None
        costs = {}
        for key, each in self._costs.items():
            replays = CostCurve(tuple(sorted(each.replay.items())))
            costs[key] = replace(each, exact=tuple((b, min(ms, replays.at(b))) for b, ms in each.exact))
        other = self.build(items, costs=CostModel(costs, HOST_MS_PER_BATCH + _TRIED * plan.milliseconds))
        if len(other.batches) >= len(plan.batches):
            return None
        unpadded = [
            (self.paths[name, batch.axis_keys].unpadded, planned.tokens)
            for batch in other.batches
            for name, planned in batch.paths.items()
            if planned.budget is None and planned.tokens
        ]
        if any(tokens in captures.refused for captures, tokens in unpadded):
            return None
        for captures, tokens in unpadded:
            captures.make_due(tokens)
        return other

    def _forget(self) -> None:
        self._kept.clear()
        self._described.clear()
        self._uses.clear()
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


# Requests of other items whose sizes are kept. A choice: a service sees few sizes.
_KEPT_ITEMS = 1024


class RequestItems(NamedTuple):
    """The items of one request."""

    specs: list[EncoderItemSpec]
    """Their sizes."""
    described: Hashable | None = None
    """A key for all that the tower says of them, see `PackedTower.described_items`; None: there is none."""


class ItemReader:
    """Reads and keeps the items of a tower's requests. Threads may share it."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self._described_items: Callable[[dict[str, Any]], Hashable | None] | None = getattr(
            tower, "described_items", None
        )
        self._known: dict[Hashable, RequestItems] = {}

    def read(self, mm_kwargs: Any) -> RequestItems:
        """Returns the items of a request; raises as `read_item_specs`."""
        described = None if self._described_items is None else self._describe(mm_kwargs)
        if described is None:
            return RequestItems(read_item_specs(self._tower, mm_kwargs))
        items = self._known.get(described)
        if items is None:
            items = RequestItems(read_item_specs(self._tower, mm_kwargs), described)
            if len(self._known) >= _KEPT_ITEMS:
                self._known = {}
            self._known[described] = items
        return items

    def _describe(self, mm_kwargs: Any) -> Hashable | None:
        assert self._described_items is not None
        if type(mm_kwargs) is not dict or not mm_kwargs:
            return None
        try:
            return self._described_items(mm_kwargs)
        except FxSplitError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None  # `read_item_specs` raises what is wrong with them
