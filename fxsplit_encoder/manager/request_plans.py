"""The plans of requests: made from the captures and their costs, and kept by the sizes of the items."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from fxsplit_encoder.caching import Recent
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import FxSplitError
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.tower import ItemFacts, TowerSpec, read_item_specs, select_items
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostCurve, CostModel
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.planning.plan import Item, MissReason, Plan
from fxsplit_encoder.planning.planner import Captured, build_fallback_plan, build_plan
from fxsplit_encoder.protocol import EncoderItemSpec

# Plans depend on sizes alone, and the same sizes come again.
_KEPT_PLANS = 1024

# Uses after which a request of several batches is planned anew, and the share of the predicted time that its
# new batches may lose until they are captured. Choices.
_RECURRING_USES = 8
_MOST_LOST = 0.1

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

    A request that recurs is planned again as if its token counts were captured without padding, as they will
    be (`UnpaddedCaptures`): several batches may become one. The first plan is used again if such a capture
    fails, or is given up and its batch is slower at its exact shape than the first plan.
    """

    def __init__(
        self,
        spec: TowerSpec,
        config: EncoderConfig,
        paths: Mapping[tuple[str, tuple[Hashable, ...]], EncoderPath],
    ) -> None:
        self.tower = spec.tower
        self.config = config
        self.model_config = spec.model_config
        self.paths = paths
        self.facts = ItemFacts(spec.tower)
        self._kept: dict[_Key, Plan] = {}
        self._described: Recent[Hashable, _Key] = Recent(_KEPT_PLANS)
        """Keys of plans, by `RequestItems.described`."""
        self._uses: Counter[_Key] = Counter()
        """Of plans of several batches."""
        self._unpadded: dict[_Key, Plan] = {}
        """The second plans of requests that recur."""
        self.is_idle = not config.enabled or all(path.mode == "none" for path in paths.values())
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
        # An adapter with capture axes says of any selection of items what their keys are.
        described = items.described if not self._num_axes else None
        if described is not None and described in self._described:  # `get` would be a call in Python
            key = self._described[described]
        else:
            key = self._key(mm_kwargs, specs)
            if described is not None:
                self._described[described] = key
        plan = self._kept.get(key)
        if plan is None:
            if len(self._kept) >= _KEPT_PLANS:
                self._forget()
            plan = self._kept[key] = self.build(self._items(specs, key))
        if len(plan.batches) == 1 or not self._plans_anew:
            return plan
        self._uses[key] += is_use
        if is_use and self._uses[key] == _RECURRING_USES:
            if (other := self._unpadded_plan(self._items(specs, key), plan)) is not None:
                self._unpadded[key] = other
        other = self._unpadded.get(key)
        return plan if other is None or self._is_given_up(other, plan) else other

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

    def _unpadded_plan(self, items: Sequence[Item], plan: Plan) -> Plan | None:
        """The plan if every token count were captured; None: it gains nothing, or costs too much."""
        replays = {key: CostCurve(tuple(sorted(each.replay.items()))) for key, each in self._costs.items()}
        costs = {
            key: replace(each, exact=tuple((b, min(price, replays[key].at(b))) for b, price in each.exact))
            for key, each in self._costs.items()
        }
        other = self.build(items, costs=CostModel(costs, HOST_MS_PER_BATCH))
        before, after = plan.milliseconds, other.milliseconds
        if len(other.batches) >= len(plan.batches) or before is None or after is None or after >= before:
            return None
        lost = 0.0
        for batch in other.batches:
            for name, planned in batch.paths.items():
                key = (name, batch.axis_keys)
                if planned.budget is None and planned.tokens:
                    exact = self._costs[key].exact_curve.at(planned.tokens)
                    lost += max(0.0, exact - replays[key].at(planned.tokens))
        return other if lost <= _MOST_LOST * before else None

    def _is_given_up(self, other: Plan, plan: Plan) -> bool:
        """Whether captures of the other plan failed or measured slower than the first plan."""
        more = 0.0
        for batch in other.batches:
            for name, planned in batch.paths.items():
                unpadded = self.paths[name, batch.axis_keys].unpadded
                if planned.budget is not None or not planned.tokens:
                    continue
                if planned.tokens in unpadded.refused:
                    return True
                if planned.milliseconds is not None and planned.tokens in unpadded.exact_ms:
                    more += unpadded.exact_ms[planned.tokens] - planned.milliseconds
        before, after = plan.milliseconds, other.milliseconds
        return more != 0 and before is not None and after is not None and after + more >= before

    def _forget(self) -> None:
        self._kept.clear()
        self._described.clear()
        self._uses.clear()
        self._unpadded.clear()

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
