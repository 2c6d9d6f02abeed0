"""Order and bounds among tenants: `FairQueue` says what is served next, `Shares` who may add to it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

FIRST = math.inf
"""The priority of what was served before without a result."""


class _Tag(NamedTuple):
    finish: float
    number: int
    cost: float


class _Place(NamedTuple):
    priority: float
    tenant: str
    flow: Hashable
    tag: _Tag


@dataclass(eq=False)
class _Tenant(Generic[T]):
    """Things of one tenant, by the virtual time at which each would be done."""

    served: float
    """Work that it has had, on the clock of its level."""
    order: list[tuple[_Tag, T]] = field(default_factory=list)
    virtual: float = 0.0
    finish: dict[Hashable, float] = field(default_factory=dict)
    lengths: Counter[Hashable] = field(default_factory=Counter)

    def push(self, thing: T, flow: Hashable, cost: float, number: int) -> _Tag:
        finish = max(self.virtual, self.finish.get(flow, 0.0)) + cost
        self.finish[flow] = finish
        self.lengths[flow] += 1
        tag = _Tag(finish, number, cost)
        insort(self.order, (tag, thing), key=lambda entry: entry[0])
        return tag

    def remove(self, flow: Hashable, tag: _Tag) -> None:
        del self.order[bisect_left(self.order, tag, key=lambda entry: entry[0])]
        self.lengths[flow] -= 1
        if not self.lengths[flow]:
            del self.lengths[flow], self.finish[flow]


@dataclass(eq=False)
class _Level(Generic[T]):
    """Tenants that wait with things of one priority."""

    tenants: dict[str, _Tenant[T]] = field(default_factory=dict)
    virtual: float = 0.0

    def __iter__(self) -> Iterator[T]:
        served = {name: tenant.served for name, tenant in self.tenants.items()}
        heads = [(time, name, 0) for name, time in served.items()]
        heapify(heads)
        while heads:
            _, name, index = heappop(heads)
            order = self.tenants[name].order
            tag, thing = order[index]
            yield thing
            served[name] += tag.cost
            if index + 1 < len(order):
                heappush(heads, (served[name], name, index + 1))


class FairQueue(Generic[T]):
    """Orders things by priority, then between tenants, then between the flows of a tenant, such as requests.

    Tenants are served by the work that each has had. Within a tenant a thing is tagged, as it comes, with the
    virtual time at which it would be done if all flows were served at once (self-clocked fair queuing): it
    waits for at most as much work of each other flow as its own has asked for, so a long video lets images
    pass.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        """Of all things in the queue."""
        self._places: dict[T, _Place] = {}
        self._levels: dict[float, _Level[T]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, thing: T) -> bool:
        return thing in self._places

    def __iter__(self) -> Iterator[T]:
        """In the order in which they are due. The queue must not change during iteration."""
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority]

    def first(self) -> T | None:
        """The thing that is due."""
        return next(iter(self), None)

    def push(self, thing: T, flow: Hashable, cost: float, tenant: str = "", *, priority: float = 0.0) -> None:
        """Add a thing, which uses the share of a flow and of a tenant among those of its priority."""
        assert thing not in self._places
        level = self._levels.setdefault(priority, _Level())
        own = level.tenants.setdefault(tenant, _Tenant(level.virtual))
        self._places[thing] = _Place(priority, tenant, flow, own.push(thing, flow, cost, self._number))
        self._number += 1
        self.cost += cost

    def take(self, thing: T) -> None:
        """Remove a thing because it is served now."""
        place = self._places[thing]
        level = self._levels[place.priority]
        own = level.tenants[place.tenant]
        level.virtual = max(level.virtual, own.served)
        own.virtual = max(own.virtual, place.tag.finish)
        own.served += place.tag.cost
        self.discard(thing)

    def discard(self, thing: T) -> bool:
        """Remove a thing that is not wanted any more; whether it was there."""
        place = self._places.pop(thing, None)
        if place is None:
            return False
        level = self._levels[place.priority]
        own = level.tenants[place.tenant]
        own.remove(place.flow, place.tag)
        if not own.order:
            del level.tenants[place.tenant]
        if not level.tenants:
            del self._levels[place.priority]
        # Rounding errors do not outlast the last thing.
        self.cost = self.cost - place.tag.cost if self._places else 0.0
        return True


class Shares:
    """How much of something bounded each tenant has. One with less than its even share is not refused for
    what others have: up to twice as much as the bound may be used then.
    """

    def __init__(self) -> None:
        self.used = self.peak = 0
        self._own: dict[str, int] = {}

    def change(self, tenant: str, amount: int) -> None:
        """Give a tenant so much more, or less."""
        self.used += amount
        self.peak = max(self.peak, self.used)
        self._own[tenant] = self._own.get(tenant, 0) + amount
        if not self._own[tenant]:
            del self._own[tenant]

    def is_refused(self, tenant: str, wanted: int, most: int) -> bool:
        """Whether a tenant may not have so much more, of `most`."""
        if self.used + wanted <= most:
            return False
        own = self._own.get(tenant, 0)
        share = most / len({*self._own, tenant}) if own else most
        return own + wanted > share or self.used + wanted > 2 * most
